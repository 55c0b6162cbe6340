"""The metrics of what turn rewards pay to attempts that act, and to those that do not.

An attempt acts if it attempts a call, whether or not the call succeeds: failed calls have costs
too, and the metric `tool_execution` counts in the same way. Branches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from turnrl.rewards.scoring import Tally
from turnrl.types import Group

_T = TypeVar("_T")

ENOUGH = 20
"""Attempts that have to act before their average is trusted. If fewer act, they often all earn the
same by chance, which looks like certainty."""


def tally_earnings(
    groups: Sequence[Group], charged: bool = False, processes: int = 1
) -> dict[str, Tally]:
    """The figures of an iteration: the share of attempts that acted, the pay of these and of the
    other attempts by turn rewards, and the standard error of the difference.

    The error is computed over groups, because attempts at one question find the same things. It is
    there only if a turn reward is a cost and at least `ENOUGH` attempts acted.

    Args:
        groups: The scored groups of this process.
        charged: True if the estimator charges costs to every attempt.
        processes: Number of processes with groups; each has about as many groups.
    """
    sums = [group.turn_rewards.sum(1).tolist() for group in groups]
    earned = [(number, sums[number][i]) for number, g in enumerate(groups) for i in g.trunks]
    acted, idle = _split_by_calls(
        earned, [_has_calls(group, i) for group in groups for i in group.trunks]
    )
    tallies = {
        "rollout/acted": Tally(len(acted), len(earned)),
        "reward/acted": Tally(sum(paid for _, paid in acted), len(acted)),
        "reward/idle": Tally(sum(paid for _, paid in idle), len(idle)),
        "reward/acting_error": Tally(0.0, 0),
    }
    every = [part for group in groups for part in group.components.values()]
    costly = any(part.by_turn and part.is_cost for part in every)
    if charged and costly and len(groups) > 1 and len(acted) >= ENOUGH and idle:
        error = _error(acted, idle, len(groups)) / math.sqrt(processes)
        tallies["reward/acting_error"] = Tally(error, 1)
    return tallies


def _error(
    acted: Sequence[tuple[int, float]], idle: Sequence[tuple[int, float]], groups: int
) -> float:
    """The standard error of the difference between two averages, if groups are drawn as a whole.
    Each value comes with the number of its group."""
    shares = [0.0] * groups
    for sign, side in ((1, acted), (-1, idle)):
        average = fmean(value for _, value in side)
        for number, value in side:
            shares[number] += sign * (value - average) / len(side)
    return math.sqrt(sum(share**2 for share in shares) * groups / (groups - 1))


def _has_calls(group: Group, member: int) -> bool:
    return any(turn.reading.calls for turn in group.trajectories[member].turns)


def _split_by_calls(values: Sequence[_T], calls: Sequence[bool]) -> tuple[list[_T], list[_T]]:
    """The values of the attempts that call, and those of the other attempts."""
    pairs = [*zip(values, calls, strict=True)]
    return [value for value, yes in pairs if yes], [value for value, yes in pairs if not yes]
