"""An estimator that compares turns taken in the same state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from turnrl import Group, Merged, Turn
from turnrl.credit.estimators import GroupRelative, returns_to_go
from turnrl.credit.why import Contrast, compares
from turnrl.plugin.errors import check_at_least, check_within
from turnrl_estimators.relative import rewards_and_outcome


def retrieved_ids(turn: Turn) -> frozenset[str]:
    """The results of a turn's calls: the ids of their passages (`metadata["passage_ids"]`) if the
    tool names them, else the contents of successful results."""
    results: set[str] = set()
    for result in turn.results:
        content = (result.content,) if result.ok else ()
        results.update(content if (ids := result.passage_ids) is None else map(str, ids))
    return frozenset(results)


def anchors(group: Group) -> Iterator[list[frozenset[str]]]:
    """The state in which each turn of each trajectory began: the passages retrieved until then. The
    question is the same throughout a group."""
    for trajectory in group.trajectories:
        passages: frozenset[str] = frozenset()
        states = []
        for turn in trajectory.turns:
            states.append(passages)
            passages |= retrieved_ids(turn)
        yield states


@final
@dataclass
class GroupInGroup(GroupRelative):
    """GiGPO: the trajectory's advantage plus the turn's advantage among turns in the same state.

    A_{i,k} = z(R + sum_l r_{.,l})_i + omega z_{(j,l): s_{j,l} = s_{i,k}}(rho_{.,.})_{i,k}, with
    rho_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}, the outcome being part of the last turn's reward
    (arXiv 2505.10978). The state s_{i,k} is the question and the set of passages retrieved before
    turn k.

    Differs from its source in the state, which there is the environment's observation, and in the
    floor of the standard deviation. It assumes that trajectories meet in states, and that the state
    can omit thoughts, failed calls and the turn's number because they matter little. A turn alone
    in its state has no second term, except with an unscaled leave-one-out baseline, where the
    second term is the turn's return. Each term estimates the whole gradient, so with omega 1 the
    sum is about twice the gradient.

    Args:
        omega: Weight of the second term; 0 gives `Merged`.
        gamma: Discount of later turns' rewards, in the second term.
        baseline: `mean` of the compared values, or `leave_one_out`.
        scale: `std` divides by their standard deviation, `none` keeps units of reward.
        min_std: Floor of the standard deviation.
    """

    omega: float = 1.0
    gamma: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(0, 1, "", self, "gamma")
        check_at_least(0, "", self, "omega", optional=False)

    def __call__(self, group: Group) -> Tensor:
        return super().__call__(group) + self.omega * self._among_equals(group)

    def advantages(self, turn_rewards: Tensor, outcome: Tensor, reached: Tensor) -> Tensor:
        """The first term."""
        rule = Merged(self.baseline, self.scale, self.min_std)
        return rule.advantages(turn_rewards, outcome, reached)

    def _among_equals(self, group: Group) -> Tensor:
        earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
        sizes = rewards_and_outcome(group.turn_rewards.abs(), group.outcome.abs(), group.reached)
        rho, size = (returns_to_go(part, self.gamma) for part in (earned, sizes))
        numbers: dict[frozenset[str], int] = {}
        state = torch.full_like(rho, -1, dtype=torch.long)
        for row, states in zip(state, anchors(group), strict=True):
            for k, passages in enumerate(states):
                row[k] = numbers.setdefault(passages, len(numbers))
        state = state.masked_fill(~group.reached, -1)
        # one column per state compares the turns taken in it
        members = state.reshape(-1, 1) == torch.arange(len(numbers))
        values, sizes = (part.reshape(-1, 1).expand_as(members) for part in (rho, size))
        return self.z(values, members, sizes).sum(1).view_as(rho)


@compares.register
def _(estimator: GroupInGroup, group: Group) -> Sequence[Contrast]:
    earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
    rho = returns_to_go(earned, estimator.gamma)
    # states are numbered in another way than in the estimator, so that one checks the other
    by_trajectory = list(anchors(group))
    distinct = list({state for states in by_trajectory for state in states})
    sets = torch.full_like(rho, -1, dtype=torch.long)
    for row, states in zip(sets, by_trajectory, strict=True):
        row[: len(states)] = torch.tensor([distinct.index(state) for state in states])
    name = "discounted return, among turns in the same state"
    among = Contrast(name, rho, sets.masked_fill(~group.reached, -1), estimator.omega)
    return [*(compares(Merged(), group) or ()), among]
