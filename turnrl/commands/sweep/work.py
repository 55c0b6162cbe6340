"""The runs of a sweep that are not done yet, at work: begun, watched, kept when they end well."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from turnrl.commands.report.curves import draw
from turnrl.commands.sweep import results
from turnrl.commands.sweep.folders import checkpoint, settle
from turnrl.commands.sweep.jobs import Job, Jobs, Places
from turnrl.commands.sweep.matrix import Cell
from turnrl.errors import DataError, TurnRLError
from turnrl.run.console.lines import duration
from turnrl.run.runs import open_runs
from turnrl.text import visible

_TAIL = 8
"""Lines of a failed run that are shown."""


class Work:
    """Runs at work.

    Args:
        folder: The sweep's folder.
        recipe: Name of the recipe.
        where: The machine, shared out.
        keep: Called with the line of each run that ended well.
    """

    def __init__(
        self, folder: Path, recipe: str, where: Places, keep: Callable[[results.Result], None]
    ) -> None:
        self._folder, self._recipe, self._where, self._keep = folder, recipe, where, keep
        self._left = 0
        self._took: list[float] = []

    def run(self, cells: Sequence[Cell]) -> None:
        """Run some cells, several at a time. One that fails is shown, and ends no other."""
        queue, self._left = [*cells], len(cells)
        with Jobs(self._where) as jobs:
            while queue or jobs.running:
                while queue and not jobs.full:
                    self._begin(queue.pop(0), jobs)
                for job, code in jobs.wait():
                    self._end(job, code)

    def _begin(self, cell: Cell, jobs: Jobs) -> None:
        home = self._folder / cell.name
        from_there = checkpoint(settle(home))
        words = ["fit", *cell.words(self._folder)]
        if from_there is not None:
            words.append(f"--ckpt_path={from_there[0]}")
        jobs.begin(cell, home / "log.txt", words, from_there is not None)
        after = "" if from_there is None else f", after iteration {from_there[1]}"
        _say(f"{'begins' if from_there is None else 'goes on':8}{cell}{after}")

    def _end(self, job: Job, code: int) -> None:
        took = time.monotonic() - job.began
        self._left -= 1
        try:
            if code:
                raise DataError(_ended(code))
            result = self._result(job)
        except TurnRLError as error:
            _say(f"FAILED  {job.cell}: {error}. {self._still(took)}")
            for line in job.said(_TAIL):
                print(f"          | {visible(line)}")
            print(f"          the whole log: {job.log}", flush=True)
            return
        self._keep(result)
        if not job.resumed:
            self._took.append(took)
        points = result.points("val/exact_match")
        match = f", exact_match {points[-1][1]:.3f}" if points else ""
        _say(f"done    {job.cell}{match}, {self._still(took)}")

    def _result(self, job: Job) -> results.Result:
        """The line of a run that ended well.

        Raises:
            DataError: If it left no figures.
        """
        folder = settle(self._folder / job.cell.name)
        (run,) = open_runs([folder])
        curves = results.curves(run.metrics)
        if not curves:
            raise DataError("it validated nothing, so it has no figures. Set data.val")
        if job.resumed:
            draw([run], folder / "curves.svg")
        return results.Result(
            digest=job.cell.digest,
            seed=job.cell.seed,
            settings=job.cell.settings,
            recipe=self._recipe,
            turnrl=version("turnrl"),
            threads=self._where.threads,
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            curves=curves,
        )

    def _still(self, took: float) -> str:
        """The time that a run took, how many are left, and the time that these may take."""
        left = f"{duration(took)}; {self._left} left"
        if not self._left or not self._took:
            return left
        rounds = math.ceil(self._left / len(self._where.devices))
        return f"{left}, some {duration(rounds * sum(self._took) / len(self._took))}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    more = ", as by the system if memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{more}"
