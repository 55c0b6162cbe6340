"""The numbers behind an advantage: what was compared with whom.

Every estimator that needs rewards alone gives a turn a sum of comparisons:

    A_{i,k} = sum over terms of  weight x (value - baseline) / divisor

The baseline and the divisor of a term come from the values of a set: the attempts of the group, the
turns of one number, or the turns that were taken in one state. `terms` gives them for each turn,
computed from the set and not by the estimator, so they also check it.

An estimator of your own is explained once you say what it compares:

    from turnrl_report.why import Comparison, compares

    @compares.register
    def _(estimator: MyEstimator, group: Group) -> list[Comparison]:
        return [Comparison("outcome", group.outcome[:, None])]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor
from turnrl_estimators import DiscountedReturn, GroupInGroup, PaperExact, PerTurnIndex
from turnrl_estimators.anchored import anchors
from turnrl_estimators.relative import rewards_and_outcome

from turnrl import (
    AdvantageEstimator,
    Group,
    GroupRelative,
    Merged,
    OutcomeOnly,
    TurnLevel,
    returns_to_go,
)


@dataclass(frozen=True)
class Comparison:
    """Values that are compared within sets.

    Args:
        name: The value, in words.
        values: (G, K), one for each turn; or (G, 1), one for each trajectory.
        sets: In the same shape, the number of the set that each value is in; -1 for none. None
            puts all of them into one.
        weight: Factor of the comparison, or (G, K) factors where turns differ.
        plus: Added to the deviation, in place of a floor; None for the estimator's floor.
    """

    name: str
    values: Tensor
    sets: Tensor | None = None
    weight: float | Tensor = 1.0
    plus: float | None = None


@dataclass(frozen=True)
class Term:
    """One comparison of one turn.

    Args:
        name: The value, in words.
        weight: Factor of the term.
        value: What the turn, or its trajectory, earned.
        baseline: What it is compared with.
        divisor: What the difference is divided by.
        mean: Mean of the set.
        std: Its unbiased standard deviation; None for a set of one.
        count: Members of the set, this one included.
    """

    name: str
    weight: float
    value: float
    baseline: float
    divisor: float
    mean: float
    std: float | None
    count: int

    @property
    def advantage(self) -> float:
        """The term's part of the advantage."""
        return self.weight * (self.value - self.baseline) / self.divisor


@singledispatch
def compares(estimator: AdvantageEstimator, group: Group) -> Sequence[Comparison] | None:
    """The comparisons that an estimator's advantages are sums of; None if nobody said.

    Args:
        estimator: The estimator. Register its class to explain it.
        group: A scored group.
    """
    return None


@compares.register
def _(estimator: OutcomeOnly, group: Group) -> Sequence[Comparison]:
    return [_outcome(group)]


@compares.register
def _(estimator: Merged, group: Group) -> Sequence[Comparison]:
    return [_all_rewards(group)]


@compares.register
def _(estimator: TurnLevel, group: Group) -> Sequence[Comparison]:
    return _by_turn(group, estimator.gamma, estimator.outcome_coef, estimator.turn_coef)


@compares.register
def _(estimator: PerTurnIndex, group: Group) -> Sequence[Comparison]:
    return _by_turn(group, 0.0, 1.0, 1.0)


@compares.register
def _(estimator: DiscountedReturn, group: Group) -> Sequence[Comparison]:
    earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
    rho, everyone = returns_to_go(earned, estimator.gamma), group.reached.long() - 1
    return [Comparison("discounted return, among all turns", rho, everyone)]


@compares.register
def _(estimator: GroupInGroup, group: Group) -> Sequence[Comparison]:
    earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
    states = torch.full_like(earned, -1, dtype=torch.long)
    numbers: dict[frozenset[str], int] = {}
    for row, known in zip(states, anchors(group), strict=True):
        for k, state in enumerate(known):
            row[k] = numbers.setdefault(state, len(numbers))
    rho = returns_to_go(earned, estimator.gamma)
    name = "discounted return, among turns in the same state"
    states = states.masked_fill(~group.reached, -1)
    return [_all_rewards(group), Comparison(name, rho, states, estimator.omega)]


@compares.register
def _(estimator: PaperExact, group: Group) -> Sequence[Comparison]:
    size, turns = group.turn_rewards.shape
    outcome, turn, both = (torch.zeros(size, turns) for _ in range(3))
    for i, trajectory in enumerate(group.trajectories):
        answered = [k for k, taken in enumerate(trajectory.turns) if taken.results]
        both[i] = not answered
        outcome[i] = bool(answered)
        if answered:
            turn[i, : answered[0] + 1] = estimator.turn_coef
    paid = (group.turn_rewards * group.reached).sum(1, keepdim=True)
    out = group.outcome[:, None]
    return [
        Comparison("outcome", out, weight=outcome, plus=1e-4),
        Comparison("all turn rewards", paid, weight=turn, plus=1e-4),
        Comparison("outcome and turn rewards", out + paid, weight=both, plus=1e-4),
    ]


def _outcome(group: Group, weight: float = 1.0) -> Comparison:
    return Comparison("outcome", group.outcome[:, None], weight=weight)


def _all_rewards(group: Group) -> Comparison:
    paid = (group.turn_rewards * group.reached).sum(1)
    return Comparison("outcome and turn rewards", (group.outcome + paid)[:, None])


def _by_turn(
    group: Group, gamma: float, outcome_coef: float, turn_coef: float
) -> Sequence[Comparison]:
    rho = returns_to_go(group.turn_rewards * group.reached, gamma)
    turn = torch.arange(rho.shape[1]).expand_as(rho).masked_fill(~group.reached, -1)
    name = "turn reward" if gamma == 0 else "turn rewards from here on"
    return [_outcome(group, outcome_coef), Comparison(name, rho, turn, turn_coef)]


def terms(estimator: AdvantageEstimator, group: Group) -> list[list[list[Term]]] | None:
    """For each trajectory and each of its turns, the terms of its advantage. A turn that a branch
    shares with the trajectory that it came from has none. None if nobody said what the estimator
    compares.

    Args:
        estimator: The estimator.
        group: A scored group.
    """
    comparisons = compares(estimator, group)
    if comparisons is None:
        return None
    tables = [_table(estimator, one, group) for one in comparisons]
    return [
        [
            [table[i][k] for table in tables if table[i][k].weight]
            if k >= trajectory.begins
            else []
            for k in range(len(trajectory.turns))
        ]
        for i, trajectory in enumerate(group.trajectories)
    ]


def _table(estimator: AdvantageEstimator, one: Comparison, group: Group) -> list[list[Term]]:
    """(G, K), the term of each turn."""
    sets = torch.zeros_like(one.values, dtype=torch.long) if one.sets is None else one.sets
    members: dict[int, list[float]] = {}
    for number, value in zip(sets.flatten().tolist(), one.values.flatten().tolist(), strict=True):
        members.setdefault(number, []).append(value)
    shape = group.turn_rewards.shape
    weights = torch.as_tensor(one.weight).expand(shape).tolist()
    places = zip(
        one.values.expand(shape).tolist(), sets.expand(shape).tolist(), weights, strict=True
    )
    return [
        [
            _term(estimator, one, weight, value, members[number])
            for value, number, weight in zip(*row, strict=True)
        ]
        for row in places
    ]


def _term(
    estimator: AdvantageEstimator, one: Comparison, weight: float, value: float, of: list[float]
) -> Term:
    count = len(of)
    mean = sum(of) / count
    std = None
    if count > 1:
        std = math.sqrt(sum((other - mean) ** 2 for other in of) / (count - 1))
    baseline, divisor = mean, 1.0
    if isinstance(estimator, GroupRelative):
        if estimator.baseline == "leave_one_out":
            baseline = (mean * count - value) / (count - 1) if count > 1 else 0.0
        if estimator.scale == "std":
            divisor = max(std or 0.0, estimator.min_std)
            baseline = value if std is None else baseline  # alone: nothing to be measured by
    elif one.plus is not None:
        divisor = (std or 0.0) + one.plus
    return Term(one.name, weight, value, baseline, divisor, mean, std, count)
