"""The numbers behind an advantage: what was compared with whom.

Every estimator that needs rewards alone gives a turn a sum of comparisons:

    A_{i,k} = sum over terms of  weight x (value - baseline) / divisor

The baseline and the divisor of a term come from the values of a set: the attempts of the group, the
turns of one number, or the turns that were taken in one state. `compares` gives the values
and their sets, as contrasts. `terms` computes the numbers.

Terms check the estimator, but not in everything:

- `terms` never asks the estimator for an advantage. It computes mean, deviation, baseline, floor
  and divisor of each set, in Python's floats and not with `standardize`. A contrast also says again
  who belongs to a set and with which weight a term counts. A mistake of the estimator in one of
  these shows: the terms then add up to another number.
- The values come from functions that the estimator uses too (`returns_to_go`,
  `rewards_and_outcome`), and so do the states of `GroupInGroup` (`anchors`) and the settings, which
  are the estimator's own (`gamma`, `min_std`, ...). A mistake in one of these does not show here.
  The tests of the estimators have a second implementation of each.

An estimator of your own is explained once you say beside its class what it compares:

    from turnrl.why import Contrast, compares

    @compares.register
    def _(estimator: MyEstimator, group: Group) -> list[Contrast]:
        return [Contrast("outcome", group.outcome[:, None])]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from turnrl.credit import GroupRelative, Merged, OutcomeOnly, TurnLevel, returns_to_go
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.trajectory import Group


@dataclass(frozen=True)
class Contrast:
    """Values that are compared within sets: one summand of every advantage of a group.

    Args:
        name: The value, in words.
        values: (G, K), one for each turn; or (G, 1), one for each trajectory.
        sets: In the same shape, the number of the set that each value is in; -1 for none. None
            puts all of them into one.
        weight: Factor of the contrast, or (G, K) factors where turns differ.
        plus: Added to the deviation, in place of a floor; None for the estimator's floor.
    """

    name: str
    values: Tensor
    sets: Tensor | None = None
    weight: float | Tensor = 1.0
    plus: float | None = None


@dataclass(frozen=True)
class Term:
    """A contrast at one turn, in numbers.

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
def compares(estimator: AdvantageEstimator, group: Group) -> Sequence[Contrast] | None:
    """The contrasts that an estimator's advantages are sums of; None if nobody said.

    Args:
        estimator: The estimator. Register its class to explain it, beside the class.
        group: A scored group.
    """
    return None


@compares.register
def _(estimator: OutcomeOnly, group: Group) -> Sequence[Contrast]:
    return [Contrast("outcome", group.outcome[:, None])]


@compares.register
def _(estimator: Merged, group: Group) -> Sequence[Contrast]:
    paid = (group.turn_rewards * group.reached).sum(1)
    return [Contrast("outcome and turn rewards", (group.outcome + paid)[:, None])]


@compares.register
def _(estimator: TurnLevel, group: Group) -> Sequence[Contrast]:
    rho = returns_to_go(group.turn_rewards * group.reached, estimator.gamma)
    turn = torch.arange(rho.shape[1]).expand_as(rho).masked_fill(~group.reached, -1)
    name = "turn reward" if estimator.gamma == 0 else "turn rewards from here on"
    return [
        Contrast("outcome", group.outcome[:, None], weight=estimator.outcome_coef),
        Contrast(name, rho, turn, estimator.turn_coef),
    ]


def terms(estimator: AdvantageEstimator, group: Group) -> list[list[list[Term]]] | None:
    """For each trajectory and each of its turns, the terms of its advantage. A turn that a branch
    shares with the trajectory that it came from has none. None if nobody said what the estimator
    compares.

    Args:
        estimator: The estimator.
        group: A scored group.
    """
    contrasts = compares(estimator, group)
    if contrasts is None:
        return None
    tables = [_table(estimator, one, group) for one in contrasts]
    return [
        [
            [table[i][k] for table in tables if table[i][k].weight]
            if k >= trajectory.begins
            else []
            for k in range(len(trajectory.turns))
        ]
        for i, trajectory in enumerate(group.trajectories)
    ]


def _table(estimator: AdvantageEstimator, one: Contrast, group: Group) -> list[list[Term]]:
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
    estimator: AdvantageEstimator, one: Contrast, weight: float, value: float, of: list[float]
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
