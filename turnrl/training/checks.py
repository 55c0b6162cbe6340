"""Checks before a run: settings that do not fit together, and installed checks."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import Timer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from turnrl.agent.rollout import Rollout
from turnrl.objectives.applying import check_needs
from turnrl.plugin.errors import (
    ArgumentTypeError,
    PluginError,
    RecipeError,
    at_least,
    blaming,
    check_numbers,
    function_of,
    in_short,
    instance_of,
    is_finite,
    kind_of,
    parse_bytes,
)
from turnrl.plugin.text import visible
from turnrl.policy.divided import FSDP2
from turnrl.policy.model import LanguageModel
from turnrl.rewards.scoring import component_name
from turnrl.training.collection import Parts
from turnrl.types import (
    AdvantageEstimator,
    Check,
    Engine,
    Finding,
    Objective,
    Reward,
    Start,
)
from turnrl.watch.recorder import Recorder
from turnrl.watch.trainer import data_of

_logger = logging.getLogger(__name__)


@runtime_checkable
class LearnerParts(Parts, Protocol):
    """The arguments of an `MTGRPO` that are checked together."""

    objective: Objective
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None
    redraws: int
    gpu_memory: str | None


def check_parts(module: LearnerParts) -> None:
    """Check the types of `MTGRPO`'s arguments; only Python callers can get them wrong.

    Raises:
        ArgumentTypeError: Naming the argument, its value, and what to write.
    """
    instance_of(Rollout, "rollout", module.rollout)
    instance_of(Objective, "objective", module.objective)
    check_needs(module.objective)
    function_of(
        "the parameters",
        name="optimizer",
        value=module.optimizer,
        example="lambda parameters: AdamW(parameters, lr=1e-5)",
    )
    function_of(
        "the optimiser",
        name="scheduler",
        value=module.scheduler,
        example="lambda optimizer: CosineAnnealingLR(optimizer, T_max=100)",
    )


def check_settings(module: LearnerParts) -> None:
    """Refuse settings of an `MTGRPO` that are out of range or do not fit together.

    Raises:
        RecipeError: Naming the setting, its value and the next step.
    """
    if module.gpu_memory not in (None, "auto"):
        parse_bytes(module.gpu_memory, "model.gpu_memory", "'auto', null, or ")
    counts = ("group_size", "passes_per_iteration", "steps_per_pass")
    at_least(1, "model.", module, *counts, whole=True, optional=False)
    least = ("max_staleness", "redraws", "seed")
    at_least(0, "model.", module, *least, whole=True, optional=False)
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


class SamplingAhead(Check):
    """Checks that the engine can sample while the policy learns, if a recipe asks for that. A
    policy that only acts needs no such engine."""

    def run(self, start: Start) -> Iterable[Finding]:
        module = start.module
        if not start.learns or not isinstance(module, LearnerParts) or not module.max_staleness:
            return
        ahead, engine, name = module.max_staleness, module.engine, module.engine.name
        if engine.keeps <= ahead:
            text = (
                f"model.max_staleness is {ahead}, which samples while the policy learns. It needs "
                f"{ahead + 1} versions of the weights, and {name} keeps {engine.keeps}"
            )
            if engine.keeps > 1:
                step = (
                    f"Set model.engine.keeps to {ahead + 1}, or max_staleness to "
                    f"{engine.keeps - 1}."
                )
            else:
                step = "Set it to 0, or take an engine with weights of its own, such as VLLM."
            yield Finding("fail", "sampling ahead", text, step)
        if "sampler" not in module.objective.needs:
            text = (
                f"model.max_staleness is {ahead}, so its samples come from older weights, "
                f"and model.objective ({type(module.objective).__name__}) does not correct for that"
            )
            yield Finding("fail", "sampling ahead", text, "Set importance_cap to 2.")


def _check_estimator(estimator: AdvantageEstimator, group_size: int, redraws: int) -> None:
    name, least = type(estimator).__name__, estimator.min_group_size
    if group_size < least:
        raise RecipeError(
            f"model.group_size is {group_size}, but {name} compares {least} trajectories or more. "
            "Raise it (16 is usual), or set baseline: leave_one_out and scale: none."
        )
    at_least(0, f"{name}.", estimator, "probes", whole=True, optional=False)
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
        if reward.right_at is not None and not is_finite(reward.right_at):
            raise RecipeError(
                f"{name} has right_at = {reward.right_at}. Give what a right attempt gets of it."
            )
        if reward.is_cost and reward.right_at is not None:
            raise RecipeError(
                f"{name} has right_at = {reward.right_at} and is_cost, but what a right attempt "
                "gets is no cost. Leave out one of the two."
            )
        if reward.by_turn and reward.right_at is not None:
            raise RecipeError(
                f"{name} has right_at = {reward.right_at}, but it scores turns, and only a whole "
                "attempt is right or wrong. Leave it out, or extend OutcomeReward."
            )


def check_batch(batch: object, kind: type, use: str, advice: str) -> None:
    """Refuse a batch from a loader other than that of the module's data.

    Args:
        batch: The batch.
        kind: The class of its items.
        use: The purpose, such as `learn from`.
        advice: The next step, as a sentence.
    Raises:
        ArgumentTypeError: Naming the batch or item that came.
    """
    misfits = [i for i in batch if not isinstance(i, kind)] if isinstance(batch, list) else []
    if misfits or not isinstance(batch, list):
        came = f"a list with {kind_of(misfits[0])}" if misfits else kind_of(batch)
        fault = f"a batch to {use} is {came}, not a list of {kind.__name__}"
        raise ArgumentTypeError(f"{fault}. {advice}")


_REPLAYED = 100_000
"""The most steps for which a schedule is tried out."""


def check_schedule(optimizer: Optimizer, schedule: LRScheduler, trainer: Any) -> None:
    """Try a schedule for all steps of a run.

    Args:
        optimizer: An optimiser that is made only for this.
        schedule: The optimiser's schedule, at its beginning.
        trainer: The run's trainer.
    Raises:
        RecipeError: If it ends before the run, or gives a rate that is negative or not finite.
    """
    trainer.fit_loop.setup_data()  # else Lightning prints that it does so
    steps = trainer.estimated_stepping_batches
    rates = []
    fault = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimiser has made no step
        for step in range(int(min(steps, _REPLAYED))):
            rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
            lowest = min(float(group["lr"]) for group in optimizer.param_groups)
            if not 0 <= lowest <= rates[-1] < math.inf:
                fault = f"gives the rate {lowest} in step {step + 1}"
                break
            try:
                schedule.step()
            except Exception as error:
                fault = f"fails after step {step + 1} ({in_short(error)})"
                break
    name = f"model.scheduler {type(schedule).__name__}"
    advice = f"The run has {steps:.0f} optimiser steps: give the schedule as many."
    timed = any(isinstance(callback, Timer) for callback in trainer.callbacks)
    if fault and not timed:
        raise RecipeError(f"{name} {fault}. {advice}")
    period = getattr(schedule, "T_max", None)
    if fault:
        fault += ", unless max_time ends the run before"
    elif isinstance(period, int) and period < len(rates) - 1:
        fault = f"falls for T_max = {period} steps, and then rises again"
    elif rates[-2:] == [0, 0] and any(rates):
        last = max(step for step, rate in enumerate(rates, 1) if rate)
        fault = f"has the rate 0 from step {last + 1} on"
    if fault and trainer.is_global_zero:
        _logger.warning(f"{name} {fault}. {advice}")


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


def start_of(
    trainer: Any,
    module: L.LightningModule,
    data: L.LightningDataModule | None,
    folder: Path | None,
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
        gpu_memory=module.gpu_memory if isinstance(module, LearnerParts) else None,
        recorded=(recorders or [Recorder()])[0].per_iteration,
        divided=isinstance(trainer.strategy, FSDP2),
    )


def settle_evaluation(module: L.LightningModule, folder: Path | None) -> None:
    """Have installed checks fill in the settings that a recipe leaves open, as for a run, because
    an evaluation samples like the run's own validation."""
    start_of(module.trainer, module, data_of(module.trainer), folder, learns=False).settle()


def examine_run(module: L.LightningModule, folder: Path | None) -> None:
    """Have installed checks fill in the settings that a recipe leaves open, and stop at a failure.

    Raises:
        RecipeError: With the text of the check that failed.
    """
    run = module.trainer
    for finding in start_of(run, module, data_of(run), folder).examine():
        text = visible(f"{finding.name}: {finding.text}. {finding.advice}".strip())
        if finding.status == "fail":
            raise RecipeError(text)
        if finding.status == "warn" and run.is_global_zero:
            _logger.warning(text)
