"""The runs of a part that are done, row by row, and what one row has more than another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from measures import Column, area, end, learned, learned_by_tokens
from parts import PARTS, Part
from turnrl_record.statistics import Difference, over_seeds
from turnrl_sweep import results
from turnrl_sweep.results import Result

OURS = "MT-GRPO"
Done = Mapping[tuple[str, int], Result]
"""Finished runs, by the digest of their recipe and their seed."""


class Row(NamedTuple):
    """An estimator, and in words what else was changed."""

    estimator: str
    label: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class Rows:
    """The rows of a part, those that stand beside it first.

    Args:
        part: The part.
        runs: By row, each by seed. Rows without a run are left out.
        trained: How many of them are the part's own.
    """

    part: Part
    runs: Mapping[Row, Mapping[int, Result]]
    trained: int

    @property
    def tokens(self) -> float:
        """The sampled tokens that every run of the rows reached."""
        return min(end(run) for some in self.runs.values() for run in some.values())

    @property
    def columns(self) -> list[Column]:
        """What was learned, of which the first is the area."""
        return (learned_by_tokens if self.part.by_tokens else learned)(self.tokens)

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

    def minus(
        self, first: Row, second: Row, figure: Callable[[Result], float]
    ) -> Difference | None:
        """A figure of one row, minus that of another, paired by seed; None below two seeds in
        common."""
        sides = (self.runs.get(first, {}), self.runs.get(second, {}))
        return _minus(*({seed: figure(run) for seed, run in some.items()} for some in sides))

    def gains(self, row: Row) -> dict[int, float]:
        """What the area of MT-GRPO with the same label has more than that of a row, by seed."""
        ours, other = self.runs.get(Row(OURS, row.label), {}), self.runs.get(row, {})
        both = sorted(ours.keys() & other.keys())
        return {s: area(ours[s], self.tokens) - area(other[s], self.tokens) for s in both}

    def change(self, before: Row, after: Row) -> Difference | None:
        """How the gain over an estimator changes from one label to another, paired by seed."""
        return _minus(self.gains(after), self.gains(before))


def _minus(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    return over_seeds([second[seed] for seed in seeds], [first[seed] for seed in seeds])


def done(folder: Path) -> Done:
    """All finished runs. What is wrong with a line is printed.

    Args:
        folder: The folder with `lines`.
    """
    every: dict[tuple[str, int], Result] = {}
    for file in sorted((folder / "lines").glob("*.jsonl")):
        found, problems = results.read(file)
        part = PARTS.get(file.stem)
        ours = {} if part is None else part.sweeps
        known = {(cell.digest, cell.seed) for of in ours.values() for _, cell in of.cells()}
        if others := found.keys() - known:
            problems.append(f"{file}: lines of no run that the study has now: {len(others)}")
        for problem in problems:
            print(problem)
        every |= {key: run for key, run in found.items() if key in known}
    return every


def rows(part: Part, runs: Done) -> Rows:
    """The rows of a part.

    Args:
        part: The part.
        runs: Finished runs, of any part.
    """
    found: dict[Row, dict[int, Result]] = {}
    trained = 0
    for sweeps in (part.beside, part.sweeps):
        trained = 0
        for label, sweep in sweeps.items():
            found |= {Row(name, label): {} for name in sweep.estimators}
            for name, cell in sweep.cells():
                if run := runs.get((cell.digest, cell.seed)):
                    found[Row(name, label)][cell.seed] = run
                    trained += 1
    return Rows(part, {row: some for row, some in found.items() if some}, trained)
