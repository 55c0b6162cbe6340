"""The tables of the page, and where they stand in it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from measures import HABITS, ITERATION, Column, area, end, never, never_good, until_good
from parts import MERGED, OURS, OUTCOMES
from rows import Row, Rows

from turnrl.commands.sweep.results import Result
from turnrl.plugin.errors import TurnRLError
from turnrl.runs.statistics import Difference
from turnrl.runs.table import format_difference

Table = Iterator[str]
_MARK = re.compile(r"<!-- ([\w-]+: [\w :-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def figures(of: Rows) -> Table:
    """Means over seeds of what was learned."""
    first, *others = of.columns
    spread, late = Column("sd of area", first.figure), never(of.part.measure)
    yield from _head("", "seeds", *(column.title for column in (first, spread, *others, late)))
    for row, some in of.runs.items():
        values = [first.figure(run) for run in some.values()]
        deviation = f"{np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        more = [_cell(column, some) for column in (*others, late)]
        yield _row(row, len(some), _cell(first, some), deviation, *more)


def leads(of: Rows) -> Table:
    """How each row learned, and by how much the first row of the part's first pair exceeds its
    area."""
    if not of.pairs:
        return
    reference, area_column = of.pairs[0][0], of.columns[0]
    first = str(reference)
    titles = ("seeds", area_column.title, f"{first} minus it", "median iterations to 0.7", "never")
    yield from _head("", *titles)
    for row, some in of.runs.items():
        lead = None if row == reference else of.minus(reference, row, area_column.figure)
        figures = (_cell(area_column, some), format_difference(lead, 3), _median(of, some))
        yield _row(row, len(some), *figures, _cell(never(of.part.measure), some))


def primary(parts: Mapping[str, Rows]) -> Table:
    """The planned result: MT-GRPO's area minus two others', in each world.

    Args:
        parts: The worlds, by what they are called.
    """
    yield from _head("MT-GRPO's area minus that of", *parts)
    for other in (MERGED, OUTCOMES):
        found = (of.minus(Row(OURS), Row(other), of.columns[0].figure) for of in parts.values())
        yield _row(other, *(format_difference(one, 3) for one in found))


def habits(of: Rows) -> Table:
    """Tool use, memory and cost."""
    yield from _head("", *(column.title for column in HABITS))
    for row, some in of.runs.items():
        yield _row(row, *(_cell(column, some) for column in HABITS))


def differences(of: Rows) -> Table:
    """The figures of one row minus those of another, with intervals over seeds."""
    yield from _head("", "minus", *(column.title for column in of.columns))
    for first, second in of.pairs:
        found = [
            format_difference(of.minus(first, second, one.figure), one.digits) for one in of.columns
        ]
        if any(found):
            yield _row(first, second, *found)


def ends(of: Rows) -> Table:
    """The differences of areas that end elsewhere: at half of the tokens, and where the two
    rows end."""
    half_way = f"to {of.tokens / 2:,.0f} tokens"
    yield from _head("", "minus", half_way, "to the tokens that both reached")
    for pair in of.pairs:
        curve = of.part.measure.curve
        both = min(end(run, curve) for row in pair for run in of.runs[row].values())
        half, whole = (
            format_difference(of.minus(*pair, partial(area, tokens=tokens, name=curve)), 3)
            for tokens in (of.tokens / 2, both)
        )
        if whole:
            yield _row(*pair, half, f"{whole} to {both:,.0f}")


def labels(of: Rows) -> Table:
    """The differences of two estimators over all labels, such as several starter policies: each
    label counts once, with the mean over its seeds."""
    return _of_pairs(of, "labels", of.over_labels)


def growth(of: Rows) -> Table:
    """How much more one estimator leads another with the last label than with the first, such as
    with more paid turns."""
    return _of_pairs(of, "seeds", of.growth)


def _of_pairs(
    of: Rows,
    counted: str,
    compare: Callable[[str, str, Callable[[Result], float]], Difference | None],
) -> Table:
    yield from _head("", "minus", counted, *(column.title for column in of.columns))
    for first, second in of.part.pairs:
        found = [compare(first, second, column.figure) for column in of.columns]
        shown = [
            format_difference(one, column.digits)
            for one, column in zip(found, of.columns, strict=True)
        ]
        if found[0]:
            yield _row(first, second, found[0].pairs, *shown)


def changes(parts: Mapping[str, Rows]) -> Table:
    """MT-GRPO's lead in area before and after each change, paired by seed.

    Args:
        parts: The conditions, by name.
    """
    yield from _head("condition", "MT-GRPO minus", "seeds", "before", "after", "change")
    for of in parts.values():
        (before,) = of.part.beside
        for row in of.runs:
            one = of.change(Row(row.estimator, before), row)
            if row.label != before and row.estimator != OURS and one:
                means = (f"{mean:+.3f}" for mean in (one.first, one.second))
                yield _row(row.label, row.estimator, one.pairs, *means, format_difference(one, 3))


def _cell(column: Column, some: Mapping[int, Result]) -> str:
    values = [column.figure(run) for run in some.values()]
    if column.total:
        return f"{sum(values):,.0f}"
    known = [value for value in values if not math.isnan(value)]
    less = "" if len(known) == len(values) else f" ({len(known)} of {len(values)} seeds)"
    return f"{np.mean(known):,.{column.digits}f}{less}" if known else "not scored"


def _median(of: Rows, some: Mapping[int, Result]) -> str:
    """The median iteration after which a run is good: more than its last for one that never is."""
    curve = of.part.measure.curve
    reached = [
        math.inf if never_good(run, curve) else until_good(run, name=curve) for run in some.values()
    ]
    middle = statistics.median(reached)
    last = max(run.points(curve, ITERATION)[-1][0] for run in some.values())
    return f"{middle:g}" if math.isfinite(middle) else f"> {last:g}"


def _head(*titles: object) -> Table:
    yield _row(*titles)
    yield _row(*["---"] * len(titles))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


TABLES: Mapping[str, Callable[[Rows], Table]] = {
    "leads": leads,
    "figures": figures,
    "differences": differences,
    "ends": ends,
    "habits": habits,
    "labels": labels,
    "growth": growth,
}
"""Of a part, by the name in its mark."""


def fill(page: Path, tables: Mapping[str, list[str]]) -> None:
    """Put tables between their marks in a page, `<!-- one-hop: figures -->` and `<!-- end -->`.

    Args:
        page: The page.
        tables: The lines of each, by the name in its mark; none if nothing was run.
    Raises:
        TurnRLError: If a mark names no table, or one without a run. The page is then as it was.
    """
    text = page.read_text("utf-8")

    def filled(mark: re.Match[str]) -> str:
        if not (table := tables.get(mark[1])):
            raise TurnRLError(
                f"{page} has the mark <!-- {mark[1]} -->, and no run has such a table."
            )
        return "\n".join([f"<!-- {mark[1]} -->", *table, "<!-- end -->"])

    page.write_text(_MARK.sub(filled, text), "utf-8")


def marks(page: Path) -> list[str]:
    """The names of the tables that a page asks for."""
    return [mark[1] for mark in _MARK.finditer(page.read_text("utf-8"))]
