"""Callbacks that belong to every run: how it began, how it goes, and what it leaves."""

import sys
import time
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.trainer.states import RunningStage
from tqdm.auto import tqdm


def is_trial(trainer: L.Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(getattr(trainer, "fast_dev_run", False))


def run_folder(trainer: L.Trainer) -> Path | None:
    """Where a run leaves its files, for itself alone; None if it has no logger, or is a trial.

    A collective call: every process has to make it, at the same moment.
    """
    logger = trainer.logger
    if logger is None or is_trial(trainer):
        return None
    own = getattr(logger, "log_dir", None)  # CSVLogger and TensorBoardLogger keep runs apart
    folder = own or Path(logger.save_dir or "runs", logger.name or "run", str(logger.version or 0))
    return Path(trainer.strategy.broadcast(str(folder)))


class InitialValidation(L.Callback):
    """Score the untrained policy, so that a run's metrics begin with what it began with.

    Lightning's sanity check runs a few batches and logs nothing; this is the whole validation,
    logged at step 0. A resumed run is past that.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if trainer.global_step > 0 or not trainer.enable_validation or is_trial(trainer):
            return
        stage = trainer.state.stage
        trainer.state.stage = RunningStage.VALIDATING
        loop.run()
        trainer.state.stage = stage
        pl_module.train()


class IterationLines(ProgressBar):
    """A line of figures per iteration and per validation, within 80 columns; and on a terminal,
    while an iteration is being learned from for more than a few seconds, a bar of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.perf_counter()
        self._validated = False
        self._steps: tqdm[NoReturn] | None = None

    def disable(self) -> None:
        """Nothing: Lightning calls this on every process but the first, which alone prints."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._steps is None:
            hidden = None if trainer.is_global_zero else True  # None: shown on a terminal only
            total = int(trainer.num_training_batches)
            self._steps = tqdm(total=total, desc="learning", delay=3, leave=False, disable=hidden)
        self._steps.update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._validated = trainer.global_step > 0
        if not self._validated:
            self._print(trainer, "untrained", "val/", "val/")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        elif trainer.is_last_batch:  # a run that goes on first ends the iteration that was over
            return
        total = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        what = "iteration" if trainer.is_last_batch else "stopped inside iteration"
        self._print(trainer, f"{what} {trainer.current_epoch + 1:>3}{total}", "train/", "")
        if self._validated:
            self._print(trainer, "validation", "val/", "val/")
        self._validated = False

    def _print(self, trainer: L.Trainer, title: str, curves: str, rewards: str) -> None:
        names = {
            "reward": f"{rewards}reward/total",
            "exact_match": f"{curves}exact_match",
            "tool_execution": f"{curves}tool_execution",
        }
        found = trainer.callback_metrics
        shown = [f"{k} {float(found[name]):.3f}" for k, name in names.items() if name in found]
        seconds = tqdm.format_interval(time.perf_counter() - self._start)
        if trainer.is_global_zero:
            print(f"{title:17}  {seconds}  {'  '.join(shown)}", flush=True)


class LastCheckpoint(Checkpoint):
    """Keep `checkpoints/last.ckpt`, written before the first iteration and after each one.

    It always lies at an iteration's boundary, so a resumed run goes on exactly as if it had not
    stopped; a run that ends inside an iteration (`max_steps`, `max_time`) keeps the one from before
    it. A new file replaces the old one when it is complete, so there is always a good one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_last_batch:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if is_trial(trainer):
            return
        folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"
        self._path, self._step = folder / "last.ckpt", trainer.global_step
        written = folder / "last.ckpt.new"
        trainer.save_checkpoint(written, weights_only=False)
        if trainer.is_global_zero:
            written.replace(self._path)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Say how to go on. Weights of mid-iteration would not resume exactly: none are saved."""
        if trainer.is_global_zero and self._path is not None and self._path.is_file():
            kept = "last finished iteration" if self._step else "untrained policy"
            print(
                f"\nThe {kept} is kept. To go on from it, repeat the command with\n"
                f"  --ckpt_path {self._path}",
                file=sys.stderr,
            )


class BestCheckpoint(ModelCheckpoint):
    """Keep `checkpoints/best.ckpt`, of the iteration after which a figure of the validation was
    best. It lies at the iteration's boundary like `last.ckpt`, and a run can go on from it.

    Args:
        monitor: The figure.
        mode: Whether the greatest or the least is best.
    """

    def __init__(
        self, monitor: str = "val/exact_match", mode: Literal["max", "min"] = "max"
    ) -> None:
        options = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        super().__init__(monitor=monitor, mode=mode, filename="best", **options)  # type: ignore[arg-type]
        self._validated = 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a run that goes on has a folder, and so a best one, of its own."""
        return {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the figure is of these very weights, at an iteration's end
        if trainer.is_last_batch and self._validated == trainer.global_step:
            super().on_train_epoch_end(trainer, pl_module)
