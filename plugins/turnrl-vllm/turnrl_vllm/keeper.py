"""Keeps a server: starts it, starts it again if it dies, and ends it when whoever began it ends.

    python keeper.py LOG FOLDER COMMAND ...

It needs nothing but Python. Whoever starts it holds the other end of its standard input, which
closes with its process, whatever ends that. The folder, with files for the server, is removed then.
A server is started again if `UP` has come through that input: one that has never answered would not
answer the next time either. After `ASLEEP` that waits for the next `UP`, because a server takes a
GPU's memory when it starts.
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
"""So often it starts the server, unless it lived for `_LIVED_S`."""
_LIVED_S = 120.0
_END_S = 15.0
"""Seconds that the server has to end by itself."""
UP, ASLEEP = b"+", b"-"
"""What is written to it when the server answers for the first time or wakes, and when it sleeps."""
_signals: list[bool] = []
"""Signals to end."""


def main(log: str, folder: str, *command: str) -> int:
    """Keep the server. Returns its exit code if it cannot be kept, or else 0."""
    parent = os.getppid()
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()  # Ctrl-C in a terminal is for whoever began this
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
    """Wait until the server, if there is one, has ended, which gives None, or something came from
    whoever began this: nothing at all if that has ended. A process that it forked may still hold
    the input open."""
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
