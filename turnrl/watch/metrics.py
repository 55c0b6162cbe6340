"""Metrics of a run: one row per policy, to every logger and to `metrics.csv`.

    iteration   iterations behind the policy: 0 untrained, k after `iteration k` of the console
    epoch       Lightning's count of the same: 0 untrained, k - 1 after iteration k
    step        optimiser steps behind the policy
    train/... rollout/... reward/...    collecting and learning in iteration k; the policy of the
                                        row above sampled its trajectories
    val/...     the policy after iteration k, greedy; empty where it was not validated

A validation inside an iteration has its own row, with the number of that iteration.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from turnrl.rewards.scoring import Tally
from turnrl.runs.files import read_table, write_table
from turnrl.watch.trainer import file_of_logger, run_folder, writing

SHOWN = {
    "train": ("reward/total", "train/exact_match", "train/tool_execution"),
    "val": ("val/reward/total", "val/exact_match", "val/tool_execution"),
}
"""The metrics of each split that the console and a progress bar show, in their order."""
_ROW = "metrics_row"
"""Key in a checkpoint of the row of metrics that is written after the checkpoint."""
_ON_BAR = {name for names in SHOWN.values() for name in names}


class MetricLog:
    """The log of a module, already reduced over processes, so that it is the same in each.

    A progress bar reads metrics in only one process, which must not wait for the others. So
    Lightning reduces nothing here (`sync_dist` with `rank_zero_only`), and loggers get their rows
    from `PolicyRows`.

    Args:
        module: The module, which has a trainer by the time it logs.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        # the names of training's figures, and of a validation's
        self._names: dict[bool, set[str]] = {False: set(), True: set()}

    def log(self, figures: Mapping[str, Tally], weigh: bool = False) -> None:
        """Log the means of a batch over all processes, whose figures may have different names.
        Every process has to call this.

        Args:
            figures: This process's figures, by name. Figures with a count of 0 are not logged.
            weigh: Weigh the batches of an epoch by their counts, for the mean of the epoch.
        """
        if (size := self._module.trainer.world_size) > 1:
            every: list[list[str]] = [[]] * size
            torch.distributed.all_gather_object(every, [*figures])
            names = sorted({name for process_names in every for name in process_names})
            figures = {name: figures.get(name, Tally(0, 0)) for name in names}
        for name, figure in self._over_processes(figures).items():
            if figure.count:
                size = int(figure.count) if weigh else 1
                self._log(name, figure.total / figure.count, batch_size=size)

    def log_sum(self, name: str, value: float) -> None:
        """Log the sum of a number over all batches and processes."""
        total = self._over_processes({name: Tally(value, 0)})[name].total
        self._log(name, total, reduce_fx="sum")

    def _over_processes(self, figures: Mapping[str, Tally]) -> dict[str, Tally]:
        # float32, even for the integer sums of a process without trajectories
        module = self._module
        pairs = [(figure.total, figure.count) for figure in figures.values()]
        local = torch.tensor(pairs, dtype=torch.float32, device=module.device)
        totals = module.trainer.strategy.reduce(local, reduce_op="sum").tolist()
        return {name: Tally(*pair) for name, pair in zip(figures, totals, strict=True)}

    def _log(self, name: str, value: float, batch_size: int = 1, reduce_fx: str = "mean") -> None:
        module = self._module
        if not module.trainer.sanity_checking:
            self._names[module.trainer.validating].add(name)
        module.log(
            name,
            value,
            prog_bar=name in _ON_BAR,
            logger=False,
            on_step=False,
            on_epoch=True,
            reduce_fx=reduce_fx,
            sync_dist=True,
            batch_size=batch_size,
            rank_zero_only=True,
        )

    def unread_metrics(self, validating: bool) -> dict[str, float]:
        """The figures of a validation, or of training, that were logged since `take_metrics`.
        Lightning's `callback_metrics` also has older ones."""
        logged, names = self._module.trainer.callback_metrics, self._names[validating]
        return {name: float(logged[name]) for name in sorted(names) if name in logged}

    def take_metrics(self, validating: bool) -> dict[str, float]:
        """The figures of `unread_metrics`, which then no longer count as new."""
        taken = self.unread_metrics(validating)
        self._names[validating].clear()
        return taken


class PolicyRows(L.Callback):
    """Write a row of metrics for each policy, once its iteration is kept.

    Lightning logs training and validation one after the other, so a row of CSVLogger has only one
    of them. `MTGRPO` therefore logs only for callbacks, and this callback collects its figures.
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

    def on_train_batch_start(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
        self._write(trainer)  # the row of a validation inside an iteration

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_ROW] = dict(self._row)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the last row of the checkpoint's run, if it was killed before it could do so."""
        row = checkpoint.get(_ROW)
        if not row or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        file = Path(str(trainer.ckpt_path)).absolute().parent.parent / "metrics.csv"
        rows = read_table(file)
        # if the checkpoint was copied beside another run's table, that table has later rows
        if rows and all(float(old.get("step") or 0) < row["step"] for old in rows):
            write_table(file, [*rows, row])

    def _take(self, trainer: L.Trainer, pl_module: Any) -> None:
        figures = pl_module.metrics.take_metrics(trainer.validating)
        if figures:
            iteration, step = pl_module.position
            place = {"iteration": iteration, "epoch": max(iteration - 1, 0), "step": step}
            self._row |= place | figures

    def _write(self, trainer: L.Trainer) -> None:
        """Write the finished row, if there is one."""
        row, self._row = self._row, {}
        if not row or not trainer.is_global_zero:
            return
        step = int(row.pop("step"))
        for logger in trainer.loggers:
            with writing(trainer, file_of_logger(logger)):
                logger.log_metrics(row, step)
                logger.save()
        if self._file is not None:
            # the file may have rows of a run that was resumed in its folder
            with writing(trainer, self._file):
                write_table(self._file, [*read_table(self._file), {**row, "step": step}])


class _WholeRows(ExperimentWriter):
    """Writes rows of policies alone. What other callbacks log between them, for example the
    learning rate, goes into the next one. Rows of a run that is resumed in its folder stay, up to
    the step from which it goes on; CSVLogger would delete them all.

    Args:
        log_dir: The run's folder, which is made with the first row.
    """

    def __init__(self, log_dir: str) -> None:
        self.metrics, self.hparams = [], {}
        self.log_dir, self._file = log_dir, Path(log_dir, self.NAME_METRICS_FILE)
        self.metrics_file_path = str(self._file)
        self._fs = get_filesystem(log_dir)
        self.metrics_keys: list[str] = []
        self._resumes = True

    def log_hparams(self, params: dict[str, Any]) -> None:
        self._fs.makedirs(self.log_dir, exist_ok=True)
        super().log_hparams(params)

    def save(self) -> None:
        whole: list[dict[str, Any]] = [row for row in self.metrics if "iteration" in row]
        if not whole:
            return
        between = [row for row in self.metrics if "iteration" not in row]
        logged = {key: value for row in between for key, value in row.items()}
        whole[0] = logged | whole[0]
        if self._resumes:
            self._resumes = False
            before: list[dict[str, Any]] = [*read_table(self._file)]
            first = whole[0]["step"]
            whole = [row for row in before if float(row.get("step") or 0) < first] + whole
            self._file.unlink(missing_ok=True)
        self._fs.makedirs(self.log_dir, exist_ok=True)
        self.metrics = whole
        try:
            super().save()
        finally:  # closing the logger after an error writes nothing again
            self.metrics = []


def write_whole_rows(trainer: L.Trainer) -> None:
    """Have the loggers that write a `metrics.csv` write rows of policies alone. Called before they
    write anything."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            logger._experiment = _WholeRows(logger.log_dir)
