"""Earnings: what turn rewards pay to attempts that act, and to those that do not.

An attempt acts if it attempts a call, whether or not the call succeeds: failed calls have costs
too, and the metric `tool_execution` counts in the same way. Branches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from turnrl.rewards.scoring import Tally
from turnrl.types import Group

_T = TypeVar("_T")

ENOUGH = 20
"""Attempts that have to act before their average is trusted. If fewer act, they often all earn the
same by chance, which looks like certainty."""


@dataclass(frozen=True)
class TurnPay:
    """The pay of one turn reward, summed over the turns of an attempt.

    Args:
        name: The reward's name in metrics.
        acted: Average over the attempts that acted; None if none did.
        idle: Average over the other attempts; None if there are none.
    """

    name: str
    acted: float | None
    idle: float | None

    def __str__(self) -> str:
        averages = [("with a call", self.acted), ("without", self.idle)]
        paid = [f"{value:.3f} {where}" for where, value in averages if value is not None]
        return f"{self.name} pays {', '.join(paid)}"


@dataclass(frozen=True)
class Earnings:
    """The pay of a set of attempts by turn rewards.

    Args:
        acted: Number of attempts that acted.
        attempts: Number of all attempts.
        parts: The pay of each turn reward.
        cost: The average loss to costs of an attempt that acted; 0 if no turn reward is a cost.
        paying: Names of rewards that are marked as costs but paid attempts that acted.
        paid: Number of attempts that acted and were paid something beside costs.
        pays: Their average pay; None if none was paid.
    """

    acted: int
    attempts: int
    parts: tuple[TurnPay, ...]
    cost: float
    paying: tuple[str, ...]
    paid: int
    pays: float | None

    @property
    def lines(self) -> list[str]:
        """The pay of each turn reward, and a verdict on calls; empty if nothing costs."""
        if self.paying:
            return [*map(str, self.parts), self.fault]
        return [*map(str, self.parts), self.verdict] if self.cost > 0 else []

    @property
    def fault(self) -> str:
        """The costs that pay attempts that act."""
        return (
            f"{', '.join(self.paying)} is marked as a cost and pays attempts that call: return "
            "numbers below 0 from its score"
        )

    @property
    def verdict(self) -> str:
        """A sentence on whether calls pay off."""
        losing = f"an attempt that calls loses {self.cost:.2g} to costs on average"
        if self.pays is None:
            return f"{losing}, and none was paid by another turn reward yet"
        share, gaining = self.cost / self.pays, f"a paid attempt gains {self.pays:.2g}"
        if share > 1:
            return f"{losing}, and {gaining}, so calls never pay off"
        often = f"1 attempt in {1 / share:.2g}" if share < 0.95 else "every attempt"
        return (
            f"{losing}, and {gaining}, so calls pay off if {often} is paid: here {self.paid} of "
            f"{self.acted} were"
        )


def earnings(groups: Sequence[Group]) -> Earnings:
    """The pay of the turn rewards of scored groups, component by component.

    Args:
        groups: Scored groups, whose costs are known.
    """
    attempts = [(group, i) for group in groups for i in group.trunks]
    calls = [_calls(group, i) for group, i in attempts]
    names = [name for group in groups for name, part in group.components.items() if part.by_turn]
    parts = []
    for name in dict.fromkeys(names):
        paid = [float(group.components[name].totals[i]) for group, i in attempts]
        with_call, without = _split(paid, calls)
        parts.append(TurnPay(name, _mean(with_call), _mean(without)))
    calling, _ = _split(attempts, calls)
    costs = [-float(group.turn_costs[i].sum()) for group, i in calling]
    gains = [float((group.turn_rewards - group.turn_costs)[i].sum()) for group, i in calling]
    gained = [gain for gain in gains if gain > 1e-6]
    costly = {name for group in groups for name in group.cost_names or ()}
    return Earnings(
        acted=len(calling),
        attempts=len(attempts),
        parts=tuple(parts),
        cost=fmean(costs) if costs else 0.0,
        paying=tuple(p.name for p in parts if p.name in costly and (p.acted or 0.0) > 0),
        paid=len(gained),
        pays=_mean(gained),
    )


def earning_tallies(
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
    acted, idle = _split(earned, [_calls(group, i) for group in groups for i in group.trunks])
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


def _calls(group: Group, member: int) -> bool:
    return any(turn.reading.calls for turn in group.trajectories[member].turns)


def _split(values: Sequence[_T], calls: Sequence[bool]) -> tuple[list[_T], list[_T]]:
    """The values of the attempts that call, and those of the other attempts."""
    pairs = [*zip(values, calls, strict=True)]
    return [value for value, yes in pairs if yes], [value for value, yes in pairs if not yes]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
