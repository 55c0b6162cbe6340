"""Alarms: signs in the rows of metrics that a run is going wrong. Plain arithmetic, without torch.

The level of a figure is its mean over three iterations in a row, or over the first one or two. An
alarm is raised once, in the first iteration in which its rule holds and in which each of the last
three iterations lies beyond half of the change, so no single iteration raises an alarm. The trouble
began in the first iteration since which the figure has stayed beyond half of the change.

    tool use    train/tool_execution is at most 0.6 x its highest level
    groups      rollout/degenerate_groups less train/exact_match is at least 0.25: this share of
                groups teaches nothing though they are not solved, because no more groups can be all
                right than trajectories are
    costs       reward/acted is below reward/idle by more than sqrt(4 + 4 ln n) standard errors of
                the difference, in the n-th iteration: costs take more from attempts that call than
                turn rewards pay them

A fall of tool use must also exceed the noise: five standard deviations of the difference of the two
levels, because the highest of many levels is high by chance. The median change from one iteration
to the next estimates the noise of an iteration, so a collapse does not hide itself.

The loss to costs has to be noticed before the policy has learned from it. So that rule has no
highest level, and does not wait for three iterations: a level of one or two will do. Its noise is
measured within an iteration, `reward/acting_error`. Two standard errors are enough in the first
iteration; later it takes more, because each iteration is another chance to be wrong. The column is
only written if a turn reward is a cost and the estimator charges it to every attempt; otherwise the
rule is silent.

As long as exact match has always been 0, it does not show how good the policy is, and `groups` is
silent.

The numbers rest on recorded runs of one world: see the page on alarms in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_high
from typing import NamedTuple

WINDOW = 3
"""Number of iterations in the mean that makes a level."""

# the numbers of the rules, in the order of the rules
TOOL_USE = 0.6
GROUPS = 0.25
COSTS = 2.0

_MATCH = "train/exact_match"
_TOOLS = "train/tool_execution"
_GROUPS = "rollout/degenerate_groups"
_ACTED, _IDLE, _ERROR = "reward/acted", "reward/idle", "reward/acting_error"

FIGURES = (
    *(_MATCH, _TOOLS, _GROUPS),
    *(_ACTED, _IDLE, _ERROR),
)
"""The columns of `metrics.csv` that the rules read."""

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Alarm:
    """Something that goes wrong in a run.

    Args:
        name: The rule: `tool use`, `groups` or `costs`.
        began: The iteration in which it began.
        noticed: The first iteration in which the rule held.
        figures: The columns that show it.
        text: The line to print.
    """

    name: str
    began: int
    noticed: int
    figures: tuple[str, ...]
    text: str


def find_alarms(rows: Iterable[Mapping[str, float]]) -> list[Alarm]:
    """The alarms of a run, in the order in which they were noticed, at most one per rule. Further
    rows do not change earlier alarms.

    Args:
        rows: Rows of `metrics.csv`, by the names of the columns. Figures that are missing or not
            finite are skipped, and so is a rule that needs them. A later row of the same iteration
            overrides an earlier one.
    """
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        figures = {name: row[name] for name in FIGURES if math.isfinite(row.get(name, math.nan))}
        if figures and math.isfinite(row.get("iteration", math.nan)):
            merged.setdefault(int(row["iteration"]), {}).update(figures)
    ordered = [{"iteration": float(number), **merged[number]} for number in sorted(merged)]
    raised = (rule(ordered) for rule in _RULES)
    return sorted((a for a in raised if a), key=lambda alarm: (alarm.noticed, alarm.began))


# -------------------------------------------------------------------------------------- the rules


def _check_tool_use(rows: Rows) -> Alarm | None:
    iterations, (values,) = _columns(rows, _TOOLS)
    before = _NONE_YET
    for now in _window_means(values):
        fell = now.mean <= TOOL_USE * before.mean and _exceeds_noise(values, before, now)
        if fell and (began := _find_onset(iterations, values, now.place, before.mean, now.mean)):
            change = f"{_TOOLS} {before.mean:.2f} -> {now.mean:.2f}"
            text = f"tool use fell from iteration {began} on: {change}"
            return Alarm("tool use", began, iterations[now.place], (_TOOLS,), text)
        before = now if now.mean > before.mean else before
    return None


def _check_groups(rows: Rows) -> Alarm | None:
    iterations, (values, match) = _columns(rows, _GROUPS, _MATCH)
    unsolved = [share - right for share, right in zip(values, match, strict=True)]
    speaks = _first_above_0(match)
    for now, right in zip(_window_means(unsolved), _window_means(match), strict=True):
        rose = now.mean >= GROUPS
        if rose and (began := _find_onset(iterations, unsolved, now.place, 0.0, now.mean, speaks)):
            share = f"{_GROUPS} {now.mean + right.mean:.2f}, with {_MATCH} {right.mean:.2f}"
            text = f"groups taught nothing from iteration {began} on: {share}"
            return Alarm("groups", began, iterations[now.place], (_GROUPS,), text)
    return None


def _check_costs(rows: Rows) -> Alarm | None:
    iterations, (acted, idle, errors) = _columns(rows, _ACTED, _IDLE, _ERROR)
    less = [with_call - without for with_call, without in zip(acted, idle, strict=True)]
    levels = zip(*map(_window_means, (less, acted, idle, [e * e for e in errors])), strict=True)
    for now, acting, resting, squared in levels:
        needed = math.sqrt(COSTS**2 + 4 * math.log(now.place + 1))
        if now.mean >= -needed * math.sqrt(squared.mean / squared.size) - 1e-6:
            continue
        first = now.place
        while first > 0 and less[first - 1] < 0:
            first -= 1
        text = (
            f"tool calls cost more than they earn, from iteration {iterations[first]} on: attempts "
            f"that call earn {acting.mean:.3f} from turn rewards on average, the others "
            f"{resting.mean:.3f}. The policy may stop calling before it learns to. "
            "Take the cost out until calls find things, or set model.estimator to CostsAmongRight"
        )
        return Alarm("costs", iterations[first], iterations[now.place], (_ACTED, _IDLE), text)
    return None


_RULES: tuple[Callable[[Rows], Alarm | None], ...]
_RULES = (_check_tool_use, _check_groups, _check_costs)


# -------------------------------------------------------------------------------- what they share


class _Level(NamedTuple):
    """A mean over iterations: the place of the last one, the mean, and their number."""

    place: int
    mean: float
    size: int


_NONE_YET = _Level(0, -math.inf, 1)


def _window_means(values: Sequence[float]) -> list[_Level]:
    windows = (values[max(t - WINDOW, 0) : t] for t in range(1, len(values) + 1))
    return [_Level(t, sum(w) / len(w), len(w)) for t, w in enumerate(windows)]


def _columns(rows: Rows, *names: str) -> tuple[list[int], list[list[float]]]:
    """The iterations that have all the named figures, and the values of each figure."""
    full = [row for row in rows if all(name in row for name in names)]
    return [int(row["iteration"]) for row in full], [[row[n] for row in full] for n in names]


def _first_above_0(values: Sequence[float]) -> int:
    return next((place for place, value in enumerate(values) if value > 0), len(values))


def _exceeds_noise(values: Sequence[float], before: _Level, now: _Level) -> bool:
    """True if a fall is more than five standard deviations of the difference of two levels.

    The noise is estimated from the series up to now: the median of |x_{t+1} - x_t| is 0.6745
    sqrt(2) standard deviations of independent noise.
    """
    changes = [abs(second - first) for first, second in pairwise(values[: now.place + 1])]
    if not changes:
        return False
    deviation = median_high(changes) / (0.6745 * math.sqrt(2))
    return before.mean - now.mean > 5 * deviation * math.sqrt(1 / before.size + 1 / now.size)


def _find_onset(
    iterations: Sequence[int],
    values: Sequence[float],
    place: int,
    before: float,
    now: float,
    speaks: int = 0,
) -> int | None:
    """The first iteration since which a series has stayed beyond half of its change. None if that
    is less than a whole window ago, or if the rule still has to be silent at this place."""
    half, first = (before + now) / 2, place + 1
    while first > 0 and (values[first - 1] - half) * (now - before) > 0:
        first -= 1
    return iterations[first] if place - first >= WINDOW - 1 and place >= speaks else None
