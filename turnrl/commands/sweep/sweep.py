"""A sweep in its folder: runs trained, kept and shown.

    FOLDER/results.jsonl      a line for each finished run
    FOLDER/RUN/version_0/     a run, and beside it its log.txt
    FOLDER/table.txt          the table printed at the end
    FOLDER/report.html        a page about the runs whose folders are there

The folder has a lock while a sweep is at work.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.commands.sweep import results
from turnrl.commands.sweep.matrix import Cell, check
from turnrl.errors import DataError, TurnRLError
from turnrl.runs.files import whole_file
from turnrl.text import counted, say, visible

if TYPE_CHECKING:
    from turnrl.commands.sweep.jobs import Job, Jobs, Workers
    from turnrl.commands.sweep.table import Table

_IN_REPORT = 5_000
"""Approximate number of trajectories of all runs in the report, so that it opens at once."""
_TAIL = 8
"""Lines shown from the log of a failed run."""


class Sweep:
    """A sweep in its folder. It reads which runs are done, and prints their number.

    Args:
        folder: Its folder.
        cells: Its runs.
        recipe: Name of the recipe.
        lines: The file with a line for each finished run. It may not exist yet.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell], recipe: str, lines: Path) -> None:
        self._folder, self._cells, self._recipe, self._lines = folder, cells, recipe, lines
        self._results, problems = results.read(lines)
        self._took: list[float] = []
        todo, count = self.todo, len(cells)
        settings = len({cell.digest for cell in cells})
        seeds = count // settings
        of_each = f" ({settings} settings x {counted(seeds, 'seed')})"
        product = of_each if settings > 1 else ""
        done = f", {count - len(todo)} of them done" if len(todo) < count else ""
        say("\n".join([f"{counted(count, 'run')}{product} in {folder}{done}", *problems]))

    @property
    def todo(self) -> list[Cell]:
        """The runs that are not done."""
        return [cell for cell in self._cells if cell.key not in self._results]

    def prepare(self, jobs: int | None, devices: str | None) -> Workers:
        """Build every recipe that will run, so that a mistake shows before anything begins, and
        divide up the machine.

        Args:
            jobs: Number of runs at a time; None for as many as the machine has GPUs or cores.
            devices: The GPUs, such as `0,1`, of which each run gets one; None for all.
        Raises:
            RecipeError: If there is a mistake.
        """
        from turnrl.commands.sweep.jobs import ONE, workers

        cells = self.todo or self._cells[:1]
        recipes = len({cell.digest for cell in cells})
        subject = f"{recipes} settings" if recipes > 1 else "the recipe"
        say(f"checking {subject}; this loads torch and Lightning")
        kind = check(cells, self._folder)
        several = next((cell.devices for cell in self._cells if cell.devices not in ONE), None)
        where = workers(jobs, devices, kind, several)
        gpus = [name for name in dict.fromkeys(where.devices) if name is not None]
        device = {"cpu": "the CPU", "cuda": "all GPUs"}.get(kind, kind)
        on = f"GPU {', '.join(gpus)}" if gpus else device
        threads = f"{counted(where.threads, 'thread')} each"
        print(f"{len(where.devices)} at a time, {threads}, on {on}", flush=True)
        return where

    def show(self) -> None:
        """List the runs."""
        todo = self.todo
        for cell in self._cells:
            begun = any((self._folder / cell.name).glob("version_*/checkpoints/last.ckpt"))
            state = "done" if cell not in todo else "begun" if begun else "to do"
            say(f"  {state:7}{cell}", indent=" " * 7)

    # --------------------------------------------------------------------------------- at work

    def train(self, where: Workers) -> None:
        """Train the runs that are not done, several at a time. If one fails, its log is shown, and
        the others continue.

        Args:
            where: The machine, as `prepare` divided it.
        """
        from turnrl.commands.sweep.jobs import Jobs

        queue = self.todo
        left = len(queue)
        try:
            with Jobs(where) as jobs:
                while queue or jobs.running:
                    while queue and not jobs.full:
                        self._begin(queue.pop(0), jobs)
                    for job, code in jobs.wait():
                        left -= 1
                        self._end(job, code, left, where)
        except KeyboardInterrupt:
            count = len(self._cells)
            done = count - len(self.todo)
            say(f"\n{done} of {counted(count, 'run')} are done. Repeat the command to resume.")
            raise

    def _begin(self, cell: Cell, jobs: Jobs) -> None:
        from turnrl.commands.sweep.folders import checkpoint, join_attempts

        home = self._folder / cell.name
        words = ["fit", *cell.words(self._folder)]
        last = checkpoint(join_attempts(home))
        if last is None:
            _log(f"begins  {cell}")
        else:
            file, iterations = last
            words.append(f"--ckpt_path={file}")
            _log(f"resumes {cell}, after iteration {iterations}")
        jobs.begin(cell, home / "log.txt", words, last is not None)

    def _end(self, job: Job, code: int, left: int, where: Workers) -> None:
        from turnrl.watch.console import duration

        took = time.monotonic() - job.began
        if not job.resumed and not code:
            self._took.append(took)
        rest = f"{duration(took)}; {left} left"
        if left and self._took:
            rounds = math.ceil(left / len(where.devices))
            rest += f", ~{duration(rounds * sum(self._took) / len(self._took))}"
        try:
            if code:
                raise DataError(_reason(code))
            result = self._result(job, where.threads)
        except TurnRLError as error:
            _log(f"FAILED  {job.cell}: {error}. {rest}")
            for line in job.tail(_TAIL):
                say(f"          | {visible(line)}")
            say(f"          the whole log: {job.log}")
            return
        results.append(self._lines, result)
        self._results[job.cell.key] = result
        ends = ((name, points[-1][1]) for name in results.MAIN if (points := result.points(name)))
        name, end = next(ends, ("", 0.0))
        reached = f", {name.removeprefix('val/')} {end:.3f}" if name else ""
        _log(f"done    {job.cell}{reached}, {rest}")

    def _result(self, job: Job, threads: int) -> results.Result:
        """The line of a run that ended well.

        Raises:
            DataError: If it left no figures.
        """
        from turnrl.commands.sweep.folders import join_attempts
        from turnrl.runs.load import open_runs
        from turnrl.watch.curves import draw

        folder = join_attempts(self._folder / job.cell.name)
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
            threads=threads,
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            curves=curves,
        )

    # ------------------------------------------------------------------------------------ the end

    def close(self) -> Table:
        """Print the table, and write it and the report."""
        from turnrl.commands.sweep.table import tabulate

        table = tabulate(self._cells, self._results)
        text = "\n".join(table.lines())
        print(f"\n{text}\n")
        with whole_file(self._folder / "table.txt") as new:
            new.write_text(f"{text}\n", encoding="utf-8")
        done = [cell for cell in self._cells if cell.key in self._results]
        self._report([self._folder / cell.name / "version_0" for cell in done])
        versions = Counter(self._results[cell.key].turnrl for cell in done)
        if len(versions) > 1:
            counts = ", ".join(f"{count} by {name}" for name, count in sorted(versions.items()))
            say(f"the runs are of several versions of turnrl: {counts}")
        return table

    def _report(self, runs: Sequence[Path]) -> None:
        from turnrl.commands.report.command import write

        there = [run for run in runs if (run / "metrics.csv").is_file()]
        if not there:
            return
        file = self._folder / "report.html"
        try:
            write(there, file, f"{self._recipe}, a sweep", max(1, _IN_REPORT // len(there)))
        except TurnRLError as error:
            say(f"no report: {error}")
            return
        elsewhere = len(runs) - len(there)
        lacks = f" It lacks {counted(elsewhere, 'run')} without a folder here." if elsewhere else ""
        say(f"report of {counted(len(there), 'run')}: {file}. Open it in a browser.{lacks}")


def _log(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {text}", indent=" " * 10)


def _reason(code: int) -> str:
    """Why a run failed, by its exit code."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as by the system if memory runs out"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
