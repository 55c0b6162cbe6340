"""Runs that learn nothing and look healthy: one warning, in words, with the first thing to change.

A group teaches nothing if all its advantages are zero, and then every figure of the iteration is
finite, the loss is 0 and nothing fails.
"""

import logging
from collections.abc import Mapping
from typing import Any

import lightning as L

_logger = logging.getLogger(__name__)

_IN_A_ROW = 3
"""Iterations that teach nothing before a run that has learned before is warned of."""


class LearnsNothing(L.Callback):
    """Warn once if iterations teach nothing, or if no trajectory answers: the first iteration, or
    several in a row later."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._said = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        why = reason(figures, pl_module.rollout)
        self._in_a_row = self._in_a_row + 1 if why else 0
        first = trainer.current_epoch == 0
        if why and not self._said and (first or self._in_a_row >= _IN_A_ROW):
            self._said = True
            if trainer.is_global_zero:
                degenerate = figures.get("train/degenerate_groups", 0.0) > 1 - 1e-6
                what = "nothing to learn from" if degenerate else "no answer"
                _logger.warning(f"{what} in iteration {trainer.current_epoch + 1}: {why}")


def reason(figures: Mapping[str, float], rollout: Any) -> str:
    """The likely cause if an iteration taught nothing or none of its trajectories answered, and the
    first thing to change; else nothing.

    Args:
        figures: The iteration's figures, as in `metrics.csv`.
        rollout: Its limits, `max_turn_tokens` and `max_tokens`, and its `temperature`.
    """
    if figures.get("rollout/truncated", 0.0) > 1 - 1e-6:
        turn, whole = rollout.max_turn_tokens, rollout.max_tokens
        full = figures["rollout/tokens"] > 0.9 * whole
        setting = f"max_tokens (it is {whole})" if full else f"max_turn_tokens (it is {turn})"
        return f"every trajectory ran out of tokens before it answered. Raise rollout.{setting}."
    if figures.get("train/degenerate_groups", 0.0) < 1 - 1e-6:
        return ""
    earned = f"mean reward {figures['reward/total']:.3f}"
    alike = f"all attempts at a question earned the same ({earned}), so every advantage is 0."
    if figures["train/exact_match"] > 1 - 1e-6:
        return f"{alike} All answers were right: train on harder questions."
    if figures.get("train/entropy", 1.0) < 0.01:
        return (
            f"{alike} The attempts hardly differ (entropy {figures['train/entropy']:.4f} nats a "
            f"token): raise rollout.temperature (it is {rollout.temperature:g})."
        )
    if figures["train/format"] < 1e-6:
        return (
            f"{alike} No trajectory was well formed: read transcripts/ in the run's folder, then "
            "make the segmenter's instructions plainer, or take a policy that can follow them."
        )
    return (
        f"{alike} Add a reward that tells attempts apart, take questions that are sometimes "
        "answered, or raise model.group_size."
    )
