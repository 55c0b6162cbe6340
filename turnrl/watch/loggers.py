"""Loggers that can show more than numbers also get, at the step of an iteration's row of metrics,

    advantages/turn_1, advantages/turn_2, ...   a histogram of the advantages of that turn
    transcripts     the trajectories in `transcripts/`, as text

TensorBoard and Weights & Biases show both, MLflow only the text, as files. Register a function for
a logger of your own:

    from turnrl.watch.loggers import Shown, show

    @show.register
    def _(logger: MyLogger, shown: Shown, step: int) -> None:
        logger.experiment.write(shown.transcripts)
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from turnrl.credit.estimators import Credit
from turnrl.types.group import Group
from turnrl.watch.recorder import Recorder
from turnrl.watch.trainer import file_of_logger, writing


@dataclass(frozen=True)
class Shown:
    """The parts of one iteration that are shown.

    Args:
        iteration: Its number, from 1.
        advantages: By number of the turn, from 1, (N,): the advantages of the N turns with this
            number from which the first process learned.
        transcripts: Trajectories as text. Policies and tools wrote it, so escape it.
    """

    iteration: int
    advantages: Mapping[int, Tensor]
    transcripts: Sequence[str]


class ToLoggers(L.Callback):
    """Show each iteration in the loggers of a run, after its row of metrics. Only the first process
    does this, and it shows only its own samples."""

    def __init__(self) -> None:
        self._seen: object = None
        self._due: tuple[Shown, int] | None = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        experience = pl_module.experience
        if experience is self._seen or not trainer.is_global_zero or not trainer.loggers:
            return  # a resumed run first ends the iteration that was complete
        self._seen = experience
        iteration, step = pl_module.position
        recorder = next((c for c in trainer.callbacks if isinstance(c, Recorder)), None)
        advantages = by_turn(experience.groups, experience.credit)
        self._due = Shown(iteration, advantages, recorder.texts if recorder else ()), step

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)  # the first moment after the row of metrics

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)

    def _show(self, trainer: L.Trainer) -> None:
        due, self._due = self._due, None
        for logger in trainer.loggers if due else ():
            with writing(trainer, file_of_logger(logger)):
                show(logger, *due)  # type: ignore[misc]


def by_turn(groups: Sequence[Group], credit: Sequence[Credit]) -> dict[int, Tensor]:
    """The advantages of each turn.

    Args:
        groups: Scored groups.
        credit: The credit of each group.
    Returns:
        By number of the turn, from 1, (N,). A turn that a branch shares with the trajectory that
        it forked from counts once.
    """
    parts: dict[int, list[Tensor]] = {}
    for group, own in zip(groups, credit, strict=True):
        for k in range(group.reached.shape[1]):
            parts.setdefault(k + 1, []).append(own.turns[:, k][group.reached[:, k]])
    joined = {turn: torch.cat(values).float().cpu() for turn, values in parts.items()}
    return {turn: values for turn, values in joined.items() if len(values)}


@singledispatch
def show(logger: object, shown: Shown, step: int) -> None:
    """Show an iteration in a logger. A logger whose class is not registered shows nothing.

    Args:
        logger: The logger. Register its class to take part.
        shown: The iteration.
        step: Optimiser steps behind the policy, as in the iteration's row of metrics.
    """


@show.register
def _(logger: TensorBoardLogger, shown: Shown, step: int) -> None:
    for turn, values in shown.advantages.items():
        logger.experiment.add_histogram(f"advantages/turn_{turn}", values, step)
    if shown.transcripts:
        text = "\n\n".join(map(fenced, shown.transcripts))
        logger.experiment.add_text("transcripts", text, step)


@show.register
def _(logger: WandbLogger, shown: Shown, step: int) -> None:
    import wandb

    media: dict[str, Any] = {
        f"advantages/turn_{turn}": wandb.Histogram(values.tolist())
        for turn, values in shown.advantages.items()
    }
    if shown.transcripts:
        text = "".join(f"<pre>{html.escape(t)}</pre><hr>" for t in shown.transcripts)
        # without wandb's own styles, so that the file opens without a network
        media["transcripts"] = wandb.Html(text, inject=False)
    logger.log_metrics(media, step)


@show.register
def _(logger: MLFlowLogger, shown: Shown, step: int) -> None:
    if shown.transcripts:
        text = ("\n" + "=" * 80 + "\n").join(shown.transcripts)
        file = f"transcripts/iteration_{shown.iteration:04d}.txt"
        logger.experiment.log_text(logger.run_id, text, file)


def fenced(text: str) -> str:
    """A text as a Markdown code block whose fence is longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
