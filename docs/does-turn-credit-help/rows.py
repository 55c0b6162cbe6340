"""The runs of a part that are done, row by row, and what one row has more than another."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from measures import Column, end
from parts import OURS, Part

from turnrl.commands.sweep import results
from turnrl.commands.sweep.results import Result, Results
from turnrl.runs.statistics import Difference, difference_by_seed


class Row(NamedTuple):
    """An estimator, and in words what else was changed."""

    estimator: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.estimator} ({self.label})" if self.label else self.estimator


@dataclass(frozen=True)
class Rows:
    """The rows of a part, those that stand beside it first.

    Args:
        part: The part.
        runs: By row, each by seed. Rows without a run are left out.
        until: The most tokens to which the area goes.
    """

    part: Part
    runs: Mapping[Row, Mapping[int, Result]]
    until: float = math.inf

    @property
    def begun(self) -> bool:
        """True if a row has a run that is the part's own, not of one that stands beside."""
        own = (Row(name, label) for label, of in self.part.sweeps.items() for name in of.estimators)
        return any(row in self.runs for row in own)

    @property
    def tokens(self) -> float:
        """Where the area ends: at the sampled tokens that every run of the rows reached, and every
        one of their world."""
        curve = self.part.measure.curve
        ends = (end(run, curve) for some in self.runs.values() for run in some.values())
        return min(self.until, *ends)

    @property
    def columns(self) -> list[Column]:
        """What was learned, of which the first is the area."""
        return self.part.columns(self.tokens, self.part.measure)

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        """The rows that are compared: one, and what is taken from it."""
        estimators, labels = (dict.fromkeys(names) for names in zip(*self.runs, strict=True))
        wanted = self.part.pairs or [(OURS, other) for other in estimators]
        found = []
        for label, (first, second) in itertools.product(labels, wanted):
            base = label if self.part.base is None else self.part.base
            pair = Row(first, base), Row(second, label)
            if pair[0] != pair[1] and self.runs.keys() >= {*pair}:
                found.append(pair)
        return found

    def minus(self, of: Row, less: Row, figure: Callable[[Result], float]) -> Difference | None:
        """The difference of a figure between two rows, paired by seed; None below two seeds in
        common."""
        sides = (self.runs.get(less, {}), self.runs.get(of, {}))
        first, second = ({seed: figure(run) for seed, run in runs.items()} for runs in sides)
        return difference_by_seed(first, second, self.part.level)

    def over_labels(
        self, of: str, less: str, figure: Callable[[Result], float]
    ) -> Difference | None:
        """A figure of one estimator less that of another: means over the seeds that both have with
        a label, paired by label; None below two labels."""
        first: dict[int, float] = {}
        second: dict[int, float] = {}
        for number, label in enumerate(dict.fromkeys(row.label for row in self.runs)):
            sides = self.runs.get(Row(less, label), {}), self.runs.get(Row(of, label), {})
            if both := sides[0].keys() & sides[1].keys():
                first[number], second[number] = (
                    statistics.mean(figure(runs[seed]) for seed in both) for runs in sides
                )
        return difference_by_seed(first, second, self.part.level)

    def gains(self, row: Row) -> dict[int, float]:
        """MT-GRPO's lead in area over a row with the same label, by seed."""
        return self._lead(Row(OURS, row.label), row, self.columns[0].figure)

    def change(self, before: Row, after: Row) -> Difference | None:
        """How the gain over an estimator changes from one label to another, paired by seed."""
        return difference_by_seed(self.gains(before), self.gains(after), self.part.level)

    def growth(self, of: str, less: str, figure: Callable[[Result], float]) -> Difference | None:
        """How a figure of one estimator less that of another changes from the first label to the
        last, paired by seed; None below two seeds in common."""
        every = [*dict.fromkeys(row.label for row in self.runs)]
        before, after = (
            self._lead(Row(of, label), Row(less, label), figure) for label in (every[0], every[-1])
        )
        return difference_by_seed(before, after, self.part.level)

    def _lead(self, of: Row, less: Row, figure: Callable[[Result], float]) -> dict[int, float]:
        first, second = self.runs.get(of, {}), self.runs.get(less, {})
        both = sorted(first.keys() & second.keys())
        return {seed: figure(first[seed]) - figure(second[seed]) for seed in both}


def done(folder: Path, parts: Mapping[str, Part]) -> Results:
    """All finished runs. What is wrong with a line is printed.

    Args:
        folder: The folder with `lines`.
        parts: The parts, by name.
    """
    every: Results = {}
    for file in sorted((folder / "lines").glob("*.jsonl")):
        found, problems = results.read_results(file)
        part = parts.get(file.stem, Part({}))
        known = {cell.key for of in part.sweeps.values() for _, cell in of.cells()}
        if others := found.keys() - known:
            problems.append(
                f"{file}: lines of no run that the study has now: {len(others)}. Their recipe or "
                "seeds were changed since. Change them back, or delete these lines."
            )
        measure = part.measure.curve
        scored = {key: run for key, run in found.items() if run.points(measure)}
        problems += [
            f"{file}: a run with seed {seed} has no {measure}. It counts as not done."
            for _, seed in found.keys() - scored
        ]
        for problem in problems:
            print(problem)
        every |= {key: run for key, run in scored.items() if key in known}
    return every


def rows(part: Part, runs: Results) -> Rows:
    """The rows of a part.

    Args:
        part: The part.
        runs: Finished runs, of any part.
    """
    found: dict[Row, dict[int, Result]] = {}
    for label, sweep in part.every():
        found |= {Row(name, label): {} for name in sweep.estimators}
        for name, cell in sweep.cells():
            if run := runs.get(cell.key):
                found[Row(name, label)][cell.seed] = run
    world = [] if part.world is None else part.world.cells()
    of_world = (runs.get(cell.key) for _, cell in world)
    until = min((end(run, part.measure.curve) for run in of_world if run), default=math.inf)
    return Rows(part, {row: some for row, some in found.items() if some}, until)
