"""A warning about runs that look healthy but learn nothing, with the first thing to change.

A group teaches nothing if all its advantages are zero. If all groups are like this, every figure of
the iteration is finite, the loss is 0, and nothing fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from turnrl.agent.rollout import Rollout
from turnrl.plugin.text import make_visible
from turnrl.types.trajectory import Trajectory

_ALL = 1 - 1e-6
_WARM_UP = " If it never calls a tool, teach it the form with 'turnrl warmup'."


def find_learning_warning(
    iteration: int,
    figures: Mapping[str, float],
    rollout: Rollout,
    trajectories: Iterable[Trajectory] = (),
) -> str:
    """The warning about an iteration that taught nothing or in which no trajectory answered, with
    the likely cause and the first thing to change; empty for any other iteration.

    Args:
        iteration: The iteration's number.
        figures: The iteration's figures, as in `metrics.csv`.
        rollout: The rollout with which the agent acted.
        trajectories: The iteration's trajectories, as far as they are at hand.
    """
    alike = figures.get("train/degenerate_groups", 0.0) > _ALL
    silent = bool(rollout.specs) and figures.get("train/tool_execution", 1.0) < 1e-6
    if figures.get("rollout/truncated", 0.0) > _ALL:
        effect = "nothing to learn from" if alike else "no answer"
        full = figures["rollout/tokens"] > 0.9 * rollout.max_tokens
        whole, turn = rollout.max_tokens, rollout.max_turn_tokens
        setting = f"max_tokens (it is {whole})" if full else f"max_turn_tokens (it is {turn})"
        return (
            f"{effect} in iteration {iteration}: every trajectory ran out of tokens before it "
            f"answered. Raise model.rollout.{setting}.{_WARM_UP if silent else ''}"
        )
    if not alike:
        return ""
    if figures.get("train/exact_match", 0.0) > _ALL:
        advice = "All answers were right: train on harder questions."
    elif figures["train/format"] < 1e-6 and not any(tool.acts for tool in rollout.toolsets):
        loop = rollout.loop
        advice = (
            "No trajectory was well formed: read transcripts/ in the run's folder, then make the "
            f"instructions of the {loop.kind} {loop.name} plainer, or take a policy that can "
            "follow them."
        )
    else:
        advice = (
            "Add a reward that tells attempts apart, take questions that are sometimes answered, "
            "or raise model.group_size or model.rollout.temperature."
        )
    return (
        f"nothing to learn from in iteration {iteration}: all attempts at a question earned the "
        f"same (mean reward {figures['reward/total']:.3f}), so every advantage is 0. {advice}"
        f"{_common_error(trajectories)}"
    )


def _common_error(trajectories: Iterable[Trajectory]) -> str:
    """A sentence that quotes the most frequent error of tool calls, if most of the calls failed."""
    results = [result for trajectory in trajectories for result in trajectory.results]
    errors = Counter(
        make_visible(result.unread or result.content)[:200] for result in results if not result.ok
    )
    if 2 * errors.total() <= len(results):
        return ""
    text, times = errors.most_common(1)[0]
    failed = f"{errors.total()} of {len(results)} tool calls failed"
    return f" {failed}, {times} of them with the error {text!r}."
