"""What the study changes one at a time: a retrieval reward that is sometimes wrong, and training
questions that tempt more or less."""

from __future__ import annotations

import random
from collections.abc import Iterable

from turnrl_atlas import Atlas
from turnrl_atlas.world import places
from turnrl_qa_rewards import AnswerRetrieved

from turnrl import Passage, Question, QuestionSource, Trajectory, TurnReward


class Noisy(TurnReward):
    """`AnswerRetrieved`, which says the opposite of a share of the turns that call.

    The text of a turn and its question decide, so the same turn always earns the same.

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


class _Some(QuestionSource):
    """The questions of `Atlas`, in training those about one sort of places."""

    famous: bool

    def questions(self, split: str) -> Iterable[Question]:
        """The questions of a split."""
        asked = Atlas().questions(split)
        if split != "train":
            return asked
        known = {place.id for place in places() if place.famous}
        return [one for one in asked if (one.metadata["supporting_ids"][0] in known) == self.famous]

    def passages(self) -> Iterable[Passage]:
        """A page per place."""
        return Atlas().passages()


class Tempting(_Some):
    """Trains on questions about famous places alone, which the starter policy knows by heart."""

    famous = True


class Untempting(_Some):
    """Trains on questions about other places alone, of which it knows nothing."""

    famous = False
