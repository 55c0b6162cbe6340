"""A decision process so small that an estimator's effect on the gradient can be summed exactly.

An agent has K turns. In each turn it either answers, which ends the trajectory, or searches; turn k
has one logit, for answering. A search earns a turn reward that depends on the turn and on luck, and
may cost something. An answer earns an outcome reward that depends on the turn, and on whether a
search earned something. After a search in the last turn there is no answer.

There are so few trajectories that an estimator can be given every group of G of them, and each
estimate of the gradient weighted by the group's probability. This includes critics, which are
exact, and probes, which earn each possible return of a state.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from turnrl import (
    AdvantageEstimator,
    Group,
    Question,
    Reading,
    RecipeError,
    Sample,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    assign_credit,
)
from turnrl.applied import Made, make, one_line
from turnrl_estimators.costs import CostsAmongRight

QUESTION = Question("toy", "How many searches does it take?", ("right",))
MOST_GROUPS = 10_000
"""If there would be more groups than this, an estimator gets fewer probes than it asks for."""
ALL_REWARDS = "the sum of all rewards"


@dataclass(frozen=True)
class Fate:
    """A possible trajectory.

    Args:
        trajectory: The trajectory, with one sampled token per turn.
        chance: Its probability.
        turn_rewards: The reward of each turn, costs included.
        turn_costs: The part of them that is costs.
        outcome: Its outcome reward.
        scores: The derivative of each turn's log-probability by the turn's logit.
    """

    trajectory: Trajectory
    chance: float
    turn_rewards: tuple[float, ...]
    turn_costs: tuple[float, ...]
    outcome: float
    scores: tuple[float, ...]

    @property
    def earned(self) -> float:
        """The return."""
        return self.outcome + sum(self.turn_rewards)


@dataclass(frozen=True)
class Toy:
    """The decision process and its policy, K turns long.

    By default the first search costs or pays, by luck, the second finds the answer, and a third
    earns nothing, because no turn is left for an answer.

    Args:
        logits: Logit of answering, in each turn.
        search_rewards: Equally likely rewards of a search, in each turn.
        outcomes: Reward of an answer, in each turn.
        search_costs: Reward that a search costs, in each turn; nothing in turns that it lacks.
        found_pays: Added to the outcome of an answer if a search before it earned something.
    """

    logits: tuple[float, ...] = (0.5, -0.5, 0.5)
    search_rewards: tuple[tuple[float, ...], ...] = ((-0.5, 0.5), (1.0,), (0.0,))
    outcomes: tuple[float, ...] = (0.5, 0.5, 1.0)
    search_costs: tuple[float, ...] = ()
    found_pays: float = 0.0

    @property
    def right_at(self) -> float:
        """The outcome of a right answer: the greatest."""
        return max(self.outcomes) + self.found_pays

    @cached_property
    def fates(self) -> tuple[Fate, ...]:
        """Every possible trajectory; their probabilities add up to 1."""
        turns = len(self.logits)
        return tuple(
            self._fate(rewards, stop < turns, ways)
            for stop in range(turns + 1)
            for rewards, ways in Counter(itertools.product(*self.search_rewards[:stop])).items()
        )

    def _fate(self, earned: tuple[float, ...], answers: bool, ways: int) -> Fate:
        """A trajectory of searches with these rewards, which luck has so many ways to bring, and
        then an answer if a turn is left."""
        last = len(self.logits) - 1
        taken, scores, chance = [], [], float(ways)
        sample = Sample().read((3,))
        for k, stops in enumerate(map(_sigmoid, self.logits[: len(earned) + 1])):
            going_on = k < len(earned)
            p = 1 - stops if going_on else stops
            scores.append(-stops if going_on else 1 - stops)
            chance *= p / len(self.search_rewards[k]) if going_on else p
            taken.append(_search(k, k == last) if going_on else _answer(k))
            sample = sample.wrote(k, (0 if going_on else 1,), (math.log(p),))
            if going_on and k < last:
                sample = sample.read((2,))
        ending: Literal["answer", "turns"] = "answer" if answers else "turns"
        trajectory = Trajectory(QUESTION, tuple(taken), ending, (sample,))
        found = self.found_pays * any(gain > 0 for gain in earned)
        outcome = self.outcomes[len(earned)] + found if answers else 0.0
        gains = (*earned, 0.0) if answers else earned
        costs = tuple(-cost for cost in self.search_costs[: len(earned)])
        costs += (0.0,) * (len(gains) - len(costs))
        rewards = tuple(gain + cost for gain, cost in zip(gains, costs, strict=True))
        return Fate(trajectory, chance, rewards, costs, outcome, tuple(scores))

    @cached_property
    def gradient(self) -> Tensor:
        """(K,), the gradient of the expected return by the logits."""
        total = torch.zeros(len(self.logits), dtype=torch.float64)
        for fate in self.fates:
            score = torch.tensor(fate.scores, dtype=torch.float64)
            total[: len(score)] += fate.chance * fate.earned * score
        return total

    @cached_property
    def gradient_among_right(self) -> Tensor:
        """(K,), what `CostsAmongRight` estimates in large groups, unscaled and with a leave-one-out
        baseline: the gradient of the expected return without costs, and for each turn k the
        probability of being right and reaching it, times the derivative by its logit of the mean
        cost from there on of those attempts."""
        total = torch.zeros(len(self.logits), dtype=torch.float64)
        for fate in self.fates:
            score = torch.tensor(fate.scores, dtype=torch.float64)
            paid = fate.earned - sum(fate.turn_costs)
            total[: len(score)] += fate.chance * paid * score
        return total + self.cost_part

    @cached_property
    def cost_part(self) -> Tensor:
        """(K,), the part of `gradient_among_right` that is due to costs."""
        part = torch.zeros(len(self.logits), dtype=torch.float64)
        for k in range(len(part)):
            those = [one for one in self.fates if self.is_right(one) and len(one.scores) > k]
            costs = [(one.chance, sum(one.turn_costs[k:]), one.scores[k]) for one in those]
            whole = sum(p for p, _, _ in costs) or 1.0
            mean = sum(p * cost for p, cost, _ in costs) / whole
            part[k] = sum(p * (cost - mean) * score for p, cost, score in costs)
        return part

    def is_right(self, fate: Fate) -> bool:
        """True if a trajectory ends with a right answer."""
        return fate.outcome >= self.right_at

    @cached_property
    def to_go(self) -> tuple[dict[float, float], ...]:
        """For each turn, the possible returns from its beginning on, with their probabilities."""
        chances_to_go: list[dict[float, float]] = []
        for k in range(len(self.logits)):
            chances: dict[float, float] = defaultdict(float)
            through = [fate for fate in self.fates if len(fate.scores) > k]
            whole = sum(fate.chance for fate in through)
            for fate in through:
                chances[fate.earned - sum(fate.turn_rewards[:k])] += fate.chance / whole
            chances_to_go.append(dict(chances))
        return tuple(chances_to_go)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """For each turn, the mean return from its beginning on."""
        return tuple(sum(value * p for value, p in one.items()) for one in self.to_go)


TOYS = {
    "searches": Toy(),
    "costs": Toy(
        logits=(1.0, -1.0, 0.0),
        search_rewards=((*[0.0] * 5, 0.5), (*[0.0] * 5, 0.5), (0.0,)),
        outcomes=(0.0, 0.0, 0.0),
        search_costs=(0.1, 0.2, 0.3),
        found_pays=1.0,
    ),
}
"""The toys of `turnrl credit-check`, by name.

In `costs`, one in six searches finds something, an answer is right after that, and each search
costs more than the one before it. To search once and answer earns 0.15 on average. But this policy
searches on too long, so that a first search costs it more than it brings."""


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _search(turn: int, late: bool) -> Turn:
    """A search; in the last turn it is not run."""
    call = ToolCall("search", {"query": f"page {turn}"})
    page = ToolResult(f"This is page {turn}.", metadata={"passage_ids": [f"page-{turn}"]})
    reading = Reading(calls=(call,), format_error="the last turn must answer" if late else None)
    return Turn(f"I open page {turn}.", reading, () if late else (page,))


def _answer(turn: int) -> Turn:
    """An answer."""
    return Turn(f"It takes {turn}.", Reading(answer=str(turn)))


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
        objective: What the true gradient is of.
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
        yield name, make(cls)
        if {"baseline", "scale"} <= {*inspect.signature(cls).parameters}:
            plain = make(cls, baseline="leave_one_out", scale="none")
            yield f"{name}(leave_one_out, none)", plain


def check(
    classes: Mapping[str, type], toy: Toy = Toy(), group_size: int = 4
) -> list[GradientEstimate | Skipped]:
    """Measure estimators, each with its defaults and as `(leave_one_out, none)`.

    Args:
        classes: Their classes, by short name.
        toy: The process.
        group_size: G, for estimators without probes.
    """
    rows: list[GradientEstimate | Skipped] = []
    for name, made in variants(classes):
        try:
            if isinstance(made, Exception):
                raise made
            rows.append(figures(name, made, toy, group_size))
            if isinstance(made, CostsAmongRight) and any(toy.search_costs):
                own = figures(name, made, toy, group_size, toy.gradient_among_right)
                rows.append(replace(own, objective="costs among right answers"))
        except Exception as error:  # a broken estimator must not stop the others
            rows.append(Skipped(name, one_line(error)))
    return rows


def figures(
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
        true: (K,), the gradient to compare with; None for the one of the expected return.
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
    length, at = float(true.norm()), float(mean.norm())
    there = at > 1e-9 * length
    cosine = float(mean @ true) / (at * length) if there else 0.0
    notes = [f"{probes} probe{'s' * (probes > 1)}"] if probes else []
    notes += ["exact values"] if estimator.critic is not None else []
    return GradientEstimate(
        name,
        bias=float((mean - true).norm()) / length,
        along=float(mean @ true) / length**2 - 1,
        angle=math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) if there else None,
        variance=size * spread,
        noise=size * spread / at**2 if there else None,
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
        for drawn in itertools.product(*(one.items() for one in means[: len(fate.scores)])):
            chance = math.prod((p for _, p in drawn), start=fate.chance)
            values = [value for value, _ in drawn]
            members.append(Member(fate, chance, (*values, *[0.0] * (turns - len(values)))))
    return members


def _tensors(fates: Sequence[Fate], turns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores, turn rewards, costs among them and turns reached, (M, K), and outcomes, (M,)."""
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


def _scored(
    toy: Toy,
    attempts: tuple[Trajectory, ...],
    rewards: Tensor,
    costs: Tensor,
    reached: Tensor,
    outcome: Tensor,
) -> Group:
    """A group with its components, of which one is a cost and one says what is right."""
    return Group(
        QUESTION,
        attempts,
        rewards,
        outcome,
        reached,
        {"turn/search": rewards - costs, "turn/cost": costs, "outcome/answer": outcome},
        costs=("turn/cost",) if any(toy.search_costs) else (),
        right_at={"outcome/answer": toy.right_at},
    )


def _groups(
    toy: Toy, size: int, probes: int, critic: bool
) -> tuple[list[Group], list[Tensor], Tensor]:
    """Every group, the scores (G, K) of its turns, and its probability (M,)."""
    members = _members(toy, probes)
    some = list(itertools.combinations_with_replacement(range(len(members)), size))
    # the mean returns of the first turn's probes, which the group shares
    shared = _means(toy.to_go[0], size * probes)
    fates = [member.fate for member in members]
    scores, rewards, costs, reached, outcome = _tensors(fates, len(toy.logits))
    values, exact = torch.tensor([m.values for m in members]), torch.tensor(toy.values)
    groups, chances = [], []
    for row, (first, p) in itertools.product(some, shared.items()):
        attempts, at = tuple(fates[i].trajectory for i in row), list(row)
        group = _scored(toy, attempts, rewards[at], costs[at], reached[at], outcome[at])
        if probes:
            known = values[at]
            known[:, 0] = first
            group = replace(group, state_values=known)
        if critic:
            tokens = tuple(exact[: len(a.turns)].clone() for a in attempts)
            group = replace(group, token_values=tokens)
        groups.append(group)
        chances.append(p * _orders(row) * math.prod(members[i].chance for i in row))
    index = torch.tensor([row for row in some for _ in shared])
    return groups, list(scores[index]), torch.tensor(chances, dtype=torch.float64)


def _ways_on(toy: Toy, fate: Fate) -> list[list[tuple[Fate, float]]]:
    """For each turn of a trajectory, the possible continuations from its beginning, with their
    probabilities."""
    ways = []
    for k in range(len(fate.scores)):
        past = fate.turn_rewards[:k]
        same = [f for f in toy.fates if len(f.scores) > k and f.turn_rewards[:k] == past]
        whole = sum(f.chance for f in same)
        ways.append([(f, f.chance / whole) for f in same])
    return ways


def _count_trees(toy: Toy, size: int, probes: int) -> int:
    """The number of possible trees, each with one trunk."""
    ways = ([len(one) ** probes for one in _ways_on(toy, fate)] for fate in toy.fates)
    return sum(map(math.prod, ways)) if size == 1 else MOST_GROUPS + 1


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
            group = _scored(toy, attempts, rewards, costs, reached, outcome)
            groups.append(replace(group, parents=(0,) * len(fates)))
            scores.append(score)
            chances.append(math.prod((p for _, p in drawn), start=trunk.chance))
    return groups, scores, torch.tensor(chances, dtype=torch.float64)


def _orders(row: Sequence[int]) -> int:
    """The number of orders of a group's members."""
    same = math.prod(map(math.factorial, Counter(row).values()))
    return math.factorial(len(row)) // same
