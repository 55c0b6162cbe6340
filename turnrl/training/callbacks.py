"""Callbacks that belong to every run: the first and the last validation, and plugins' callbacks."""

import logging
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage

from turnrl.plugin.errors import summarize_error
from turnrl.plugin.hooks import load_plugins
from turnrl.watch.checkpoints import LastCheckpoint
from turnrl.watch.metrics import PolicyRows, write_whole_rows
from turnrl.watch.trainer import is_trial

_logger = logging.getLogger(__name__)


def callbacks_of_a_run(trainer: Any) -> list[L.Callback]:
    """The callbacks that belong to every run of `MTGRPO`: the core's, and those that plugins bring
    (`turnrl_callbacks`). If the trainer already has a callback of a class, it is used instead of a
    new one.

    The order is a promise to plugins. When training starts, their callbacks run before the
    untrained policy is scored. When an iteration or training has ended, they run after its row is
    written.

    Raises:
        PluginError: If a plugin brings something else.
    """
    write_whole_rows(trainer)
    made: list[L.Callback | None] = [LastValidation(), PolicyRows()]
    for plugin in load_plugins():
        for make in plugin.load_components("turnrl_callbacks"):
            try:
                callback = make() if isinstance(make, type) else make(trainer)
            except Exception as error:
                raise plugin.error(f"cannot make a callback by {make!r}", error) from error
            if not isinstance(callback, L.Callback | None):
                raise plugin.error(f"made {callback!r}, which is not a Lightning callback")
            made.append(callback)
    made += [FirstValidation(), EndsSampling()]
    existing = {type(callback): callback for callback in trainer.callbacks}
    ordered = [existing.get(type(callback), callback) for callback in made if callback is not None]
    others = [callback for callback in trainer.callbacks if callback not in ordered]
    # Lightning asks the first callback that keeps checkpoints for the best one
    trainer.callbacks = sorted(others, key=lambda callback: isinstance(callback, LastCheckpoint))
    return ordered


class EndsSampling(L.Callback):
    """Close the collector if a run fails or is interrupted, because Lightning then tears down
    nothing. This ends sampling ahead, and frees the tools and what the engine holds here and at its
    servers."""

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        try:
            pl_module.collector.close()
        except Exception as error:  # only a warning: the user has to read what ended the run
            _logger.warning(f"closing tools and engine failed as well: {summarize_error(error)}")


class FirstValidation(L.Callback):
    """Score the untrained policy, whatever the interval of validations.

    Lightning's sanity check runs a few batches and logs nothing. This is the whole validation,
    logged at step 0. A resumed run skips it.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            _validate(trainer, pl_module)


class LastValidation(L.Callback):
    """Score the trained policy, whatever the interval of validations.

    The last iteration is validated where Lightning would validate it, before its checkpoint, so
    that `best.ckpt` can be from this iteration. A run that ends elsewhere (inside an iteration, or
    by early stopping on a figure of training) is validated at its end.
    """

    def __init__(self) -> None:
        self._validated = -1
        self._interval: int | None = None
        self._trained = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._interval = trainer.check_val_every_n_epoch

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
        progress = trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.completed:
            # after resuming from a checkpoint of an iteration's last step, Lightning does not count
            # the next iteration
            progress.increment_ready()
            progress.increment_started()

    def on_train_batch_end(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
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
