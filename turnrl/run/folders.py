"""Folders of runs, with the files that each run leaves.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Nothing here imports torch, so that a command can name the folder before it loads anything.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger

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
    """Write a file so that it is there whole or not at all, even if the disk fills up or the
    process is killed: `with whole_file(path) as new: new.write_text(text)`.

    Args:
        file: The file's path. Its parent folders are made.
    Yields:
        The path to write to, `FILE.new` beside the file. It replaces the file in one move when the
        block ends. After an error it is removed, and the file is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.new")
    try:
        yield written
        written.replace(file)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


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
