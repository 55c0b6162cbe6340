"""Runs side by side: a process for each, with its share of the cores.

A run has its own session, so Ctrl-C reaches the sweep alone, which stops its runs. None outlives
it: see `child`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from turnrl.commands.sweep.matrix import SweepRun
from turnrl.plugin.errors import RecipeError

_THREADS = [f"{name}_THREADS" for name in ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "VECLIB_MAXIMUM")]
_GRACE_S = 30.0
"""Time that a run has to stop: its engine waits for the pass under way."""


def share_cores(jobs: int | None, kind: str) -> tuple[int, int]:
    """The number of runs at a time, and the threads of each.

    Args:
        jobs: The number that the user wants; None for a run on each core, or one run at a time on
            any other device.
        kind: Device of the recipe: `cpu`, `cuda` or another.
    Raises:
        RecipeError: If `jobs` is below 1.
    """
    if jobs is not None and jobs < 1:
        raise RecipeError(f"--jobs is {jobs}; it must be 1 or more.")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    jobs = jobs or (cores if kind == "cpu" else 1)
    own = os.environ.get(_THREADS[0], "")  # a user's own number of threads stays
    return jobs, int(own) if own.isdigit() else max(1, cores // jobs)


# ---------------------------------------------------------------------------------------- one run


@dataclass
class Job:
    """A run that is at work.

    Args:
        cell: The run.
        log: The file of everything that its attempts printed.
        words: What follows `turnrl`.
        threads: Number of its threads.
    """

    cell: SweepRun
    log: Path
    words: Sequence[str]
    threads: int
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        threads = dict.fromkeys(_THREADS, str(self.threads))
        with self.log.open("ab") as out:
            self._from = out.tell()
            program = [sys.executable, str(Path(__file__).with_name("child.py"))]
            self._process = subprocess.Popen(
                [*program, *self.words],
                stdin=subprocess.PIPE,  # which ends when this process does
                stdout=out,
                stderr=subprocess.STDOUT,
                # unbuffered, so that the log of a killed run has its last words
                env={**os.environ, **threads, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it is at work."""
        code, pipe = self._process.poll(), self._process.stdin
        if code is not None and pipe is not None and not pipe.closed:
            self.signal(signal.SIGKILL)  # what it started and left behind
            pipe.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        while self.exit_code() is None:
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process and to those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, of the dead
            os.killpg(self._process.pid, number)

    def tail(self, lines: int) -> list[str]:
        """The last lines that this attempt printed."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            text = file.read().decode("utf-8", "replace")
        whole = (line.split("\r")[-1].rstrip() for line in text.splitlines())
        return [line for line in whole if line][-lines:]


class Jobs:
    """Runs at work, of which none is left when the block ends.

    Args:
        most: Number of runs at a time.
        threads: Threads of each.
    """

    def __init__(self, most: int, threads: int) -> None:
        self._most, self._threads = most, threads
        self.running: list[Job] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for job in self.running:
                job.signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(
                job.exit_code() is None for job in self.running
            ):
                time.sleep(0.05)
        finally:  # also after a second Ctrl-C
            for job in self.running:
                job.kill()

    @property
    def is_full(self) -> bool:
        """True if every place is taken."""
        return len(self.running) >= self._most

    def begin(self, cell: SweepRun, log: Path, words: Sequence[str]) -> None:
        """Start a run in a free place."""
        self.running.append(Job(cell, log, words, self._threads))

    def wait(self) -> list[tuple[Job, int]]:
        """Wait for a moment, and take the runs that have ended, with their exit codes."""
        time.sleep(0.1)
        ended = [(job, code) for job in self.running if (code := job.exit_code()) is not None]
        for job, _ in ended:
            self.running.remove(job)
        return ended
