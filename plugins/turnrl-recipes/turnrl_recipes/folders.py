"""Folders of runs: tried before they are written, counted, and their checkpoints found again."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from turnrl import CheckpointError, RecipeError, did_you_mean

LATEST = ("last", "best")
"""Checkpoints of a recipe's newest run, by name."""


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


def next_version(home: Path) -> int:
    """The number that the next run in a folder of runs gets, as Lightning's loggers count."""
    names = [path.name.removeprefix("version_") for path in home.glob("version_*") if path.is_dir()]
    return max((int(name) for name in names if name.isdigit()), default=-1) + 1


def newest(home: Path, name: str) -> Path:
    """A checkpoint of the newest run that has it.

    Args:
        home: The folder of the runs.
        name: `last` or `best`.
    Raises:
        CheckpointError: If none has it.
    """
    files = list(home.glob(f"*/checkpoints/{name}.ckpt"))
    if not files:
        raise CheckpointError(
            f"ckpt_path is {name!r}, and no run in {str(home)!r} has a {name}.ckpt (best.ckpt "
            "comes with the first validation: trainer.check_val_every_n_epoch). Give the path of "
            "one, or of a run's folder."
        )
    return max(files, key=lambda file: file.stat().st_mtime)


def checkpoint_at(path: str) -> str:
    """The checkpoint that a path means: the file itself, or the `last.ckpt` of a run's folder.

    Raises:
        CheckpointError: If there is none, or the file is no checkpoint.
    """
    if "://" in path or zipfile.is_zipfile(path):
        return path
    if Path(path).is_file():
        raise CheckpointError(f"{path!r} is not a checkpoint. Give a last.ckpt of a run.")
    if Path(path).is_dir():
        for file in (Path(path, "checkpoints", "last.ckpt"), Path(path, "last.ckpt")):
            if file.is_file():
                return checkpoint_at(str(file))
        runs = sorted(str(file.parents[1]) for file in Path(path).glob("*/checkpoints/last.ckpt"))
        others = sorted(str(file) for file in Path(path, "checkpoints").glob("*.ckpt"))
        known = "Give the folder of a run that has one"
        if runs:
            known = f"Runs in it: {', '.join(runs)}"
        elif others:
            known = f"It has {', '.join(others)}"
        raise CheckpointError(f"no checkpoints/last.ckpt in {path!r}. {known}.")
    near = did_you_mean(path, LATEST) or " Runs keep theirs in their checkpoints/."
    raise CheckpointError(f"no checkpoint at {path!r}.{near}")
