"""Folders of runs: where a run leaves its files.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Nothing here imports torch, so that a command can name the folder before it loads anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L


def is_trial(trainer: L.Trainer) -> bool:
    """True if this is a `fast_dev_run`, which leaves nothing behind."""
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


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Write a file so that it is there whole or not at all, also if the disk fills or the process
    is ended: `with whole_file(path) as new: new.write_text(text)`.

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
