"""The measures of plan.md: figures of one run, and the columns that tables make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from turnrl.commands.sweep.results import Result
from turnrl.commands.sweep.results import area_under_curve as area_until

MATCH, CALLS, FAMOUS = "val/exact_match", "train/tool_execution", "famous/exact_match"
TOKENS, ITERATION = "sampled_tokens", "iteration"
GOOD = 0.7
CALLING, FALLEN = 0.5, 0.25


class Measure(NamedTuple):
    """What a policy is judged by: a share, which is the higher the better.

    Args:
        curve: Its name in a run's curves.
        title: Its name in tables.
    """

    curve: str
    title: str


EXACT = Measure(MATCH, "exact match")


class Column(NamedTuple):
    """A measure as a column.

    Args:
        title: Its heading.
        figure: Of a run; not a number if the run has none.
        digits: After the point.
        total: True to show the sum over seeds, else their mean.
    """

    title: str
    figure: Callable[[Result], float]
    digits: int = 3
    total: bool = False


def end(run: Result, name: str = MATCH) -> float:
    """The sampled tokens up to which a run was validated."""
    return run.points(name)[-1][0]


def area(run: Result, tokens: float, name: str = MATCH) -> float:
    """The primary measure: the average of held-out exact match, or of another curve, over the first
    sampled tokens."""
    return area_until(run.points(name), tokens)


def at(run: Result, tokens: float, name: str = MATCH) -> float:
    """Held-out exact match after a number of sampled tokens, on a line between validations."""
    reached, matches = (np.asarray(one) for one in zip(*run.points(name), strict=True))
    return float(np.interp(tokens, reached, matches))


def until_good(run: Result, by: str = ITERATION, name: str = MATCH) -> float:
    """The first iteration, or number of sampled tokens, after which held-out exact match is 0.7 or
    more; the last if none is."""
    points = run.points(name, by)
    return next((x for x, match in points if match >= GOOD), points[-1][0])


def never_good(run: Result, name: str = MATCH) -> bool:
    """True if held-out exact match was never 0.7 or more."""
    return all(match < GOOD for _, match in run.points(name))


def by_iteration(run: Result, name: str = MATCH) -> float:
    """The area under held-out exact match per iteration."""
    points = run.points(name, ITERATION)
    return area_until(points, points[-1][0])


def collapsed(run: Result) -> bool:
    """True if sampled tool execution was 0.5 or more and 0.25 or less later."""
    calls = [value for _, value in run.points(CALLS)]
    highest = np.maximum.accumulate(calls)
    return any(v <= FALLEN and high >= CALLING for v, high in zip(calls, highest, strict=True))


def lowest(run: Result, name: str = CALLS) -> float:
    """The least value of a curve, which is sampled tool execution if no other is named."""
    return min((value for _, value in run.points(name)), default=math.nan)


def last(run: Result, name: str = MATCH) -> float:
    """The last value of a curve."""
    value = run.curves.get(name, (None,))[-1]
    return math.nan if value is None else value


def learned(tokens: float, of: Measure = EXACT) -> list[Column]:
    """What was learned, and how fast.

    Args:
        tokens: Sampled tokens up to which the area goes.
        of: What it is measured by.
    """
    return [
        _area(tokens, of),
        Column(f"final {of.title}", partial(last, name=of.curve)),
        Column("iterations to 0.7", partial(until_good, name=of.curve), 1),
        Column("area per iteration", partial(by_iteration, name=of.curve)),
    ]


def learned_by_tokens(tokens: float, of: Measure = EXACT) -> list[Column]:
    """The same where an iteration samples more for some than for others."""
    at_end = partial(at, tokens=tokens, name=of.curve)
    return [
        _area(tokens, of),
        Column(f"{of.title} at {tokens:,.0f} tokens", at_end),
        Column("tokens to 0.7", partial(until_good, by=TOKENS, name=of.curve), 0),
    ]


def learned_and_kept(tokens: float, of: Measure = EXACT) -> list[Column]:
    """What was learned, and how much of memory was lost meanwhile."""
    return [*learned(tokens, of), KEPT]


def learned_and_spent(tokens: float, of: Measure = EXACT) -> list[Column]:
    """What was learned, and how many turns an attempt takes at the end."""
    turns = Column("turns at the end", partial(last, name="rollout/turns"), 2)
    return [*learned(tokens, of), turns]


def _area(tokens: float, of: Measure) -> Column:
    return Column(f"area to {tokens:,.0f} tokens", partial(area, tokens=tokens, name=of.curve))


def never(of: Measure) -> Column:
    """The number of runs that never got there."""
    return Column("never reached 0.7", partial(never_good, name=of.curve), 0, total=True)


KEPT = Column("lowest on famous places", partial(lowest, name=FAMOUS))
HABITS = [
    Column("lowest tool execution", lowest, 2),
    Column("final tool execution", partial(last, name=CALLS), 2),
    Column("collapses", collapsed, 0, total=True),
    KEPT._replace(digits=2),
    Column("final on famous places", partial(last, name=FAMOUS), 2),
    Column("sampled tokens", partial(last, name=TOKENS), 0),
    Column("minutes", lambda run: last(run, "seconds") / 60, 1),
]
"""How it was done: tool use, memory and cost."""
