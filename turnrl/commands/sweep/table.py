"""The figures of a sweep: those of each setting over its seeds, and its gains over the first
setting.

The area is the average of exact match (or of the reward, if no question has an accepted answer)
over the sampled tokens, from the first to a number that every run reached. It is high if a policy
does well early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from string import ascii_uppercase
from textwrap import wrap

import numpy as np

from turnrl.commands.sweep.matrix import Cell, title
from turnrl.commands.sweep.results import MAIN, Result, Results
from turnrl.runs import record
from turnrl.runs.statistics import Difference, by_seed, interval_over_seeds
from turnrl.text import counted, visible

_WIDTH = 80
_NAME = 18
"""Columns for the name of a figure; a longer name has its own line."""
_FIRST = ("area", *record.CURVES)
"""Figures at the top of the table. Shares among them end at 0 and 1, like `f1`."""
_SAME = 1e-9
_LEFT_OUT = ("val/findable", "val/questions")
_PLACES = ("train", "iteration", "step", "sampled_tokens", "seconds")
"""Curves that are not figures of a validation."""


@dataclass(frozen=True)
class OverSeeds:
    """A figure of one setting.

    Args:
        values: The values, by seed.
        ends: The interval over seeds, by Student's t, within 0 and 1 for shares; None for one seed.
        less: The gain over the first setting, paired by seed; None for the first setting, and with
            fewer than two seeds in common.
    """

    values: Mapping[int, float]
    ends: tuple[float, float] | None
    less: Difference | None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values.values())


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        settings: The values of `--set`, by key.
        seeds: The seeds of its runs that finished.
        figures: By name: `area`, then figures of the last validation.
    """

    settings: Mapping[str, str]
    seeds: Sequence[int]
    figures: Mapping[str, OverSeeds]


@dataclass(frozen=True)
class Table:
    """All settings that have a finished run, in order.

    Args:
        rows: The settings. The first one is the baseline of the others.
        main: The figure whose area is shown.
        tokens: The area is over this many sampled tokens.
        missing: Runs that did not finish.
    """

    rows: Sequence[Setting]
    main: str
    tokens: float
    missing: Sequence[Cell]

    def as_json(self) -> dict[str, object]:
        """The table as plain values."""
        settings = [
            {
                "settings": dict(row.settings),
                "seeds": [*row.seeds],
                "figures": {
                    name: {
                        "mean": figure.mean,
                        "low": figure.ends and figure.ends[0],
                        "high": figure.ends and figure.ends[1],
                        "values": figure.values,
                        "difference": figure.less and asdict(figure.less),
                    }
                    for name, figure in row.figures.items()
                },
            }
            for row in self.rows
        ]
        missing = [{"settings": dict(cell.settings), "seed": cell.seed} for cell in self.missing]
        about = {"area_of": self.main, "area_tokens": self.tokens}
        return {"settings": settings, **about, "missing": missing}

    def lines(self) -> Iterator[str]:
        """The table as lines of at most 80 columns."""
        if not self.rows:
            yield "no run has finished: there are no figures."
            return
        rows = {_letter(number): row for number, row in enumerate(self.rows)}
        for letter, row in rows.items():
            seeds = f"seed{'s' * (len(row.seeds) > 1)} {', '.join(map(str, row.seeds))}"
            yield from _wrapped(f"{title(row.settings) or 'the recipe'}: {seeds}", f"{letter:3}")
        gains = f"{'less A':>9}  95 % interval" if len(rows) > 1 else ""
        yield f"\n{'':21}{'mean':>8}  {'95 % interval':18}{gains}".rstrip()
        for name in dict.fromkeys(name for row in self.rows for name in row.figures):
            shown = name if len(name) < _NAME else ""
            if not shown:
                yield name
            for letter, row in rows.items():
                if figure := row.figures.get(name):
                    yield _line(shown if letter == "A" else "", letter, figure)
        yield ""
        for sentence in _notes(self, rows):
            yield from _wrapped(sentence)


def tabulate(cells: Sequence[Cell], results: Results) -> Table:
    """The table of runs.

    Args:
        cells: The runs.
        results: The results of finished runs; those of other runs are ignored.
    """
    of_digest: dict[str, dict[int, Result]] = {}
    settings: dict[str, Mapping[str, str]] = {}
    for cell in cells:
        if result := results.get(cell.key):
            of_digest.setdefault(cell.digest, {})[cell.seed] = result
            settings.setdefault(cell.digest, cell.settings)
    runs_of_all = [run for runs in of_digest.values() for run in runs.values()]
    main = next((name for name in MAIN if any(run.points(name) for run in runs_of_all)), MAIN[0])
    every = [run.points(main) for run in runs_of_all]
    tokens = min((points[-1][0] for points in every if points), default=0.0)
    rows: list[Setting] = []
    for digest, runs in of_digest.items():
        values: dict[str, dict[int, float]] = {}
        for seed, run in sorted(runs.items()):
            for name, value in _figures(run, main, tokens).items():
                values.setdefault(name, {})[seed] = value
        base = rows[0].figures if rows else {}
        figures = {n: _figure(n, values[n], base.get(n), main) for n in sorted(values, key=_order)}
        rows.append(Setting(settings[digest], sorted(runs), figures))
    return Table(rows, main, tokens, [cell for cell in cells if cell.key not in results])


def _figures(result: Result, main: str, tokens: float) -> dict[str, float]:
    """The figures of one run. If no question has an accepted answer, the outcome is among them."""
    figures = {}
    rewards = ["val/reward/total", *["val/reward/outcome"][: main != MAIN[0]]]
    if tokens and (points := result.points(main)):
        figures["area"] = area(points, tokens)
    for name, curve in result.curves.items():
        shown = not name.startswith("val/reward/") or name in rewards
        shown = shown and name not in _LEFT_OUT and name.partition("/")[0] not in _PLACES
        if shown and (last := curve[-1]) is not None:
            figures[name.removeprefix("val/")] = float(last)
    return figures


def area(points: Sequence[tuple[float, float]], end: float) -> float:
    """The area under a curve from its first point to an end, by the trapezoid rule, divided by the
    width.

    Args:
        points: x and y, in the order of x.
        end: The x at which the area ends, at most that of the last point.
    """
    xs, ys = (np.asarray(values, float) for values in zip(*points, strict=True))
    if end <= xs[0]:
        return float(ys[0])
    until = [*xs[xs < end], end]
    return float(np.trapezoid(np.interp(until, xs, ys), until) / (end - xs[0]))


def _figure(name: str, values: dict[int, float], base: OverSeeds | None, main: str) -> OverSeeds:
    of = main if name == "area" else name
    share = of.rpartition("/")[2] in (*record.CURVES, "f1")
    ends = interval_over_seeds([*values.values()], share) if len(values) > 1 else None
    return OverSeeds(values, ends, by_seed(base.values, values) if base else None)


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


# ------------------------------------------------------------------------------------------- shown


def _line(name: str, letter: str, figure: OverSeeds) -> str:
    gain, ends = "", ""
    if (less := figure.less) is not None:
        gain, ends = f"{less.change:+9.4f}", _ends((less.low, less.high), "+")
    left = f"{name:{_NAME}}{letter:3}{figure.mean:8.4f}  {_ends(figure.ends):18}"
    return f"{left}{gain:9}  {ends}".rstrip()


def _ends(ends: tuple[float, float] | None, sign: str = "") -> str:
    if ends is None:
        return ""
    low, high = ends
    return "all seeds alike" if high - low < _SAME else f"[{low:{sign}.4f}, {high:{sign}.4f}]"


def _notes(table: Table, rows: Mapping[str, Setting]) -> Iterator[str]:
    """Sentences that explain each figure and its basis."""
    if table.tokens:
        yield (
            f"area is the average of {table.main.removeprefix('val/')} over the first "
            f"{table.tokens:,.0f} sampled tokens, which every run reached. The other figures are "
            "of the last validation."
        )
    if any(len(row.seeds) > 1 for row in table.rows):
        yield (
            "Intervals: Student's t over seeds; those of differences are paired by seed. They hold "
            "for other seeds of these recipes, on these questions."
        )
    else:
        yield "One seed shows nothing about others: for intervals, give more with --seeds."
    for letter, row in rows.items():
        for name, figure in row.figures.items():
            if len(figure.values) < len(row.seeds):
                yield f"{name} of {letter} is over {len(figure.values)} of its seeds."
        pairs = max((f.less.pairs for f in row.figures.values() if f.less), default=0)
        if 0 < pairs < max(len(row.seeds), len(table.rows[0].seeds)):
            shared = counted(pairs, "seed")
            yield f"{letter} shares {shared} with A: its differences are over these."
    if len(table.missing) == 1:
        yield "1 run did not finish, so no figure includes it."
    elif table.missing:
        yield f"{len(table.missing)} runs did not finish, so no figure includes them."


def _wrapped(text: str, begin: str = "") -> list[str]:
    return wrap(visible(text), _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin))


def _letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(number, len(ascii_uppercase))
    return (_letter(more - 1) if more else "") + ascii_uppercase[last]
