"""Folders of runs, with the files that each run leaves.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Nothing here imports torch, so that a command can name the folder before it loads anything.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from turnrl.errors import WorldError, in_short

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger

_TORN = ".new"
_FULL = (errno.ENOSPC, errno.EDQUOT)

TRANSCRIPT = "demonstrations.txt"
"""File beside a warmed-up policy, with some of the demonstrations that it learned from."""


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


def data_of(trainer: L.Trainer) -> L.LightningDataModule | None:
    """The data module of a trainer."""
    return getattr(trainer, "datamodule", None)  # Lightning sets it when one is attached


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Write a file so that it is there whole or not at all, even if the disk fills up, the process
    is killed or the machine stops: `with whole_file(path) as new: new.write_text(text)`.

    Args:
        file: The file's path. Its parent folders are made.
    Yields:
        The path to write to, `FILE.new` beside the file. It replaces the file in one move when the
        block ends. After an error it is removed, and the file is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}{_TORN}")
    if written.is_symlink() and (written.is_file() or not written.exists()):
        written.unlink()  # of a stranger: it would write over another file
    try:
        with written.open("ab") as held:
            _locked(held)
            yield written
            os.fsync(held.fileno())  # the move must not reach the disk before the contents
            if fcntl is None:
                held.close()  # Windows moves no open file
            written.replace(file)
        _sync_folder(file.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def remove_torn(folder: Path) -> None:
    """Remove what `whole_file` left in a folder when its process was killed. What another process
    is writing stays."""
    for file in folder.glob(f"*{_TORN}"):
        with contextlib.suppress(OSError), file.open("ab") as held:
            if _locked(held):
                file.unlink()


def _locked(held: BinaryIO) -> bool:
    """Lock a file until it is closed. False if another process has it, or if files have no locks
    here."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems open no folders, and some disks sync none
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


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
        why = os.strerror(number) if number else in_short(error)
        raise WorldError(
            f"cannot write {str(file)!r}{_moment(trainer)}: {why}. {advice}"
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
            f"the run's folder {str(folder)!r} is gone{_moment(trainer)}: it was moved or removed. "
            "If you moved it, resume from its last checkpoint. Otherwise start again."
        )


def _moment(trainer: L.Trainer) -> str:
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


def read_table(file: Path) -> list[dict[str, str]]:
    """The complete rows of a CSV file, without empty cells; no rows if there is no such file. While
    the file is being written, its last row may be torn."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as read:
        rows = [row for row in csv.DictReader(read) if None not in row.values()]
    return [{k: v for k, v in row.items() if k and v} for row in rows]


def write_table(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as a CSV file that is there whole or not at all."""
    with whole_file(file) as new, new.open("w", newline="", encoding="utf-8") as written:
        table = csv.DictWriter(written, sorted({name for row in rows for name in row}))
        table.writeheader()
        table.writerows(rows)
