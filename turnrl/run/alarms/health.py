"""Runs that learn nothing and look healthy: the warning, with the first thing to change.

A group teaches nothing if all its advantages are zero, and then every figure of the iteration is
finite, the loss is 0 and nothing fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnrl.agent.rollout import Rollout

_ALL = 1 - 1e-6


def idle(iteration: int, figures: Mapping[str, float], rollout: Rollout) -> str:
    """The warning about an iteration that taught nothing or in which no trajectory answered, with
    the likely cause and the first thing to change; empty for any other.

    Args:
        iteration: Its number.
        figures: The iteration's figures, as in `metrics.csv`.
        rollout: How the agent acted.
    """
    alike = figures.get("train/degenerate_groups", 0.0) > _ALL
    if figures.get("rollout/truncated", 0.0) > _ALL:
        effect = "nothing to learn from" if alike else "no answer"
        full = figures["rollout/tokens"] > 0.9 * rollout.max_tokens
        whole, turn = rollout.max_tokens, rollout.max_turn_tokens
        setting = f"max_tokens (it is {whole})" if full else f"max_turn_tokens (it is {turn})"
        return (
            f"{effect} in iteration {iteration}: every trajectory ran out of tokens before it "
            f"answered. Raise rollout.{setting}."
        )
    if not alike:
        return ""
    if figures.get("train/exact_match", 0.0) > _ALL:
        advice = "All answers were right: train on harder questions."
    elif figures.get("train/entropy", 1.0) < 0.01:
        advice = (
            f"The attempts hardly differ (entropy {figures['train/entropy']:.4f} nats a token): "
            f"raise rollout.temperature (it is {rollout.temperature:g})."
        )
    elif figures["train/format"] < 1e-6:
        advice = (
            "No trajectory was well formed: read transcripts/ in the run's folder, then make the "
            "segmenter's instructions plainer, or take a policy that can follow them."
        )
    else:
        advice = (
            "Add a reward that tells attempts apart, take questions that are sometimes answered, "
            "or raise model.group_size."
        )
    return (
        f"nothing to learn from in iteration {iteration}: all attempts at a question earned the "
        f"same (mean reward {figures['reward/total']:.3f}), so every advantage is 0. {advice}"
    )
