"""Claim the folder of a new run: its number, and whether it can be written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from turnrl.plugin.errors import RecipeError
from turnrl.runs.find import is_run

_MAX_VANISHED = 100
"""How often a folder of runs may vanish while a run begins in it."""


def refuse_other_run(folder: Path, checkpoint: str | Path | None) -> None:
    """Refuse to write a run over another one.

    Args:
        folder: Where the run will write.
        checkpoint: The checkpoint that it resumes from; None if it begins anew. A run that resumes
            from the `last.ckpt` of its own folder goes on there.
    Raises:
        RecipeError: If there is a run in the folder.
    """
    own = folder / "checkpoints" / "last.ckpt"
    if is_run(folder) and (checkpoint is None or Path(checkpoint).resolve() != own.resolve()):
        raise RecipeError(
            f"{folder} holds a run already, which this one would overwrite. Leave out the logger's "
            "version, so that each run gets a folder of its own, or give another one. To go on "
            f"with that run, resume from {own}."
        )


def find_writable(folder: Path) -> Path:
    """Find the folder, or the nearest existing folder above it, and try to write there.

    Raises:
        RecipeError: If it cannot be written.
    """
    folder = folder.absolute()
    above = (folder, *folder.parents)
    existing = next(path for path in above if path.exists() or path.is_symlink())
    try:  # permissions are not enough: a file system may be read-only, or take no folders
        with tempfile.TemporaryDirectory(dir=existing, prefix=".turnrl-"):
            return existing
    except OSError as error:
        raise _not_writable(existing, error) from error


def _not_writable(folder: Path, error: OSError) -> RecipeError:
    why = "is a file" if folder.is_file() else f"takes no folder ({error.strerror})"
    if folder.is_symlink() and not folder.exists():
        why = f"is a link to {folder.readlink()}, which is not there"
    return RecipeError(
        f"{folder} {why}. Set trainer.logger.init_args.save_dir to a folder that can be written."
    )


def next_version(home: Path) -> int:
    """The number of the next run in a folder of runs, counted as Lightning's loggers count."""
    names = [path.name.removeprefix("version_") for path in home.glob("version_*") if path.is_dir()]
    return max((int(name) for name in names if name.isdigit()), default=-1) + 1


@contextlib.contextmanager
def claim_number(home: Path) -> Iterator[int]:
    """Claim the number of a new run by making its folder, so that no other run takes it. A folder
    that is empty at the end is removed, and so are the folders above that were made for it.

    Args:
        home: The folder of the runs.
    Raises:
        RecipeError: If no folder can be made there.
    """
    made = [folder for folder in (home, *home.parents) if not folder.exists()]
    number, vanished = next_version(home), 0
    while True:
        try:
            home.mkdir(parents=True, exist_ok=True)
            (home / f"version_{number}").mkdir()
            break
        except FileExistsError as error:
            if not home.is_dir():  # a file, or a link that leads nowhere
                raise _not_writable(home, error) from error
            number += 1
        except OSError as error:
            vanished += 1  # another run may have just removed the folder above
            if vanished > _MAX_VANISHED or not isinstance(error, FileNotFoundError):
                raise _not_writable(home, error) from error
    try:
        yield number
    finally:
        with contextlib.suppress(OSError):  # not empty: it has files, or other runs lie beside it
            for folder in (home / f"version_{number}", *made):
                folder.rmdir()
