"""`turnrl eval RECIPE [--ckpt_path FILE] [--split NAME]`: a split scored with greedy trajectories.

Every figure is printed with its 95 % interval, and every trajectory is kept in the run's record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turnrl import PluginError, RecipeError, add_recipe_command, hookimpl, load_plugins

if TYPE_CHECKING:
    from turnrl import Built, record


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """The command `eval`."""
    told = "score a split: turnrl eval RECIPE.yaml --ckpt_path FILE [--split NAME]"
    settings = {"split": (Literal["train", "val", "test"], "val")}
    return [partial(add_recipe_command, name="eval", told=told, act=evaluate, settings=settings)]


def evaluate(built: Built) -> None:
    """Score a split of the recipe's data, and print its figures.

    Args:
        built: What the recipe makes. Without a checkpoint, the policy is scored as the recipe names
            it.
    Raises:
        RecipeError: If it is no `MTGRPO` on `QuestionData`, or there is nothing to score.
        PluginError: If the plugin that keeps the record is not loaded.
    """
    if not load_plugins("record"):
        what = "'turnrl eval' prints figures of the record, and the plugin 'record' is not loaded"
        raise PluginError(f"{what}. Install turnrl-record, and add record to TURNRL_LOAD_PLUGINS.")
    import torch
    from turnrl_record.recording import Recorder

    from turnrl import MTGRPO, QuestionData

    module, data = built.module, built.data
    trainer: Any = built.trainer
    if not isinstance(module, MTGRPO) or not isinstance(data, QuestionData):
        has = f"{type(module).__name__} and {type(data).__name__}"
        raise RecipeError(f"'turnrl eval' scores MTGRPO on QuestionData, not {has}.")
    data.split = built.settings["split"]
    # a checkpoint is data from somewhere: no code in it is run
    path = built.checkpoint
    if path is None and trainer.is_global_zero:
        print("no --ckpt_path: this scores the policy as the recipe names it, before any training")
    trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False, weights_only=True)
    (own,) = (one.evaluated for one in trainer.callbacks if isinstance(one, Recorder))
    parts, log_dir = [own] * trainer.world_size, trainer.log_dir  # a collective call
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(parts, own)
    rows = [row for part in parts for row in part]
    if not rows:
        raise RecipeError("nothing to score. Set data.val; leave out limit_val_batches 0.")
    if trainer.is_global_zero:
        print(f"\n{len(rows)} questions, greedy; mean and 95 % interval")
        print("\n".join(figures(rows, data.split)))
        if log_dir:
            print(f"written to {Path(log_dir) / 'metrics.csv'}; every trajectory in record/")


def figures(rows: Iterable[record.Row], split: str) -> Iterable[str]:
    """A line for each figure of an evaluation: its mean over the questions, and its interval.

    Args:
        rows: The rows of the record, one for each question.
        split: The split that was scored.
    """
    from turnrl import record

    rows = list(rows)
    for name, figure in record.figures(rows).items():
        value, few = "-", ""
        if figure.mean is not None:
            value = f"{figure.mean:.4f}  [{figure.low:.4f}, {figure.high:.4f}]"
        if figure.questions < len(rows):
            few = f"  of {figure.questions} questions, whose answer can be found"
        yield f"    {f'{split}/{name}':36} {value}{few}"
