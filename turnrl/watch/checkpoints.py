"""Checkpoints that a run keeps: the last, and the one whose validation was best.

Both are saved at the end of an iteration and are there whole or not at all, so a run can resume
from them.
"""

import io
import sys
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.text import say
from turnrl.runs.files import remove_torn, whole_file
from turnrl.watch.trainer import check_folder, is_trial, run_folder, writing

__all__ = ["BestCheckpoint", "LastCheckpoint", "WholeFiles"]

_BEST = "best_checkpoint"
"""The key of a checkpoint with the state of `BestCheckpoint`."""


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints as Lightning does, but each is there whole or not at all: if the disk is
    full, the checkpoint before it stays as it was.

    Args:
        trainer: The run's trainer.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: _PATH, storage_options: object = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()  # torch, writing a file itself, hides why it cannot
        torch.save(checkpoint, buffer)
        with writing(self._trainer, path), whole_file(Path(path)) as written:
            written.write_bytes(buffer.getbuffer())


def _write_whole_files(trainer: L.Trainer) -> None:
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not a user's own
        trainer.strategy.checkpoint_io = WholeFiles(trainer)


class LastCheckpoint(Checkpoint):
    """Keep `checkpoints/last.ckpt`, written before the first iteration and after each one.

    It is always saved between iterations, so a resumed run continues exactly as if it had not
    stopped, unless it samples ahead (`max_staleness`). A run that ends inside an iteration
    (`max_steps`, `max_time`) keeps the checkpoint from before that iteration. A new file replaces
    the old one when it is complete, so there is always a good one.
    """

    best_model_path = ""
    """None: `BestCheckpoint` has it. Lightning asks every callback that keeps checkpoints."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._kept = ""
        self._begins = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        _write_whole_files(trainer)
        self._begins = stage == "fit" and not is_trial(trainer)
        if trainer.is_global_zero and trainer.ckpt_path is not None:
            remove_torn(Path(str(trainer.ckpt_path)).absolute().parent)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Without a folder of the run, refuse to replace the checkpoint of another one."""
        file = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if run_folder(trainer) is not None or not self._begins or not file.is_file():
            return
        goes_on = (
            trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == file.resolve()
        )
        if trainer.is_global_zero and self._path != file and not goes_on:
            raise RecipeError(
                f"{file} is the checkpoint of another run, and without a logger this run would "
                "write over it. Move it, leave trainer.logger out, or set trainer.default_root_dir."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._save(trainer, "The policy before training")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_last_batch:
            self._save(trainer, f"Iteration {trainer.current_epoch + 1}")

    def _save(self, trainer: L.Trainer, policy: str) -> None:
        if is_trial(trainer):
            return
        folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"
        if self._path is not None:
            check_folder(trainer, self._path.parent)
        trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
        self._path, self._kept = folder / "last.ckpt", policy

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Print how to resume. Weights from inside an iteration would not resume exactly, so none
        are saved."""
        if trainer.is_global_zero and self._path is not None and self._path.is_file():
            print(
                f"\n{self._kept} is kept. To resume from it, repeat the command with\n"
                f"  --ckpt_path {self._path}",
                file=sys.stderr,
            )
        elif trainer.is_global_zero and isinstance(exception, KeyboardInterrupt) and self._begins:
            say("\nNo iteration is finished. Repeat the command to start again.", sys.stderr)


class BestCheckpoint(ModelCheckpoint):
    """Keep `checkpoints/best.ckpt`, from after the iteration with the best value of a validation
    figure. Like `last.ckpt`, it is saved between iterations, and a run can resume from it.

    Args:
        monitor: The figure; None takes `val/exact_match`, or `val/reward/total` if the questions
            have no accepted answers.
        mode: `max` if the greatest value is best, `min` if the least is best.
    """

    def __init__(self, monitor: str | None = None, mode: Literal["max", "min"] = "max") -> None:
        self.chooses = monitor is None
        monitor = monitor or "val/exact_match"
        options = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        super().__init__(monitor=monitor, mode=mode, filename="best", **options)  # type: ignore[arg-type]
        self._validated = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        _write_whole_files(trainer)

    def state_dict(self) -> dict[str, object]:
        """Nothing: Lightning warns if a checkpoint has the state of a callback that a trainer
        lacks, and trainers that only evaluate lack this one."""
        return {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_BEST] = super().state_dict()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with the best checkpoint of a run that is resumed in its own folder. In any other
        folder, the resumed run has a best checkpoint of its own."""
        state = checkpoint.get(_BEST, {})
        if Path(state.get("dirpath") or "").resolve() == Path(self.dirpath or "").resolve():
            self.load_state_dict(state)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # only if the figure belongs to these weights, at the end of an iteration
        if trainer.is_last_batch and self._validated == trainer.global_step:
            if self.chooses and self.monitor not in trainer.callback_metrics:
                self.monitor = "val/reward/total"
            super().on_train_epoch_end(trainer, pl_module)
