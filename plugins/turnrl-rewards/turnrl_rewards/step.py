"""A turn reward that passes on the environment's reward."""

from __future__ import annotations

from numbers import Real
from typing import final

from turnrl import Trajectory, TurnReward
from turnrl.plugin.errors import check_instance


@final
class StepReward(TurnReward):
    """r_k = weight x the world's reward for turn k: the sum of `ToolResult.reward` over its calls,
    as an environment gives it for a step.

    It is the environment's own reward, so it changes the best policy exactly as the environment
    means it to. If an environment pays for reaching the same states again and again, a policy
    lingers there: prefer rewards that are differences of a potential.

    Args:
        weight: Factor of the world's reward.
    """

    def __init__(self, weight: float = 1.0) -> None:
        check_instance(Real, "StepReward.weight", weight)
        self.weight = weight

    def score(self, trajectory: Trajectory, turn: int) -> float:
        return self.weight * trajectory.turns[turn].reward
