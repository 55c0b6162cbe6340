"""A turn reward: what one turn earns."""

from typing import final

from turnrl import Trajectory, TurnReward, finds_answer


@final
class ExampleNewlyFound(TurnReward):
    """weight if a result of the turn contains an accepted answer, and no earlier result does.

    Finding it again earns nothing, or the policy would search for it until its turns are used up.

    Args:
        weight: Reward of the turn that found the answer.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        # the trajectory has later turns too, but a turn's reward must not depend on them
        *before, now = (finds_answer(trajectory, k) for k in range(turn + 1))
        return self.weight if now and not any(before) else 0.0
