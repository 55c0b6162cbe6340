"""What the study brings of its own: an estimator between two others, a retrieval reward that is
sometimes wrong, and training questions that tempt more or less."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from turnrl_atlas import Atlas
from turnrl_qa_rewards import AnswerRetrieved

from turnrl import GroupRelative, Passage, Question, QuestionSource, Trajectory, TurnReward


@final
@dataclass
class Apart(GroupRelative):
    """One advantage for the whole attempt, of turn and outcome rewards that are normalised apart.

    A_{i,k} = z(R)_i + z(sum_l r_{.,l})_i. It weighs turn rewards against the outcome as `TurnLevel`
    does, and gives every turn the same, as `Merged` does.
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The equation."""
        both = torch.stack([outcome, turn_rewards.sum(1)], 1)
        return self.z(both, torch.ones_like(both).bool()).sum(1, keepdim=True) * reached


class Noisy(TurnReward):
    """`AnswerRetrieved`, which says the opposite of a share of the turns that call.

    The text of a turn and its question decide, so the same turn always earns the same. A call that
    failed is a turn that calls.

    Args:
        wrong: The share.
        weight: Reward of a turn that is said to have brought an accepted answer.
    """

    def __init__(self, wrong: float = 0.2, weight: float = 0.5) -> None:
        self.wrong = wrong
        self.weight = weight
        self._true = AnswerRetrieved(weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        taken = trajectory.turns[turn]
        paid = self._true.score(trajectory, turn)
        if not taken.results:
            return paid
        draw = random.Random(f"{trajectory.question.id} {turn} {taken.text}").random()
        return self.weight - paid if draw < self.wrong else paid


class _OneSort(QuestionSource):
    """The questions of `Atlas`, in training those about one sort of places."""

    famous: bool

    def questions(self, split: str) -> Iterable[Question]:
        """The questions of a split."""
        asked = Atlas().questions(split)
        if split != "train":
            return asked
        return [one for one in asked if one.metadata["famous"] == self.famous]

    def passages(self) -> Iterable[Passage]:
        """A page per place."""
        return Atlas().passages()


class Tempting(_OneSort):
    """Trains on questions about famous places alone, which the starter policy knows by heart."""

    famous = True


class Untempting(_OneSort):
    """Trains on questions about other places alone, of which it knows nothing."""

    famous = False
