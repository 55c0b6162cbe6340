"""Tidying: removes the folder of a run that fails before it has anything to keep."""

import contextlib
import shutil
import time

import lightning as L

from turnrl.runs.find import RUNS
from turnrl.watch.trainer import folder_of_logger, is_trial

_OF_A_START = ("config.yaml", "hparams.yaml", "events.out.")
"""Beginnings of the names of files that exist before anything is trained or scored."""


class Tidy(L.Callback):
    """Removes the folder of a run that failed before it had anything to keep, or that had nothing
    left to train. Then it removes the folder above and `runs` itself, if they are empty. It leaves
    the folders of other loggers alone."""

    def __init__(self) -> None:
        self._begun = time.time()
        self._trains = False

    def on_train_start(self, *args: object) -> None:
        self._trains = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not self._trains:
            self._remove(trainer)

    def on_exception(self, trainer: L.Trainer, *args: object) -> None:
        self._remove(trainer)

    def _remove(self, trainer: L.Trainer) -> None:
        if trainer.logger is None or not trainer.is_global_zero or is_trial(trainer):
            return
        folder = folder_of_logger(trainer.logger)
        if folder is None or not folder.is_dir():
            return
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        of_a_start = all(path.name.startswith(_OF_A_START) for path in files)
        # one second of tolerance, because clocks of file systems are coarse
        if of_a_start and all(path.stat().st_mtime > self._begun - 1 for path in files):
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # not empty: there are other runs
                for home in folder.parents[: 2 if trainer.logger.name else 0]:
                    if home == folder.parent or home.name == RUNS.name:
                        home.rmdir()
