"""The numbers behind an advantage: which values an estimator compared.

Every estimator that needs only rewards gives a turn a sum of comparisons:

    A_{i,k} = sum over terms of  weight x (value - baseline) / divisor

The baseline and the divisor of a term come from a set of values: the attempts of the group, the
turns with one number, or the turns taken in one state. `compares` returns the values and their sets
as contrasts. `compute_terms` computes the numbers.

The terms check the estimator in part:

- `compute_terms` never asks the estimator for an advantage. It computes mean, deviation, baseline,
  floor and divisor of each set in Python floats, without `standardize`. A contrast also repeats the
  members of each set and the weight of a term. If the estimator is wrong in any of these, the terms
  add up to a different number.
- The values come from functions that the estimator uses too (`returns_to_go`,
  `rewards_and_outcome`, the states of `GroupInGroup`), and the settings (`gamma`, `min_std`, ...)
  are the estimator's. A mistake in these does not show here. The estimators' tests have a second
  implementation of each.

To explain your own estimator, register beside its class what it compares:

    from turnrl.credit.why import Contrast, compares

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

from turnrl.credit.estimators import GroupRelative, Merged, OutcomeOnly, TurnLevel, returns_to_go
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.group import Group


@dataclass(frozen=True)
class Contrast:
    """Values that are compared within sets: one summand of every advantage of a group.

    Args:
        name: The value, in words.
        values: (G, K), one per turn; or (G, 1), one per trajectory.
        sets: The number of each value's set, in the same shape; -1 for no set. None puts all
            values into one set.
        weight: Factor of the contrast, or (G, K) factors if turns differ.
        plus: Added to the deviation, instead of a floor; None uses the estimator's floor.
        divisor: Divides the differences in place of the set's own deviation; None uses the
            deviation. With a divisor, a value that is alone in its set contributes nothing.
    """

    name: str
    values: Tensor
    sets: Tensor | None = None
    weight: float | Tensor = 1.0
    plus: float | None = None
    divisor: float | None = None


@dataclass(frozen=True)
class Term:
    """A contrast at one turn, in numbers.

    Args:
        name: The value, in words.
        weight: Factor of the term.
        value: The value of the turn or its trajectory.
        baseline: Subtracted from the value.
        divisor: Divides the difference.
        mean: Mean of the set.
        std: Unbiased standard deviation of the set; None for a set of one.
        count: Members of the set, including this one.
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
    """The contrasts whose sums are an estimator's advantages; None if its class is not registered.

    Args:
        estimator: The estimator. Register its class, beside the class, to explain it.
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


def compute_terms(estimator: AdvantageEstimator, group: Group) -> list[list[list[Term]]] | None:
    """The terms of the advantage of each turn of each trajectory; None if the estimator's class is
    not registered. A turn that a branch shares with its trunk has no terms.

    Args:
        estimator: The estimator.
        group: A scored group.
    """
    contrasts = compares(estimator, group)
    if contrasts is None:
        return None
    tables = [_table(estimator, contrast, group) for contrast in contrasts]
    return [
        [
            [table[i][k] for table in tables if table[i][k].weight]
            if k >= trajectory.begins
            else []
            for k in range(len(trajectory.turns))
        ]
        for i, trajectory in enumerate(group.trajectories)
    ]


def _table(estimator: AdvantageEstimator, contrast: Contrast, group: Group) -> list[list[Term]]:
    """(G, K), the term of each turn."""
    values, sets = contrast.values, contrast.sets
    sets = torch.zeros_like(values, dtype=torch.long) if sets is None else sets
    members: dict[int, list[float]] = {}
    for number, value in zip(sets.flatten().tolist(), values.flatten().tolist(), strict=True):
        members.setdefault(number, []).append(value)
    shape = group.turn_rewards.shape
    weights = torch.as_tensor(contrast.weight).expand(shape).tolist()
    rows = zip(values.expand(shape).tolist(), sets.expand(shape).tolist(), weights, strict=True)
    return [
        [
            _term(estimator, contrast, weight, value, members[number])
            for value, number, weight in zip(*row, strict=True)
        ]
        for row in rows
    ]


def _term(
    estimator: AdvantageEstimator,
    contrast: Contrast,
    weight: float,
    value: float,
    members: list[float],
) -> Term:
    count = len(members)
    mean = sum(members) / count
    std = None
    if count > 1:
        std = math.sqrt(sum((member - mean) ** 2 for member in members) / (count - 1))
    baseline, divisor = mean, 1.0
    if isinstance(estimator, GroupRelative):
        if estimator.baseline == "leave_one_out":
            baseline = (mean * count - value) / (count - 1) if count > 1 else 0.0
        if contrast.divisor is not None:
            divisor, baseline = contrast.divisor, value if std is None else baseline
        elif estimator.scale == "std":
            divisor = max(std or 0.0, estimator.min_std)
            baseline = value if std is None else baseline  # alone: there is no scale
    elif contrast.plus is not None:
        divisor = (std or 0.0) + contrast.plus
    return Term(contrast.name, weight, value, baseline, divisor, mean, std, count)
