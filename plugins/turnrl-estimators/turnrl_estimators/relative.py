"""Estimators that compare the rewards of a group and need nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from turnrl import AdvantageEstimator, Group, TurnLevel
from turnrl.credit.estimators import GroupRelative, returns_to_go, standardize
from turnrl.credit.why import Contrast, compares
from turnrl.plugin.errors import check_within


def rewards_and_outcome(turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
    """(G, K), the reward of each turn; the last turn's includes the outcome."""
    last = reached & (reached.flip(1).cumsum(1).flip(1) == 1)
    return turn_rewards * reached + outcome[:, None] * last


@final
@dataclass
class PerTurnIndex(GroupRelative):
    """The naive port of MT-GRPO to K turns: each turn's own reward, next to the outcome's. Biased.

    A_{i,k} = z(R)_i + z_{j reached k}(r_{.,k})_i (arXiv 2505.11821, whose two turns it fits).

    Differs from its source in that more than one turn may be rewarded. Then nobody gets credit for
    what a turn makes possible later: on the toy of `turnrl credit-check`, unscaled and with a
    leave-one-out baseline, 60 % of the gradient is lost, and the rest points 46 degrees away from
    it. This is `TurnLevel` with gamma 0, as a baseline for comparisons.
    """

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        naive = TurnLevel(gamma=0.0, baseline=self.baseline, scale=self.scale, min_std=self.min_std)
        return naive.advantages(turn_rewards, outcome, reached)


@compares.register
def _(estimator: PerTurnIndex, group: Group) -> Sequence[Contrast] | None:
    return compares(TurnLevel(gamma=0.0), group)


@final
@dataclass
class PaperExact(AdvantageEstimator):
    """The rule of the code that was released with MT-GRPO, for comparison only.

    With T_i = sum_k r_{i,k}, z(x) = (x - mean) / (std + 1e-4) over the group, and f_i the first
    turn whose calls were answered, by an error perhaps:

        no such turn   A_{i,k} = z(R + T)_i
        k <= f_i       A_{i,k} = z(R)_i + turn_coef z(T)_i
        k > f_i        A_{i,k} = z(R)_i

    A trajectory without a tool call gets a formula of its own, which penalises it only half as
    much, and the rule divides by the std even if that is 0.001. (Zeng et al., arXiv 2505.11821,
    `advantage_est="aae"`.) Same credit as its source, which infers the first turn with a result
    from flips of the loss mask; turnrl knows that turn.

    Args:
        turn_coef: Weight of the turns' advantage.
    """

    turn_coef: float = 1.0

    min_group_size = 2

    def __call__(self, group: Group) -> Tensor:
        paid, out = group.turn_rewards * group.reached, group.outcome[:, None]
        both, outcome, turn = map(_z, (torch.cat([out, paid], 1), out, paid))
        rows = []
        for i, trajectory in enumerate(group.trajectories):
            row = torch.zeros_like(group.turn_rewards[i])
            answered = [k for k, taken in enumerate(trajectory.turns) if taken.results]
            if answered:
                row += outcome[i]
                row[: answered[0] + 1] += self.turn_coef * turn[i]
            else:
                row += both[i]
            rows.append(row)
        return torch.stack(rows) * group.reached


def _z(rewards: Tensor) -> Tensor:
    """(G,), z of the sum of each member's rewards (G, N), with the released code's divisor."""
    total, size = (part.sum(1, keepdim=True) for part in (rewards, rewards.abs()))
    centred = standardize(total, torch.ones_like(total).bool(), scale="none", sizes=size)[:, 0]
    return centred / (centred.std() + 1e-4)


@compares.register
def _(estimator: PaperExact, group: Group) -> Sequence[Contrast]:
    size, turns = group.turn_rewards.shape
    outcome, turn, both = (torch.zeros(size, turns) for _ in range(3))
    for i, trajectory in enumerate(group.trajectories):
        answered = [k for k, taken in enumerate(trajectory.turns) if taken.results]
        both[i] = not answered
        outcome[i] = bool(answered)
        if answered:
            turn[i, : answered[0] + 1] = estimator.turn_coef
    paid = (group.turn_rewards * group.reached).sum(1, keepdim=True)
    out = group.outcome[:, None]
    return [
        Contrast("outcome", out, weight=outcome, plus=1e-4),
        Contrast("all turn rewards", paid, weight=turn, plus=1e-4),
        Contrast("outcome and turn rewards", out + paid, weight=both, plus=1e-4),
    ]


@final
@dataclass
class DiscountedReturn(GroupRelative):
    """Each turn of the group is a separate sample, judged by its discounted return.

    A_{i,k} = z over all turns (j, l) of the group of rho_{j,l},
    rho_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}, the outcome being part of the last turn's reward
    (Kevin, arXiv 2507.11948; GTPO, arXiv 2511.14846, weighs it differently).

    Differs from its source in that the outcome is added to the last turn's reward, where Kevin
    scores every turn, and in the floor of the standard deviation. It assumes that turns of
    different numbers are comparable. A baseline over all turns leaves more variance, and some bias,
    because it includes the trajectory's other turns.

    Args:
        gamma: Discount of what later turns earn.
        baseline: `mean` of the compared turns, or `leave_one_out`.
        scale: `std` divides by their standard deviation, `none` keeps units of reward.
        min_std: Floor of the standard deviation.
    """

    gamma: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(0, 1, "", self, "gamma")

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        earned = rewards_and_outcome(turn_rewards, outcome, reached)
        sizes = rewards_and_outcome(turn_rewards.abs(), outcome.abs(), reached)
        rho, size = (returns_to_go(part, self.gamma).view(-1, 1) for part in (earned, sizes))
        return self.z(rho, reached.reshape(-1, 1), size).view_as(turn_rewards)


@compares.register
def _(estimator: DiscountedReturn, group: Group) -> Sequence[Contrast]:
    earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
    rho, everyone = returns_to_go(earned, estimator.gamma), group.reached.long() - 1
    return [Contrast("discounted return, among all turns", rho, everyone)]
