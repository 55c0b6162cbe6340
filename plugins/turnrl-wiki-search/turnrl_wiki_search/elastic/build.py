"""Builds an index on a server, and resumes after faults on either side."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from turnrl import ToolError
from turnrl.plugin.patience import Unavailable
from turnrl.types import Passage
from turnrl_wiki_search.elastic.client import RETRIED, Connection
from turnrl_wiki_search.elastic.search import read_description
from turnrl_wiki_search.index import FORMAT, Analyzer, IndexInfo, info_from, remark
from turnrl_wiki_search.settings import RETRIES, Elasticsearch
from turnrl_wiki_search.sources import Corpus, Mark

_SAVE_EVERY_CHUNKS = 25
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
    on_progress: Callable[[int], None] | None = None,
) -> IndexInfo:
    """Build an index on a server, or resume an interrupted build of the same corpus.

    Passages are stored under their own ids, so a passage that is sent twice is stored once. The
    index's mapping holds the place reached, and a build resumes there.

    Args:
        settings: The index and its server.
        corpus: The passages.
        analyzer: How text becomes terms.
        overwrite: Delete an index of this name first, if turnrl built it.
        on_progress: Called with the number of passages indexed so far.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the index exists already, the server stays away, or passages are missing.
    """
    connection = Connection(settings, max(settings.timeout_s, _REQUEST_S))
    meta = {
        "backend": "elasticsearch",
        "source": corpus.source.name,
        "splitter": str(corpus.splitter),
        "analyzer": analyzer,
        "format": FORMAT,
        "build": dict(corpus.identity),
    }
    try:
        return _Builder(connection, settings.name, corpus, meta, on_progress).build(overwrite)
    finally:
        connection.close()


class _Builder:
    def __init__(
        self,
        connection: Connection,
        name: str,
        corpus: Corpus,
        meta: dict[str, Any],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._connection, self._client, self._call = connection, connection.client, connection.call
        self._name, self._corpus, self._meta = name, corpus, meta
        self._on_progress = on_progress

    def build(self, overwrite: bool) -> IndexInfo:
        mark = self._load(self._prepare(overwrite))
        self._call(lambda: self._client.indices.refresh(index=self._name))
        held = self._call(lambda: self._client.count(index=self._name))["count"]
        if held != mark.passages:
            raise ToolError(
                f"{mark.passages:,} passages were read from {self._corpus.source.name!r}, but "
                f"index {self._name!r} holds {held:,}. Build it again with --overwrite."
            )
        self._merge(mark)
        settings = {"refresh_interval": None, "auto_expand_replicas": "0-1"}
        self._call(lambda: self._client.indices.put_settings(index=self._name, settings=settings))
        meta = {
            **self._meta,
            "version": f"elasticsearch-{mark.digest}-{self._meta['analyzer']}",
            "passages": mark.passages,
            "built": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._save(meta)
        return info_from(meta, self._name, "")

    def _prepare(self, overwrite: bool) -> Mark:
        """Make the index, or return the mark of an interrupted build."""
        indices = self._client.indices
        if self._call(lambda: indices.exists(index=self._name)):
            meta = read_description(self._connection, self._name)
            progress = meta.pop("progress", None)
            if progress and not overwrite and meta == self._meta:
                remark(f"resuming index {self._name!r} after passage {progress['passages']:,}")
                return Mark(**progress)
            if not overwrite:
                exists = "holds another, unfinished build" if progress else "exists already"
                raise ToolError(
                    f"index {self._name!r} at {self._connection.label} {exists}. Add --overwrite "
                    "to rebuild it, or choose another name."
                )
            self._call(lambda: indices.delete(index=self._name))
        text = {
            "type": "text",
            "analyzer": self._meta["analyzer"],
            "similarity": "turnrl",
            "index_options": "freqs",
        }
        mappings: dict[str, Any] = {
            "dynamic": "strict",
            "_meta": {"turnrl": {**self._meta, "progress": asdict(Mark())}},
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
        return Mark()

    def _load(self, mark: Mark) -> Mark:
        """Send everything after a mark, one chunk while the next one is read."""
        self._saved = mark
        sent: Future[None] | None = None
        with ThreadPoolExecutor(1) as pool:
            for chunk, after in self._corpus.chunks(mark):
                if sent is not None:
                    self._acknowledge(sent, mark)
                sent, mark = pool.submit(self._call, partial(self._send, chunk), RETRIES), after
            if sent is not None:
                self._acknowledge(sent, mark)
        return mark

    def _acknowledge(self, sent: Future[None], mark: Mark) -> None:
        """Wait until a chunk has been sent, and save the place reached now and then."""
        sent.result()
        if self._on_progress:
            self._on_progress(mark.passages)
        if mark.passages - self._saved.passages >= _SAVE_EVERY_CHUNKS * self._corpus.chunk:
            self._saved = mark
            self._save({**self._meta, "progress": asdict(mark)})

    def _send(self, chunk: list[Passage]) -> None:
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

    def _save(self, meta: dict[str, object]) -> None:
        self._call(
            lambda: self._client.indices.put_mapping(index=self._name, meta={"turnrl": meta})
        )

    def _merge(self, mark: Mark) -> None:
        """Merge the finished index into one segment, which saves a quarter of the work per query.

        An unmerged index is complete too, so a failure is only printed.
        """
        if mark.passages > _LONG_MERGE:
            remark(f"index {self._name!r} has all passages; the server merges it for some minutes")
        patient = self._client.options(request_timeout=_LONGEST_MERGE_S)
        try:
            patient.indices.forcemerge(index=self._name, max_num_segments=1)
        except Exception as error:
            meaning = self._connection.translate(error)
            if meaning is error:
                raise
            remark(f"index {self._name!r} was not merged, so it is slower ({meaning})")
