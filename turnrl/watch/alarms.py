"""The callback that raises alarms while a run trains, and warns if it learns nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback

from turnrl.plugin.text import paint
from turnrl.rewards.scoring import Tally
from turnrl.runs.alarms import FIGURES, Alarm, find_alarms
from turnrl.watch.health import find_learning_warning
from turnrl.watch.trainer import announce

_logger = logging.getLogger(__name__)

_IN_A_ROW = 3
"""Iterations in a row that have to teach nothing before the warning, in a run that has learned."""


class Alarms(L.Callback):
    """Print each alarm of a run once, on its own line, and count alarms in `train/alarms`.
    Warn once if iterations teach nothing or no trajectory answers: after the first iteration, or
    later after several in a row.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        """The figures that the rules read, for each iteration so far, including those of the run
        that this one resumes."""
        self._due: list[Alarm] = []
        self._taught_nothing = 0  # iterations in a row
        self._warned = False
        # counts before the row of metrics is taken; `self` prints after the iteration's line
        self._counts = LambdaCallback(on_train_epoch_end=self._look)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.rows, self._due = [], []
            self._taught_nothing, self._warned = 0, False
            callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            between = [c for c in callbacks if c not in (self, self._counts)]
            trainer.callbacks = [self._counts, *between, self]  # type: ignore[attr-defined]

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        checkpoint["alarms"] = self.rows

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Mapping[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self.rows = list(checkpoint.get("alarms", []))

    def _look(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take the figures of the iteration that has ended, and log the number of alarms so far.
        Every process has to call this."""
        iteration = pl_module.position.iteration
        figures = pl_module.metrics.unread_metrics(validating=False)
        taken = {name: figures[name] for name in FIGURES if name in figures}
        if not taken or (self.rows and self.rows[-1]["iteration"] >= iteration):
            return  # a resumed run first ends the iteration that was complete
        self.rows.append({"iteration": float(iteration), **taken})
        raised = find_alarms(self.rows)
        # earlier ones were printed, here or by the run that this one resumes
        self._due = [alarm for alarm in raised if alarm.noticed == iteration]
        pl_module.metrics.log({"train/alarms": Tally(len(raised), 1)})
        experience = pl_module.experience  # of this process; None in a run that resumes
        trajectories = experience.trajectories if experience is not None else ()
        warning = find_learning_warning(iteration, figures, pl_module.rollout, trajectories)
        self._taught_nothing = self._taught_nothing + 1 if warning else 0
        if warning and not self._warned and (iteration == 1 or self._taught_nothing >= _IN_A_ROW):
            self._warned = True
            if trainer.is_global_zero:
                _logger.warning(warning)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(trainer)  # the first moment after the checkpoint

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(trainer)

    def _print(self, trainer: L.Trainer) -> None:
        due, self._due = self._due, []
        silent = trainer.progress_bar_callback is None and trainer.is_global_zero
        for alarm in due:
            announce(trainer, paint(f"alarm: {alarm.text}", "alarm"))
            if silent:
                _logger.warning(f"alarm: {alarm.text}")
