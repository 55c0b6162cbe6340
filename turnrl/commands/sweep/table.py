"""The figures of a sweep: each setting's over its seeds, and what it gains over the first.

The area is the average of exact match over the sampled tokens, from the first to a number that
every run reached: it is high if a policy answers well early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from string import ascii_uppercase
from textwrap import wrap
from typing import Any

import numpy as np

from turnrl.commands.sweep.matrix import Cell, title
from turnrl.commands.sweep.results import Result
from turnrl.run import record
from turnrl.run.statistics import Difference, mean_over_seeds, over_seeds
from turnrl.text import visible

_WIDTH = 80
_NAME = 18
"""Columns for the name of a figure; a longer one has a line of its own."""
_MATCH = "val/exact_match"
_AREA = "area"
_SHARES = (_AREA, *record.CURVES, "f1")
"""Figures between 0 and 1. Their intervals end there too."""
_SAME = 1e-9
_LEFT_OUT = ("val/findable", "val/questions")
_PLACES = ("train", "iteration", "step", "sampled_tokens", "seconds")
"""Curves that are no figures of a validation."""


@dataclass(frozen=True)
class Figure:
    """A figure of one setting.

    Args:
        values: Of each seed.
        over: Student's t over the seeds, within 0 and 1 for shares; None for one seed.
        less: What it gains over the first setting, paired by seed; None for the first one, and
            where fewer than two seeds are common.
    """

    values: Mapping[int, float]
    over: Difference | None
    less: Difference | None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean([*self.values.values()]))


@dataclass(frozen=True)
class Row:
    """One setting.

    Args:
        settings: The values of `--set`, by key.
        seeds: The seeds of its runs that finished.
        figures: By name: `area`, then figures of the last validation.
    """

    settings: Mapping[str, str]
    seeds: Sequence[int]
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class Table:
    """All settings that have a run, in order.

    Args:
        rows: The settings. The first is what the others are compared with.
        tokens: Sampled tokens up to which the area goes.
        missing: Runs that did not finish.
    """

    rows: Sequence[Row]
    tokens: float
    missing: Sequence[Cell]


def tabulate(cells: Sequence[Cell], results: Mapping[tuple[str, int], Result]) -> Table:
    """The table of some runs.

    Args:
        cells: The runs.
        results: Those that finished, by digest and seed. Others than of these runs are left out.
    """
    of_digest: dict[str, dict[int, Result]] = {}
    settings: dict[str, Mapping[str, str]] = {}
    for cell in cells:
        if (one := results.get((cell.digest, cell.seed))) is not None:
            of_digest.setdefault(cell.digest, {})[cell.seed] = one
            settings.setdefault(cell.digest, cell.settings)
    every = [one for some in of_digest.values() for one in some.values()]
    tokens = min((one.points(_MATCH)[-1][0] for one in every if one.points(_MATCH)), default=0.0)
    values = [
        {seed: _figures(one, tokens) for seed, one in some.items()} for some in of_digest.values()
    ]
    rows = []
    for setting, by_seed in zip(settings.values(), values, strict=True):
        names = dict.fromkeys(name for one in by_seed.values() for name in one)
        figures = {
            name: _figure(name, _of(by_seed, name), _of(values[0], name), by_seed is values[0])
            for name in sorted(names, key=_order)
        }
        rows.append(Row(setting, sorted(by_seed), figures))
    missing = [cell for cell in cells if (cell.digest, cell.seed) not in results]
    return Table(rows, tokens, missing)


def _figures(result: Result, tokens: float) -> dict[str, float]:
    """The figures of one run."""
    figures = {}
    if tokens and (points := result.points(_MATCH)):
        figures[_AREA] = area(points, tokens)
    for name in result.curves:
        shown = not name.startswith("val/reward/") or name == "val/reward/total"
        if name.partition("/")[0] not in _PLACES and shown and name not in _LEFT_OUT:
            last = result.curves[name][-1]
            if last is not None:
                figures[name.removeprefix("val/")] = float(last)
    return figures


def area(points: Sequence[tuple[float, float]], end: float) -> float:
    """The area under a curve from its first point to an end, as an average: by the trapezoid rule,
    over the width.

    Args:
        points: x and y, in the order of x.
        end: The x to which it goes, at most that of the last point.
    """
    xs, ys = (np.asarray(values, float) for values in zip(*points, strict=True))
    if end <= xs[0]:
        return float(ys[0])
    until = [*xs[xs < end], end]
    return float(np.trapezoid(np.interp(until, xs, ys), until) / (end - xs[0]))


def _of(by_seed: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {seed: one[name] for seed, one in sorted(by_seed.items()) if name in one}


def _figure(name: str, values: dict[int, float], base: dict[int, float], first: bool) -> Figure:
    numbers = [*values.values()]
    share = name.rpartition("/")[2] in _SHARES
    over = mean_over_seeds(numbers, share) if len(numbers) > 1 else None
    common = [seed for seed in values if seed in base]
    if first or len(common) < 2:
        return Figure(values, over, None)
    less = over_seeds([base[seed] for seed in common], [values[seed] for seed in common])
    return Figure(values, over, less)


def _order(name: str) -> tuple[int, str]:
    known = (_AREA, *record.CURVES)
    return (known.index(name), name) if name in known else (len(known), name)


# ------------------------------------------------------------------------------------------- shown


def as_json(table: Table) -> dict[str, Any]:
    """The table as plain values."""
    settings = [
        {
            "settings": dict(row.settings),
            "seeds": [*row.seeds],
            "figures": {
                name: {
                    "mean": one.mean,
                    "low": one.over and one.over.low,
                    "high": one.over and one.over.high,
                    "values": one.values,
                    "difference": one.less and asdict(one.less),
                }
                for name, one in row.figures.items()
            },
        }
        for row in table.rows
    ]
    missing = [{"settings": dict(one.settings), "seed": one.seed} for one in table.missing]
    return {"settings": settings, "area_tokens": table.tokens, "missing": missing}


def as_text(table: Table) -> Iterator[str]:
    """The lines of a table, of at most 80 columns."""
    if not table.rows:
        yield "no run has finished: there are no figures."
        return
    letters = [_letter(n) for n in range(len(table.rows))]
    for letter, row in zip(letters, table.rows, strict=True):
        seeds = ", ".join(map(str, row.seeds))
        name = f"{title(row.settings) or 'the recipe'}: seed{'s' * (len(row.seeds) > 1)}"
        yield from _wrapped(f"{name} {seeds}", f"{letter:3}")
    gains = f"{'less A':>9}  95 % interval" if len(table.rows) > 1 else ""
    yield f"\n{'':21}{'mean':>8}  {'95 % interval':18}{gains}".rstrip()
    for name in dict.fromkeys(name for row in table.rows for name in row.figures):
        shown = [
            (letter, row.figures.get(name)) for letter, row in zip(letters, table.rows, strict=True)
        ]
        if long := len(name) >= _NAME:
            yield name
        for number, (letter, one) in enumerate(shown):
            if one is not None:
                yield _line(name if number == 0 and not long else "", letter, one)
    yield ""
    for sentence in _notes(table, letters):
        yield from _wrapped(sentence)


def _line(name: str, letter: str, one: Figure) -> str:
    gain = "" if one.less is None else f"{one.less.change:+9.4f}"
    left = f"{name:{_NAME}}{letter:3}{one.mean:8.4f}  {_ends(one.over):18}"
    return f"{left}{gain:9}  {_ends(one.less, '+')}".rstrip()


def _ends(one: Difference | None, sign: str = "") -> str:
    if one is None:
        return ""
    if one.high - one.low < _SAME:
        return "all seeds alike"
    return f"[{one.low:{sign}.4f}, {one.high:{sign}.4f}]"


def _notes(table: Table, letters: Sequence[str]) -> Iterator[str]:
    """Sentences that say what each figure is, and what it rests on."""
    if table.tokens:
        yield (
            f"area is the average of exact_match over the first {table.tokens:,.0f} sampled "
            "tokens, which every run reached. The other figures are of the last validation."
        )
    if any(len(row.seeds) > 1 for row in table.rows):
        yield (
            "Intervals: Student's t over seeds; those of differences are paired by seed. They hold "
            "for other seeds of these recipes, on these questions."
        )
    else:
        yield "One seed shows nothing about others: for intervals, give more with --seeds."
    for letter, row in zip(letters, table.rows, strict=True):
        for name, one in row.figures.items():
            if len(one.values) < len(row.seeds):
                yield f"{name} of {letter} is over {len(one.values)} of its seeds."
        pairs = {one.less.pairs for one in row.figures.values() if one.less is not None}
        if pairs and max(pairs) < max(len(row.seeds), len(table.rows[0].seeds)):
            yield f"{letter} shares {max(pairs)} seeds with A: its differences are over these."
    if table.missing:
        count = len(table.missing)
        runs = (
            "1 run did not finish, and is"
            if count == 1
            else f"{count} runs did not finish, and are"
        )
        yield f"{runs} in no figure."


def _wrapped(text: str, begin: str = "") -> list[str]:
    return wrap(visible(text), _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin))


def _letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(number, len(ascii_uppercase))
    return (_letter(more - 1) if more else "") + ascii_uppercase[last]
