"""Files that are there whole or not at all, and tables in CSV."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_TORN = ".new"


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
            _try_lock(held)
            yield written
            os.fsync(held.fileno())  # the move must not reach the disk before the contents
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
            if _try_lock(held):
                file.unlink()


def _try_lock(held: BinaryIO) -> bool:
    """Lock a file until it is closed. False if another process has it, or if files have no locks
    here."""
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
