"""A corpus, remembered by its index: the state of its files, and the ids of its passages."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnrl.types import Passage


def states_of(files: Sequence[Path]) -> dict[str, list[object]]:
    """The size, the time and a digest of each file, as JSON."""
    return {str(file): [*_dated(file), _digest(file)] for file in files}


def changed_file(files: Sequence[Path], states: Mapping[str, Sequence[object]]) -> str | None:
    """A file that differs from its state in `states_of`, or that is new or gone; None if all are
    as they were. A file with another time but the same content is as it was."""
    now = {str(file): file for file in files}
    for name in sorted({*now, *states}):
        if name not in now or name not in states:
            return name
        *dated, digest = states[name]
        if dated != _dated(now[name]) and digest != _digest(now[name]):
            return name
    return None


def _dated(file: Path) -> list[int]:
    state = file.stat()
    return [state.st_size, state.st_mtime_ns]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


class Ids:
    """The ids of passages, in 8 bytes each. Looks for a repeated one whenever their number has
    doubled, and at the end."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._looked_at = 1000

    def has_repeated(self, chunk: Sequence[Passage]) -> bool:
        """Add the ids of a chunk; an empty chunk is the end. True if an id may have come twice."""
        self._hashes.extend(hash(passage.id) for passage in chunk)
        if chunk and len(self._hashes) < 2 * self._looked_at:
            return False
        self._looked_at = len(self._hashes)
        return bool(self.repeated())

    def repeated(self) -> set[int]:
        """The hashes that came more than once."""
        import numpy as np

        hashes = np.sort(np.frombuffer(self._hashes, dtype=np.int64))
        return {*hashes[1:][hashes[1:] == hashes[:-1]].tolist()}
