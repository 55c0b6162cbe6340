"""Rewards of an agent that looks things up and answers (Zeng et al., arXiv 2505.11821).

    turn      ToolExecuted 0.2, AnswerRetrieved 0.5
    outcome   ExactMatch 1.0, AnswerPresent up to 0.5, WellFormed up to 0.4

The magnitudes are the paper's. Its released code differs: there an error counts as a tool result,
a list of candidates earns what the right one earns, any text earns something for its form, and
weights are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from turnrl import (
    OutcomeReward,
    Reward,
    Trajectory,
    TurnReward,
    contained_answer,
    contains_answer,
    exact_match,
    hookimpl,
    normalize_answer,
)


@final
class ToolExecuted(TurnReward):
    """weight x successful calls / attempted calls of the turn; 0 without a call.

    Args:
        weight: Reward of a turn whose calls all succeed.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        taken = trajectory.turns[turn]
        attempted = len(taken.reading.calls)
        successful = sum(result.ok for result in taken.results)
        return self.weight * successful / attempted if attempted else 0.0


@final
class AnswerRetrieved(TurnReward):
    """weight if an accepted answer stands in a successful result of the turn, else 0.

    Args:
        weight: Reward of a turn that brought an accepted answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        answers = trajectory.question.answers
        results = trajectory.turns[turn].results
        found = any(result.ok and contains_answer(result.content, answers) for result in results)
        return self.weight if found else 0.0


@final
class AnswerPresent(OutcomeReward):
    """weight x words of the accepted answer / words of the given answer it stands in, else 0.

    The paper pays in full for an accepted answer anywhere in the given one, which pays for naming
    every candidate. The share of words makes that useless: if candidate i has w_i words and is
    right with probability p_i, naming all earns sum(p_i w_i) / sum(w_i), a weighted mean of the
    p_i, and so never more than naming the likeliest.

    Args:
        weight: Reward of an answer that is nothing but an accepted one.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        given = trajectory.answer or ""
        accepted = contained_answer(given, trajectory.question.answers)
        if accepted is None:
            return 0.0
        return self.weight * len(accepted.split()) / len(normalize_answer(given).split())


@final
class ExactMatch(OutcomeReward):
    """weight if the given answer is an accepted one after normalisation of both, else 0.

    Args:
        weight: Reward of a right answer.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        return self.weight if exact_match(trajectory.answer, trajectory.question.answers) else 0.0


@final
class WellFormed(OutcomeReward):
    """weight x share of turns without a format error if the trajectory ends with an answer, else 0.

    The paper's format and tag-use rewards (0.2 each) in one. There each tag earns a part for
    itself, so that a text of no form at all still earns 0.04.

    Args:
        weight: Reward of a trajectory that is well formed throughout.
    """

    def __init__(self, weight: float = 0.4) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        if not normalize_answer(trajectory.answer or ""):
            return 0.0
        good = sum(turn.reading.format_error is None for turn in trajectory.turns)
        return self.weight * good / len(trajectory.turns)


@hookimpl
def turnrl_rewards() -> Iterable[type[Reward]]:
    """The rewards of this package."""
    return [ToolExecuted, AnswerRetrieved, AnswerPresent, ExactMatch, WellFormed]
