"""Earnings: what turn rewards pay to attempts that act, and to those that do not.

An attempt acts if it attempts a call, whether or not the call succeeds: costs fall on attempted
calls too, and the metric `tool_execution` counts in the same way. Branches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import TypeVar

from turnrl.scoring import Tally
from turnrl.types import Group

_T = TypeVar("_T")

ENOUGH = 20
"""Attempts that have to act before their average is trusted: fewer often all earn the same by
chance, which looks like a certainty."""


@dataclass(frozen=True)
class TurnPay:
    """What one turn reward paid, summed over the turns of an attempt.

    Args:
        name: Its name in metrics.
        acted: Average over the attempts that acted; None without any.
        idle: Average over the others; None without any.
        correlation: With the outcome reward, over all attempts; None if one of them is constant, or
            fewer than `ENOUGH` acted.
    """

    name: str
    acted: float | None
    idle: float | None
    correlation: float | None

    def __str__(self) -> str:
        known = [("with a call", self.acted), ("without", self.idle)]
        paid = [f"{value:.3f} {where}" for where, value in known if value is not None]
        if self.correlation is not None:
            paid.append(f"correlation with the outcome {self.correlation:.2f}")
        return f"{self.name} pays {', '.join(paid)}"


@dataclass(frozen=True)
class Earnings:
    """What turn rewards paid to some attempts.

    Args:
        acted: How many acted.
        attempts: How many there are.
        parts: Each turn reward.
        cost: What an attempt that acted lost to costs, on average; 0 where no turn reward is one.
        least: The least that a turn with a cost lost; 0 if none did.
        paying: Names of costs that paid those that acted, so that they are none.
        paid: How many of those that acted were paid something beside costs.
        pays: How much that was, on average. If none was paid, the most that one turn can be paid
            by the bounds of rewards (`Reward.bounds`); None if one of them does not say.
    """

    acted: int
    attempts: int
    parts: tuple[TurnPay, ...]
    cost: float
    least: float
    paying: tuple[str, ...]
    paid: int
    pays: float | None

    @property
    def lines(self) -> list[str]:
        """What each turn reward paid, and whether calls pay off; empty where nothing costs."""
        if self.paying:
            return [*map(str, self.parts), self.fault]
        return [*map(str, self.parts), self.verdict] if self.cost > 0 else []

    @property
    def fault(self) -> str:
        """Which costs pay those that act."""
        return (
            f"{', '.join(self.paying)} is marked as a cost and pays attempts that call: return "
            "numbers below 0 from its score"
        )

    @property
    def verdict(self) -> str:
        """Whether calls pay off."""
        losing = f"an attempt that calls loses {self.cost:.2g} to costs on average"
        seen = f"here {self.paid} of {self.acted} were"
        return self._compared(losing, self.cost, seen)

    @property
    def outlook(self) -> str:
        """Whether calls could pay off, of scripted attempts."""
        losing = f"a call that costs loses {self.least:.2g}"
        return self._compared(losing, self.least, "a run says how many are")

    def _compared(self, losing: str, cost: float, seen: str) -> str:
        if self.pays is None:
            return f"{losing}, and none was paid by another turn reward yet"
        if self.pays <= 0:
            return f"{losing}, and no other turn reward pays anything"
        share, gaining = cost / self.pays, f"a paid attempt gains {self.pays:.2g}"
        if share > 1:
            return f"{losing}, and {gaining}, so calls never pay off"
        often = f"1 attempt in {1 / share:.2g}" if share < 0.95 else "every attempt"
        return f"{losing}, and {gaining}, so calls pay off if {often} is paid: {seen}"


def earnings(groups: Sequence[Group]) -> Earnings:
    """What the turn rewards of scored groups paid, component by component.

    Args:
        groups: Scored groups, whose costs are known.
    """
    attempts = [(group, i) for group in groups for i in group.trunks]
    calls = [_calls(group, i) for group, i in attempts]
    outcome = [float(group.outcome[i]) for group, i in attempts]
    names = [name for group in groups for name, part in group.components.items() if part.by_turn]
    parts = []
    for name in dict.fromkeys(names):
        paid = [float(group.components[name].totals[i]) for group, i in attempts]
        related = _correlation(paid, outcome) if sum(calls) >= ENOUGH else None
        with_call, without = _split(paid, calls)
        parts.append(TurnPay(name, _mean(with_call), _mean(without), related))
    calling, _ = _split(attempts, calls)
    costs = [-float(group.turn_costs[i].sum()) for group, i in calling]
    gains = [float((group.turn_rewards - group.turn_costs)[i].sum()) for group, i in calling]
    spent = [-cost for group, i in calling for cost in group.turn_costs[i].tolist() if cost < 0]
    gained = [gain for gain in gains if gain > 1e-6]
    costly = {name for group in groups for name in group.cost_names or ()}
    return Earnings(
        acted=len(calling),
        attempts=len(attempts),
        parts=tuple(parts),
        cost=fmean(costs) if costs else 0.0,
        least=min(spent, default=0.0),
        paying=tuple(one.name for one in parts if one.name in costly and (one.acted or 0.0) > 0),
        paid=len(gained),
        pays=fmean(gained) if gained else _most(groups),
    )


def earning_tallies(
    groups: Sequence[Group], charged: bool = False, processes: int = 1
) -> dict[str, Tally]:
    """The figures of an iteration: how many attempts acted, what turn rewards paid to those and to
    the others, and the standard error of the difference.

    The error goes by groups, because attempts at one question find the same things. It is there
    only where a turn reward is a cost, and at least `ENOUGH` attempts acted.

    Args:
        groups: The scored groups of this process.
        charged: Whether the estimator charges costs to every attempt.
        processes: How many processes have groups; each has about as many.
    """
    sums = [group.turn_rewards.sum(1).tolist() for group in groups]
    earned = [(number, sums[number][i]) for number, one in enumerate(groups) for i in one.trunks]
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
    """The standard error of the difference of two averages over values with the numbers of their
    groups, each group drawn as a whole."""
    shares = [0.0] * groups
    for sign, some in ((1, acted), (-1, idle)):
        average = fmean(value for _, value in some)
        for number, value in some:
            shares[number] += sign * (value - average) / len(some)
    return math.sqrt(sum(share**2 for share in shares) * groups / (groups - 1))


def _calls(group: Group, member: int) -> bool:
    return any(turn.reading.calls for turn in group.trajectories[member].turns)


def _most(groups: Sequence[Group]) -> float | None:
    """The most that a turn can be paid beside costs; None if a reward has no bounds."""
    parts = {name: part for group in groups for name, part in group.components.items()}
    paying = [part.bounds for part in parts.values() if part.by_turn and not part.is_cost]
    return None if None in paying else sum(both[1] for both in paying if both is not None)


def _split(values: Sequence[_T], calls: Sequence[bool]) -> tuple[list[_T], list[_T]]:
    """The values of the attempts that call, and of the others."""
    pairs = [*zip(values, calls, strict=True)]
    return [value for value, yes in pairs if yes], [value for value, yes in pairs if not yes]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    try:
        return correlation(one, other)
    except StatisticsError:  # fewer than two, or all alike
        return None
