"""Metrics of a run: one row per policy, to every logger and to `metrics.csv`.

    iteration   iterations behind the policy: 0 untrained, k after `iteration k` of the console
    epoch       the same as Lightning counts: 0 untrained, k - 1 after iteration k
    step        optimiser steps behind the policy
    train/... rollout/... reward/...    what iteration k collected and learned. Its trajectories are
                                        sampled by the policy of the row above
    val/...     the policy that iteration k left behind, greedy; empty where it was not validated

A validation inside an iteration has a row of its own, with the number of that iteration.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from turnrl.run.folders import run_folder, whole_file
from turnrl.scoring import Tally

_SHOWN = ("train/exact_match", "train/tool_execution", "reward/total", "val/exact_match")
"""Metrics that a progress bar shows."""


class MetricLog:
    """The log of a module, reduced over processes first, so that it is the same in each.

    A progress bar reads metrics in one process alone, which must not wait for the others. So
    Lightning reduces nothing here (`sync_dist` with `rank_zero_only`), and loggers get their rows
    from `PolicyRows`.

    Args:
        module: The module, which has a trainer by the time that it logs.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._names: dict[bool, set[str]] = {False: set(), True: set()}  # by whether it validated

    def log(self, figures: Mapping[str, Tally], weigh: bool = False) -> None:
        """Log the means of a batch over all processes. Each process has to call it.

        Args:
            figures: This process's figures, by name. One that no process counts is left out.
            weigh: Weigh the batches of an epoch by their counts, for the mean of the epoch.
        """
        for name, figure in self._over_processes(figures).items():
            if figure.count:
                size = int(figure.count) if weigh else 1
                self._log(name, figure.total / figure.count, batch_size=size)

    def log_sum(self, name: str, value: float) -> None:
        """Log a number whose sum over all batches and processes is meant."""
        total = self._over_processes({name: Tally(value, 0)})[name].total
        self._log(name, total, reduce_fx="sum")

    def _over_processes(self, figures: Mapping[str, Tally]) -> dict[str, Tally]:
        # a process without any has sums of integers, and the others would not understand it
        module = self._module
        pairs = [(figure.total, figure.count) for figure in figures.values()]
        mine = torch.tensor(pairs, dtype=torch.float32, device=module.device)
        every = module.trainer.strategy.reduce(mine, reduce_op="sum").tolist()
        return {name: Tally(*pair) for name, pair in zip(figures, every, strict=True)}

    def _log(self, name: str, value: float, **more: Any) -> None:
        module, options = self._module, {"on_step": False, "on_epoch": True, "sync_dist": True}
        if not module.trainer.sanity_checking:
            self._names[module.trainer.validating].add(name)
        shown = {"logger": False, "prog_bar": name in _SHOWN, "rank_zero_only": True}
        module.log(name, value, **{"batch_size": 1, **options, **shown, **more})

    def take(self, validating: bool) -> dict[str, float]:
        """The figures of a validation, or of training, that were not taken before."""
        logged, names = self._module.trainer.callback_metrics, self._names[validating]
        taken = {name: float(logged[name]) for name in sorted(names) if name in logged}
        names.clear()
        return taken


class PolicyRows(L.Callback):
    """Write a row of metrics for each policy, once its iteration is kept.

    Lightning gives loggers training and validation one after the other, so a row of CSVLogger has
    one of them. `MTGRPO` therefore logs for callbacks alone, and this takes its figures.
    """

    def __init__(self) -> None:
        self._row: dict[str, float] = {}
        self._file: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)  # a collective call
        written = any(isinstance(made, CSVLogger) for made in trainer.loggers)
        self._file = None if folder is None or written else folder / "metrics.csv"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._take(trainer, pl_module)
        if trainer.state.fn != "fit":
            self._write(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._take(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)  # the first moment after the checkpoint

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._write(trainer)  # of a validation inside an iteration

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def _take(self, trainer: L.Trainer, pl_module: Any) -> None:
        figures = pl_module.metrics.take(trainer.validating)
        if figures:
            iteration, step = pl_module.iteration_and_version
            place = {"iteration": iteration, "epoch": max(iteration - 1, 0), "step": step}
            self._row |= place | figures

    def _write(self, trainer: L.Trainer) -> None:
        """Write the row that is finished, if there is one."""
        row, self._row = self._row, {}
        if not row or not trainer.is_global_zero:
            return
        step = int(row.pop("step"))
        for logger in trainer.loggers:
            logger.log_metrics(row, step)
            logger.save()
        if self._file is not None:
            _append({**row, "step": step}, self._file)


def _append(row: dict[str, Any], file: Path) -> None:
    """Add a row to a file, which may be of a run that goes on in its folder."""
    rows = [row]
    if file.is_file():
        with file.open(newline="") as read:
            rows = [*csv.DictReader(read), row]
    with whole_file(file) as path, path.open("w", newline="") as written:
        writer = csv.DictWriter(written, sorted({name for one in rows for name in one}))
        writer.writeheader()
        writer.writerows(rows)
