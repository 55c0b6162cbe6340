"""Folders of runs: where a run leaves its files.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Nothing here imports torch, so that a command can try the folder before it loads anything.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.errors import RecipeError

if TYPE_CHECKING:
    import lightning as L

_OF_A_START = ("config.yaml", "hparams.yaml", "events.out.")
"""Beginnings of the names of files that are there before anything is trained or scored."""


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


def writable_part(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists, once it has taken a file.

    Raises:
        RecipeError: If it takes none.
    """
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:  # permissions do not tell all: a file system may be read-only, or take no folders
        with tempfile.TemporaryDirectory(dir=there, prefix=".turnrl-"):
            return there
    except OSError as error:
        why = f"takes no folder ({error.strerror})" if there.is_dir() else "is a file"
        step = "Set trainer.logger.init_args.save_dir to a folder that can be written."
        raise RecipeError(f"{there} {why}. {step}") from error


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


def tidy(trainer: L.Trainer, since: float) -> None:
    """Remove the folder of a run that failed before it had anything to keep, and if they are empty
    then, the folder of its runs and `runs` itself. Other folders are the user's own, and those of
    further loggers are theirs.

    Args:
        since: When the run began, in seconds of `time.time`; a folder with older files stays.
    """
    if trainer.logger is None or not trainer.is_global_zero or is_trial(trainer):
        return
    folder = Path(getattr(trainer.logger, "log_dir", None) or "")
    if not folder.name or not folder.is_dir():
        return
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    of_a_start = all(path.name.startswith(_OF_A_START) for path in files)
    # clocks of file systems are coarse
    if of_a_start and all(path.stat().st_mtime > since - 1 for path in files):
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # there are other runs
            for home in folder.parents[: 2 if trainer.logger.name else 0]:
                if home == folder.parent or home.name == "runs":
                    home.rmdir()
