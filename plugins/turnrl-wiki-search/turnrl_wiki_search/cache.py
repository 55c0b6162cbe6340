"""Search results cached on disk, for repeated epochs and for replay without a server."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from turnrl import Passage, ToolError
from turnrl.servers import Cache
from turnrl_wiki_search.index import FORMAT, Backend, Hit, IndexInfo, SearchIndex

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, hits BLOB NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_used ON answers (used);
CREATE TABLE IF NOT EXISTS indexes (backend TEXT, name TEXT, info TEXT NOT NULL, PRIMARY KEY
(backend, name)); CREATE TABLE IF NOT EXISTS size (bytes INTEGER NOT NULL);
INSERT INTO size SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM size);
"""
_SHRINK = """
DELETE FROM answers WHERE key IN (SELECT key FROM
(SELECT key, sum(bytes) OVER (ORDER BY used DESC) AS newer FROM answers) WHERE newer > ?)
"""


class AnswerCache:
    """Hits by (index version, query, k), and the descriptions of indexes.

    When it outgrows `max_bytes`, the least recently used answers are dropped until nine tenths are
    left.

    Args:
        path: The file; made if absent.
        max_bytes: The most bytes of answers, compressed.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int) -> None:
        self._cache = Cache(path, _TABLES, ToolError)
        self._max_bytes = max_bytes
        self.path, self.close = self._cache.path, self._cache.close

    def remember(self, info: IndexInfo, name: str) -> None:
        """Store the description of an index under a name, for replay without the index.

        Raises:
            ToolError: If the index has no version, so that answers may be out of date.
        """
        if info.version is None:
            raise ToolError(
                f"the search cache {str(self.path)!r} cannot know when the passages of "
                f"{info.index!r} change, because turnrl did not build them. Set 'version' to a "
                "name of your choice for their present state, or leave 'cache' out."
            )
        row = (info.backend, name, json.dumps(asdict(info)))
        with self._cache.transaction() as db:
            db.execute("INSERT OR REPLACE INTO indexes VALUES (?, ?, ?)", row)

    def recall(self, backend: Backend, name: str) -> IndexInfo:
        """The description last stored for an index.

        Raises:
            ToolError: If there is no description, or it is of another format.
        """
        with self._cache.transaction() as db:
            row = db.execute(
                "SELECT info FROM indexes WHERE backend = ? AND name = ?", (backend, name)
            ).fetchone()
        if row is None or (info := IndexInfo(**json.loads(row[0]))).format != FORMAT:
            raise ToolError(
                f"the search cache {str(self.path)!r} has never seen the {backend} index {name!r}, "
                "so there is nothing to replay. Run once with 'offline' set to false."
            )
        return info

    def get(self, version: str, queries: Sequence[str], k: int) -> dict[str, list[Hit]]:
        """The cached answers, by query."""
        answers: dict[str, list[Hit]] = {}
        used = []
        with self._cache.transaction() as db:
            for query in queries:
                key = _key(version, query, k)
                row = db.execute("SELECT hits FROM answers WHERE key = ?", (key,)).fetchone()
                if row:
                    answers[query] = _unpack(row[0])
                    used.append((time.time_ns(), key))
            db.executemany("UPDATE answers SET used = ? WHERE key = ?", used)
        return answers

    def put(self, version: str, answers: dict[str, list[Hit]], k: int) -> None:
        """Store answers by query."""
        with self._cache.transaction() as db:
            for query, hits in answers.items():
                packed = _pack(hits)
                row = (_key(version, query, k), packed, len(packed), time.time_ns())
                if db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", row).rowcount:
                    db.execute("UPDATE size SET bytes = bytes + ?", (len(packed),))
            (size,) = db.execute("SELECT bytes FROM size").fetchone()
            if size > self._max_bytes:
                db.execute(_SHRINK, (0.9 * self._max_bytes,))
                db.execute("UPDATE size SET bytes = (SELECT sum(bytes) FROM answers)")


@dataclass(eq=False)
class CachedIndex(SearchIndex):
    """An index with a cache in front. It is opened only when a query is not cached.

    Args:
        open_index: Opens the index.
        cache: The cached answers.
        backend: The index's backend.
        name: The index's name in the cache; see `SearchServer.known_as`.
        offline: Never open the index; a query that is not cached is an error.
    """

    open_index: Callable[[], SearchIndex]
    cache: AnswerCache
    backend: Backend
    name: str
    offline: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._index: SearchIndex | None = None
        self._info: IndexInfo | None = None

    def info(self) -> IndexInfo:
        with self._lock:
            if self._info is None:
                if self.offline:
                    self._info = self.cache.recall(self.backend, self.name)
                else:
                    self._index = self._index or self.open_index()
                    self._info = self._index.info()
                    self.cache.remember(self._info, self.name)
            return self._info

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        info = self.info()
        version = str(info.version)
        answers = self.cache.get(version, queries, k)
        missing = [query for query in dict.fromkeys(queries) if query not in answers]
        if missing:
            if self._index is None:
                raise ToolError(
                    f"{len(missing)} of {len(queries)} queries are not in the search cache "
                    f"{str(self.cache.path)!r} (k={k}, the first is {missing[0][:80]!r}), and the "
                    "tool is offline. A replay must ask what the first run asked: keep its recipe "
                    "and seed, or set 'offline' to false."
                )
            fresh = dict(zip(missing, self._index.search(missing, k), strict=True))
            self.cache.put(version, fresh, k)
            answers.update(fresh)
        return [answers[query] for query in queries]

    def close(self) -> None:
        self.cache.close()
        if self._index is not None:
            self._index.close()


def _key(version: str, query: str, k: int) -> bytes:
    return hashlib.blake2b(
        f"{FORMAT}\x1f{version}\x1f{k}\x1f{query}".encode(), digest_size=16
    ).digest()


def _pack(hits: list[Hit]) -> bytes:
    rows = [[h.passage.id, h.passage.title, h.passage.text, h.score] for h in hits]
    return zlib.compress(json.dumps(rows, ensure_ascii=False).encode(), 1)


def _unpack(data: bytes) -> list[Hit]:
    return [
        Hit(Passage(i, title, text), score)
        for i, title, text, score in json.loads(zlib.decompress(data))
    ]
