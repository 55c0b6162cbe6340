"""The callback that raises alarms while a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning as L

from turnrl.errors import TrainingError
from turnrl.run.alarms.rules import FIGURES, Alarm, alarms
from turnrl.run.announce import announce
from turnrl.scoring import Tally

_logger = logging.getLogger(__name__)


class Alarms(L.Callback):
    """Say each alarm of a run once, in a line of its own, and count them in `train/alarms`.

    Args:
        stop: Stop the run at the first alarm: with an error, once its iteration is kept.
    """

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop
        self.rows: list[dict[str, float]] = []
        """The figures of each iteration so far that the rules read, also of the run that this one
        goes on from."""
        self._due: list[Alarm] = []

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.rows, self._due = [], []
            others = [one for one in trainer.callbacks if one is not self]
            others = [one for one in others if not isinstance(one, _Column)]
            # it counts before a row of metrics is taken, and speaks after the line of an iteration
            trainer.callbacks = [_Column(self), *others, self]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["alarms"] = self.rows

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self.rows = list(checkpoint.get("alarms", []))

    def look(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take the figures of the iteration that is over, and log the alarms so far. Every process
        has to call it."""
        iteration = pl_module.iteration_and_version[0]
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        taken = {name: figures[name] for name in FIGURES if name in figures}
        if not taken or (self.rows and self.rows[-1]["iteration"] >= iteration):
            return  # a run that goes on first ends the iteration that was over
        self.rows.append({"iteration": float(iteration), **taken})
        raised = alarms(self.rows)
        # those noticed before were said, here or in the run that this one goes on from
        self._due = [one for one in raised if one.noticed == iteration]
        pl_module.metrics.log({"train/alarms": Tally(len(raised), 1)})

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        due = self._say(trainer)  # the first moment after the checkpoint
        if due and self.stop:
            raise TrainingError(
                f"stopped by an alarm: {due[0].text}. Look at the run with 'turnrl report', change "
                "the recipe, and begin anew or go on from a checkpoint of before. Without "
                "'stop: true' of turnrl.Alarms a run goes on."
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._say(trainer)

    def _say(self, trainer: L.Trainer) -> list[Alarm]:
        due, self._due = self._due, []
        for one in due:
            announce(trainer, f"alarm: {one.text}")
            if trainer.progress_bar_callback is None and trainer.is_global_zero:
                _logger.warning(f"alarm: {one.text}")
        return due


class _Column(L.Callback):
    """Has the alarms of an iteration counted before its row of metrics is taken.

    Args:
        owner: What counts.
    """

    def __init__(self, owner: Alarms) -> None:
        self._owner = owner

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._owner.look(trainer, pl_module)
