"""Search results cached on disk, for repeated epochs and for replay without a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict

from turnrl import ToolError
from turnrl.plugin.cache import Cache
from turnrl.types import Passage
from turnrl_wiki_search.index import FORMAT, Hit, IndexInfo, SearchIndex
from turnrl_wiki_search.settings import IndexSettings


class CachedIndex(SearchIndex):
    """An index with a cache in front. A query that is cached is not sent to it.

    Args:
        settings: The index, which is opened on the first `info` or `search`.
        path: The file of the cache; made if absent.
        offline: Never open the index; a query that is not cached is an error.
    """

    def __init__(self, settings: IndexSettings, path: str, offline: bool = False) -> None:
        self._settings, self._offline = settings, offline
        self._cache = Cache(path, ToolError)
        self._lock = threading.Lock()
        self._index: SearchIndex | None = None
        self._info: IndexInfo | None = None

    def info(self) -> IndexInfo:
        with self._lock:
            if self._info is None:
                self._info = self._recall() if self._offline else self._describe()
            return self._info

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        version = self.info().version
        keys = {query: f"{FORMAT}\x1f{version}\x1f{k}\x1f{query}" for query in queries}
        found = self._cache.get(keys.values())
        answers = {query: _unpack(found[key]) for query, key in keys.items() if key in found}
        missing = [query for query in keys if query not in answers]
        if missing:
            if self._index is None:
                raise ToolError(
                    f"{len(missing)} of {len(queries)} queries are not in the search cache "
                    f"{str(self._cache.path)!r} (k={k}, the first is {missing[0][:80]!r}), and the "
                    "tool is offline. A replay must ask what the first run asked: keep its recipe "
                    "and seed, or set 'offline' to false."
                )
            fresh = dict(zip(missing, self._index.search(missing, k), strict=True))
            self._cache.put({keys[query]: _pack(hits) for query, hits in fresh.items()})
            answers.update(fresh)
        return [answers[query] for query in queries]

    def close(self) -> None:
        self._cache.close()
        if self._index is not None:
            self._index.close()

    def _describe(self) -> IndexInfo:
        """The index's description, which the cache keeps for a replay."""
        self._index = self._index or self._settings.open()
        info = self._index.info()
        if info.version is None:
            raise ToolError(
                f"the search cache {str(self._cache.path)!r} cannot know when the passages of "
                f"{info.index!r} change, because turnrl did not build them. Set 'version' to a "
                "name of your choice for their present state, or leave 'cache' out."
            )
        self._cache.put({self._own_key: asdict(info)})
        return info

    def _recall(self) -> IndexInfo:
        for fields in self._cache.get([self._own_key]).values():
            return IndexInfo(**fields)
        raise ToolError(
            f"the search cache {str(self._cache.path)!r} has never seen the index "
            f"{self._settings.cache_name!r}, so there is nothing to replay. Run once with "
            "'offline' set to false."
        )

    @property
    def _own_key(self) -> str:
        return f"{FORMAT}\x1f{type(self._settings).__name__}\x1f{self._settings.cache_name}"


def _pack(hits: Sequence[Hit]) -> object:
    return [[h.passage.id, h.passage.title, h.passage.text, h.score] for h in hits]


def _unpack(rows: object) -> list[Hit]:
    return [Hit(Passage(i, title, text), score) for i, title, text, score in rows]  # type: ignore[attr-defined]
