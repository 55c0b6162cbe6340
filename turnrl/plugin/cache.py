"""`Cache`: answers kept in a SQLite file, which threads and processes share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from turnrl.plugin.errors import WorldError

_LOCKED_S = 60.0
"""The longest time that a process waits for another one that writes to a cache."""
_TABLE = "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"


def _advice(error: Exception) -> str:
    """The first words of a next step for a cache that cannot be used."""
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "Another run is writing to it: repeat the command when that run has ended"
    if kind in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return "It is no cache, or it is damaged: delete it"
    return "Make its folder one in which you may write, with space on its disk"


@final
class Cache:
    """Answers in a SQLite file, by key. Threads and processes may share it; its first use opens it.

    Args:
        path: The file; made if absent.
        error: The class of the error if the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], error: type[WorldError]) -> None:
        self.path = Path(path)
        self._error = error
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values that the cache has, by key."""
        query, found = "SELECT value FROM entries WHERE key = ?", dict[str, Any]()
        with self._transaction() as db:
            for key in keys:
                if row := db.execute(query, (_digest(key),)).fetchone():
                    found[key] = json.loads(zlib.decompress(row[0]))
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        """Keep values, which are plain JSON, by key."""
        rows = [
            (_digest(key), zlib.compress(json.dumps(value, ensure_ascii=False).encode(), 1))
            for key, value in values.items()
        ]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Read and write in one transaction. Nothing is written if the block raises."""
        # one connection for all threads, kept open because closing it waits for the disk
        try:
            with self._lock:
                self._db = self._db or self._open()
                with self._db as db:
                    db.execute("BEGIN IMMEDIATE")
                    yield db
        except (sqlite3.Error, OSError) as error:
            raise self._error(
                f"the cache {str(self.path)!r} cannot be used ({error}). {_advice(error)}, or set "
                "'cache' to another file."
            ) from error

    def _open(self) -> sqlite3.Connection:
        self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(
            self.path, timeout=_LOCKED_S, isolation_level=None, check_same_thread=False
        )
        end = time.monotonic() + _LOCKED_S
        while True:  # SQLite does not wait here for another process that also opens the file
            try:
                db.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # of any kind
                if not busy or time.monotonic() > end:
                    db.close()
                    raise
                time.sleep(0.01)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(_TABLE)
        return db

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __del__(self) -> None:
        self.close()


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
