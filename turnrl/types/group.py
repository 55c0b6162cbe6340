"""Trajectories that are compared with each other, and their rewards."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from turnrl.types.questions import Question
from turnrl.types.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class RewardComponent:
    """The values that one reward gave each attempt of a group, and the properties it declares.

    Args:
        values: For a turn reward (G, K), zero after an attempt's last turn; for an outcome reward
            (G,). In float64.
        is_cost: True if it is a cost (`Reward.is_cost`).
        right_at: The least score of a right attempt (`Reward.right_at`); None if the reward does
            not say which attempts are right.
    """

    values: Tensor
    is_cost: bool = False
    right_at: float | None = None

    @property
    def by_turn(self) -> bool:
        """True if the values are those of a turn reward."""
        return self.values.ndim == 2

    @property
    def totals(self) -> Tensor:
        """(G,), the total of each attempt."""
        return self.values.sum(1) if self.by_turn else self.values


@dataclass(frozen=True, eq=False)
class Group:
    """G trajectories of one question and their rewards, in the same order.

    Args:
        question: The question.
        trajectories: G attempts at it, trajectory i with K_i turns.
        turn_rewards: (G, K), reward of each turn, summed over components; zero after the last.
        outcome: (G,), outcome reward of each trajectory, summed over components.
        reached: (G, K), bool: True where the trajectory took that turn as one of its own.
        components: The values of each reward by its name: `turn/...` or `outcome/...`.
        state_values: (G, K), the average return of the policy from the beginning of each turn on,
            turn rewards and outcome; zero where not reached. For an estimator with `probes`.
        token_values: For each trajectory (N_i,), the return that a critic expects before each of
            its N_i sampled tokens. For an estimator with a `critic`.
        parents: For each trajectory, the member that it branched off, at the beginning of the turn
            `begins`; its own number if it did not. For an estimator that `trains_probes`.
        logged: Figures of the whole batch, from `Reward.prepare`.
    """

    question: Question
    trajectories: tuple[Trajectory, ...]
    turn_rewards: Tensor
    outcome: Tensor
    reached: Tensor
    components: Mapping[str, RewardComponent] = field(default_factory=dict)
    state_values: Tensor | None = None
    token_values: tuple[Tensor, ...] = ()
    parents: tuple[int, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def trunks(self) -> list[int]:
        """The members that branched off no other: plain attempts of the policy at the question."""
        members = range(len(self.trajectories))
        return [i for i in members if not self.parents or self.parents[i] == i]

    @property
    def right(self) -> Tensor | None:
        """(G,), bool: True where every component with a `right_at` finds the attempt right; None
        if no component has one."""
        parts = self.components.values()
        verdicts = [p.values >= p.right_at - 1e-6 for p in parts if p.right_at is not None]
        return reduce(operator.and_, verdicts) if verdicts else None

    @property
    def cost_names(self) -> tuple[str, ...]:
        """Names of the components that are costs."""
        return tuple(name for name, part in self.components.items() if part.is_cost)

    @property
    def turn_costs(self) -> Tensor:
        """(G, K), the sum of the costs in `turn_rewards`, which is hardly ever above 0."""
        return self._costs_in(self.turn_rewards)

    @property
    def outcome_costs(self) -> Tensor:
        """(G,), the sum of the costs in `outcome`."""
        return self._costs_in(self.outcome)

    def _costs_in(self, total: Tensor) -> Tensor:
        costs = (part.values for part in self.components.values() if part.is_cost)
        same = (values.to(total.dtype) for values in costs if values.ndim == total.ndim)
        return sum(same, total.new_zeros(total.shape))

    @property
    def component_totals(self) -> dict[str, Tensor]:
        """Each component's total for each trajectory, (G,)."""
        return {name: part.totals for name, part in self.components.items()}

    @property
    def totals(self) -> Tensor:
        """(G,), the sum of all rewards of each trajectory."""
        return self.outcome + self.turn_rewards.sum(1)
