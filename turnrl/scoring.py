"""Scoring: rewards applied to trajectories, credit given to groups, and what a collection is
watched by."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnrl.errors import PluginError, blaming
from turnrl.text import contains_answer, exact_match
from turnrl.types import AdvantageEstimator, Group, Reward, Trajectory, TurnReward

CURVES = ("exact_match", "tool_execution", "answer_in_results", "format")
"""The paper's four curves, whatever the rewards are; see `curves`."""


def component_name(reward: Reward) -> str:
    """`turn/tool_executed`, `outcome/exact_match`: the name of a reward in metrics."""
    name = reward.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(reward).__name__).lower()
    return f"{'turn' if isinstance(reward, TurnReward) else 'outcome'}/{name}"


def score_group(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], turns: int | None = None
) -> Group:
    """Apply every reward to the G trajectories of a question.

    Args:
        trajectories: G attempts at one question, at least one.
        rewards: Each kind is summed.
        turns: K, columns of the group's tensors; by default the most turns that one of them took.
    Raises:
        PluginError: If a reward raises, or gives something that is not a finite number.
    """
    size = len(trajectories)
    turns = max(len(t.turns) for t in trajectories) if turns is None else turns
    turn_rewards, outcome = torch.zeros(size, turns), torch.zeros(size)
    reached = torch.zeros(size, turns, dtype=torch.bool)
    components: list[dict[str, float]] = []
    for i, trajectory in enumerate(trajectories):
        taken = len(trajectory.turns)
        reached[i, :taken] = True
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


def assign_credit(group: Group, estimator: AdvantageEstimator) -> Tensor:
    """Advantages (G, K) of a group.

    Raises:
        PluginError: If the estimator raises, or gives another shape or numbers that are not finite.
    """
    size, turns = group.turn_rewards.shape
    what = f"{type(estimator).__name__} on a group of {size} with {turns} turns"
    with blaming(PluginError, what, "Mend the estimator."):
        advantages = estimator(group)
        finite = bool(advantages.isfinite().all())
    if advantages.shape != (size, turns) or not finite:
        told = f"{what} gave advantages of shape {tuple(advantages.shape)} (finite: {finite})"
        raise PluginError(f"{told}, not {(size, turns)}")
    return advantages


def curves(trajectory: Trajectory) -> dict[str, float]:
    """The paper's four curves for one trajectory.

    `exact_match`: the answer is an accepted one. `tool_execution`: share of attempted calls that
    succeeded, 0 if none was attempted; a call that was never answered did not succeed.
    `answer_in_results`: an accepted answer stands in what the policy read of the tools' replies.
    `format`: every turn was well formed and the last one answered.
    """
    answers = trajectory.question.answers
    results = trajectory.results
    attempted = sum(len(turn.reading.calls) for turn in trajectory.turns)
    well_formed = all(turn.reading.format_error is None for turn in trajectory.turns)
    values = (
        exact_match(trajectory.answer, answers),
        sum(r.ok for r in results) / max(attempted, 1),
        any(r.ok and contains_answer(r.content, answers) for r in results),
        well_formed and trajectory.answer is not None,
    )
    return dict(zip(CURVES, map(float, values), strict=True))


@dataclass(frozen=True)
class Experience:
    """What one iteration collected in this process: groups, their advantages (one (G, K) each), and
    how many seconds that took."""

    groups: tuple[Group, ...]
    advantages: tuple[Tensor, ...]
    seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, group by group."""
        return [t for group in self.groups for t in group.trajectories]


def group_sums(groups: Sequence[Group], rewards: Sequence[Reward]) -> dict[str, float]:
    """What groups are watched by, summed over their trajectories: the four curves, and the rewards
    by component, by kind and in total."""
    names = dict.fromkeys(component_name(reward) for reward in rewards)
    shown = [curves(t) for group in groups for t in group.trajectories]
    components = [c for group in groups for c in group.components]
    found = {name: sum(row[name] for row in shown) for name in CURVES}
    found |= {f"reward/{name}": sum(row[name] for row in components) for name in names}
    turn = sum(float(group.turn_rewards.sum()) for group in groups)
    outcome = sum(float(group.outcome.sum()) for group in groups)
    return found | {"reward/turn": turn, "reward/outcome": outcome, "reward/total": turn + outcome}


def rollout_sums(experience: Experience) -> dict[str, float]:
    """The shape of a collection's rollouts, summed over its trajectories.

    A group is degenerate if all its advantages are zero: it teaches nothing.
    """
    trajectories = experience.trajectories
    # rounding leaves 1e-8 where rewards are equal
    idle = [len(a) for a in experience.advantages if float(a.abs().max()) < 1e-6]
    return {
        "rollout/turns": sum(len(t.turns) for t in trajectories),
        "rollout/tokens": sum(len(t.token_ids) for t in trajectories),
        "rollout/sampled_tokens": sum(len(u.token_ids) for t in trajectories for u in t.turns),
        "rollout/truncated": sum(t.stop == "length" for t in trajectories),
        "rollout/degenerate_groups": sum(idle),
    }


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
