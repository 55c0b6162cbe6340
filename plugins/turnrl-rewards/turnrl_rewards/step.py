"""A turn reward for what the world pays."""

from __future__ import annotations

from numbers import Real
from typing import final

from turnrl import Trajectory, TurnReward, instance_of


@final
class StepReward(TurnReward):
    """r_k = weight x what the world paid for turn k: the sum of `ToolResult.reward` over its calls,
    as an environment gives it for a step.

    It is the environment's own reward, so it changes which policy is best exactly as the
    environment means it to. If an environment pays for reaching states again and again, a policy
    lingers there: prefer rewards that are differences of a potential.

    Args:
        weight: Factor of the world's reward.
    """

    def __init__(self, weight: float = 1.0) -> None:
        instance_of(Real, "StepReward.weight", weight)
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        return self.weight * trajectory.turns[turn].reward
