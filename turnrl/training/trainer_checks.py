"""Settings and callbacks of Lightning's Trainer that a run refuses, because they would change what
is learned or kept."""

from pathlib import Path
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

from turnrl.plugin.errors import ArgumentTypeError, RecipeError
from turnrl.policy.sharding import FSDP2
from turnrl.runs.claim import refuse_other_run
from turnrl.watch.trainer import get_data_module

_REFUSED = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
    callbacks.WeightAveraging,
)
"""Callbacks that change weights, gradients or batches without the engine and the checkpoint."""
_claimed: WeakKeyDictionary[L.Trainer, Path] = WeakKeyDictionary()
"""The folder that each trainer writes to."""


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings and callbacks of a Trainer that would change what is learned or kept.

    Raises:
        RecipeError: Naming the setting or the callback, the reason, and what to take.
        ArgumentTypeError: If it would train on something other than a data module.
    """
    if trainer.state.fn == "fit" and get_data_module(trainer) is None:
        raise ArgumentTypeError(
            "Trainer.fit has no data module, but a DataLoader, a list or nothing, which cannot say "
            "what an iteration asks. Pass one: trainer.fit(module, QuestionData(train=rows))."
        )
    if trainer.precision != "32-true":
        raise RecipeError(
            f"trainer.precision is {trainer.precision!r}, but trained weights are kept in "
            "32-true. Leave it out; model.policy.dtype sets the dtype of the base."
        )
    if trainer.accumulate_grad_batches != 1:
        raise RecipeError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but a "
            "batch is a whole step. Leave it out; model.policy.minibatch_tokens bounds its memory."
        )
    if share := trainer.overfit_batches:  # type: ignore[attr-defined]
        raise RecipeError(
            f"trainer.overfit_batches is {share}, but a batch is one step of an "
            "iteration, and each iteration asks other questions. Leave it out; data.train_limit, "
            "with data.questions_per_iteration no larger, asks the same ones each time."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _REFUSED):
            raise RecipeError(
                f"trainer.callbacks has a {type(callback).__name__}, which changes weights, "
                "gradients or batches, but the engine samples with the weights of each step, and a "
                "batch is a whole step. Leave it out."
            )
    strategy = trainer.strategy
    if isinstance(strategy, ParallelStrategy) and not isinstance(strategy, DDPStrategy | FSDP2):
        raise RecipeError(
            f"trainer.strategy is a {type(strategy).__name__}. Take ddp, with the whole policy in "
            "each process, or fsdp2, which divides it over them."
        )


def claim_folder(
    trainer: L.Trainer, folder: Path | None, checkpoint: str | Path | None = None
) -> None:
    """Refuse to write over a run of another trainer. A trainer claims its folder once.

    Args:
        trainer: The trainer.
        folder: The run's folder; None if the run writes none.
        checkpoint: The checkpoint that the run resumes from; None if it begins anew.
    Raises:
        RecipeError: If there is a run in the folder.
    """
    if folder is not None and trainer.is_global_zero and _claimed.get(trainer) != folder:
        refuse_other_run(folder, checkpoint)
        _claimed[trainer] = folder
