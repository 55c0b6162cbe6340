"""Means, intervals and differences as text: the one table of `turnrl eval`, `compare` and `sweep`,
and the cells of the study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from textwrap import wrap

from turnrl.plugin.text import make_visible
from turnrl.runs.statistics import Difference, Ends

WIDTH = 80
"""Columns of a line."""
_NAME = 18
_WIDE_NAME = 36
"""Columns for the name of a metric beside differences, and without them. A longer name has its own
line."""


@dataclass(frozen=True)
class Line:
    """A metric of one side.

    Args:
        name: The metric.
        mean: Its mean; None if there is nothing to average.
        ends: The interval of the mean; None if there is none.
        side: The letter of the side; empty if there is only one.
        gain: The difference from the first side; None for that side itself.
        note: Printed at the end of the line.
    """

    name: str
    mean: float | None
    ends: Ends | None
    side: str = ""
    gain: Difference | None = None
    note: str = ""


def table_lines(lines: Sequence[Line]) -> Iterator[str]:
    """A table with a line for each metric and side, of at most 80 columns except for notes."""
    gains = any(line.gain for line in lines)
    width = _NAME if gains else _WIDE_NAME
    heads = f"{'':{width + 2}}{'mean':>7}  {'95 % interval':15}"
    has_p = any(line.gain and line.gain.p is not None for line in lines)
    heads += f"{'vs A':>9}  {'95 % interval':16}{'p' if has_p else '':>7}" if gains else ""
    yield heads.rstrip()
    before = None
    for line in lines:
        name, before = "" if line.name == before else line.name, line.name
        if len(name) >= width:
            yield name
            name = ""
        yield f"{name:{width}}{line.side:2}{_values(line)}".rstrip()


def _values(line: Line) -> str:
    if line.mean is None:
        return f"{'-':>7}  {line.note}"
    gain = line.gain
    numbers = [line.mean, *(line.ends or ()), *((gain.low, gain.high) if gain else ())]
    large = max(map(abs, numbers))
    digits = 3 if large < 100 else 1 if large < 10_000 else 0  # so that the columns stay aligned
    text = f"{line.mean:7.{digits}f}  {format_ends(line.ends, digits):15}"
    if gain is not None:
        ends = format_ends((gain.low, gain.high), digits, "+")
        text += f"{gain.change:+9.{digits}f}  {ends:16}"
        if gain.p is not None:
            text += f"{'<.001' if gain.p < 1e-3 else f'{gain.p:.3f}':>7}"
    return f"{text}{line.note}"


def format_ends(ends: Ends | None, digits: int = 3, sign: str = "") -> str:
    """An interval such as `[0.035, 0.076]`; `all alike` if it has no width."""
    if ends is None:
        return ""
    low, high = ends
    return "all alike" if low == high else f"[{low:{sign},.{digits}f}, {high:{sign},.{digits}f}]"


def format_difference(one: Difference | None, digits: int = 3) -> str:
    """A difference with its interval, such as `+0.572 [+0.469, +0.674]`; empty for None."""
    if one is None:
        return ""
    return f"{one.change:+,.{digits}f} [{one.low:+,.{digits}f}, {one.high:+,.{digits}f}]"


def side_letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(number, len(ascii_uppercase))
    return (side_letter(more - 1) if more else "") + ascii_uppercase[last]


def wrap_lines(text: str, begin: str = "") -> list[str]:
    """A sentence as lines of 80 columns, the later ones indented by the width of `begin`."""
    return wrap(
        make_visible(text),
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
