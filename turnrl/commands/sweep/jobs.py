"""Runs side by side: a process for each, with its share of the cores or a GPU.

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

from turnrl.commands.sweep.matrix import Cell
from turnrl.plugin.errors import RecipeError

_THREADS = [f"{name}_THREADS" for name in ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "VECLIB_MAXIMUM")]
ONE = (None, "auto", 1, "1", -1, "-1")
"""Values of `trainer.devices` with which a run may have one GPU."""
_GRACE_S = 30.0
"""Time that a run has to stop: its engine waits for the pass under way."""


@dataclass(frozen=True)
class Workers:
    """Where runs are at work.

    Args:
        devices: For each run at a time, its GPU as `CUDA_VISIBLE_DEVICES` names it, or None.
        threads: Threads of each.
    """

    devices: Sequence[str | None]
    threads: int

    def environment(self, device: str | None) -> dict[str, str]:
        """The environment of a run."""
        own = {name: str(self.threads) for name in _THREADS}
        if device is not None:
            own["CUDA_VISIBLE_DEVICES"] = device
        # unbuffered, so that the log of a killed run has its last words
        return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}


def workers(jobs: int | None, kind: str, several: object) -> Workers:
    """Divide up the cores or GPUs of this machine.

    Args:
        jobs: Runs at a time; None for one on each GPU, and without GPUs one on each core.
        kind: Device of the recipe: `cpu`, `cuda` or another.
        several: The recipe's `trainer.devices`. A recipe that asks for several gets all GPUs, and
            its runs come one after the other.
    Raises:
        RecipeError: If `jobs` is below 1.
    """
    if jobs is not None and jobs < 1:
        raise RecipeError(f"--jobs is {jobs}; it must be 1 or more.")
    gpus = _gpus() if kind == "cuda" and several in ONE else []
    cores = _cores()
    if jobs is None:
        jobs = len(gpus) or (cores if kind == "cpu" else 1)
    # a user's own number of threads stays
    own = os.environ.get(_THREADS[0], "")
    threads = int(own) if own.isdigit() else max(1, cores // jobs)
    return Workers([gpus[n % len(gpus)] if gpus else None for n in range(jobs)], threads)


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[str]:
    """The GPUs that this process may use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [*map(str, range(count))] if visible is None else visible.split(",")
    return [name.strip() for name in names[:count]]


# ---------------------------------------------------------------------------------------- one run


@dataclass
class Job:
    """A run that is at work.

    Args:
        cell: The run.
        log: The file of everything that its attempts printed.
        words: What follows `turnrl`.
        environment: Of its process.
        device: Its GPU.
    """

    cell: Cell
    log: Path
    words: Sequence[str]
    environment: dict[str, str]
    device: str | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._from = out.tell()
            program = [sys.executable, str(Path(__file__).with_name("child.py"))]
            self._process = subprocess.Popen(
                [*program, *self.words],
                stdin=subprocess.PIPE,  # which ends when this process does
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it is at work."""
        code, pipe = self._process.poll(), self._process.stdin
        if code is not None and pipe is not None and not pipe.closed:
            self.signal(signal.SIGKILL)  # what it started and left behind
            pipe.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        while self.ended() is None:
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
        where: Where they work.
    """

    def __init__(self, where: Workers) -> None:
        self._free = [*where.devices]
        self._where = where
        self.running: list[Job] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for job in self.running:
                job.signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(job.ended() is None for job in self.running):
                time.sleep(0.05)
        finally:  # also after a second Ctrl-C
            for job in self.running:
                job.kill()

    @property
    def full(self) -> bool:
        """True if every place is taken."""
        return not self._free

    def begin(self, cell: Cell, log: Path, words: Sequence[str]) -> None:
        """Start a run in a free place."""
        device = self._free.pop(0)
        environment = self._where.environment(device)
        self.running.append(Job(cell, log, words, environment, device))

    def wait(self) -> list[tuple[Job, int]]:
        """Wait for a moment, and take the runs that have ended, with their exit codes."""
        time.sleep(0.1)
        ended = [(job, code) for job in self.running if (code := job.ended()) is not None]
        for job, _ in ended:
            self.running.remove(job)
            self._free.append(job.device)
        return ended
