"""An estimator's gradient on a toy, summed over every group, each weighted by its probability.

This includes critics, which are exact, and probes, which earn each possible return of a state.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnrl import AdvantageEstimator, Group, RecipeError, Trajectory, assign_credit
from turnrl.credit.apply import Made, error_line, make_estimator
from turnrl.plugin.text import format_count
from turnrl.types import RewardComponent
from turnrl_estimators.costs import CostsAmongRight
from turnrl_estimators.toy import QUESTION, Fate, Toy

MOST_GROUPS = 10_000
"""If there would be more groups than this, an estimator gets fewer probes than it asks for."""
ALL_REWARDS = "the sum of all rewards"


@dataclass(frozen=True)
class Member:
    """A possible member of a group: a fate, and the returns of its probes.

    Args:
        fate: Its trajectory.
        chance: The probability of both.
        values: (K,), the mean return of each turn's probes; zero without probes, and for the first
            turn, whose probes all members of a group share.
    """

    fate: Fate
    chance: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class GradientEstimate:
    """Bias and variance of an estimator's gradient. Dividing by the std, as `scale: std` does, only
    rescales the gradient, which the learning rate can absorb. It cannot fix a wrong angle.

    Args:
        estimator: Its name, and any options that are not its defaults.
        bias: |E[g] - gradient| / |gradient|, with g the estimate of one group.
        along: The part of the bias along the gradient: below 0 the estimate is too short, and below
            -1 it points backwards.
        angle: The angle between E[g] and the gradient, in degrees; None if E[g] is zero.
        variance: G tr Cov[g], the variance per trajectory.
        noise: variance / |E[g]|^2, which does not depend on scale; None if E[g] is zero.
        group_size: G.
        note: Its inputs besides rewards.
        objective: The objective whose gradient is the true one.
    """

    estimator: str
    bias: float
    along: float
    angle: float | None
    variance: float
    noise: float | None
    group_size: int
    note: str = ""
    objective: str = ALL_REWARDS


@dataclass(frozen=True)
class Skipped:
    """An estimator that could not be measured, and the reason."""

    estimator: str
    reason: str


def variants(classes: Mapping[str, type]) -> Iterator[tuple[str, Made]]:
    """Each estimator with its defaults, and again as `(leave_one_out, none)`, the unbiased and
    unscaled form, if it has these options. An estimator that cannot be made is replaced by its
    error."""
    for name, cls in classes.items():
        yield name, make_estimator(cls)
        if {"baseline", "scale"} <= {*inspect.signature(cls).parameters}:
            plain = make_estimator(cls, baseline="leave_one_out", scale="none")
            yield f"{name}(leave_one_out, none)", plain


def measure_all(
    classes: Mapping[str, type], toy: Toy | None = None, group_size: int = 4
) -> list[GradientEstimate | Skipped]:
    """Measure estimators, each with its defaults and as `(leave_one_out, none)`.

    Args:
        classes: Their classes, by short name.
        toy: The process; None for the first of the toys, `Toy()`.
        group_size: G, for estimators without probes.
    """
    toy = Toy() if toy is None else toy
    rows: list[GradientEstimate | Skipped] = []
    for name, estimator in variants(classes):
        try:
            if isinstance(estimator, Exception):
                raise estimator
            rows.append(measure(name, estimator, toy, group_size))
            if isinstance(estimator, CostsAmongRight) and any(toy.search_costs):
                row = measure(name, estimator, toy, group_size, toy.gradient_among_right)
                rows.append(replace(row, objective="costs among right answers"))
        except Exception as error:  # a broken estimator must not stop the others
            rows.append(Skipped(name, error_line(error)))
    return rows


def measure(
    name: str,
    estimator: AdvantageEstimator,
    toy: Toy,
    group_size: int = 4,
    true: Tensor | None = None,
) -> GradientEstimate:
    """Compute the exact bias and variance, over all groups, of an estimator's policy gradient

        g = 1/G sum_i sum_k A_{i,k} grad log pi(a_{i,k} | s_{i,k}).

    Groups that differ only in order are tried once, because an estimator treats members alike. An
    estimator with probes gets the smallest groups that it takes, because the possible returns of
    probes multiply the number of groups, and if necessary fewer probes than it asks for.

    Args:
        name: Name of the result.
        estimator: The estimator.
        toy: The process.
        group_size: G, for estimators without probes.
        true: (K,), the gradient to compare with; None for the gradient of the expected return.
    Raises:
        PluginError: If the estimator breaks its contract.
        RecipeError: If there are too many groups.
    """
    least, probes = estimator.min_group_size, estimator.probes
    size = least if probes else max(group_size, least)
    count = _count_trees if estimator.trains_probes else _count
    while count(toy, size, probes) > MOST_GROUPS:
        if probes <= 1:
            raise RecipeError(f"there are more than {MOST_GROUPS:,} groups of {size}")
        probes -= 1
    if estimator.trains_probes:
        groups, scores, chances = _trees(toy, probes)
    else:
        groups, scores, chances = _groups(toy, size, probes, estimator.critic is not None)
    estimates = torch.zeros(len(groups), len(toy.logits), dtype=torch.float64)
    for estimate, group, score in zip(estimates, groups, scores, strict=True):
        credit = assign_credit(group, estimator).turns  # the toy has one token to a turn
        turns = credit.shape[1]
        estimate[:turns] = (credit * score[:, :turns]).sum(0) / size
    mean = (chances[:, None] * estimates).sum(0)
    spread = float((chances * (estimates - mean).square().sum(1)).sum())
    true = toy.gradient if true is None else true
    length, norm = float(true.norm()), float(mean.norm())
    nonzero = norm > 1e-9 * length
    cosine = float(mean @ true) / (norm * length) if nonzero else 0.0
    notes = [format_count(probes, "probe")] if probes else []
    notes += ["exact values by turn"] if estimator.critic is not None else []
    return GradientEstimate(
        name,
        bias=float((mean - true).norm()) / length,
        along=float(mean @ true) / length**2 - 1,
        angle=math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) if nonzero else None,
        variance=size * spread,
        noise=size * spread / norm**2 if nonzero else None,
        group_size=size,
        note=", ".join(notes),
    )


def _count(toy: Toy, size: int, probes: int) -> int:
    """The number of possible groups."""
    members, shared = _members(toy, probes), _means(toy.to_go[0], size * probes)
    return math.comb(len(members) + size - 1, size) * len(shared)


def _means(chances: Mapping[float, float], count: int) -> dict[float, float]:
    """The possible means of `count` draws, with their probabilities; zero for no draws."""
    sums: dict[float, float] = {0.0: 1.0}
    for _ in range(count):
        longer: dict[float, float] = defaultdict(float)
        for (a, p), (b, q) in itertools.product(sums.items(), chances.items()):
            longer[round(a + b, 9)] += p * q
        sums = longer
    return {total / max(count, 1): p for total, p in sums.items()}


def _members(toy: Toy, probes: int) -> list[Member]:
    """Every possible member of a group, without the first turn's value, which the group shares."""
    turns = len(toy.logits)
    means = [{0.0: 1.0}, *(_means(chances, probes) for chances in toy.to_go[1:])]
    members = []
    for fate in toy.fates:
        for drawn in itertools.product(*(mean.items() for mean in means[: len(fate.scores)])):
            chance = math.prod((p for _, p in drawn), start=fate.chance)
            values = [value for value, _ in drawn]
            members.append(Member(fate, chance, (*values, *[0.0] * (turns - len(values)))))
    return members


def _tensors(fates: Sequence[Fate], turns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores, turn rewards, their costs and turns reached, each (M, K), and outcomes, (M,)."""
    scores, rewards, costs, reached = (
        torch.tensor([[*row, *[0.0] * (turns - len(row))] for row in rows], dtype=torch.float64)
        for rows in (
            [fate.scores for fate in fates],
            [fate.turn_rewards for fate in fates],
            [fate.turn_costs for fate in fates],
            [[1.0] * len(fate.scores) for fate in fates],
        )
    )
    # single precision, as in a run
    outcome = torch.tensor([fate.outcome for fate in fates])
    return scores, rewards.float(), costs.float(), reached.bool(), outcome


def _make_group(
    toy: Toy,
    attempts: tuple[Trajectory, ...],
    rewards: Tensor,
    costs: Tensor,
    reached: Tensor,
    outcome: Tensor,
) -> Group:
    """A group with its components; one is a cost, and one has `right_at`."""
    return Group(
        QUESTION,
        attempts,
        rewards,
        outcome,
        reached,
        {
            "turn/search": RewardComponent(rewards - costs),
            "turn/cost": RewardComponent(costs, is_cost=any(toy.search_costs)),
            "outcome/answer": RewardComponent(outcome, right_at=toy.correct_at),
        },
    )


def _groups(
    toy: Toy, size: int, probes: int, critic: bool
) -> tuple[list[Group], list[Tensor], Tensor]:
    """Every group, the scores (G, K) of its turns, and its probability (M,)."""
    members = _members(toy, probes)
    combinations = list(itertools.combinations_with_replacement(range(len(members)), size))
    # the mean returns of the first turn's probes, which the group shares
    shared = _means(toy.to_go[0], size * probes)
    fates = [member.fate for member in members]
    scores, rewards, costs, reached, outcome = _tensors(fates, len(toy.logits))
    values, exact = torch.tensor([m.values for m in members]), torch.tensor(toy.values)
    groups, chances = [], []
    for row, (first, p) in itertools.product(combinations, shared.items()):
        attempts, at = tuple(fates[i].trajectory for i in row), list(row)
        group = _make_group(toy, attempts, rewards[at], costs[at], reached[at], outcome[at])
        if probes:
            state_values = values[at]
            state_values[:, 0] = first
            group = replace(group, state_values=state_values)
        if critic:
            tokens = tuple(exact[: len(a.turns)].clone() for a in attempts)
            group = replace(group, token_values=tokens)
        groups.append(group)
        chances.append(p * _orders(row) * math.prod(members[i].chance for i in row))
    index = torch.tensor([row for row in combinations for _ in shared])
    return groups, list(scores[index]), torch.tensor(chances, dtype=torch.float64)


def _ways_on(toy: Toy, fate: Fate) -> list[list[tuple[Fate, float]]]:
    """For each turn of a trajectory, the possible continuations from its beginning, with their
    probabilities."""
    ways = []
    for k in range(len(fate.scores)):
        past = fate.turn_rewards[:k]
        onward = [f for f in toy.fates if len(f.scores) > k and f.turn_rewards[:k] == past]
        total = sum(f.chance for f in onward)
        ways.append([(f, f.chance / total) for f in onward])
    return ways


def _count_trees(toy: Toy, size: int, probes: int) -> int:
    """The number of possible trees, each with one trunk."""
    counts = ([len(ways) ** probes for ways in _ways_on(toy, fate)] for fate in toy.fates)
    return sum(map(math.prod, counts)) if size == 1 else MOST_GROUPS + 1


def _trees(toy: Toy, probes: int) -> tuple[list[Group], list[Tensor], Tensor]:
    """Every trunk and its branches as a group, the scores (M, K) of each, and its probability."""
    groups, scores, chances, width = [], [], [], len(toy.logits)
    for trunk in toy.fates:
        at = [k for k in range(len(trunk.scores)) for _ in range(probes)]
        ways = _ways_on(toy, trunk)
        for drawn in itertools.product(*(ways[k] for k in at)):
            fates, begins = [trunk, *(fate for fate, _ in drawn)], [0, *at]
            score, rewards, costs, reached, outcome = _tensors(fates, width)
            reached &= torch.arange(width) >= torch.tensor(begins)[:, None]
            branches = zip(fates, begins, strict=True)
            attempts = tuple(replace(fate.trajectory, begins=k) for fate, k in branches)
            group = _make_group(toy, attempts, rewards, costs, reached, outcome)
            groups.append(replace(group, parents=(0,) * len(fates)))
            scores.append(score)
            chances.append(math.prod((p for _, p in drawn), start=trunk.chance))
    return groups, scores, torch.tensor(chances, dtype=torch.float64)


def _orders(row: Sequence[int]) -> int:
    """The number of distinct orders of a group's members."""
    repeats = math.prod(map(math.factorial, Counter(row).values()))
    return math.factorial(len(row)) // repeats
