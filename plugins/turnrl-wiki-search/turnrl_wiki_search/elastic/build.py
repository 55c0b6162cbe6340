"""Builds an index on a server."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import islice
from typing import Any

from turnrl import ToolError
from turnrl.plugin.patience import Unavailable
from turnrl.types import Passage
from turnrl_wiki_search.elastic.client import RETRIED, Connection
from turnrl_wiki_search.elastic.search import read_description
from turnrl_wiki_search.index import FORMAT, Analyzer, IndexInfo, parse_info, print_remark
from turnrl_wiki_search.settings import RETRIES, Elasticsearch
from turnrl_wiki_search.sources import Corpus

_AT_ONCE = 2000
_REQUEST_S = 60.0
_LONG_MERGE = 2_000_000
_LONGEST_MERGE_S = 24 * 3600.0
_LONGEST_BULK_BYTES = 20_000_000
_K1, _B = 1.2, 0.75
"""BM25's parameters, as in the embedded index."""


def build(
    settings: Elasticsearch,
    corpus: Corpus,
    analyzer: Analyzer = "english",
    overwrite: bool = False,
) -> IndexInfo:
    """Build an index on a server. Faults of the server that pass are waited out; passages are
    stored under their own ids, so a passage that is sent twice is stored once. An interrupted build
    leaves an index that no search uses.

    Args:
        settings: The index and its server.
        corpus: The passages.
        analyzer: How text becomes terms.
        overwrite: Delete an index of this name first, if turnrl built it.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the index exists already, the server stays away, or passages are missing.
    """
    connection = Connection(settings, max(settings.timeout_s, _REQUEST_S))
    try:
        return _Builder(connection, settings.name).build(corpus, analyzer, overwrite)
    finally:
        connection.close()


class _Builder:
    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._client, self._call = connection, connection.client, connection.call
        self._name = name

    def build(self, corpus: Corpus, analyzer: Analyzer, overwrite: bool) -> IndexInfo:
        meta: dict[str, Any] = {
            "backend": "elasticsearch",
            "source": corpus.name,
            "splitter": str(corpus.splitter),
            "analyzer": analyzer,
            "format": FORMAT,
        }
        passages = corpus.passages()
        chunk = [*islice(passages, _AT_ONCE)]  # a source that is broken leaves no index behind
        self._create(meta, overwrite)
        while chunk:
            self._call(lambda sent=chunk: self._send(sent), RETRIES)  # type: ignore[misc]
            chunk = [*islice(passages, _AT_ONCE)]
        self._call(lambda: self._client.indices.refresh(index=self._name))
        held = self._call(lambda: self._client.count(index=self._name))["count"]
        if held != corpus.count:
            raise ToolError(
                f"{corpus.count:,} passages were read from {corpus.name!r}, but index "
                f"{self._name!r} holds {held:,}. Build it again with --overwrite."
            )
        self._merge(corpus.count)
        settings = {"refresh_interval": None, "auto_expand_replicas": "0-1"}
        self._call(lambda: self._client.indices.put_settings(index=self._name, settings=settings))
        meta |= {
            "version": f"elasticsearch-{corpus.digest}-{analyzer}",
            "passages": corpus.count,
            "built": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._call(
            lambda: self._client.indices.put_mapping(index=self._name, meta={"turnrl": meta})
        )
        return parse_info(meta, self._name, "")

    def _create(self, meta: dict[str, Any], overwrite: bool) -> None:
        """Make the index. Its description has no number of passages before the build ends."""
        indices = self._client.indices
        if self._call(lambda: indices.exists(index=self._name)):
            read_description(self._connection, self._name)  # never delete another's index
            if not overwrite:
                raise ToolError(
                    f"index {self._name!r} at {self._connection.label} exists already. Add "
                    "--overwrite to rebuild it, or choose another name."
                )
            self._call(lambda: indices.delete(index=self._name))
        text = {
            "type": "text",
            "analyzer": meta["analyzer"],
            "similarity": "turnrl",
            "index_options": "freqs",
        }
        mappings: dict[str, Any] = {
            "dynamic": "strict",
            "_meta": {"turnrl": meta},
            "properties": {
                # one field for both, as in the embedded index: words of titles weigh no more
                "title": {"type": "text", "index": False, "copy_to": "contents"},
                "text": {"type": "text", "index": False, "copy_to": "contents"},
                "contents": text,
            },
        }
        settings = {
            "number_of_shards": 1,
            "number_of_replicas": 0,
            "refresh_interval": "-1",
            "similarity": {"turnrl": {"type": "BM25", "k1": _K1, "b": _B}},
        }
        self._call(lambda: indices.create(index=self._name, mappings=mappings, settings=settings))

    def _send(self, chunk: Sequence[Passage]) -> None:
        from elasticsearch import helpers

        actions = (
            {"_index": self._name, "_id": p.id, "title": p.title, "text": p.text} for p in chunk
        )
        try:
            helpers.bulk(
                self._client, actions, chunk_size=len(chunk), max_chunk_bytes=_LONGEST_BULK_BYTES
            )
        except helpers.BulkIndexError as error:
            (reply,) = error.errors[0].values()
            reason = self._connection.clean(reply.get("error"))
            if reply.get("status") in RETRIED:
                raise Unavailable(f"status {reply['status']}: {reason}") from None
            raise ToolError(
                f"{self._connection.label} refused passage {reply.get('_id')!r} ({reason})."
            ) from None

    def _merge(self, passages: int) -> None:
        """Merge the finished index into one segment, which saves a quarter of the work per query.

        An unmerged index is complete too, so a failure is only printed.
        """
        if passages > _LONG_MERGE:
            print_remark(
                f"index {self._name!r} has all passages; the server merges it for some minutes"
            )
        patient = self._client.options(request_timeout=_LONGEST_MERGE_S)
        try:
            patient.indices.forcemerge(index=self._name, max_num_segments=1)
        except Exception as error:
            meaning = self._connection.translate(error)
            if meaning is error:
                raise
            print_remark(f"index {self._name!r} was not merged, so it is slower ({meaning})")
