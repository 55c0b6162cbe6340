"""Estimators that use values of states, from probes, branches or a critic."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from turnrl import AdvantageEstimator, Group, RecipeError
from turnrl.credit.estimators import returns_to_go, standardize
from turnrl.plugin.errors import check_within
from turnrl.types import Attempts, Critic, Probe, Scorer
from turnrl_estimators.relative import rewards_and_outcome

MOST_PROBES = 256
"""The most probes per turn; more would only fill the memory."""


def check_probes(probes: int) -> None:
    """Raise a RecipeError if the number of probes is out of range."""
    if not 1 <= probes <= MOST_PROBES:
        raise RecipeError(f"probes is {probes}; it must be at least 1 and at most {MOST_PROBES}")


def with_state_values(group: Group, probes: Sequence[Probe], scored: Group) -> Group:
    """The group with the mean return of its probes as `state_values`.

    All trajectories of a group begin in the same state, so the first value is a mean over all their
    probes.

    Args:
        group: G trajectories.
        probes: Their continuations from the beginning of each turn.
        scored: The probes' trajectories with their rewards, in the same order.
    """
    turn = torch.tensor([probe.trajectory.begins for probe in probes])
    member = torch.tensor([probe.member for probe in probes])
    to_go = returns_to_go(scored.turn_rewards, 1.0) + scored.outcome[:, None]
    earned = to_go.gather(1, turn[:, None])[:, 0].double()
    sums, counts = torch.zeros(2, *group.reached.shape, dtype=torch.float64)
    sums.index_put_((member, turn), earned, accumulate=True)
    counts.index_put_((member, turn), torch.ones_like(earned), accumulate=True)
    values = sums / counts.clamp(min=1)
    values[:, 0] = earned[turn == 0].mean()
    return replace(group, state_values=(values * group.reached).to(to_go.dtype))


def with_parents(group: Group, probes: Sequence[Probe]) -> Group:
    """The group with `parents`; its last members are these probes."""
    trunks = range(len(group.trajectories) - len(probes))
    return replace(group, parents=(*trunks, *(probe.member for probe in probes)))


def estimate_state_values(attempts: Attempts, scorer: Scorer) -> list[Group]:
    """The groups with `state_values`, for an estimator's `prepare`."""
    groups = scorer.score(attempts.trajectories)
    probed = scorer.score([[probe.trajectory for probe in row] for row in attempts.probes])
    return list(map(with_state_values, groups, attempts.probes, probed))


def make_trees(attempts: Attempts, scorer: Scorer) -> list[Group]:
    """The groups with the probes as members and their `parents`, for an estimator's `prepare`."""
    pairs = zip(attempts.trajectories, attempts.probes, strict=True)
    members = [[*trunks, *(probe.trajectory for probe in probes)] for trunks, probes in pairs]
    return list(map(with_parents, scorer.score(members), attempts.probes))


@final
@dataclass
class Branched(AdvantageEstimator):
    """The change that a turn made: its reward, plus the next state's value minus this state's.

    A_{i,k} = r_{i,k} + V(s_{i,k+1}) - V(s_{i,k}), with the outcome R_i in place of V(s_{i,k+1})
    after the last turn, and V the mean return (turn rewards and outcome) of `probes` continuations
    from the beginning of the turn (VinePPO, arXiv 2410.01679).

    Differs from its source in that a step is a turn, and that the first turn's value is the mean
    over the probes of the whole group, because all its trajectories begin in one state. It is
    unbiased, and only assumes that a trajectory can be continued from any turn (tools with sessions
    must be copyable). Its cost is sampling: K x `probes` continuations for a trajectory of K turns,
    half as long on average. The continuations are not trained on.

    Args:
        probes: Continuations sampled from the beginning of each turn.
    """

    probes: int = 4

    def __post_init__(self) -> None:
        check_probes(self.probes)

    def prepare(self, attempts: Attempts, scorer: Scorer) -> list[Group]:
        return estimate_state_values(attempts, scorer)

    def __call__(self, group: Group) -> Tensor:
        if group.state_values is None:
            raise RecipeError("Branched needs a group with state_values, which come from probes")
        earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
        value = group.state_values * group.reached
        later = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        # each pair as a group of two, so that values which differ by rounding are equal
        pair = torch.stack([(earned + later).flatten(), value.flatten()])
        size = torch.stack([(earned.abs() + later.abs()).flatten(), value.abs().flatten()])
        both = torch.ones_like(pair).bool()
        change: Tensor = standardize(pair, both, "leave_one_out", "none", sizes=size)[0]
        return change.view_as(value) * group.reached


@final
@dataclass
class Tree(AdvantageEstimator):
    """Branches compared with the others from the same state; all of them are trained on.

    At the beginning of each turn k of a trajectory, the trunk, m branches leave it. Let E be the
    return from turn k on, turn rewards and outcome. Then a branch, in each of its own turns l >= k,
    and the trunk, in turn k, get

        A_l = w_l (E - mean of E over the others that continued from there)
        w_l = 1 / (1 + m l)

    (Tree-GRPO, arXiv 2509.21240, compares within and between trees.) Differs from its source in
    that branches leave at every turn, and in w. Turns that a trunk shares with its branches are
    trained on once, in the trunk. Turn l occurs 1 + m l times, which w corrects: a trunk and its
    branches together are one unbiased estimate.

    Args:
        probes: m, branches from the beginning of each turn.
    """

    probes: int = 2
    trains_probes = True

    def __post_init__(self) -> None:
        check_probes(self.probes)

    def prepare(self, attempts: Attempts, scorer: Scorer) -> list[Group]:
        return make_trees(attempts, scorer)

    def __call__(self, group: Group) -> Tensor:
        if len(group.parents) != len(group.trajectories):
            raise RecipeError("Tree needs a group with parents, which come from branches")
        to_go, sizes = (
            returns_to_go(turn_rewards, 1.0) + outcome[:, None]
            for turn_rewards, outcome in (
                (group.turn_rewards, group.outcome),
                (group.turn_rewards.abs(), group.outcome.abs()),
            )
        )
        advantages = torch.zeros_like(to_go)
        born: dict[tuple[int, int], list[int]] = {}
        for member, (trunk, branch) in enumerate(
            zip(group.parents, group.trajectories, strict=True)
        ):
            if trunk != member:
                born.setdefault((trunk, branch.begins), []).append(member)
        for (trunk, k), branches in born.items():
            members = [trunk, *branches]
            earned, everyone = to_go[members, k : k + 1], torch.ones(len(members), 1).bool()
            size = sizes[members, k : k + 1]
            beyond = standardize(earned, everyone, "leave_one_out", "none", sizes=size)
            advantages[trunk, k] = beyond[0, 0]
            advantages[branches] = beyond[1:]
        turn = torch.arange(to_go.shape[1])
        per_turn = len(born[group.parents[0], 0])  # an exact check may use a smaller m
        return advantages * group.reached / (1 + per_turn * (turn + 1))


@final
@dataclass
class TurnCritic(AdvantageEstimator):
    """MT-PPO: credit for each sampled token, from a critic that is trained beside the policy.

    Over the N_i sampled tokens of a trajectory, with r_t the turn's reward on the last token of
    each turn, the outcome added on the very last, and zero elsewhere:

        delta_t = r_t + gamma V_{t+1} - V_t         A_t = delta_t + gamma lam A_{t+1}

    with V = 0 beyond the last token (v2 of arXiv 2505.11821; GAE, arXiv 1506.02438). Tokens of tool
    results are skipped: the last token of a turn is followed by the first of the next turn, also
    where that turn was sampled in another history.

    Differs from its source in that there is no KL penalty in the reward, and that advantages are
    not whitened over the batch. With gamma = lam = 1 the critic is only a baseline, and a bad one
    costs variance, not bias. Below 1 its errors become bias.

    Args:
        gamma: Discount per token.
        lam: 1 uses the rewards up to the end; towards 0 the critic replaces them.
        critic: The value head that is trained beside the policy.
    """

    gamma: float = 1.0
    lam: float = 1.0
    critic: Critic = field(default_factory=Critic)

    def __post_init__(self) -> None:
        check_within(0, 1, "", self, "gamma", "lam")

    def __call__(self, group: Group) -> tuple[Tensor, ...]:
        if len(group.token_values) != len(group.trajectories):
            raise RecipeError("TurnCritic needs a group with token_values, which a critic computes")
        earned = rewards_and_outcome(group.turn_rewards, group.outcome, group.reached)
        advantages = []
        for i, trajectory in enumerate(group.trajectories):
            turns, values = trajectory.sampled_turns, group.token_values[i]
            # tokens come history by history, and an agent may go back to an earlier history
            order = sorted(range(len(turns)), key=turns.__getitem__)
            last = {turns[n]: n for n in order}  # token of each turn
            rewards = [float(earned[i, k]) if last[k] == n else 0.0 for n, k in enumerate(turns)]
            value_list = values.tolist()
            in_time = self._advantages([rewards[n] for n in order], [value_list[n] for n in order])
            row = torch.zeros_like(values)
            row[order] = values.new_tensor(in_time)
            advantages.append(row)
        return tuple(advantages)

    def _advantages(self, rewards: Sequence[float], values: Sequence[float]) -> list[float]:
        """The recursion, from the last token to the first, in double precision."""
        advantages, advantage, later = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            delta = reward + self.gamma * later - value
            advantage, later = delta + self.gamma * self.lam * advantage, value
            advantages.append(advantage)
        return advantages[::-1]
