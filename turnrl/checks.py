"""Checks before a run: of settings that do not fit together, and by installed checks."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from turnrl.errors import RecipeError, at_least, parse_bytes
from turnrl.scoring import component_name
from turnrl.text import visible
from turnrl.types import AdvantageEstimator, Reward, Start

_logger = logging.getLogger(__name__)


def check_settings(module: Any) -> None:
    """Refuse settings of an `MTGRPO` that are out of range or do not fit together.

    Raises:
        RecipeError: Naming the setting, its value and the next step.
    """
    counts = ("group_size", "updates_per_iteration", "steps_per_update", "minibatch_tokens")
    at_least(1, "model.", module, *counts)
    kept = ("record_per_iteration", "transcripts_per_iteration")
    at_least(0, "model.", module, *kept, "redraws", "seed")
    if module.profile not in (None, "auto"):
        parse_bytes(module.profile, "model.profile", "'auto', null, or ")
    _check_estimator(module.estimator, module.group_size, module.redraws)
    _check_rewards(module.rewards)
    if module.objective.kl_coef > 0 and module.policy.lora is None:
        raise RecipeError(
            f"objective.kl_coef is {module.objective.kl_coef}, which compares with the policy "
            "without its adapter, but policy.lora is not set. Set it, or set kl_coef to 0."
        )


def _check_estimator(estimator: AdvantageEstimator, group_size: int, redraws: int) -> None:
    name, least = type(estimator).__name__, estimator.min_group_size
    if group_size < least:
        raise RecipeError(
            f"model.group_size is {group_size}, but {name} compares {least} trajectories or more. "
            "Raise it (16 is usual), or set baseline: leave_one_out and scale: none."
        )
    at_least(0, f"{name}.", estimator, "probes")
    if redraws and estimator.critic is not None:
        raise RecipeError(
            f"model.redraws is {redraws}, but with a critic ({name}) no group is without "
            "advantages. Set it to 0."
        )


def _check_rewards(rewards: Sequence[Reward]) -> None:
    if not rewards:
        raise RecipeError("rewards is empty: nothing to learn from. Add one, ExactMatch say.")
    names = [component_name(reward) for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(
            f"model.rewards has {min(twice)!r} twice. Leave one out, or raise its weight."
        )


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings of a Trainer that the module replaces by its own.

    Raises:
        RecipeError: Naming the setting of the module.
    """
    if trainer.precision != "32-true":
        raise RecipeError(
            f"trainer.precision is {trainer.precision!r}, but what is trained is kept in "
            "32-true. Leave it out, and set policy.dtype, which is the base's."
        )
    if trainer.accumulate_grad_batches != 1:
        raise RecipeError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but a "
            "batch is a whole step. Leave it out; model.minibatch_tokens bounds its memory."
        )


def _start_of(module: L.LightningModule, folder: Path | None, learns: bool = True) -> Start:
    run: Any = module.trainer
    device, data = run.strategy.root_device, getattr(run, "datamodule", None)
    return Start(device, module, data, folder, run.world_size, run.max_epochs, learns)


def settle_evaluation(module: L.LightningModule, folder: Path | None) -> None:
    """Have installed checks settle what a recipe leaves open, as they do for a run: an evaluation
    samples as the run's own validation does."""
    _start_of(module, folder, learns=False).settle()


def examine_run(module: L.LightningModule, folder: Path | None) -> None:
    """Have installed checks settle the settings that a recipe leaves open, and stop at a failure.

    Raises:
        RecipeError: With the text of the check that failed.
    """
    run: Any = module.trainer
    for finding in _start_of(module, folder).examine():
        text = visible(f"{finding.name}: {finding.text}. {finding.step}".strip())
        if finding.status == "fail":
            raise RecipeError(text)
        if finding.status == "warn" and run.is_global_zero:
            _logger.warning(text)
