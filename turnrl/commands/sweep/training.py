"""A sweep in its folder: runs trained, kept and shown.

    FOLDER/results.jsonl      a line for each finished run
    FOLDER/RUN/version_0/     a run, and beside it its log.txt
    FOLDER/table.txt          the table printed at the end

The folder has a lock while a sweep is at work.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from turnrl.commands.sweep import results
from turnrl.commands.sweep.jobs import Job, Jobs, share_cores
from turnrl.commands.sweep.matrix import SweepRun, check
from turnrl.commands.sweep.table import Table, tabulate
from turnrl.plugin.errors import DataError, TurnRLError
from turnrl.plugin.text import format_count, make_visible, say
from turnrl.runs.files import whole_file
from turnrl.runs.load import open_runs

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

    def __init__(self, folder: Path, cells: Sequence[SweepRun], recipe: str, lines: Path) -> None:
        self._folder, self._cells, self._recipe, self._lines = folder, cells, recipe, lines
        self._results, problems = results.read_results(lines)
        todo, count = self.pending, len(cells)
        settings = len({cell.digest for cell in cells})
        of_each = f" ({settings} settings x {format_count(count // settings, 'seed')})"
        product = of_each if settings > 1 else ""
        done = f", {count - len(todo)} of them done" if len(todo) < count else ""
        say("\n".join([f"{format_count(count, 'run')}{product} in {folder}{done}", *problems]))

    @property
    def pending(self) -> list[SweepRun]:
        """The runs that are not done."""
        return [cell for cell in self._cells if cell.key not in self._results]

    def train(self, at_a_time: int | None) -> None:
        """Train the runs that are not done, several at a time. Every recipe is built first, so
        that a mistake shows before anything begins. If a run fails, its log is shown, and the
        others continue.

        Args:
            at_a_time: Number of runs at a time; None for one on each core.
        Raises:
            RecipeError: If there is a mistake.
        """
        queue = self.pending
        recipes = len({cell.digest for cell in queue})
        subject = f"{recipes} settings" if recipes > 1 else "the recipe"
        say(f"checking {subject}; this loads torch and Lightning")
        kind = check(queue, self._folder)
        most, threads = share_cores(at_a_time, kind)
        say(f"{most} at a time, {format_count(threads, 'thread')} each, on {kind}")
        left = len(queue)
        try:
            with Jobs(most, threads) as jobs:
                while queue or jobs.running:
                    while queue and not jobs.is_full:
                        self._begin(queue.pop(0), jobs)
                    for job, code in jobs.wait():
                        left -= 1
                        self._end(job, code, left, threads)
        except KeyboardInterrupt:
            count = len(self._cells)
            done = count - len(self.pending)
            say(f"\n{done} of {format_count(count, 'run')} are done. Repeat the command to resume.")
            raise

    def _begin(self, cell: SweepRun, jobs: Jobs) -> None:
        """Begin a run, or resume it in its own folder."""
        home = self._folder / cell.name
        words = ["fit", *cell.words(self._folder)]
        checkpoint = home / "version_0" / "checkpoints" / "last.ckpt"
        if checkpoint.is_file():
            words.append(f"--ckpt_path={checkpoint}")
        else:
            shutil.rmtree(home / "version_0", ignore_errors=True)  # killed before it kept anything
        _log(f"{'resumes' if checkpoint.is_file() else 'begins '} {cell}")
        jobs.begin(cell, home / "log.txt", words)

    def _end(self, job: Job, code: int, left: int, threads: int) -> None:
        rest = f"{time.monotonic() - job.began:.0f} s; {left} left"
        try:
            if code:
                raise DataError(_reason(code))
            result = self._result(job.cell, threads)
        except TurnRLError as error:
            _log(f"FAILED  {job.cell}: {error}. {rest}")
            for line in job.tail(_TAIL):
                say(f"          | {make_visible(line)}")
            say(f"          the whole log: {job.log}")
            return
        results.append_result(self._lines, result)
        self._results[job.cell.key] = result
        ends = ((name, points[-1][1]) for name in results.MAIN if (points := result.points(name)))
        name, end = next(ends, ("", 0.0))
        reached = f", {name.removeprefix('val/')} {end:.3f}" if name else ""
        _log(f"done    {job.cell}{reached}, {rest}")

    def _result(self, cell: SweepRun, threads: int) -> results.Result:
        """The line of a run that ended well.

        Raises:
            DataError: If it left no figures.
        """
        (run,) = open_runs([self._folder / cell.name / "version_0"])
        curves = results.read_curves(run.metrics)
        if not curves:
            raise DataError("it validated nothing, so it has no figures. Set data.val")
        return results.Result(
            digest=cell.digest,
            seed=cell.seed,
            settings=cell.settings,
            recipe=self._recipe,
            turnrl=version("turnrl"),
            threads=threads,
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            curves=curves,
        )

    def close(self) -> Table:
        """Print the table, and write it."""
        table = tabulate(self._cells, self._results)
        text = "\n".join(table.lines())
        print(f"\n{text}\n")
        with whole_file(self._folder / "table.txt") as new:
            new.write_text(f"{text}\n", encoding="utf-8")
        say(f"See the runs: turnrl report {self._folder}/*/version_0")
        return table


def _log(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {text}", indent=" " * 10)


def _reason(code: int) -> str:
    """Why a run failed, by its exit code."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as by the system if memory runs out"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
