"""The metrics of a sweep: those of each setting over its seeds, and its gains over the first
setting.

The area is the average of exact match (or of the reward, if no question has an accepted answer)
over the sampled tokens, from the first to a number that every run reached. It is high if a policy
does well early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from turnrl.commands.sweep.matrix import SweepRun, format_settings
from turnrl.commands.sweep.results import MAIN, Result, Results, area_under_curve
from turnrl.plugin.text import format_count
from turnrl.runs import record
from turnrl.runs.statistics import Difference, difference_by_seed, student_interval
from turnrl.runs.table import Line, side_letter, table_lines, wrap_lines

_FIRST = ("area", *record.CURVES)
"""Metrics at the top of the table."""
_LEFT_OUT = ("val/findable", "val/questions")
_PLACES = ("train", "iteration", "step", "sampled_tokens", "seconds")
"""Curves that are not metrics of a validation."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        settings: The values of `--set`, by key.
        values: By metric, the value of each seed that finished: `area`, then metrics of
            the last validation.
        gains: By metric, the difference from the first setting, paired by seed. Empty for the
            first setting; without metrics for which the two share fewer than two seeds.
    """

    settings: Mapping[str, str]
    values: Mapping[str, Mapping[int, float]]
    gains: Mapping[str, Difference]

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs that finished."""
        return sorted({seed for of_metric in self.values.values() for seed in of_metric})


@dataclass(frozen=True)
class Table:
    """All settings that have a finished run, in order.

    Args:
        rows: The settings. The first one is the baseline of the others.
        main: The metric whose area is shown.
        tokens: The area is over this many sampled tokens.
        missing: Runs that did not finish.
    """

    rows: Sequence[Setting]
    main: str
    tokens: float
    missing: Sequence[SweepRun]

    def lines(self) -> Iterator[str]:
        """The table as lines of at most 80 columns."""
        if not self.rows:
            yield "no run has finished: there are no figures."
            return
        for number, row in enumerate(self.rows):
            seeds = f"seed{'s' * (len(row.seeds) > 1)} {', '.join(map(str, row.seeds))}"
            title_of_row = format_settings(row.settings) or "the recipe"
            yield from wrap_lines(f"{title_of_row}: {seeds}", f"{side_letter(number):3}")
        yield ""
        names = dict.fromkeys(name for row in self.rows for name in row.values)
        yield from table_lines(
            [
                Line(
                    name,
                    fmean(values),
                    student_interval(values),
                    side_letter(number),
                    row.gains.get(name),
                )
                for name in sorted(names, key=_order)
                for number, row in enumerate(self.rows)
                if (values := [*row.values.get(name, {}).values()])
            ]
        )
        yield ""
        for sentence in self._notes():
            yield from wrap_lines(sentence)

    def _notes(self) -> Iterator[str]:
        """Sentences that explain the metrics and their basis."""
        if self.tokens:
            yield (
                f"area is the average of {self.main.removeprefix('val/')} over the first "
                f"{self.tokens:,.0f} sampled tokens, which every run reached. The other figures "
                "are of the last validation."
            )
        if any(len(row.seeds) > 1 for row in self.rows):
            yield (
                "Intervals: Student's t over seeds; those of differences are paired by seed. They "
                "hold for other seeds of these recipes, on these questions."
            )
        else:
            yield "One seed shows nothing about others: for intervals, give more with --seeds."
        for number, row in enumerate(self.rows):
            for name, values in row.values.items():
                if len(values) < len(row.seeds):
                    yield f"{name} of {side_letter(number)} is over {len(values)} of its seeds."
        if self.missing:
            yield f"Not finished, and in no figure: {format_count(len(self.missing), 'run')}."


def tabulate(cells: Sequence[SweepRun], results: Results) -> Table:
    """The table of runs.

    Args:
        cells: The runs.
        results: The results of finished runs; those of other runs are ignored.
    """
    of_digest: dict[str, list[Result]] = {}
    settings = {cell.digest: cell.settings for cell in reversed(cells)}
    for cell in cells:
        if result := results.get(cell.key):
            of_digest.setdefault(cell.digest, []).append(result)
    every = [run for runs in of_digest.values() for run in runs]
    main = next((name for name in MAIN if any(run.points(name) for run in every)), MAIN[0])
    ends = [points[-1][0] for run in every if (points := run.points(main))]
    tokens = min(ends, default=0.0)
    rows: list[Setting] = []
    for digest, runs in of_digest.items():
        values: dict[str, dict[int, float]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            for name, value in _metrics(run, main, tokens).items():
                values.setdefault(name, {})[run.seed] = value
        base = rows[0].values if rows else {}
        pairs = {
            name: difference_by_seed(base[name], values[name]) for name in values if name in base
        }
        gains = {name: gain for name, gain in pairs.items() if gain is not None}
        rows.append(Setting(settings[digest], values, gains))
    return Table(rows, main, tokens, [cell for cell in cells if cell.key not in results])


def _metrics(result: Result, main: str, tokens: float) -> dict[str, float]:
    """The metrics of one run. If no question has an accepted answer, the outcome is among them."""
    metrics = {}
    rewards = ["val/reward/total", *["val/reward/outcome"][: main != MAIN[0]]]
    if tokens and (points := result.points(main)):
        metrics["area"] = area_under_curve(points, tokens)
    for name, curve in result.curves.items():
        shown = not name.startswith("val/reward/") or name in rewards
        shown = shown and name not in _LEFT_OUT and name.partition("/")[0] not in _PLACES
        if shown and (last := curve[-1]) is not None:
            metrics[name.removeprefix("val/")] = float(last)
    return metrics


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)
