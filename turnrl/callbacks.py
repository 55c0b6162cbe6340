"""Callbacks that belong to every run: validation before and after it, checkpoints, and those of
plugins."""

import sys
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage

from turnrl.plugins import load_plugins
from turnrl.run.folders import is_trial, run_folder, whole_file
from turnrl.run.metrics import PolicyRows


def callbacks_of_a_run(trainer: Any) -> list[L.Callback]:
    """The callbacks that belong to every run of `MTGRPO`: the core's, and those that plugins bring
    (`turnrl_callbacks`). One that the trainer has already takes the place of a new one.

    The order is a promise to plugins: when training starts they come before the untrained policy is
    scored, and when an iteration or training has ended they come after its row is written.

    Raises:
        PluginError: If a plugin brings something else.
    """
    made: list[L.Callback | None] = [LastValidation(), PolicyRows()]
    for plugin in load_plugins():
        for make in plugin.brings("turnrl_callbacks"):
            try:
                one = make() if isinstance(make, type) else make(trainer)
            except Exception as error:
                raise plugin.fault(f"cannot make a callback by {make!r}", error) from error
            if not isinstance(one, L.Callback | None):
                raise plugin.fault(f"made {one!r}, which is no callback of Lightning's")
            made.append(one)
    made.append(FirstValidation())
    there = {type(one): one for one in trainer.callbacks}
    ordered = [there.get(type(one), one) for one in made if one is not None]
    trainer.callbacks = [one for one in trainer.callbacks if one not in ordered]
    return ordered


class FirstValidation(L.Callback):
    """Score the untrained policy, whatever the interval of validations.

    Lightning's sanity check runs a few batches and logs nothing; this is the whole validation,
    logged at step 0. A resumed run is past that.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            _validate(trainer, pl_module)


class LastValidation(L.Callback):
    """Score the trained policy, whatever the interval of validations.

    The last iteration is validated where Lightning would do it, before its checkpoint, so
    `best.ckpt` can be of it. A run that ends elsewhere (inside an iteration, or by early stopping
    on a figure of training) is validated at its end.
    """

    def __init__(self) -> None:
        self._validated = -1
        self._interval: int | None = None
        self._trained = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._interval = trainer.check_val_every_n_epoch

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._trained = True
        done, steps = trainer.current_epoch + 1, trainer.global_step
        last = done >= (trainer.max_epochs or -1) > 0 or steps >= trainer.max_steps > 0
        if last and self._interval is not None:
            trainer.check_val_every_n_epoch = 1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.check_val_every_n_epoch = self._interval
        if self._trained and self._validated != trainer.global_step:
            _validate(trainer, pl_module)


def _validate(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    if not trainer.enable_validation or is_trial(trainer):
        return
    stage = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.state.stage = stage
    pl_module.train()


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints as Lightning does, but each is there whole or not at all: one that the
    disk has no room for leaves the one before it as it was."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with whole_file(Path(path)) as written:
            super().save_checkpoint(checkpoint, written, storage_options)


def _write_whole_files(trainer: L.Trainer) -> None:
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not one of a user's own
        trainer.strategy.checkpoint_io = WholeFiles()


class LastCheckpoint(Checkpoint):
    """Keep `checkpoints/last.ckpt`, written before the first iteration and after each one.

    It always lies at an iteration's boundary, so a resumed run goes on exactly as if it had not
    stopped; a run that ends inside an iteration (`max_steps`, `max_time`) keeps the one from before
    it. A new file replaces the old one when it is complete, so there is always a good one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._kept = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        _write_whole_files(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._save(trainer, "The untrained policy")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_last_batch:
            self._save(trainer, f"Iteration {trainer.current_epoch + 1}")

    def _save(self, trainer: L.Trainer, what: str) -> None:
        if is_trial(trainer):
            return
        folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"
        trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
        self._path, self._kept = folder / "last.ckpt", what

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Say how to go on. Weights of mid-iteration would not resume exactly: none are saved."""
        if trainer.is_global_zero and self._path is not None and self._path.is_file():
            print(
                f"\n{self._kept} is kept. To go on from it, repeat the command with\n"
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        _write_whole_files(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a run that goes on has a folder, and so a best one, of its own."""
        return {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the figure is of these very weights, at an iteration's end
        if trainer.is_last_batch and self._validated == trainer.global_step:
            super().on_train_epoch_end(trainer, pl_module)
