"""Rewards for environments: pay for steps, and costs of turns and endings without them."""

from __future__ import annotations

from typing import Literal, final

from turnrl import OutcomeReward, RecipeError, Trajectory, Turn, TurnReward
from turnrl.plugin.errors import check_at_least, check_one_of, check_within
from turnrl_environments.world import STEP


def count_steps(turn: Turn) -> int:
    """The number of successful steps in the environment in a turn. Calls of other tools do not
    count."""
    return sum(result.ok and STEP in result.metadata for result in turn.results)


def has_ended(trajectory: Trajectory) -> bool:
    """True if the environment ended the attempt, but not because its time was up."""
    return bool(trajectory.figures.get("ended"))


@final
class EnvironmentReward(TurnReward):
    """r_k = weight x the environment's reward for turn k
    - idle, if no step of turn k in the environment succeeded
    - unfinished, in the last turn of an attempt that the environment did not end.

    The weighted part is the environment's own reward, so it changes the best policy exactly as the
    environment means it to. The two prices close the ways out that a policy finds wherever steps
    cost something: it takes turns without a step, or it ends the attempt itself, by an answer or by
    a turn that is too long. Neither price is potential-based. Set `idle` to at least the cost of
    the dearest step, and `unfinished` to more than all steps of an attempt cost together.

    Args:
        weight: Factor of the environment's reward.
        idle: Reward lost by a turn without a successful step in the environment; a call of another
            tool does not count as a step.
        unfinished: Reward lost by an attempt that the environment does not end, or truncates.
        last_step: True if the step with which the environment ends the attempt pays for its turn.
            False leaves it to `EnvironmentOutcome` with `of: last_step`.
    """

    def __init__(
        self,
        weight: float = 1.0,
        idle: float = 0.1,
        unfinished: float = 1.0,
        last_step: bool = True,
    ) -> None:
        self.weight, self.idle, self.unfinished = weight, idle, unfinished
        self.last_step = last_step
        check_within(-1e9, 1e9, "EnvironmentReward.", self, "weight")
        check_at_least(0, "EnvironmentReward.", self, "idle", "unfinished", optional=False)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        taken, last = trajectory.turns[turn], turn == len(trajectory.turns) - 1
        left_out = last and has_ended(trajectory) and not self.last_step
        reward = 0.0 if left_out else self.weight * taken.reward
        if not count_steps(taken):
            reward -= self.idle
        if last and not has_ended(trajectory):
            reward -= self.unfinished
        return reward


@final
class StepCost(TurnReward):
    """r_k = -weight x successful steps of turn k in the environment, in units of reward.

    A price of time, which the best policy keeps low. Estimators that treat costs apart see it as a
    cost. They do not see the environment's own price of a step as one, because `EnvironmentReward`
    pays it within one sum. Not potential-based.

    Args:
        weight: Reward lost for each step.
    """

    is_cost = True

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        check_at_least(0, "StepCost.", self, "weight", optional=False)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        steps = count_steps(trajectory.turns[turn])
        return -self.weight * steps if steps else 0.0


@final
class EnvironmentOutcome(OutcomeReward):
    """R = weight x the environment's reward for the attempt: its `get_reward()`, or its last step.

    Args:
        weight: Factor of the environment's reward.
        of: `get_reward` for the result of the environment's method of that name at the end; or
            `last_step` for the reward of the turn with which the environment ended the attempt, 0
            if it did not. `EnvironmentReward` then needs `last_step: false`, or that turn is paid
            twice.
        right_at: The least reward of a right attempt, weight included; None if the reward does not
            define which attempts are right.
    """

    def __init__(
        self,
        weight: float = 1.0,
        of: Literal["get_reward", "last_step"] = "get_reward",
        right_at: float | None = None,
    ) -> None:
        self.weight, self.of, self.right_at = weight, of, right_at
        check_within(-1e9, 1e9, "EnvironmentOutcome.", self, "weight")
        check_one_of(("get_reward", "last_step"), "EnvironmentOutcome.", self, "of")

    def score(self, trajectory: Trajectory) -> float:
        if self.of == "last_step":
            return self.weight * trajectory.turns[-1].reward if has_ended(trajectory) else 0.0
        outcome = trajectory.figures.get("outcome")
        if not isinstance(outcome, float):
            raise RecipeError(
                "EnvironmentOutcome pays what get_reward gives, and no environment of the recipe "
                "has it. Add 'def get_reward(self) -> float:' to its class, set "
                "EnvironmentOutcome.of to last_step, or leave the reward out."
            )
        return self.weight * outcome
