"""A turn reward: what one turn earns."""

from typing import final

from turnrl import Trajectory, TurnReward, contains_answer


@final
class ExampleNewlyFound(TurnReward):
    """weight if an accepted answer stands in a result of the turn and in none before it.

    Finding it again earns nothing, or the policy would search for it until its turns are used up.

    Args:
        weight: Reward of the turn that found the answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        # later turns are there to be seen as well, but a turn's reward shall not depend on them
        answers = trajectory.question.answers
        found = [
            any(result.ok and contains_answer(result.content, answers) for result in taken.results)
            for taken in trajectory.turns[: turn + 1]
        ]
        return self.weight if found[-1] and not any(found[:-1]) else 0.0
