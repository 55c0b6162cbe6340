"""Experience: scored groups, and minibatches of per-token streams.

Credit ends here: what leaves this module for the objective knows tokens, not turns or groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from turnrl.credit import spread_over_tokens
from turnrl.errors import PluginError
from turnrl.text import contains_answer, exact_match
from turnrl.types import (
    AdvantageEstimator,
    Group,
    OutcomeReward,
    Reward,
    Scores,
    Trajectory,
    TurnReward,
)


@dataclass
class Minibatch:
    """B trajectories as per-token streams, padded on the right.

    Not frozen, because Lightning moves its tensors in place.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), bool: every real token, tool results included.
        loss_mask: (B, T), bool: sampled tokens.
        advantages: (B, T), each sampled token's advantage.
        old_logprobs: (B, T), the sampler's log-probability of each sampled token.
        weights: (B, T), each sampled token's share of the loss.
        fresh: Whether the weights are still those that sampled, so that the ratio is 1 by
            definition.
        metrics: What the collection measured; on the first minibatch of an iteration only.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    weights: Tensor
    fresh: bool
    metrics: dict[str, float] = field(default_factory=dict)


def component_name(reward: Reward) -> str:
    """`turn/tool_executed`, `outcome/exact_match`: the name of a reward in metrics."""
    name = reward.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(reward).__name__).lower()
    return f"{'turn' if isinstance(reward, TurnReward) else 'outcome'}/{name}"


def score(trajectory: Trajectory, rewards: Sequence[Reward]) -> Scores:
    """Apply every reward to a trajectory.

    Raises:
        PluginError: If a reward raises, or gives something that is not a finite number.
    """
    turn = [0.0] * len(trajectory.turns)
    outcome = 0.0
    components: dict[str, float] = {}
    for reward in rewards:
        name = component_name(reward)
        total = 0.0
        if isinstance(reward, TurnReward):
            for k in range(len(turn)):
                value = _checked(reward, trajectory, partial(reward.score, trajectory, k))
                turn[k] += value
                total += value
        elif isinstance(reward, OutcomeReward):
            total = _checked(reward, trajectory, partial(reward.score, trajectory))
            outcome += total
        components[name] = components.get(name, 0.0) + total
    return Scores(tuple(turn), outcome, components)


def _checked(reward: Reward, trajectory: Trajectory, evaluate: Callable[[], float]) -> float:
    what = f"reward {type(reward).__name__} on question {trajectory.question.id!r}"
    try:
        value = float(evaluate())
    except Exception as error:
        raise PluginError(
            f"{what} raised {type(error).__name__}: {error}. A reward must score any trajectory."
        ) from error
    if not -1e9 < value < 1e9:
        raise PluginError(f"{what} gave {value}, which is not a finite number")
    return value


def outcome_metrics(trajectory: Trajectory) -> dict[str, float]:
    """The paper's four curves for one trajectory, whatever its rewards are.

    `exact_match`: the answer is an accepted one. `tool_execution`: share of attempted calls that
    succeeded, 0 if none was attempted. `answer_in_results`: an accepted answer stands in what the
    tools returned. `format`: every turn was well formed and the last one answered.
    """
    answers = trajectory.question.answers
    results = trajectory.results
    well_formed = all(turn.reading.format_error is None for turn in trajectory.turns)
    return {
        "exact_match": float(exact_match(trajectory.answer, answers)),
        "tool_execution": sum(r.ok for r in results) / len(results) if results else 0.0,
        "answer_in_results": float(
            any(r.ok and contains_answer(r.content, answers) for r in results)
        ),
        "format": float(well_formed and trajectory.answer is not None),
    }


def mean_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over rows with the same names."""
    return {name: fmean(row[name] for row in rows) for name in rows[0]} if rows else {}


def group_tensors(group: Group, turns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rewards of a group as tensors.

    Args:
        group: G scored trajectories.
        turns: K, columns of the tensors.
    Returns:
        Turn rewards (G, K), outcome (G,) and reached (G, K).
    """
    size = len(group.scores)
    rewards, reached = torch.zeros(size, turns), torch.zeros(size, turns, dtype=torch.bool)
    for i, scores in enumerate(group.scores):
        rewards[i, : len(scores.turn)] = torch.tensor(scores.turn)
        reached[i, : len(scores.turn)] = True
    return rewards, torch.tensor([s.outcome for s in group.scores]), reached


def credit(group: Group, estimator: AdvantageEstimator, turns: int) -> Tensor:
    """Advantages (G, K) of a group.

    Raises:
        PluginError: If the estimator gives another shape or numbers that are not finite.
    """
    try:
        advantages = estimator(*group_tensors(group, turns))
    except Exception as error:
        raise PluginError(
            f"{type(estimator).__name__} raised {type(error).__name__}: {error} on a group of "
            f"{len(group.scores)} with {turns} turns. Mend the estimator."
        ) from error
    if advantages.shape != (len(group.scores), turns) or not advantages.isfinite().all():
        raise PluginError(
            f"{type(estimator).__name__} gave advantages of shape {tuple(advantages.shape)} "
            f"(finite: {bool(advantages.isfinite().all())}) for a group of {len(group.scores)} "
            f"with {turns} turns"
        )
    return advantages


def pack(
    trajectories: Sequence[Trajectory], advantages: Tensor, token_weights: Tensor, fresh: bool
) -> Minibatch:
    """Trajectories as per-token streams.

    Args:
        trajectories: B of them.
        advantages: (B, K).
        token_weights: (B,), weight of each sampled token of each trajectory.
        fresh: See `Minibatch`.
    """
    longest = max(len(t.token_ids) for t in trajectories)

    def padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=dtype)

    turn_index = padded([t.turn_index for t in trajectories], -1, torch.long)
    mask = turn_index >= 0
    return Minibatch(
        input_ids=padded([t.token_ids for t in trajectories], 0, torch.long),
        attention_mask=padded([[1] * len(t.token_ids) for t in trajectories], 0, torch.bool),
        loss_mask=mask,
        advantages=spread_over_tokens(advantages, turn_index),
        old_logprobs=padded([t.logprobs for t in trajectories], 0.0, torch.float32),
        weights=token_weights[:, None] * mask,
        fresh=fresh,
    )


@dataclass(frozen=True)
class Experience:
    """What one iteration collected on this rank: groups, their advantages (one (G, K) each), and
    metrics.
    """

    groups: tuple[Group, ...]
    advantages: tuple[Tensor, ...]
    metrics: Mapping[str, float]


def rollout_metrics(
    groups: Sequence[Group], advantages: Sequence[Tensor], seconds: float
) -> dict[str, Any]:
    """What a collection is watched by: outcomes, rewards by component, and the shape of the
    rollouts.

    A group is degenerate if all its advantages are zero: it teaches nothing.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    scores = [s for group in groups for s in group.scores]
    sampled = sum(len(turn.token_ids) for t in trajectories for turn in t.turns)
    metrics = {
        f"train/{k}": v for k, v in mean_metrics([outcome_metrics(t) for t in trajectories]).items()
    }
    metrics |= {
        f"reward/{k}": v for k, v in mean_metrics([dict(s.components) for s in scores]).items()
    }
    metrics |= {
        "reward/turn": fmean(sum(s.turn) for s in scores),
        "reward/outcome": fmean(s.outcome for s in scores),
        "rollout/turns": fmean(len(t.turns) for t in trajectories),
        "rollout/tokens": fmean(len(t.token_ids) for t in trajectories),
        "rollout/sampled_tokens": sampled / len(trajectories),
        "rollout/truncated": fmean(t.stop == "length" for t in trajectories),
        # rounding leaves 1e-8 where rewards are equal
        "rollout/degenerate_groups": fmean(float(a.abs().max()) < 1e-6 for a in advantages),
        "rollout/tokens_per_s": sampled / max(seconds, 1e-9),
        "rollout/seconds": seconds,
    }
    return metrics
