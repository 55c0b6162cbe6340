"""Trajectories that are compared with each other, and what rewards gave them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from turnrl.types.questions import Question
from turnrl.types.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class RewardComponent:
    """What one reward gave each attempt of a group, and what it says of itself.

    Args:
        values: (G, K) of a turn reward, zero after an attempt's last turn, and (G,) of an outcome
            reward; in float64.
        bounds: The least and the most that one score can be (`Reward.bounds`); None if it does not
            say.
        is_cost: Whether it is a cost (`Reward.is_cost`); None if nobody knows, as in the record of
            an older turnrl.
        right_at: The least that a right attempt gets of it (`Reward.right_at`); None if it does not
            say what is right.
    """

    values: Tensor
    bounds: tuple[float, float] | None = None
    is_cost: bool | None = False
    right_at: float | None = None

    @property
    def by_turn(self) -> bool:
        """Whether it is a turn reward's."""
        return self.values.ndim == 2

    @property
    def totals(self) -> Tensor:
        """(G,), what it gave each attempt in all."""
        return self.values.sum(1) if self.by_turn else self.values


@dataclass(frozen=True, eq=False)
class Group:
    """G trajectories of one question and their rewards, in the same order.

    Args:
        question: The question.
        trajectories: G attempts at it, trajectory i with K_i turns.
        turn_rewards: (G, K), reward of each turn, summed over components; zero after the last.
        outcome: (G,), outcome reward of each trajectory, summed over components.
        reached: (G, K), bool: whether the trajectory took that turn, as one of its own.
        components: What each reward gave, by its name: `turn/...` or `outcome/...`.
        state_values: (G, K), what the policy earns on average from the beginning of each turn on,
            turn rewards and outcome; zero where not reached. Given to an estimator with `probes`.
        token_values: For each trajectory (N_i,), what a critic expects of each of its N_i sampled
            tokens before it is sampled. Given to an estimator with a `critic`.
        parents: For each trajectory the member that it branched off, at the beginning of the turn
            `begins`; its own number if it did not. Given to an estimator that `trains_probes`.
        logged: Figures of the whole batch from the notes of rewards (`Notes.metrics`).
        extra: For each trajectory what the notes say of it, by column (`Notes.columns`); empty
            without any.
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
    extra: tuple[Mapping[str, Any], ...] = ()

    @property
    def trunks(self) -> list[int]:
        """The members that branched off no other: what the policy does when it is asked."""
        members = range(len(self.trajectories))
        return [i for i in members if not self.parents or self.parents[i] == i]

    @property
    def right(self) -> Tensor | None:
        """(G,), bool: whether each attempt is right, which is what every component with a
        `right_at` says; None without any."""
        parts = self.components.values()
        verdicts = [p.values >= p.right_at - 1e-6 for p in parts if p.right_at is not None]
        return reduce(operator.and_, verdicts) if verdicts else None

    @property
    def cost_names(self) -> tuple[str, ...] | None:
        """Names of the components that are costs; None if nobody knows."""
        parts = self.components.items()
        if any(part.is_cost is None for _, part in parts):
            return None
        return tuple(name for name, part in parts if part.is_cost)

    @property
    def turn_costs(self) -> Tensor:
        """(G, K), the part of `turn_rewards` that is costs, and so hardly ever above 0."""
        return self._costs_in(self.turn_rewards)

    @property
    def outcome_costs(self) -> Tensor:
        """(G,), the part of `outcome` that is costs."""
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
