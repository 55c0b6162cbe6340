"""A sweep in its folder: runs begun, kept and shown.

    FOLDER/results.jsonl      a line for each run that is done
    FOLDER/RUN/version_0/     a run, and beside it its log.txt
    FOLDER/table.txt          what is printed at the end
    FOLDER/report.html        the runs that are there, as a page

The folder has a lock while a sweep is at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnrl.commands.sweep import results
from turnrl.commands.sweep.matrix import Cell, check
from turnrl.errors import TurnRLError
from turnrl.run.folders import whole_file

if TYPE_CHECKING:
    from turnrl.commands.sweep.jobs import Places

_IN_REPORT = 5_000
"""Trajectories of all runs in the report, more or less, so that it opens at once."""


class Sweep:
    """A sweep in its folder.

    Args:
        folder: Its folder.
        cells: Its runs.
        recipe: Name of the recipe.
        lines: The file with a line for each run that is done; None for `results.jsonl` in the
            folder.
    """

    def __init__(
        self, folder: Path, cells: Sequence[Cell], recipe: str, lines: Path | None = None
    ) -> None:
        self.todo: list[Cell] = []
        """The runs that are not done."""
        self._folder, self._cells, self._recipe = folder, cells, recipe
        self._lines = lines or folder / results.FILE
        self._results: dict[tuple[str, int], results.Result] = {}

    def read(self) -> None:
        """Read which runs are done, and say so."""
        self._results, problems = results.read(self._lines)
        self.todo = [one for one in self._cells if (one.digest, one.seed) not in self._results]
        count, settings = len(self._cells), len({cell.digest for cell in self._cells})
        seeds = count // settings
        of_each = f" ({settings} settings x {seeds} seed{'s' * (seeds > 1)})"
        product = of_each if settings > 1 else ""
        done = f", {count - len(self.todo)} of them done" if len(self.todo) < count else ""
        print(f"{_count(count)}{product} in {self._folder}{done}", flush=True)
        for problem in problems:
            print(problem)

    def prepare(self, jobs: int | None, devices: str | None) -> Places:
        """Make every recipe that is to be run, so that a mistake shows before anything begins;
        and share out the machine.

        Args:
            jobs: Runs at a time; None for as many as the machine has GPUs or cores.
            devices: GPUs of which each run gets one, `0,1`; None for all.
        Raises:
            RecipeError: If there is a mistake.
        """
        from turnrl.commands.sweep.jobs import ONE, places

        cells = self.todo or self._cells[:1]
        recipes = len({cell.digest for cell in cells})
        what = f"{recipes} settings" if recipes > 1 else "the recipe"
        print(f"checking {what}; this loads torch and Lightning", flush=True)
        start = check(cells, self._folder)
        several = next((one.devices for one in self._cells if one.devices not in ONE), None)
        where = places(jobs, devices, start.device.type, several)
        gpus = [name for name in dict.fromkeys(where.devices) if name is not None]
        kind = {"cpu": "the CPU", "cuda": "all GPUs"}.get(start.device.type, start.device.type)
        on = f"on GPU {', '.join(gpus)}" if gpus else f"on {kind}"
        threads = f"{where.threads} thread{'s' * (where.threads > 1)} each"
        print(f"{len(where.devices)} at a time, {threads}, {on}", flush=True)
        return where

    def show(self) -> None:
        """List the runs."""
        for cell in self._cells:
            done = cell not in self.todo
            begun = any((self._folder / cell.name).glob("version_*/checkpoints/last.ckpt"))
            print(f"  {'done' if done else 'begun' if begun else 'to do':7}{cell}")

    def work(self, where: Places) -> None:
        """Run what is not done, several at a time.

        Args:
            where: The machine, as `prepare` shared it out.
        """
        from turnrl.commands.sweep.work import Work

        try:
            Work(self._folder, self._recipe, where, self._keep).run(self.todo)
        except KeyboardInterrupt:
            done = sum((one.digest, one.seed) in self._results for one in self._cells)
            print(f"\n{done} of {_count(len(self._cells))} are done. The same command goes on.")
            raise

    def _keep(self, result: results.Result) -> None:
        results.append(self._lines, result)
        self._results[result.digest, result.seed] = result

    # ------------------------------------------------------------------------------------ the end

    def close(self, as_json: bool) -> tuple[int, dict[str, Any] | None]:
        """Print the table and write the report.

        Returns:
            The exit code, which is 1 if a run did not finish; and the table as plain values if it
            was asked for.
        """
        from turnrl.commands.sweep import table

        whole = table.tabulate(self._cells, self._results)
        text = "\n".join(table.as_text(whole))
        print(f"\n{text}\n")
        with whole_file(self._folder / "table.txt") as new:
            new.write_text(f"{text}\n", encoding="utf-8")
        self._report([one for one in self._cells if one not in whole.missing])
        versions = Counter(
            self._results[one.digest, one.seed].turnrl
            for one in self._cells
            if one not in whole.missing
        )
        if len(versions) > 1:
            counts = ", ".join(f"{count} by {name}" for name, count in sorted(versions.items()))
            print(f"the runs are of several versions of turnrl: {counts}")
        return int(bool(whole.missing)), table.as_json(whole) if as_json else None

    def _report(self, done: Sequence[Cell]) -> None:
        from turnrl.commands.report.command import write

        runs = [self._folder / one.name / "version_0" for one in done]
        there = [run for run in runs if (run / "metrics.csv").is_file()]
        if not there:
            return
        file = self._folder / "report.html"
        try:
            write(there, file, f"{self._recipe}, a sweep", max(1, _IN_REPORT // len(there)))
        except TurnRLError as error:
            print(f"no report: {error}")
            return
        elsewhere = len(runs) - len(there)
        but = f" The folders of {elsewhere} others are not here." if elsewhere else ""
        print(f"report of {_count(len(there))}: {file}. Open it in a browser.{but}")


def _count(runs: int) -> str:
    return f"{runs} run{'s' * (runs != 1)}"
