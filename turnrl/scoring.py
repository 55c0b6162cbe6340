"""Scoring: rewards applied to trajectories, credit given to groups, and what a collection is
watched by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from turnrl.answers import answer_in_results, can_be_found, exact_match
from turnrl.credit import returns_to_go
from turnrl.errors import DataError, PluginError, blaming
from turnrl.types import (
    AdvantageEstimator,
    Group,
    Probe,
    Reward,
    SampledPolicy,
    Trajectory,
    TurnReward,
)

Credit = Tensor | tuple[Tensor, ...]
"""(G, K), advantages of turns; or (N_i,) for each trajectory, of its sampled tokens."""

CURVES = ("exact_match", "tool_execution", "answer_in_results", "format")
"""The paper's four curves, whatever the rewards are; see `curves`."""


def component_name(reward: Reward) -> str:
    """`turn/tool_executed`, `outcome/llm_judge`: the name of a reward in metrics."""
    words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    name = reward.name or re.sub(words, "_", type(reward).__name__).lower()
    return f"{'turn' if isinstance(reward, TurnReward) else 'outcome'}/{name}"


def score_group(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward],
    turns: int | None = None,
    policy: SampledPolicy | None = None,
) -> Group:
    """Apply every reward to the G trajectories of a question.

    Args:
        trajectories: G attempts at one question, at least one.
        rewards: Each kind is summed.
        turns: K, columns of the group's tensors; by default the most turns that one of them took.
        policy: The policy that acted, for rewards that ask it.
    Raises:
        DataError: If there is no trajectory, or they are of several questions.
        PluginError: If a reward raises, or gives something that is not a finite number.
    """
    return score_groups([trajectories], rewards, turns, policy)[0]


def score_groups(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[Reward],
    turns: int | None = None,
    policy: SampledPolicy | None = None,
) -> tuple[Group, ...]:
    """Apply every reward to the trajectories of several questions; see `score_group`."""
    for group in groups:
        _check_group(group)
    every = [trajectory for group in groups for trajectory in group]
    for reward in rewards:
        what = f"reward {type(reward).__name__} on {len(every)} trajectories"
        with blaming(PluginError, what, "A reward must score any trajectory."):
            reward.prepare(every, policy)
    return tuple(_scored(group, rewards, turns) for group in groups)


def _check_group(trajectories: Sequence[Trajectory]) -> None:
    if not trajectories:
        raise DataError("a group has no trajectory to score. Give at least one attempt.")
    first, *others = (trajectory.question for trajectory in trajectories)
    for other in others:
        if (other.id, other.text) != (first.id, first.text):
            what = f"a group has attempts at {first.text!r} and at {other.text!r}"
            raise DataError(
                f"{what}, which are not comparable. Score each question's on their own."
            )


def _scored(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], turns: int | None
) -> Group:
    size = len(trajectories)
    turns = max(len(t.turns) for t in trajectories) if turns is None else turns
    turn_rewards, outcome = torch.zeros(size, turns), torch.zeros(size)
    reached = torch.zeros(size, turns, dtype=torch.bool)
    components: list[dict[str, float]] = []
    for i, trajectory in enumerate(trajectories):
        taken = len(trajectory.turns)
        reached[i, trajectory.begins : taken] = True
        components.append(dict.fromkeys(map(component_name, rewards), 0.0))
        for reward in rewards:
            if isinstance(reward, TurnReward):
                values = [_value(reward, trajectory, k) for k in range(taken)]
                turn_rewards[i, :taken] += torch.tensor(values)
            else:
                values = [_value(reward, trajectory)]
                outcome[i] += values[0]
            components[i][component_name(reward)] += sum(values)
    some = tuple(trajectories)
    return Group(some[0].question, some, turn_rewards, outcome, reached, tuple(components))


def _value(reward: Any, trajectory: Trajectory, *turn: int) -> float:
    what = f"reward {type(reward).__name__} on question {trajectory.question.id!r}"
    with blaming(PluginError, what, "A reward must score any trajectory."):
        value = float(reward.score(trajectory, *turn))
    if not -1e9 < value < 1e9:
        raise PluginError(f"{what} gave {value}, which is not a finite number")
    return value


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


def assign_credit(group: Group, estimator: AdvantageEstimator) -> Credit:
    """Advantages of a group: (G, K) of turns, or (N_i,) for each trajectory, of its sampled tokens.

    Raises:
        PluginError: If the estimator raises, or gives another shape or numbers that are not finite.
    """
    size, turns = group.turn_rewards.shape
    what = f"{type(estimator).__name__} on a group of {size} with {turns} turns"
    with blaming(PluginError, what, "Mend the estimator."):
        credit = estimator(group)
        parts = [credit] if isinstance(credit, Tensor) else credit
        finite = all(bool(part.isfinite().all()) for part in parts)
        shape = [tuple(part.shape) for part in credit]
    wanted = [(turns,)] * size
    if not isinstance(credit, Tensor):
        wanted = [(len(sampled_turns(t)),) for t in group.trajectories]
    if shape != wanted or not finite:
        told = f"{what} gave advantages of shape {shape} (finite: {finite})"
        raise PluginError(f"{told}, not {wanted}")
    return credit


def sampled_turns(trajectory: Trajectory) -> Tensor:
    """(N,), the turn of each token that was sampled in a turn of the trajectory's own."""
    index = torch.tensor(trajectory.turn_index)
    return index[index >= 0]


def token_credit(group: Group, credit: Credit) -> list[Tensor]:
    """For each trajectory (N_i,), the advantage of each of its sampled tokens: its turn's, if
    credit is given by turns."""
    if not isinstance(credit, Tensor):
        return list(credit)
    return [row[sampled_turns(t)] for row, t in zip(credit, group.trajectories, strict=True)]


def curves(trajectory: Trajectory) -> dict[str, float | None]:
    """The paper's four curves for one trajectory.

    `exact_match`: the answer is an accepted one. `tool_execution`: share of attempted calls that
    succeeded, 0 if none was attempted; a call that was never answered did not succeed.
    `answer_in_results`: an accepted answer stands in what the policy read of the tools' replies;
    None where that says nothing (see `can_be_found`). `format`: every turn was well formed and the
    last one answered.
    """
    question, results = trajectory.question, trajectory.results
    attempted = sum(len(turn.reading.calls) for turn in trajectory.turns)
    well_formed = all(turn.reading.format_error is None for turn in trajectory.turns)
    values = (
        exact_match(trajectory.answer, question),
        sum(r.ok for r in results) / max(attempted, 1),
        answer_in_results(results, question) if can_be_found(question) else None,
        well_formed and trajectory.answer is not None,
    )
    return {k: None if v is None else float(v) for k, v in zip(CURVES, values, strict=True)}


@dataclass(frozen=True)
class Experience:
    """Groups and their credit that one iteration collected in this process.

    Args:
        groups: The groups.
        credit: Of each group.
        seconds: How long the policy took to act.
        sampled: Tokens sampled in that time, those included that are not learnt from.
        probe_tokens: Those that were sampled for values alone.
        redrawn: Trajectories of groups that were sampled anew.
    """

    groups: tuple[Group, ...]
    credit: tuple[Credit, ...]
    seconds: float
    sampled: int = 0
    probe_tokens: int = 0
    redrawn: int = 0

    @property
    def idle(self) -> list[int]:
        """Groups that teach nothing."""
        return [i for i, credit in enumerate(self.credit) if is_idle(credit)]

    def redrawn_by(self, places: Sequence[int], anew: Experience) -> Experience:
        """The same with other groups in these places."""
        groups, credit = list(self.groups), list(self.credit)
        for i, group, one in zip(places, anew.groups, anew.credit, strict=True):
            groups[i], credit[i] = group, one
        return Experience(
            tuple(groups),
            tuple(credit),
            self.seconds + anew.seconds,
            self.sampled + anew.sampled,
            self.probe_tokens + anew.probe_tokens,
            self.redrawn + sum(len(group.trunks) for group in anew.groups),
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, group by group."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def advantages(self) -> list[Tensor]:
        """Of each one's sampled tokens."""
        pairs = zip(self.groups, self.credit, strict=True)
        return [tokens for group, credit in pairs for tokens in token_credit(group, credit)]

    @property
    def returns(self) -> list[Tensor] | None:
        """Target of a critic for each one's sampled tokens: GAE's lambda-return, the advantage plus
        the value; None without a critic."""
        values = [expected for group in self.groups for expected in group.token_values]
        if not values:
            return None
        return [a + v for a, v in zip(self.advantages, values, strict=True)]


def group_sums(groups: Sequence[Group], rewards: Sequence[Reward]) -> dict[str, float]:
    """Figures that groups are watched by, summed over their trajectories, without branches: the
    four curves, `findable` (the number of them of which `answer_in_results` says something), and
    the rewards by component, by kind and in total."""
    names = dict.fromkeys(component_name(reward) for reward in rewards)
    shown = [curves(group.trajectories[i]) for group in groups for i in group.trunks]
    components = [group.components[i] for group in groups for i in group.trunks]
    found = {name: sum(row[name] or 0.0 for row in shown) for name in CURVES}
    found["findable"] = float(sum(row["answer_in_results"] is not None for row in shown))
    found |= {f"reward/{name}": sum(row[name] for row in components) for name in names}
    turn = sum(float(group.turn_rewards[group.trunks].sum()) for group in groups)
    outcome = sum(float(group.outcome[group.trunks].sum()) for group in groups)
    return found | {"reward/turn": turn, "reward/outcome": outcome, "reward/total": turn + outcome}


def rollout_sums(experience: Experience) -> dict[str, float]:
    """The shape of a collection's rollouts, summed over its trajectories, without branches; but for
    `sampled_tokens`, which is what is learnt from.

    A group is degenerate if all its advantages are zero: it teaches nothing.
    """
    trajectories = [group.trajectories[i] for group in experience.groups for i in group.trunks]
    idle = sum(len(experience.groups[i].trunks) for i in experience.idle)
    found: dict[str, float] = {
        "rollout/turns": sum(len(t.turns) for t in trajectories),
        "rollout/tokens": sum(len(t.token_ids) for t in trajectories),
        "rollout/sampled_tokens": sum(map(len, experience.advantages)),
        "rollout/truncated": sum(t.stop == "length" for t in trajectories),
        "rollout/degenerate_groups": idle,
        "rollout/probe_tokens": experience.probe_tokens,
        "rollout/redrawn_groups": experience.redrawn,
    }
    if (returns := experience.returns) is not None:
        varied, missed = torch.cat(returns).var(), torch.cat(experience.advantages)
        explained = 1 - float(missed.var() / varied) if varied > 1e-12 else 0.0
        found["critic/explained_variance"] = explained * len(trajectories)
        found["critic/bias"] = -float(missed.mean()) * len(trajectories)  # which that does not see
    return found


def is_idle(credit: Credit) -> bool:
    """True if a group teaches nothing: all its advantages are zero. Rounding leaves 1e-8 where
    rewards are equal."""
    return all(float(part.abs().max()) < 1e-6 for part in credit)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean over questions: Wilson's for a rate (every value 0 or 1), the
    percentile bootstrap's for anything else."""
    from scipy import stats

    if set(values) <= {0.0, 1.0}:
        found = stats.binomtest(int(sum(values)), len(values)).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    if len(set(values)) == 1:
        return values[0], values[0]
    # sorted, so that the order in which processes scored them changes no digit
    drawn = [sorted(values)]
    found = stats.bootstrap(drawn, lambda v, axis: v.mean(axis), method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
