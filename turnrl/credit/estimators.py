"""Credit: from the rewards of a group to one advantage per turn, and from there to its tokens.

For one question, G trajectories; trajectory i takes K_i turns, earns turn rewards r_{i,k} and an
outcome reward R_i. With z(x) = (x - baseline) / max(std, min_std) over a stated set:

    OutcomeOnly  GRPO-OR   A_{i,k} = z(R)_i
    Merged       GRPO-MR   A_{i,k} = z(R + sum_k r_{.,k})_i
    TurnLevel    MT-GRPO   A_{i,k} = outcome_coef z(R)_i + turn_coef z_{j reached k}(rho_{.,k})_i
                           rho_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}

Source: Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit
Assignment", arXiv 2505.11821, whose two-turn agent has A_{i,1} = z(r)_i + z(R)_i and
A_{i,2} = z(R)_i: exactly `TurnLevel` where only the first turn is rewarded.

`assign_credit` applies an estimator to a group. A token gets the advantage of its turn, and the
objective knows nothing else about turns.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from turnrl.plugin.errors import (
    PluginError,
    RecipeError,
    blaming,
    check_one_of,
    check_within,
    describe_value,
)
from turnrl.types import AdvantageEstimator, Group, Trajectory

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]

_ROUNDING = 2.0**-21
"""Rewards and their sums are rounded to float32, each by at most 2^-24 of what was summed, so equal
sums differ by at most 2^-22 of it. Twice that leaves room for sums that were rounded more often."""


def standardize(
    values: Tensor,
    members: Tensor,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    min_std: float = 0.1,
    sizes: Tensor | None = None,
) -> Tensor:
    """z(x): each value against the members of its column.

    The paper divides by std + 1e-4. Here the std has a floor instead: without it, a format
    difference of 0.01 in one trajectory of a group of 21 becomes an advantage of -4.4.

    If the members differ by no more than the rounding of float32, they are equal: exactly 0 each.

    Args:
        values: (G, K).
        members: (G, K), bool, True for values that belong to the set.
        baseline: Subtract the set's mean, or for each member the mean of the others (unbiased). The
            only member of a set has a leave-one-out baseline of 0: dropping it would bias the
            gradient.
        scale: Divide by the set's unbiased standard deviation, or not at all. The only member of a
            set has no deviation, so with "std" its value is 0.
        min_std: Floor of the standard deviation, in units of reward.
        sizes: (G, K), the sum of the absolute rewards in each value, for sums that can cancel out;
            None for the absolute values.
    Returns:
        (G, K), zero outside the set. Computed in float64, so that equal differences of opposite
        sign cancel out.
    """
    dtype, values = values.dtype, values.double()
    weight = members.to(values.dtype)
    count = weight.sum(0, keepdim=True)
    others = (count - 1).clamp(min=1)
    mean = (values * weight).sum(0, keepdim=True) / count.clamp(min=1)
    largest = ((values if sizes is None else sizes).abs() * weight).amax(0, keepdim=True)
    low, high = (values.masked_fill(~members, end) for end in (torch.inf, -torch.inf))
    spread = high.amax(0, keepdim=True) - low.amin(0, keepdim=True)
    centred = ((values - mean) * weight).masked_fill(spread <= _ROUNDING * largest, 0.0)
    std = (centred.square().sum(0, keepdim=True) / others).sqrt()
    if baseline == "leave_one_out":
        centred = torch.where(count == 1, values * weight, centred * count / others)
    if scale == "none":
        return centred.to(dtype)
    return (centred / std.clamp(min=min_std)).masked_fill(count == 1, 0.0).to(dtype)


@dataclass
class GroupRelative(AdvantageEstimator):
    """An estimator that needs only the rewards of a group: `advantages` is its equation.

    Args:
        baseline: `mean` of the trajectories compared, or `leave_one_out`.
        scale: `std` divides by their standard deviation, `none` keeps units of reward.
        min_std: Floor of the standard deviation.
    """

    baseline: Baseline = "mean"
    scale: Scale = "std"
    min_std: float = 0.1

    def __post_init__(self) -> None:
        check_one_of(get_args(Baseline), f"{type(self).__name__}.", self, "baseline")
        check_one_of(get_args(Scale), f"{type(self).__name__}.", self, "scale")
        if not 0 < self.min_std < math.inf:
            raise RecipeError(
                f"min_std is {self.min_std}. Set a finite number above 0: 1e-4 all but removes it."
            )
        # a single trajectory has no other to differ from, and no deviation; unscaled leave-one-out
        # is plain REINFORCE, which works for one
        alone = self.baseline == "leave_one_out" and self.scale == "none"
        self.min_group_size = 1 if alone else 2

    def __call__(self, group: Group) -> Tensor:
        return self.advantages(group.turn_rewards * group.reached, group.outcome, group.reached)

    @abstractmethod
    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The equation, from turn rewards (G, K), zero where not reached, outcome (G,) and reached
        (G, K) to advantages (G, K)."""

    def z(self, values: Tensor, members: Tensor, sizes: Tensor | None = None) -> Tensor:
        """`standardize` with the estimator's options: values (G, K) and members (G, K) to (G,
        K)."""
        return standardize(values, members, self.baseline, self.scale, self.min_std, sizes)

    def _total(self, outcome: Tensor, turn_rewards: Tensor, reached: Tensor) -> Tensor:
        """z of the sum of all rewards over the whole group, given to every turn that was reached:
        outcome (G,) and turn rewards (G, K) to (G, K)."""
        rewards = torch.cat([outcome[:, None], turn_rewards], 1).double()
        total, size = (
            part.sum(1, keepdim=True).to(outcome.dtype) for part in (rewards, rewards.abs())
        )
        return self.z(total, torch.ones_like(total).bool(), size) * reached


@final
@dataclass
class OutcomeOnly(GroupRelative):
    """GRPO-OR: every turn gets the advantage of the outcome; turn rewards are not used.

    A_{i,k} = z(R)_i (arXiv 2505.11821, baseline GRPO-OR; arXiv 2402.03300).
    """

    charges_costs = False

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        return self._total(outcome, turn_rewards[:, :0], reached)


@final
@dataclass
class Merged(GroupRelative):
    """GRPO-MR: turn rewards and outcome are summed into one reward of the trajectory.

    A_{i,k} = z(R + sum_l r_{.,l})_i (arXiv 2505.11821, baseline GRPO-MR).
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        return self._total(outcome, turn_rewards, reached)


@final
@dataclass(kw_only=True)
class TurnLevel(GroupRelative):
    """MT-GRPO: each turn gets credit for the turn rewards from there on, and for the outcome.

    A_{i,k} = outcome_coef z(R)_i + turn_coef z_{j reached k}(rho_{.,k})_i, with the return-to-go
    rho_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}.

    The paper (arXiv 2505.11821) gives the equation for two turns, of which the first is rewarded.
    This extends it to K turns so that it stays unbiased when the policy chooses how many turns to
    take. The same formula applies to trajectories with and without tool calls.

    Args:
        outcome_coef: Weight of the outcome's advantage.
        turn_coef: Weight of the turn rewards' advantage; 0 gives `OutcomeOnly`.
        gamma: Discount of later turn rewards. 0 normalises only each turn's own reward: an
            ablation, biased if the policy chooses the number of turns.
        baseline: `mean` of the trajectories compared, or `leave_one_out`.
        scale: `std` divides by their standard deviation, `none` keeps units of reward.
        min_std: Floor of the standard deviation.
    """

    outcome_coef: float = 1.0
    turn_coef: float = 1.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(0, 1, "", self, "gamma")
        self.charges_costs = self.turn_coef != 0

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        rho, size = (returns_to_go(part, self.gamma) for part in (turn_rewards, turn_rewards.abs()))
        outcome_term = self._total(outcome, turn_rewards[:, :0], reached)
        return self.outcome_coef * outcome_term + self.turn_coef * self.z(rho, reached, size)


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """rho_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}.

    Args:
        rewards: (G, K), zero where a turn was not reached.
        gamma: Discount.
    Returns:
        (G, K), summed in float64.
    """
    rho = rewards.to(torch.float64, copy=True)
    for k in reversed(range(rewards.shape[1] - 1)):
        rho[:, k] += gamma * rho[:, k + 1]
    return rho.to(rewards.dtype)


@dataclass(frozen=True)
class Credit:
    """Advantages of a group of G trajectories, in units of normalised reward.

    Args:
        turns: (G, K), the advantage of each turn. If the estimator credits tokens, the mean over
            the turn's tokens.
        tokens: For each trajectory (N_i,), the advantage of each token sampled in its own turns.
    """

    turns: Tensor
    tokens: tuple[Tensor, ...]

    @property
    def is_degenerate(self) -> bool:
        """True if the group teaches nothing: all its advantages are zero. `standardize` gives zero
        where rewards are equal; terms that cancel out may leave 1.2e-7, a rounding."""
        return bool((torch.cat(self.tokens).abs() < 2.5e-7).all())


def assign_credit(group: Group, estimator: AdvantageEstimator) -> Credit:
    """Compute the advantages of a scored group.

    Args:
        group: G trajectories of one question with their rewards.
        estimator: The rule, for example `TurnLevel`.
    Raises:
        PluginError: If the estimator raises, or returns another shape or numbers that are not
            finite.
    """
    size, turns = group.turn_rewards.shape
    applied = f"{type(estimator).__name__} on a group of {size} with {turns} turns"
    with blaming(PluginError, applied, "Fix the estimator."):
        advantages = estimator(group)
        parts = advantages if isinstance(advantages, tuple | list) else [advantages]
        if misfits := [part for part in parts if not isinstance(part, Tensor)]:
            kinds = f"a tensor ({size}, {turns}), or a tuple with one for each trajectory"
            raise PluginError(f"{applied} gave {describe_value(misfits[0])}. Return {kinds}.")
        finite = all(bool(part.isfinite().all()) for part in parts)
        shape = [tuple(row.shape) for row in advantages]
    owners = list(map(sampled_turns, group.trajectories))
    by_turn = isinstance(advantages, Tensor)
    wanted = [(turns,)] * size if by_turn else [tuple(own.shape) for own in owners]
    if shape != wanted or not finite:
        problem = f"{applied} gave advantages of shape {shape} (finite: {finite})"
        raise PluginError(f"{problem}, not {wanted}")
    rows = [row.float() for row in advantages]
    pairs = zip(rows, owners, strict=True)
    if by_turn:  # each token gets the advantage of its turn
        return Credit(torch.stack(rows), tuple(row[own] for row, own in pairs))
    means = torch.zeros(size, turns)
    for mean, (row, own) in zip(means, pairs, strict=True):
        for k in own.unique().tolist():
            mean[k] = row[own == k].mean()
    return Credit(means, tuple(rows))


def sampled_turns(trajectory: Trajectory) -> Tensor:
    """(N,), the turn of each token sampled in the trajectory's own turns."""
    return torch.tensor(trajectory.sampled_turns, dtype=torch.long)


def count_sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Number of tokens sampled in the trajectories' own turns."""
    return sum(len(trajectory.sampled_turns) for trajectory in trajectories)
