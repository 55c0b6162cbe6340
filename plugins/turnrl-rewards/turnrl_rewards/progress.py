"""Progress: a score of the state after each turn, turned into differences.

The state after n turns is the question and all that was said and read until then. What a trajectory
earns is the score of its last state minus that of its first, so stalling, going back and forth or
finding a thing twice earns nothing (potential-based shaping, Ng, Harada and Russell 1999, at a
discount of 1). Their theorem, that shaping leaves the best policy what it was, also asks that the
score of the last state be the same whatever was done. It is not, and is not meant to be: the best
policy moves to last states that score high, and by nothing else.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

from turnrl import RecipeError, SampledPolicy, Trajectory, TurnReward, answer_in_results


class StateScore(ABC):
    """phi(s), a score of the state after some turns. Extend it and name it in `Progress.state`."""

    def prepare(  # noqa: B027 - optional, as `Reward.prepare` is
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> None:
        """See all trajectories before any of their states is scored; see `Reward.prepare`."""

    def rehearsal(self) -> AbstractContextManager[StateScore]:
        """What `turnrl doctor` scores with in place of this; see `Reward.rehearsal`."""
        return contextlib.nullcontext(self)

    @abstractmethod
    def score(self, trajectory: Trajectory, turns: int) -> float:
        """phi of the state after the first `turns` turns of the trajectory; 0 is the prompt alone.

        Later turns are there to be seen, but a state's score shall not depend on them.
        """


class Difference(TurnReward):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)): what turn k adds to a score of the state. Each
    class that extends it says which score that is."""

    @abstractmethod
    def __init__(self, state: StateScore, weight: float) -> None:
        self.state = state
        self.weight = weight

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self.state.prepare(trajectories, policy)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[Difference]:
        """The same difference, of the score's rehearsal."""
        rehearsed = copy.copy(self)
        with self.state.rehearsal() as rehearsed.state:
            yield rehearsed

    def score(self, trajectory: Trajectory, turn: int) -> float:
        after = self.state.score(trajectory, turn + 1)
        return self.weight * (after - self.state.score(trajectory, turn))


@final
class Progress(Difference):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)), what turn k adds to a score of the state, with s_k
    the state before it. In units of weight x phi.

    Potential-based: the sum over a trajectory is weight x (last - first), so it pays for where a
    trajectory ends and for nothing on the way (see `turnrl_rewards.progress`).

    Args:
        state: The score: `AnswerSeen`, `SupportSeen`, or a `StateScore` of one's own.
        weight: Reward of one unit of the score.
    """

    def __init__(self, state: StateScore, weight: float = 1.0) -> None:
        super().__init__(state, weight)


@final
class AnswerSeen(StateScore):
    """1 if an accepted answer stands in a successful result so far, else 0. It is 0 throughout
    where finding the answer says nothing (`turnrl.can_be_found`): it is yes or no, say, or stands
    in the question."""

    def score(self, trajectory: Trajectory, turns: int) -> float:
        results = (result for turn in trajectory.turns[:turns] for result in turn.results)
        return float(answer_in_results(results, trajectory.question))


@final
class SupportSeen(StateScore):
    """Share, 0 to 1, of the question's supporting passages that successful results showed so far.

    Results name what they showed in `metadata["passage_ids"]`, as `WikiSearch` does. A question
    that names no passages scores 0 throughout.

    Args:
        field: Where the question's metadata has the ids of its supporting passages: a list, or the
            one.
    """

    def __init__(self, field: str = "supporting_ids") -> None:
        self.field = field
        self._named = False

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        known = {name: None for t in trajectories for name in t.question.metadata}
        self._named |= self.field in known
        if known and not self._named:  # it would score 0 for ever
            what = f"SupportSeen.field is {self.field!r}, and no question has metadata of that name"
            there = ", ".join(known)
            raise RecipeError(f"{what}; there is {there}. Set it to where passages are named.")

    def score(self, trajectory: Trajectory, turns: int) -> float:
        named = trajectory.question.metadata.get(self.field, ())
        wanted = {named} if isinstance(named, str) else set(named)
        return len(wanted & passages_shown(trajectory, turns)) / max(len(wanted), 1)


@final
class FirstHit(Difference):
    """weight in the turn in which an accepted answer first stands in a successful result, else 0.

    This is `Progress` of `AnswerSeen`, so potential-based: the sum over a trajectory is weight if
    the answer was found at all, and nothing where finding it says nothing. `AnswerRetrieved` pays
    in every turn that finds it again.

    Args:
        weight: Reward of the turn that found the answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__(AnswerSeen(), weight)
        self.bounds = (0.0, weight)


def passages_shown(trajectory: Trajectory, turns: int) -> set[str]:
    """Ids of the passages that the policy read in successful results of its first `turns` turns, as
    tools name them in `metadata["passage_ids"]`."""
    results = (result for turn in trajectory.turns[:turns] for result in turn.results)
    return {i for result in results if result.ok for i in result.metadata.get("passage_ids", ())}


def informed(trajectory: Trajectory, turns: int) -> int:
    """Number of turns, of the first `turns`, up to the last that brought a successful result; 0 if
    none did.

    What was read before then is all there is to know: an error, or the policy's own words, tell
    nothing of the world. A score that asks a model about the state this many turns in cannot pay
    for words alone.
    """
    numbers = (n for n in range(turns, 0, -1) if any(r.ok for r in trajectory.turns[n - 1].results))
    return next(numbers, 0)
