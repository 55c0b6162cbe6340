"""An estimator: from the rewards of a group to one advantage per turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from turnrl import AdvantageEstimator, Group

if TYPE_CHECKING:  # every `turnrl` command imports this module, and few of them need torch
    from torch import Tensor


@final
class ExampleToGo(AdvantageEstimator):
    """A_{i,k} = rho_{i,k} - mean of rho_{j,k} over the trajectories j that took turn k, with
    rho_{i,k} = R_i + sum_{l >= k} r_{i,l}: what the turn and those after it earn.
    """

    # a single trajectory is its own mean, so it would teach nothing
    min_group_size = 2

    def __call__(self, group: Group) -> Tensor:
        # A pure function: the group's tensors are not changed in place. In float64 equal rewards
        # have exactly their mean, so that a group in which nothing differs teaches nothing.
        to_go = group.turn_rewards.double().flip(1).cumsum(1).flip(1) + group.outcome[:, None]
        taken = group.reached.to(to_go.dtype)
        mean = (to_go * taken).sum(0) / taken.sum(0).clamp(min=1)
        # a turn that was not taken has zero reward, which is not the same as zero advantage
        return (to_go - mean) * taken
