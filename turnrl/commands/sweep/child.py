"""`turnrl`, as a process that never outlives the sweep that started it.

Its standard input is a pipe that the sweep holds open and never writes to. The pipe ends when the
sweep does, even by a kill -9. Then this process and all that it started are killed, at once: a
killed run resumes from its last checkpoint as if nothing had happened.
"""

import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def _follow() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # its modules have common names
    threading.Thread(target=_follow, daemon=True).start()
    runpy.run_module("turnrl", run_name="__main__", alter_sys=True)
