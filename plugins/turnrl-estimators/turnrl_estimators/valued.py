"""Estimators that are told what a state is worth: by probes, by branches, or by a critic."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from turnrl import (
    AdvantageEstimator,
    Attempts,
    Critic,
    Group,
    Probe,
    RecipeError,
    Scorer,
    returns_to_go,
    within,
)
from turnrl_estimators.relative import rewards_and_outcome

MOST_PROBES = 256
"""For each turn of each trajectory; far more would only fill the memory."""


def check_probes(probes: int) -> None:
    """Refuse a number of probes that cannot be.

    Raises:
        RecipeError: Naming it.
    """
    if not 1 <= probes <= MOST_PROBES:
        raise RecipeError(f"probes is {probes}; it must be at least 1 and at most {MOST_PROBES}")


def with_state_values(group: Group, probes: Sequence[Probe], scored: Group) -> Group:
    """The group with the mean of what its probes earned as `state_values`.

    All trajectories of a group begin in the same state, so its value is the mean over the probes of
    them all.

    Args:
        group: G trajectories.
        probes: Continuations of theirs from the beginning of each turn.
        scored: The probes' trajectories with their rewards, in the same order.
    """
    turn = torch.tensor([probe.trajectory.begins for probe in probes])
    member = torch.tensor([probe.member for probe in probes])
    to_go = returns_to_go(scored.turn_rewards, 1.0) + scored.outcome[:, None]
    earned = to_go.gather(1, turn[:, None])[:, 0]
    sums, counts = torch.zeros(2, *group.reached.shape)
    sums.index_put_((member, turn), earned, accumulate=True)
    counts.index_put_((member, turn), torch.ones_like(earned), accumulate=True)
    values = sums / counts.clamp(min=1)
    values[:, 0] = earned[turn == 0].mean()
    return replace(group, state_values=values * group.reached)


def with_parents(group: Group, probes: Sequence[Probe]) -> Group:
    """The group with `parents`; its last members are the branches of these probes."""
    trunks = range(len(group.trajectories) - len(probes))
    return replace(group, parents=(*trunks, *(probe.member for probe in probes)))


def state_values(attempts: Attempts, scorer: Scorer) -> list[Group]:
    """The groups with `state_values`, for an estimator's `prepare`."""
    groups = scorer.score(attempts.trajectories)
    probed = scorer.score([[probe.trajectory for probe in some] for some in attempts.probes])
    return list(map(with_state_values, groups, attempts.probes, probed))


def trees(attempts: Attempts, scorer: Scorer) -> list[Group]:
    """The groups with the probes as members and their `parents`, for an estimator's `prepare`."""
    pairs = zip(attempts.trajectories, attempts.probes, strict=True)
    whole = [[*trunks, *(probe.trajectory for probe in more)] for trunks, more in pairs]
    return list(map(with_parents, scorer.score(whole), attempts.probes))


@final
@dataclass
class Branched(AdvantageEstimator):
    """Change that each turn made: its reward, and the value of the state after it less that before.

    A_{i,k} = r_{i,k} + V(s_{i,k+1}) - V(s_{i,k}), with the outcome R_i in place of V(s_{i,k+1})
    after the last turn, and V the mean of what `probes` continuations from the beginning of the
    turn earn, turn rewards and outcome (VinePPO, arXiv 2410.01679).

    Differs from its source in that a step is a turn, and that the first turn's value is the mean
    over the probes of the whole group, which begins in one state. It assumes nothing but that a
    trajectory can be continued from a turn (tools with sessions have to be copied), and is
    unbiased. What it costs is the sampling: for a trajectory of K turns K `probes` continuations,
    half as long as itself on average. They are not trained on.

    Args:
        probes: Continuations sampled from the beginning of each turn.
    """

    probes: int = 4

    def __post_init__(self) -> None:
        check_probes(self.probes)

    def prepare(self, attempts: Attempts, scorer: Scorer) -> list[Group]:
        return state_values(attempts, scorer)

    def __call__(self, group: Group) -> Tensor:
        if group.state_values is None:
            raise RecipeError("Branched needs a group with state_values, which probes give it")
        earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
        value = group.state_values * group.reached
        later = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        return (earned + later - value) * group.reached


@final
@dataclass
class Tree(AdvantageEstimator):
    """Branches compared with those that went on from the same state, all of them learned from.

    At the beginning of each turn k of a trajectory i, its trunk, m branches go their own way. Let E
    be what one earns from turn k on, turn rewards and outcome. Then a branch, in each of its own
    turns l >= k, and the trunk, in turn k, get

        A_l = w_l (E - mean of E over the others that went on from there)
        w_l = 1 / (1 + m l)

    (Tree-GRPO, arXiv 2509.21240, compares within and between trees.) Differs from its source in
    that branches come off at every turn, and in w. What a trunk and its branches share is learned
    from once, in the trunk; but turn l is then taken 1 + m l times, and w makes up for that: a
    trunk and its branches together are one unbiased estimate.

    Args:
        probes: m, branches from the beginning of each turn.
    """

    probes: int = 2
    trains_probes = True

    def __post_init__(self) -> None:
        check_probes(self.probes)

    def prepare(self, attempts: Attempts, scorer: Scorer) -> list[Group]:
        return trees(attempts, scorer)

    def __call__(self, group: Group) -> Tensor:
        if len(group.parents) != len(group.trajectories):
            raise RecipeError("Tree needs a group with parents, which its branches give it")
        to_go = returns_to_go(group.turn_rewards, 1.0) + group.outcome[:, None]
        advantages = torch.zeros_like(to_go)
        born: dict[tuple[int, int], list[int]] = {}
        for member, (trunk, branch) in enumerate(
            zip(group.parents, group.trajectories, strict=True)
        ):
            if trunk != member:
                born.setdefault((trunk, branch.begins), []).append(member)
        for (trunk, k), branches in born.items():
            earned = to_go[[trunk, *branches], k]
            beyond = (earned * len(earned) - earned.sum()) / (len(earned) - 1)
            advantages[trunk, k] = beyond[0]
            advantages[branches] = beyond[1:, None]
        turn = torch.arange(to_go.shape[1])
        per_turn = len(born[group.parents[0], 0])  # m, of which an exact check takes fewer
        return advantages * group.reached / (1 + per_turn * (turn + 1))


@final
@dataclass
class TurnCritic(AdvantageEstimator):
    """MT-PPO: credit for each sampled token, by a critic that is trained beside the policy.

    Over the N_i sampled tokens of a trajectory, with r_t the turn's reward on the last token of
    each turn, the outcome added on the very last, and zero elsewhere:

        delta_t = r_t + gamma V_{t+1} - V_t         A_t = delta_t + gamma lam A_{t+1}

    V beyond the last token being zero (v2 of arXiv 2505.11821; GAE, arXiv 1506.02438). Tokens of
    tool results are skipped: the token after the last of a turn is the first of the next turn.

    Differs from its source in that there is no KL penalty in the reward, and that advantages are
    not whitened over the batch. With gamma = lam = 1 the critic is a baseline alone, and a bad one
    costs variance, not bias; below 1 it is believed, and its errors are bias.

    Args:
        gamma: Discount per token.
        lam: 1 sums what was earned to the end; towards 0 the critic stands in for it.
        critic: The value head that is trained beside the policy.
    """

    gamma: float = 1.0
    lam: float = 1.0
    critic: Critic = field(default_factory=Critic)

    def __post_init__(self) -> None:
        within(0, 1, "", self, "gamma", "lam")

    def __call__(self, group: Group) -> tuple[Tensor, ...]:
        if len(group.token_values) != len(group.trajectories):
            raise RecipeError("TurnCritic needs a group with token_values, which a critic gives it")
        earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
        advantages = []
        for i, trajectory in enumerate(group.trajectories):
            rewards: list[float] = []
            for turn, reward in zip(trajectory.turns, earned[i].tolist(), strict=False):
                rewards += [0.0] * (len(turn.token_ids) - 1) + [reward]
            values = group.token_values[i]
            advantages.append(values.new_tensor(self._advantages(rewards, values.tolist())))
        return tuple(advantages)

    def _advantages(self, rewards: Sequence[float], values: Sequence[float]) -> list[float]:
        """The recursion, from the last token to the first, in double precision."""
        advantages, advantage, later = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            delta = reward + self.gamma * later - value
            advantage, later = delta + self.gamma * self.lam * advantage, value
            advantages.append(advantage)
        return advantages[::-1]
