"""Search results cached on disk, for repeated epochs and other runs."""

from __future__ import annotations

from collections.abc import Sequence

from turnrl import ToolError
from turnrl.plugin.cache import Cache
from turnrl.types import Passage
from turnrl_wiki_search.index import FORMAT, Hit, IndexInfo, SearchIndex


class CachedIndex(SearchIndex):
    """An index with a cache in front. A query that is cached is not sent to it.

    Args:
        index: The index.
        path: The file of the cache; made if absent.
    """

    def __init__(self, index: SearchIndex, path: str) -> None:
        self._index = index
        self._cache = Cache(path, ToolError)
        self._version: str | None = None

    def info(self) -> IndexInfo:
        """The index's description.

        Raises:
            ToolError: If nothing tells when its passages change.
        """
        info = self._index.info()
        if info.version is None:
            raise ToolError(
                f"the search cache {str(self._cache.path)!r} cannot know when the passages of "
                f"{info.index!r} change, because turnrl did not build them. Set 'version' to a "
                "name of your choice for their present state, or leave 'cache' out."
            )
        self._version = info.version
        return info

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        version = self._version or self.info().version
        keys = {query: f"{FORMAT}\x1f{version}\x1f{k}\x1f{query}" for query in queries}
        found = self._cache.get(keys.values())
        answers = {query: _unpack(found[key]) for query, key in keys.items() if key in found}
        if missing := [query for query in keys if query not in answers]:
            fresh = dict(zip(missing, self._index.search(missing, k), strict=True))
            self._cache.put({keys[query]: _pack(hits) for query, hits in fresh.items()})
            answers.update(fresh)
        return [answers[query] for query in queries]

    def close(self) -> None:
        self._cache.close()
        self._index.close()


def _pack(hits: Sequence[Hit]) -> object:
    return [[h.passage.id, h.passage.title, h.passage.text, h.score] for h in hits]


def _unpack(rows: object) -> list[Hit]:
    return [Hit(Passage(i, title, text), score) for i, title, text, score in rows]  # type: ignore[attr-defined]
