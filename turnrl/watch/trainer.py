"""A Lightning Trainer as a run: its folder, the files that it writes there, the lines it prints.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.plugin.errors import WorldError, summarize_error

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_trial(trainer: L.Trainer) -> bool:
    """True if this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def folder_of_logger(logger: Logger) -> Path | None:
    """The folder that a logger makes for one run; None if it makes none."""
    # not in Lightning's contract: CSVLogger and TensorBoardLogger have it, other loggers do not
    own = getattr(logger, "log_dir", None)
    return Path(own) if own else None


def run_folder(trainer: L.Trainer) -> Path | None:
    """The run's own folder for its files; None if it has no logger, or is a trial.

    This is a collective call: all processes have to make it at the same time.
    """
    logger = trainer.logger
    if logger is None or is_trial(trainer):
        return None
    folder = folder_of_logger(logger) or Path(
        logger.save_dir or "runs", logger.name or "run", str(logger.version or 0)
    )
    return Path(trainer.strategy.broadcast(str(folder)))


def get_data_module(trainer: L.Trainer) -> L.LightningDataModule | None:
    """The data module of a trainer."""
    return getattr(trainer, "datamodule", None)  # Lightning sets it when one is attached


@contextlib.contextmanager
def writing(trainer: L.Trainer, file: Path | str) -> Iterator[None]:
    """A block that writes a file of a run.

    Args:
        trainer: The run's trainer.
        file: The file, or what else is written, for the message.
    Raises:
        WorldError: If it cannot be written, or if the run's folder is gone. The message names the
            file, the iteration, the step and what to do.
    """
    folder: Path | None = getattr(trainer.lightning_module, "folder", None)
    check_folder(trainer, folder)
    try:
        yield
    except Exception as error:
        number = _fault_of_disk(error)
        if number is None:
            raise
        check_folder(trainer, folder)  # it may be why
        advice = "Make room there, and resume." if number in _FULL else "Correct that, and resume."
        why = os.strerror(number) if number else summarize_error(error)
        raise WorldError(
            f"cannot write {str(file)!r}{_describe_moment(trainer)}: {why}. {advice}"
        ) from error


def check_folder(trainer: L.Trainer, folder: Path | None) -> None:
    """Refuse to go on without the folder of a run, because nothing of it would be kept.

    Args:
        trainer: The run's trainer.
        folder: A folder that the run has made; None if there is none.
    Raises:
        WorldError: If it was moved or removed.
    """
    if folder is not None and not folder.is_dir():
        raise WorldError(
            f"the run's folder {str(folder)!r} is gone{_describe_moment(trainer)}: it was moved "
            "or removed. If you moved it, resume from its last checkpoint. Otherwise start again."
        )


def _describe_moment(trainer: L.Trainer) -> str:
    if trainer.state.fn != "fit":
        return ""
    return f" in iteration {trainer.current_epoch + 1}, after step {trainer.global_step}"


def _fault_of_disk(error: Exception) -> int | None:
    """The number of the system's error; 0 if it has none, and None for any other error."""
    if isinstance(error, BrokenPipeError):  # of the output's reader
        return None
    if isinstance(error, OSError):
        return error.errno or 0
    system = re.search(r"\(os error (\d+)\)", str(error))  # of safetensors, which has its own
    return None if system is None else int(system[1])


def file_of_logger(logger: Logger) -> Path:
    """The file or folder to which a logger writes metrics, or its name, for messages."""
    folder = folder_of_logger(logger)
    if folder is None:
        return Path(type(logger).__name__)
    writer = getattr(logger, "experiment", None)
    return folder / "metrics.csv" if hasattr(writer, "metrics_file_path") else folder


def announce(trainer: L.Trainer | None, text: str) -> None:
    """Print a line about a run's progress, once, whatever the number of processes.

    Args:
        trainer: The run's trainer. Without one, or without a bar, nothing is printed.
        text: The line.
    """
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is not None and trainer is not None and trainer.is_global_zero:
        bar.print(text)
