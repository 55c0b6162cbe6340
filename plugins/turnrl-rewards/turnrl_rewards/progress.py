"""Progress: differences of a score of the state after each turn.

The state after n turns is the question and the history until then. A trajectory earns the score of
its last state minus the score of its first, so stalling, going back and forth or finding something
twice earns nothing (potential-based shaping, Ng, Harada and Russell 1999, with discount 1). By
their theorem shaping keeps the best policy, but only if every last state has the same score. Here,
on purpose, it does not: the best policy moves towards last states with high scores, and changes in
no other way.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

from turnrl import RecipeError, Trajectory, TurnReward, finds_answer
from turnrl.engines import SampledPolicy


class StateScore(ABC):
    """phi(s), a score of a state. Extend it, and name your class in `Progress.state`."""

    def prepare(  # noqa: B027 - optional, as `Reward.prepare` is
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> None:
        """See all trajectories before the first state is scored; see `Reward.prepare`."""

    def rehearsal(self) -> AbstractContextManager[StateScore]:
        """A replacement for `turnrl doctor`; see `Reward.rehearsal`."""
        return contextlib.nullcontext(self)

    @abstractmethod
    def score(self, trajectory: Trajectory, turns: int) -> float:
        """phi of the state after the first `turns` turns of the trajectory; 0 is the prompt alone.

        The score must not depend on later turns.
        """


class Difference(TurnReward):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)): the change of a state's score in turn k. Subclasses
    choose the score."""

    @abstractmethod
    def __init__(self, state: StateScore, weight: float) -> None:
        self.state = state
        self.weight = weight

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self.state.prepare(trajectories, policy)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[Difference]:
        """The same difference, with the score's rehearsal."""
        rehearsed = copy.copy(self)
        with self.state.rehearsal() as rehearsed.state:
            yield rehearsed

    def score(self, trajectory: Trajectory, turn: int) -> float:
        after = self.state.score(trajectory, turn + 1)
        return self.weight * (after - self.state.score(trajectory, turn))


@final
class Progress(Difference):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)), the change of a state's score in turn k, with s_k
    the state before it. In units of weight x phi.

    Potential-based: the sum over a trajectory is weight x (last - first), so it pays only for the
    last state (see `turnrl_rewards.progress`).

    Args:
        state: The score: `AnswerSeen`, `SupportSeen`, or your own `StateScore`.
        weight: Reward of one unit of the score.
    """

    def __init__(self, state: StateScore, weight: float = 1.0) -> None:
        super().__init__(state, weight)


@final
class AnswerSeen(StateScore):
    """1 if a successful result so far contains an accepted answer that the policy had not written
    into a call before (`turnrl.finds_answer`), else 0. Always 0 if finding the answer means nothing
    (`turnrl.rewards.answers.is_searchable`), for example because the answer is yes or no, or occurs
    in the question."""

    def score(self, trajectory: Trajectory, turns: int) -> float:
        return float(any(finds_answer(trajectory, turn) for turn in range(turns)))


@final
class SupportSeen(StateScore):
    """The share, 0 to 1, of the question's supporting passages in successful results so far.

    Results name their passages in `metadata["passage_ids"]`, as `WikiSearch` does. A question
    without supporting passages always scores 0.

    Args:
        field: The field of the question's metadata that holds the ids of its supporting passages,
            or a single id.
    """

    def __init__(self, field: str = "supporting_ids") -> None:
        self.field = field
        self._field_exists = False

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        fields = {name: None for t in trajectories for name in t.question.metadata}
        self._field_exists |= self.field in fields
        if fields and not self._field_exists:  # the score would always be 0
            raise RecipeError(
                f"SupportSeen.field is {self.field!r}, and no question has metadata of that name; "
                f"there is {', '.join(fields)}. Set it to the field that names passages."
            )

    def score(self, trajectory: Trajectory, turns: int) -> float:
        ids = trajectory.question.metadata.get(self.field, ())
        wanted = {ids} if isinstance(ids, str) else set(ids)
        return len(wanted & passages_shown(trajectory, turns)) / max(len(wanted), 1)


@final
class FirstHit(Difference):
    """weight in the turn whose successful result first contains an accepted answer, else 0.

    This is `Progress` of `AnswerSeen`, so potential-based: the sum over a trajectory is weight if
    the answer was found, and 0 if finding it means nothing. `AnswerRetrieved`, in contrast, pays in
    every turn that finds the answer.

    Args:
        weight: Reward of the turn that found the answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__(AnswerSeen(), weight)


def passages_shown(trajectory: Trajectory, turns: int) -> set[str]:
    """Ids (`metadata["passage_ids"]`) of the passages in successful results of the first `turns`
    turns."""
    results = (result for turn in trajectory.turns[:turns] for result in turn.results)
    return {i for result in results if result.ok for i in result.passage_ids or ()}


def informed_turns(trajectory: Trajectory, turns: int) -> int:
    """The number of turns up to the last of the first `turns` turns that has a successful result
    that the policy read; 0 if none has.

    Errors, results that nobody read, and the policy's own words carry no information about the
    world. A score that shows a model only this many turns cannot pay for words alone.
    """
    read = (any(result.informs for result in turn.results) for turn in trajectory.turns[:turns])
    return max((n for n, informs in enumerate(read, 1) if informs), default=0)
