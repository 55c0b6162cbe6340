"""Folders of runs: where a run leaves its files.

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
"""File beside a policy that was warmed up, with some of what it was taught."""


def is_trial(trainer: L.Trainer) -> bool:
    """True if this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def folder_of_logger(logger: Logger) -> Path | None:
    """The folder that a logger makes for one run; None if it makes none."""
    # it is not in Lightning's contract: CSVLogger and TensorBoardLogger have it, others do not
    own = getattr(logger, "log_dir", None)
    return Path(own) if own else None


def run_folder(trainer: L.Trainer) -> Path | None:
    """Where a run leaves its files, for itself alone; None if it has no logger, or is a trial.

    A collective call: every process has to make it, at the same moment.
    """
    logger = trainer.logger
    if logger is None or is_trial(trainer):
        return None
    folder = folder_of_logger(logger) or Path(
        logger.save_dir or "runs", logger.name or "run", str(logger.version or 0)
    )
    return Path(trainer.strategy.broadcast(str(folder)))


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Write a file so that it is there whole or not at all, even if the disk fills up or the
    process is killed: `with whole_file(path) as new: new.write_text(text)`.

    Args:
        file: Its path. Folders above it are made.
    Yields:
        Where to write: beside it, named `FILE.new`. It takes the file's place in one move when the
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
    """The whole rows of a CSV file without empty cells; no row if the file is not there. The last
    row is torn while the file is being written."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as read:
        rows = [row for row in csv.DictReader(read) if None not in row.values()]
    return [{k: v for k, v in row.items() if k and v} for row in rows]


def write_table(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as a CSV file, which is there whole or not at all."""
    with whole_file(file) as new, new.open("w", newline="", encoding="utf-8") as written:
        table = csv.DictWriter(written, sorted({name for row in rows for name in row}))
        table.writeheader()
        table.writerows(rows)
