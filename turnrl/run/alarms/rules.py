"""Alarms: signs in the rows of metrics that a run goes wrong. Plain arithmetic, without torch.

The level of a figure is its mean over three iterations in a row, or over the first one or two. An
alarm is raised once, in the first iteration in which its rule holds, and each of the last three
iterations lies beyond half of the change, so no single one raises an alarm. It began in the first
iteration beyond half of the change without a return since.

    tool use    train/tool_execution is at most 0.6 x its highest level
    entropy     train/entropy is at most 0.1 x its highest level, and train/exact_match below 0.5
    groups      rollout/degenerate_groups less train/exact_match is at least 0.25: this share of
                groups teaches nothing though they are not solved, because no more groups can be all
                right than trajectories are
    lengths     rollout/tokens or rollout/turns is at least twice what it was when train/exact_match
                was as high; or rollout/truncated is 0.25 above its lowest level
    reward      train/exact_match is at most 0.75 x its highest level, and reward/total is above its
                level then
    costs       reward/acted is below reward/idle by more than sqrt(4 + 4 ln n) standard errors of
                the difference, in the n-th iteration: costs take more from attempts that call than
                turn rewards pay them

A fall of tool use or of exact match is also more than noise makes: five standard deviations of the
difference of the two levels, because the highest of many levels is high by chance. The noise of an
iteration is estimated by the median change from one iteration to the next, so a collapse does not
hide itself.

What costs take has to be noticed before the policy has learned from it. So that rule has no
highest level, and does not wait for three iterations: a level of one or two will do. Its noise is
known from within an iteration, `reward/acting_error`. Two standard errors are enough in the first
iteration, and more later, because each iteration is another chance to be wrong. The column is only
written where a turn reward is a cost and the estimator charges it to every attempt, so elsewhere
the rule is silent.

As long as exact match has always been 0, it does not show how good the policy is. Until then
`lengths` uses reward/total, and `entropy`, `groups` and `reward` are silent.

The numbers rest on recorded runs of one world: see the page on alarms in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median_high
from typing import NamedTuple

WINDOW = 3
"""Iterations that a level is the mean of."""

# the numbers of the rules, in their order
TOOL_USE = 0.6
ENTROPY = 0.1
UNSOLVED = 0.5
GROUPS = 0.25
LENGTHS = 2.0
TRUNCATED = 0.25
EXACT_MATCH = 0.75
COSTS = 2.0

_MATCH = "train/exact_match"
_REWARD = "reward/total"
_TOOLS = "train/tool_execution"
_ENTROPY = "train/entropy"
_GROUPS = "rollout/degenerate_groups"
_LENGTHS = ("rollout/tokens", "rollout/turns")
_TRUNCATED = "rollout/truncated"
_ACTED, _IDLE, _ERROR = "reward/acted", "reward/idle", "reward/acting_error"

FIGURES = (
    *(_MATCH, _REWARD, _TOOLS, _ENTROPY, _GROUPS, *_LENGTHS, _TRUNCATED),
    *(_ACTED, _IDLE, _ERROR),
)
"""The columns of `metrics.csv` that the rules read."""

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Alarm:
    """Something that goes wrong in a run.

    Args:
        name: The rule: `tool use`, `entropy`, `groups`, `lengths`, `reward` or `costs`.
        began: The iteration in which it began.
        noticed: The iteration in which the rule held first.
        figures: The columns that show it.
        text: The line to print.
    """

    name: str
    began: int
    noticed: int
    figures: tuple[str, ...]
    text: str


def alarms(rows: Iterable[Mapping[str, float]]) -> list[Alarm]:
    """The alarms of a run, in the order in which they were noticed, at most one of each rule.

    More rows leave the alarms of those before as they are.

    Args:
        rows: Rows of `metrics.csv`, by the names of the columns. Figures that are missing or not
            finite are skipped, and so is a rule that needs them. A later row of the same iteration
            overrides an earlier one.
    """
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        known = {name: row[name] for name in FIGURES if math.isfinite(row.get(name, math.nan))}
        if known and math.isfinite(row.get("iteration", math.nan)):
            merged.setdefault(int(row["iteration"]), {}).update(known)
    ordered = [{"iteration": float(number), **merged[number]} for number in sorted(merged)]
    raised = (rule(ordered) for rule in _RULES)
    return sorted((one for one in raised if one), key=lambda one: (one.noticed, one.began))


# -------------------------------------------------------------------------------------- the rules


def _tool_use(rows: Rows) -> Alarm | None:
    its, (values,) = _columns(rows, _TOOLS)
    before = _NONE_YET
    for now in _levels(values):
        fell = now.mean <= TOOL_USE * before.mean and _exceeds_noise(values, before, now)
        if fell and (began := _began(its, values, now.place, before.mean, now.mean)):
            change = f"{_TOOLS} {before.mean:.2f} -> {now.mean:.2f}"
            text = f"tool use fell from iteration {began} on: {change}"
            return Alarm("tool use", began, its[now.place], (_TOOLS,), text)
        before = now if now.mean > before.mean else before
    return None


def _entropy(rows: Rows) -> Alarm | None:
    its, (values, match) = _columns(rows, _ENTROPY, _MATCH)
    logs, highest, speaks = list(map(_log, values)), 0.0, _first_above_0(match)
    for now, right in zip(_levels(values), _levels(match), strict=True):
        fell = now.mean <= ENTROPY * highest and right.mean < UNSOLVED
        ends = _log(highest), _log(now.mean)
        if fell and (began := _began(its, logs, now.place, *ends, speaks)):
            change = f"{_ENTROPY} {highest:.3f} -> {now.mean:.3f}, with {_MATCH} {right.mean:.2f}"
            text = f"entropy fell from iteration {began} on: {change}"
            return Alarm("entropy", began, its[now.place], (_ENTROPY,), text)
        highest = max(highest, now.mean)
    return None


def _groups(rows: Rows) -> Alarm | None:
    its, (values, match) = _columns(rows, _GROUPS, _MATCH)
    unsolved = [share - right for share, right in zip(values, match, strict=True)]
    speaks = _first_above_0(match)
    for now, right in zip(_levels(unsolved), _levels(match), strict=True):
        rose = now.mean >= GROUPS
        if rose and (began := _began(its, unsolved, now.place, 0.0, now.mean, speaks)):
            share = f"{_GROUPS} {now.mean + right.mean:.2f}, with {_MATCH} {right.mean:.2f}"
            text = f"groups taught nothing from iteration {began} on: {share}"
            return Alarm("groups", began, its[now.place], (_GROUPS,), text)
    return None


def _lengths(rows: Rows) -> Alarm | None:
    mute = list(takewhile(lambda row: not row.get(_MATCH), rows))
    found = [_cut(rows)]
    for name in _LENGTHS:
        found += [_grew(rows, name, _MATCH), _grew(mute, name, _REWARD)]
    return min((one for one in found if one), key=lambda one: one.noticed, default=None)


def _grew(rows: Rows, name: str, by: str) -> Alarm | None:
    its, (values, goods) = _columns(rows, name, by)
    speaks = _first_above_0(goods) if by == _MATCH else 0
    best: list[tuple[float, float]] = []  # lengths, and how good: none is shorter and as good
    for now, good in zip(_levels(values), _levels(goods), strict=True):
        before = min((length for length, other in best if other >= good.mean), default=math.inf)
        grew = now.mean >= LENGTHS * before
        if grew and (began := _began(its, values, now.place, before, now.mean, speaks)):
            change = f"{name} {before:.3g} -> {now.mean:.3g}, with {by} {good.mean:.2f}"
            text = f"trajectories grew from iteration {began} on: {change}"
            return Alarm("lengths", began, its[now.place], (name,), text)
        if now.mean < before:
            best = [one for one in best if one[0] < now.mean or one[1] > good.mean]
            best.append((now.mean, good.mean))
    return None


def _cut(rows: Rows) -> Alarm | None:
    its, (values,) = _columns(rows, _TRUNCATED)
    lowest = math.inf
    for now in _levels(values):
        rose = now.mean - lowest >= TRUNCATED
        if rose and (began := _began(its, values, now.place, lowest, now.mean)):
            change = f"{_TRUNCATED} {lowest:.2f} -> {now.mean:.2f}"
            text = f"trajectories ran out of tokens from iteration {began} on: {change}"
            return Alarm("lengths", began, its[now.place], (_TRUNCATED,), text)
        lowest = min(lowest, now.mean)
    return None


def _reward(rows: Rows) -> Alarm | None:
    its, (match, rewards) = _columns(rows, _MATCH, _REWARD)
    before, then = _NONE_YET, math.inf
    for now, paid in zip(_levels(match), _levels(rewards), strict=True):
        fell = now.mean <= EXACT_MATCH * before.mean and _exceeds_noise(match, before, now)
        rose = paid.mean > then
        if fell and rose and (began := _began(its, match, now.place, before.mean, now.mean)):
            change = f"{_REWARD} {then:.2f} -> {paid.mean:.2f}"
            change += f", {_MATCH} {before.mean:.2f} -> {now.mean:.2f}"
            text = f"the reward rose and exact match fell from iteration {began} on: {change}"
            return Alarm("reward", began, its[now.place], (_REWARD, _MATCH), text)
        if now.mean > before.mean:
            before, then = now, paid.mean
    return None


def _costs(rows: Rows) -> Alarm | None:
    its, (acted, idle, errors) = _columns(rows, _ACTED, _IDLE, _ERROR)
    less = [one - other for one, other in zip(acted, idle, strict=True)]
    levels = zip(*map(_levels, (less, acted, idle, [e * e for e in errors])), strict=True)
    for now, acting, resting, squared in levels:
        needed = math.sqrt(COSTS**2 + 4 * math.log(now.place + 1))
        if now.mean >= -needed * math.sqrt(squared.mean / squared.size) - 1e-6:
            continue
        first = now.place
        while first > 0 and less[first - 1] < 0:
            first -= 1
        text = (
            f"calls cost more than they find, from iteration {its[first]} on: attempts that call "
            f"earn {acting.mean:.3f} from turn rewards on average, the others {resting.mean:.3f}. "
            "The policy may stop calling before it learns to. Take the cost out until calls find "
            "things, or set model.estimator to CostsAmongRight"
        )
        return Alarm("costs", its[first], its[now.place], (_ACTED, _IDLE), text)
    return None


_RULES: tuple[Callable[[Rows], Alarm | None], ...]
_RULES = (_tool_use, _entropy, _groups, _lengths, _reward, _costs)


# -------------------------------------------------------------------------------- what they share


class _Level(NamedTuple):
    """A mean over some iterations: the place of the last one, the mean, and how many they are."""

    place: int
    mean: float
    size: int


_NONE_YET = _Level(0, -math.inf, 1)


def _levels(values: Sequence[float]) -> list[_Level]:
    windows = (values[max(t - WINDOW, 0) : t] for t in range(1, len(values) + 1))
    return [_Level(t, sum(some) / len(some), len(some)) for t, some in enumerate(windows)]


def _columns(rows: Rows, *names: str) -> tuple[list[int], list[list[float]]]:
    """The iterations in which all the named figures are known, and the values of each figure."""
    known = [row for row in rows if all(name in row for name in names)]
    return [int(row["iteration"]) for row in known], [[row[n] for row in known] for n in names]


def _first_above_0(values: Sequence[float]) -> int:
    return next((place for place, value in enumerate(values) if value > 0), len(values))


def _log(value: float) -> float:
    return math.log(max(value, 1e-9))


def _exceeds_noise(values: Sequence[float], before: _Level, now: _Level) -> bool:
    """True if a fall is more than five standard deviations of the difference of two levels.

    The noise is that of the series up to now: the median of |x_{t+1} - x_t| is 0.6745 sqrt(2)
    standard deviations of independent noise.
    """
    changes = [abs(other - one) for one, other in pairwise(values[: now.place + 1])]
    if not changes:
        return False
    deviation = median_high(changes) / (0.6745 * math.sqrt(2))
    return before.mean - now.mean > 5 * deviation * math.sqrt(1 / before.size + 1 / now.size)


def _began(
    its: Sequence[int],
    values: Sequence[float],
    place: int,
    before: float,
    now: float,
    speaks: int = 0,
) -> int | None:
    """The first iteration since which a series lies beyond half of its change. None if that is
    less than a whole window, or if the rule still has to be silent at this place."""
    half, first = (before + now) / 2, place + 1
    while first > 0 and (values[first - 1] - half) * (now - before) > 0:
        first -= 1
    return its[first] if place - first >= WINDOW - 1 and place >= speaks else None
