"""A decision process so small that an estimator's effect on the gradient can be summed exactly.

An agent has K turns. In each turn it either answers, which ends the trajectory, or searches; turn k
has one logit, for answering. A search earns a turn reward that depends on the turn and on luck, and
may cost something. An answer earns an outcome reward that depends on the turn, and on whether a
search earned something. After a search in the last turn there is no answer.

There are so few trajectories that an estimator can be given every group of them (exact.py).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from turnrl import Question, Reading, ToolCall, ToolResult, Trajectory, Turn
from turnrl.types import Sample

QUESTION = Question("toy", "How many searches does it take?", ("right",))


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
    def correct_at(self) -> float:
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
        """A trajectory of searches that earn these rewards (`ways` draws of luck lead to them), and
        then an answer if `answers`, that is, if a turn is left."""
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
        bonus = self.found_pays * any(gain > 0 for gain in earned)
        outcome = self.outcomes[len(earned)] + bonus if answers else 0.0
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
        """(K,), the gradient that `CostsAmongRight` estimates in large groups, unscaled and with a
        leave-one-out baseline: the gradient of the expected return without costs, plus for each
        turn k the probability that an attempt is right and reaches k, times the derivative, by the
        logit of k, of the mean cost of such attempts from k on."""
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
            right = [fate for fate in self.fates if self.is_right(fate) and len(fate.scores) > k]
            costs = [(fate.chance, sum(fate.turn_costs[k:]), fate.scores[k]) for fate in right]
            total = sum(p for p, _, _ in costs) or 1.0
            mean = sum(p * cost for p, cost, _ in costs) / total
            part[k] = sum(p * (cost - mean) * score for p, cost, score in costs)
        return part

    def is_right(self, fate: Fate) -> bool:
        """True if a trajectory ends with a right answer."""
        return fate.outcome >= self.correct_at

    @cached_property
    def to_go(self) -> tuple[dict[float, float], ...]:
        """For each turn, the possible returns from its beginning on, with their probabilities."""
        chances_to_go: list[dict[float, float]] = []
        for k in range(len(self.logits)):
            chances: dict[float, float] = defaultdict(float)
            through = [fate for fate in self.fates if len(fate.scores) > k]
            total = sum(fate.chance for fate in through)
            for fate in through:
                chances[fate.earned - sum(fate.turn_rewards[:k])] += fate.chance / total
            chances_to_go.append(dict(chances))
        return tuple(chances_to_go)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """For each turn, the mean return from its beginning on."""
        return tuple(sum(value * p for value, p in chances.items()) for chances in self.to_go)


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
goes on searching too long, so its first search costs more than it brings in."""


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
