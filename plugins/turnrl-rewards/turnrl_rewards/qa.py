"""Rewards of an agent that looks things up and answers (Zeng et al., arXiv 2505.11821).

    turn      ToolExecuted 0.2, AnswerRetrieved 0.5
    outcome   ExactMatch 1.0, AnswerPresent up to 0.5, WellFormed up to 0.4

The magnitudes are the paper's. Its released code differs: an error counts as a tool result, a list
of candidates earns as much as the right one, any text earns something for its form, and weights are
ignored.
"""

from __future__ import annotations

from typing import final

from turnrl import OutcomeReward, Trajectory, TurnReward, exact_match, finds_answer
from turnrl.plugin.text import find_contained_answer, normalize_answer
from turnrl.rewards.answers import is_empty_answer
from turnrl.types import Phrase


@final
class ToolExecuted(TurnReward):
    """weight x successful calls / attempted calls of the turn; 0 without a call. It pays again in
    every turn, so it needs a price where there are more than two turns.

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
    """weight if a successful result of the turn contains an accepted answer, else 0.

    It pays in every turn that finds one, so it needs a price where there are more than two turns. 0
    if the policy had written the answer into a call, whose words a tool may repeat. Also 0 if
    finding the answer means nothing (`turnrl.rewards.answers.is_searchable`), for example because
    it is yes or no, or occurs in the question.

    Args:
        weight: Reward of a turn that found an accepted answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        return self.weight if finds_answer(trajectory, turn) else 0.0


@final
class AnswerPresent(OutcomeReward):
    """weight x words of the accepted answer / words of the given answer that contains it, else 0.

    The paper pays in full for an accepted answer anywhere in the given answer, so naming every
    candidate pays. The share of words prevents that: if candidate i has w_i words and is right with
    probability p_i, naming all earns sum(p_i w_i) / sum(w_i), a weighted mean of the p_i, and so
    never more than naming the likeliest.

    An answer that is not a phrase (`data.answers`) has no parts: it earns weight if it is right.

    Args:
        weight: Reward of an answer that equals an accepted one.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        given, question = trajectory.answer or "", trajectory.question
        if not isinstance(question.rule, Phrase):
            return self.weight if exact_match(given, question) else 0.0
        accepted = find_contained_answer(given, question.answers)
        if accepted is None:
            return 0.0
        return self.weight * len(accepted.split()) / len(normalize_answer(given).split())


@final
class ExactMatch(OutcomeReward):
    """weight if the given answer is accepted by the question's rule, else 0.

    It defines which attempts are right, unless its weight is 0.

    Args:
        weight: Reward of a right answer.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.right_at = weight if weight > 0 else None

    def score(self, trajectory: Trajectory) -> float:
        return self.weight if exact_match(trajectory.answer, trajectory.question) else 0.0


@final
class WellFormed(OutcomeReward):
    """weight x share of turns without a format error if the trajectory ends with an answer, else 0.

    This merges the paper's format and tag-use rewards (0.2 each). There each tag earns a part, so
    that even a formless text earns 0.04.

    Args:
        weight: Reward of a trajectory that is well formed throughout.
    """

    def __init__(self, weight: float = 0.4) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory) -> float:
        if is_empty_answer(trajectory.answer, trajectory.question):
            return 0.0
        good = sum(turn.reading.format_error is None for turn in trajectory.turns)
        return self.weight * good / len(trajectory.turns)
