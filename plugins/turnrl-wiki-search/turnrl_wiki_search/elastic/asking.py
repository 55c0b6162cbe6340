"""The searches for a query under each ranking, and the passages in their hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from turnrl import Passage, ToolError
from turnrl_wiki_search.fusion import fuse
from turnrl_wiki_search.index import Hit, Ranking
from turnrl_wiki_search.server import SearchServer
from turnrl_wiki_search.sources import passage_of

if TYPE_CHECKING:
    from turnrl_wiki_search.encoding import Vectors

VECTOR = "vector"
"""The field of the vectors in an index that turnrl built."""

_FUSED = 20
"""The best passages of each ranking that a hybrid search joins."""
_CANDIDATES = 100
"""The fewest passages per shard whose similarity a search by vectors compares."""
_MOST_CANDIDATES = 10_000
"""The server's own limit."""


@dataclass(frozen=True)
class Asking:
    """How to search an index.

    Args:
        ranking: The ranking.
        fields: The fields of an index that turnrl did not build; None for an index of its own.
    """

    ranking: Ranking
    fields: Mapping[str, str] | None

    @classmethod
    def of(cls, server: SearchServer) -> Asking:
        return cls(server.ranking, server.fields)

    def bodies(self, query: str, vector: Vectors | None, k: int) -> list[dict[str, object]]:
        """The searches for a query.

        Args:
            query: Its text.
            vector: Its vector (dimensions,); None if the ranking does not use vectors, or if the
                vector is zero, which is near to nothing.
            k: The most hits.
        """
        size = max(k, _FUSED) if self.ranking == "hybrid" else k
        bodies: list[dict[str, object]] = []
        if self.ranking != "knn":
            bodies.append({"query": self._matching(query)})
        if vector is not None:
            near: dict[str, object] = {
                "field": self.fields["vector"] if self.fields else VECTOR,
                "query_vector": vector.tolist(),
                "k": size,
                "num_candidates": min(max(2 * size, _CANDIDATES), _MOST_CANDIDATES),
            }
            if self.fields is not None:
                near["filter"] = has_field(self.fields["text"])
            bodies.append({"knn": near})
        common = {"size": size, "track_total_hits": False, **self.shown}
        return [{**body, **common} for body in bodies]

    def _matching(self, query: str) -> dict[str, object]:
        if self.fields is None:
            return {"match": {"contents": {"query": query}}}
        text, title = self.fields["text"], self.fields.get("title")
        matching: dict[str, object] = {"match": {text: {"query": query}}}
        if title is not None:
            # as if title and text were one field, as they are in an index of ours
            fields = {"query": query, "type": "cross_fields", "fields": [title, text]}
            matching = {"multi_match": fields}
        return {"bool": {"must": matching, "filter": has_field(text)}}

    @property
    def shown(self) -> dict[str, object]:
        """The part of a search that names the fields to return of a document."""
        if self.fields is None:
            return {"_source": ["title", "text"]}
        names = [self.fields[part] for part in ("title", "text") if part in self.fields]
        # unlike `_source`, this knows a field within a field, such as body.english
        return {"_source": False, "fields": names}

    def passage(self, hit: Mapping[str, Any]) -> Passage:
        """The passage in a hit, from the fields that `shown` asks for."""
        if self.fields is None:
            return Passage(hit["_id"], hit["_source"]["title"], hit["_source"]["text"])
        values = hit.get("fields", {})
        title, text = (
            "\n".join(map(str, values.get(self.fields.get(part), ()))) for part in ("title", "text")
        )
        return passage_of(hit["_id"], title, text)

    def hits(self, replies: Sequence[Sequence[Mapping[str, Any]]], k: int) -> list[Hit]:
        """The best hits, from the replies to the searches of `bodies`; ids decide between equal
        scores.

        Raises:
            ToolError: If an index of somebody else has hits, but none shows its text.
        """
        replies = [sorted(reply, key=lambda hit: (-hit["_score"], hit["_id"])) for reply in replies]
        if self.fields is not None:
            refuse_hidden([hit for reply in replies for hit in reply], self.fields["text"])
        if self.ranking != "hybrid":
            scored = [(hit, hit["_score"]) for hit in (replies[0] if replies else ())]
        else:
            keyed = [{(hit["_id"], hit["_index"]): hit for hit in reply} for reply in replies]
            words, near = keyed if len(keyed) == 2 else (*keyed, {})
            by_key = {**near, **words}
            scored = [(by_key[key], score) for key, score in fuse([*words], [*near])]
        hits = (Hit(self.passage(document), score) for document, score in scored)
        # a document in somebody else's index may lack the fields
        return [*islice((hit for hit in hits if hit.passage.title or hit.passage.text.strip()), k)]


def has_field(name: str) -> dict[str, object]:
    """The query for all documents with a field."""
    return {"exists": {"field": name}}


def refuse_hidden(hits: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise if there are hits in an index that turnrl did not build, and none shows its text.

    Args:
        hits: Documents that have the field `text`, as a search with `Asking.shown` returns them.
        text: The field.
    Raises:
        ToolError: Naming an index.
    """
    if hits and not any(hit.get("fields", {}).get(text) for hit in hits):
        raise ToolError(
            f"index {hits[0]['_index']!r} is searched by its field {text!r}, but does not return "
            "its text: the mapping leaves the field out of '_source'. Set fields.text to a field "
            "that is in it."
        )
