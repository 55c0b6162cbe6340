"""Keeps a server: starts it, restarts it if it dies, and ends it with the run.

    python keeper.py LOG FOLDER COMMAND ...

It needs nothing but Python. The run holds the other end of its standard input, which closes with
the run's process, whatever ends that. The keeper then ends the server, and removes the folder with
files for it. It restarts a server only after it has read `UP` from that input: a server that has
never answered would not answer the next time either. After `ASLEEP` a restart waits for the next
`UP`, because a server takes a GPU's memory when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

_STARTS = 4
"""Starts in a row after which it gives up, unless the server lived for `_LIVED_S`."""
_LIVED_S = 120.0
_END_S = 15.0
"""Seconds that the server has to end before it is killed."""
UP, ASLEEP = b"+", b"-"
"""The run writes `UP` when the server answers for the first time or wakes, `ASLEEP` when it
sleeps."""
_signals: list[bool] = []
"""An item for each signal that asked it to end."""


def main(log: str, folder: str, *command: str) -> int:
    """Keep the server. Returns 0, or the server's exit code if it is not restarted."""
    parent = os.getppid()
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()  # Ctrl-C in a terminal is for the run
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _signals.append(True))
    starts, was_up, asleep = 0, False, False
    while True:
        with Path(log).open("ab") as file:
            began = time.monotonic()
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            while came := _wait(server, parent):
                was_up, asleep = True, came == ASLEEP
            _end(server)
            starts = 1 if time.monotonic() - began > _LIVED_S else starts + 1
            over = came is not None
            if not over:
                _note(file, f"vLLM ended with exit code {server.returncode}")
            while asleep and not over:
                came = _wait(None, parent)
                over, asleep = not came, came == ASLEEP
            if over:
                shutil.rmtree(folder, ignore_errors=True)
                return 0
            if starts >= _STARTS or not was_up:
                _note(file, "it is not started again")
                return server.returncode or 1
            _note(file, "it is started again")


def _wait(server: subprocess.Popen[bytes] | None, parent: int) -> bytes | None:
    """Wait until the server has ended, which gives None, or the run has written, which gives the
    byte. If the run has ended, the bytes are empty: a process that it forked may still hold the
    input open, so its process is looked at too."""
    while server is None or server.poll() is None:
        if _signals or os.getppid() != parent:
            return b""
        if select.select([0], [], [], 0.5)[0]:
            return os.read(0, 1)
    return None


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started."""
    for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(patience_s)
            if number == signal.SIGKILL or not _is_group(server.pid):
                return


def _is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end_with_parent() -> None:
    """On Linux: if this keeper is killed, so is the server."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _note(file: IO[bytes], text: str) -> None:
    file.write(f"turnrl: {text}\n".encode())
    file.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
