"""Searches an index on a server. A search returns complete answers or raises."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from turnrl import ToolError
from turnrl.plugin.patience import Patience, Unavailable
from turnrl.types import Passage
from turnrl_wiki_search.elastic.client import RETRIED, Connection
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex, parse_info
from turnrl_wiki_search.settings import RETRIES, Elasticsearch
from turnrl_wiki_search.sources import make_passage

_BATCH = 64
_LANES = 2
"""Requests in flight at once: the server works on one while we read the answers to another."""
_WORDS = 20
"""Words of a document of the user's own index that a search looks for before a run."""


class ElasticIndex(SearchIndex):
    """An index on a server. It connects on the first `info` or `search`.

    Args:
        settings: The index and its server.
    """

    def __init__(self, settings: Elasticsearch) -> None:
        self._settings, self._name = settings, settings.name
        self._fields = settings.fields
        self._connection = Connection(settings)
        self._free = threading.Semaphore(_LANES)
        self._patience = Patience(
            self._connection.label, settings.wait_s, self._away_error, RETRIES, setting="wait_s"
        )

    def info(self) -> IndexInfo:
        """See `SearchIndex.info`. It is called before a run, so it does not wait for a server that
        is away."""
        return self._own_info() if self._fields is None else self._foreign_info(self._fields)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), _BATCH):
            hits += self._answer(queries[start : start + _BATCH], k)
        return hits

    def close(self) -> None:
        self._connection.close()

    def _own_info(self) -> IndexInfo:
        meta = read_description(self._connection, self._name)
        build = build_command(self._name, str(meta.get("source")))
        if "passages" not in meta:
            raise ToolError(
                f"index {self._name!r} at {self._connection.label} is unfinished. Wait for the "
                f"build, or build it again with '{build} --overwrite'."
            )
        return parse_info(meta, self._name, build)

    def _foreign_info(self, fields: Mapping[str, str]) -> IndexInfo:
        """Describe an index that turnrl did not build, and check that its fields can be searched.

        Raises:
            ToolError: If a field is absent or of another type, or if no search could find the text.
        """
        call, client = self._connection.call, self._connection.client
        where = f"index {self._name!r} at {self._connection.label}"
        quiet = client.options(ignore_status=[404])
        count = call(lambda: quiet.count(index=self._name))
        if count.meta.status == 404:
            raise ToolError(f"no {where}. Correct Elasticsearch.name.")
        caps = call(lambda: client.field_caps(index=self._name, fields="*"))["fields"]
        texts = [n for n, kinds in caps.items() if [*kinds] == ["text"]]
        texts = sorted(name for name in texts if caps[name]["text"]["searchable"])
        for part, name in fields.items():
            if name not in texts:
                raise ToolError(
                    f"{where} cannot be searched by its field {name!r}, which is not an indexed "
                    f"text field. It has: {', '.join(texts[:20]) or 'none'}. Correct "
                    f"Elasticsearch.fields.{part}."
                )
        if count["count"]:
            self._check_texts(fields["text"], where)
        version = self._settings.version
        version = version and f"elasticsearch-{version}-{self._name}-{sorted(fields.items())}"
        return IndexInfo("elasticsearch", self._name, version, passages=count["count"])

    def _check_texts(self, field: str, where: str) -> None:
        """Raise if a search cannot show the text of a document, or find it by the text's words."""

        def find(query: Mapping[str, object]) -> list[list[object]]:
            search = self._connection.client.search
            found = self._connection.call(
                lambda: search(
                    index=self._name, fields=[{"field": field}], source=False, query=query
                )
            )
            hits = found["hits"]["hits"]
            return [hit["fields"][field] for hit in hits if hit.get("fields", {}).get(field)]

        texts = [" ".join(map(str, values)).split()[:_WORDS] for values in find(_has(field))]
        own = [{"match": {field: " ".join(words)}} for words in texts]
        if not own or not find({"bool": {"should": own}}):
            raise ToolError(
                f"searches in {where} find no text in its field {field!r}: no document has it, its "
                "mapping leaves it out of '_source', or its analyzer does not split a text into "
                "words. Set Elasticsearch.fields.text to another field."
            )

    def _answer(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Answer a batch; only failed queries are sent again."""
        answers: dict[int, list[Hit]] = {}
        request = self._patience.request()
        with self._free:
            request.ask(lambda: self._ask(queries, k, answers))
        return [answers[i] for i in range(len(queries))]

    def _away_error(self, problem: str) -> ToolError:
        resume = (
            "; then resume the run from its last checkpoint with --ckpt_path, or raise 'wait_s'"
        )
        return ToolError(
            f"the search server {self._connection.label} {problem} Start it, or correct 'url'"
            f"{resume if self._settings.wait_s else ''}."
        )

    def _ask(self, queries: Sequence[str], k: int, answers: dict[int, list[Hit]]) -> None:
        """Send one request, store its answers, and raise if some are missing."""
        waiting = [i for i in range(len(queries)) if i not in answers]
        lines: list[dict[str, object]] = []
        for i in waiting:
            # copies of a shard may differ in their deleted documents, and so in their scores. So a
            # query always goes to the same copies, while different queries use all of them
            where: dict[str, object] = {"index": self._name, "preference": _digest(queries[i])}
            # a missing shard would silently shorten the answer, so partial results are refused
            where["allow_partial_search_results"] = False
            lines += [where, self._body(queries[i], k)]
        try:
            replies = self._connection.client.msearch(searches=lines)["responses"] if lines else []
        except Exception as error:
            raise self._connection.translate(error) from None
        fault: Unavailable | None = None
        for i, reply in zip(waiting, replies, strict=True):
            if problem := self._fault(reply):
                fault = problem
            else:
                answers[i] = self._hits(reply["hits"]["hits"])
        if fault is not None:
            raise fault

    def _body(self, query: str, k: int) -> dict[str, object]:
        """The search for a query, and the part of a document that it returns."""
        size = {"size": k, "track_total_hits": False}
        if self._fields is None:
            match = {"match": {"contents": {"query": query}}}
            return {"query": match, "_source": ["title", "text"], **size}
        text, names = self._fields["text"], [*self._fields.values()]
        # title and text as if they were one field, as they are in an index of ours
        matching = {"multi_match": {"query": query, "type": "cross_fields", "fields": names}}
        bounded = {"bool": {"must": matching, "filter": _has(text)}}
        # unlike `_source`, `fields` knows a field within a field, such as body.english
        return {"query": bounded, "_source": False, "fields": names, **size}

    def _hits(self, documents: Sequence[Mapping[str, Any]]) -> list[Hit]:
        """The hits, best first; ids decide between equal scores.

        Raises:
            ToolError: If an index of the user's own returns hits without their text.
        """
        text = self._fields and self._fields["text"]
        if text and documents and not any(hit.get("fields", {}).get(text) for hit in documents):
            raise ToolError(
                f"index {self._name!r} returns hits without their text. Set "
                "Elasticsearch.fields.text to a field that is in '_source'."
            )
        ordered = sorted(documents, key=lambda hit: (-hit["_score"], hit["_id"]))
        hits = [Hit(self._passage(hit), hit["_score"]) for hit in ordered]
        return [hit for hit in hits if hit.passage.title or hit.passage.text.strip()]

    def _passage(self, hit: Mapping[str, Any]) -> Passage:
        if self._fields is None:
            return Passage(hit["_id"], hit["_source"]["title"], hit["_source"]["text"])
        values = hit.get("fields", {})
        title, text = (
            "\n".join(map(str, values.get(self._fields.get(part), ())))
            for part in ("title", "text")
        )
        return make_passage(hit["_id"], title, text)

    def _fault(self, reply: Mapping[str, Any]) -> Unavailable | None:
        """The reason why a search has no complete answer; None if it has one.

        Raises:
            ToolError: If it will never have one.
        """
        status = reply.get("status", 200)
        partial = reply.get("timed_out") or reply.get("_shards", {}).get("failed")
        if status == 200 and not partial:
            return None
        error = reply.get("error", {})
        causes = [cause.get("reason") for cause in error.get("root_cause", ())]
        reason = self._connection.clean(
            next(filter(None, [*causes, error.get("reason")]), "some shards did not answer")
        )
        if status not in (200, *RETRIED):
            raise ToolError(
                f"{self._connection.label} refused a search in index {self._name!r} (status "
                f"{status}: {reason})."
            )
        return Unavailable(f"status {status}: {reason}")


def build_command(name: str, source: str = "SOURCE") -> str:
    """The command that builds an index on a server, for messages."""
    index = f"'{{class_path: Elasticsearch, init_args: {{name: {name}}}}}'"
    return f"turnrl index build --index {index} --source {source!r}"


def read_description(connection: Connection, name: str) -> dict[str, Any]:
    """The description that turnrl wrote into an index's mapping.

    Raises:
        ToolError: If there is no such index, or turnrl did not build it.
    """
    quiet = connection.client.options(ignore_status=[404])
    response = connection.call(lambda: quiet.indices.get_mapping(index=name))
    if response.meta.status == 404:
        raise ToolError(
            f"no index {name!r} at {connection.label}. Build it with {build_command(name)}, or "
            "correct Elasticsearch.name."
        )
    meta = [m["mappings"].get("_meta", {}).get("turnrl") for m in response.values()]
    if len(meta) != 1 or not isinstance(meta[0], dict):
        raise ToolError(
            f"index {name!r} at {connection.label} was not built by turnrl. To search it as it is, "
            "name its fields: Elasticsearch.fields, as {text: body, title: headline}. Or choose "
            "another name, and build it."
        )
    return dict(meta[0])


def _has(field: str) -> dict[str, object]:
    """The query for all documents with a field."""
    return {"exists": {"field": field}}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
