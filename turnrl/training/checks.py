"""Checks before a run: settings that do not fit together, and installed checks."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from turnrl.plugin.errors import (
    PluginError,
    RecipeError,
    blaming,
    check_at_least,
    check_numbers,
    is_finite,
    parse_bytes,
)
from turnrl.plugin.text import make_visible
from turnrl.policy.model import LanguageModel
from turnrl.policy.sharding import FSDP2
from turnrl.rewards.scoring import component_name
from turnrl.training.collection import Parts
from turnrl.types import (
    AdvantageEstimator,
    Engine,
    Reward,
    Start,
)
from turnrl.watch.recorder import Recorder

_logger = logging.getLogger(__name__)


def check_settings(module: Parts) -> None:
    """Refuse settings of an `MTGRPO` that are out of range or do not fit together.

    Raises:
        RecipeError: Naming the setting, its value and the next step.
    """
    if module.gpu_memory not in (None, "auto"):
        parse_bytes(module.gpu_memory, "model.gpu_memory", "'auto', null, or ")
    counts = ("group_size", "passes_per_iteration", "steps_per_pass")
    check_at_least(1, "model.", module, *counts, whole=True, optional=False)
    least = ("max_staleness", "redraws", "seed")
    check_at_least(0, "model.", module, *least, whole=True, optional=False)
    _check_estimator(module.estimator, module.group_size, module.redraws)
    check_rewards(module.rewards)
    with blaming(PluginError, f"{type(module.estimator).__name__}.check", "Fix the estimator."):
        module.estimator.check(module.rewards)
    if "reference" in module.objective.needs and module.policy.lora is None:
        raise RecipeError(
            f"model.objective ({type(module.objective).__name__}) compares with the policy that "
            "training began from, and only an adapter can be taken off to have it. Set "
            "model.policy.lora, such as {r: 16, alpha: 32}, or set objective.kl_coef to 0."
        )


def _check_estimator(estimator: AdvantageEstimator, group_size: int, redraws: int) -> None:
    name, least = type(estimator).__name__, estimator.min_group_size
    if group_size < least:
        raise RecipeError(
            f"model.group_size is {group_size}, but {name} compares {least} trajectories or more. "
            "Raise it (16 is usual), or set baseline: leave_one_out and scale: none."
        )
    check_at_least(0, f"{name}.", estimator, "probes", whole=True, optional=False)
    if redraws and estimator.critic is not None:
        raise RecipeError(
            f"model.redraws is {redraws}, but with a critic ({name}) no group is without "
            "advantages. Set it to 0."
        )


def check_rewards(rewards: Sequence[Reward]) -> None:
    if not rewards:
        raise RecipeError(
            "rewards is empty: nothing to learn from. Add one, for example ExactMatch."
        )
    names = [component_name(reward) for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(
            f"model.rewards has {min(twice)!r} twice. Leave one out, or raise its weight; of two "
            "functions, name one: {class_path: FunctionReward, init_args: {function: my_module.f, "
            "name: other}}."
        )
    for name, reward in zip(names, rewards, strict=True):
        check_numbers(f"{name}: ", reward, "right_at")
        right = reward.right_at
        if right is not None and (not is_finite(right) or reward.is_cost or reward.by_turn):
            raise RecipeError(
                f"{name} has right_at = {right}. It is what a right attempt gets of an outcome "
                "reward: a finite number, and none for a cost or for a reward of turns."
            )


def check_division(policy: LanguageModel, engine: Engine) -> None:
    """Refuse settings under which a policy cannot be divided over processes.

    Raises:
        RecipeError: Naming the setting.
    """
    if (method := policy.files.base_quantization) is not None:
        raise RecipeError(
            f"trainer.strategy is fsdp2, and the weights of {policy.settings.model!r} are "
            f"quantised ({method}), which do not come apart: the bits of each lie with the scales "
            "of its block. Set model.policy.quantization to none, with dtype bfloat16 and a model "
            "that is not quantised on disk, or take ddp."
        )
    if not engine.copies_weights:
        raise RecipeError(
            f"trainer.strategy is fsdp2, and {engine.name} samples with the policy's own "
            "weights, of which each process has only a part. Let servers sample (VLLM), or take "
            "ddp."
        )


def make_start(
    trainer: Any,
    module: L.LightningModule,
    data: L.LightningDataModule | None,
    folder: Path | None,
    gpu_memory: str | None,
    learns: bool = True,
) -> Start:
    """The run that a Trainer would begin."""
    recorders = [c for c in trainer.callbacks if isinstance(c, Recorder)]
    return Start(
        trainer.strategy.root_device,
        module,
        data,
        folder,
        trainer.world_size,
        trainer.max_epochs,
        learns,
        gpu_memory=gpu_memory,
        recorded=(recorders or [Recorder()])[0].per_iteration,
        divided=isinstance(trainer.strategy, FSDP2),
    )


def examine_run(start: Start, shown: bool) -> None:
    """Have installed checks fill in the settings that a recipe leaves open, and stop at a failure.

    Args:
        start: The run.
        shown: Print warnings.
    Raises:
        RecipeError: With the text of the check that failed.
    """
    for finding in start.examine():
        text = make_visible(f"{finding.name}: {finding.text}. {finding.advice}".strip())
        if finding.status == "fail":
            raise RecipeError(text)
        if finding.status == "warn" and shown:
            _logger.warning(text)
