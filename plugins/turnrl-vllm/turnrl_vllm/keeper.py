"""Ends a server with the run that has started it, whatever ends the run.

    python keeper.py RUN FOLDER LOG COMMAND ...

It needs nothing but Python, and notices the end of the run, the process RUN, by its own parent. It
then ends the server and all that it started, and removes the folder with files for it. If the
server ends first, the keeper ends with its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_END_S = 15.0
"""Seconds that the server has to end before it is killed."""


def main(run: str, folder: str, log: str, *command: str) -> int:
    """Keep the server. Returns its exit code, or 0 if the run has ended."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()  # Ctrl-C in a terminal is for the run
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    with Path(log).open("wb") as file:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    while server.poll() is None and not asked_to_end and os.getppid() == int(run):
        time.sleep(0.2)
    code = server.poll()
    _end(server)
    if code is None:
        shutil.rmtree(folder, ignore_errors=True)
    return code or 0


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)


def _end_with_parent() -> None:
    """On Linux: if this keeper is killed, so is the server."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
