"""Builds an index on a server, and resumes after faults on either side."""

from __future__ import annotations

import collections
import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from turnrl import Passage, ToolError
from turnrl.servers import Unavailable, pause_s
from turnrl_wiki_search.elastic.access import Access
from turnrl_wiki_search.elastic.asking import VECTOR
from turnrl_wiki_search.elastic.faults import RETRIED, call, translate
from turnrl_wiki_search.elastic.search import check_version, describe, digest
from turnrl_wiki_search.index import FORMAT, Analyzer, IndexInfo, described, remark
from turnrl_wiki_search.server import SearchServer
from turnrl_wiki_search.sources import Corpus, Mark

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

    from turnrl_wiki_search.encoding import Encoder

T = TypeVar("T")

_SAVE_EVERY_CHUNKS = 25
_LOADERS = 2
_LONG_MERGE = 2_000_000
_LONGEST_MERGE_S = 24 * 3600.0
_LONGEST_BULK_BYTES = 20_000_000


def build(
    server: SearchServer,
    name: str,
    corpus: Corpus,
    analyzer: Analyzer = "english",
    overwrite: bool = False,
    on_progress: Callable[..., None] | None = None,
    shards: int = 1,
    k1: float = 1.2,
    b: float = 0.75,
    encoder: Encoder | None = None,
    passage_prefix: str = "",
) -> IndexInfo:
    """Build an index on a server, or resume an interrupted build of the same corpus.

    Passages are stored under their own ids, so a passage that is sent twice is stored once. The
    index's mapping holds the place reached; a build resumes there after the server was away.

    Args:
        server: The server.
        name: Name of the index.
        corpus: The passages.
        analyzer: How text becomes terms.
        overwrite: Delete an index of this name first, if turnrl built it.
        on_progress: Called with the number of passages indexed so far. If passages are encoded, it
            is called with the number encoded so far, and with the number read as `read`.
        shards: Primary shards.
        k1: BM25's saturation of term frequency.
        b: BM25's normalisation by length.
        encoder: Makes a vector from each passage's title and text; None for an index without them.
        passage_prefix: Put in front of each passage before it is encoded, such as "passage: ".
    Returns:
        The description of the index.
    Raises:
        ToolError: If the index exists already, the server stays away, or passages are missing.
    """
    access = Access.of(server)
    meta: dict[str, object] = {
        "backend": "elasticsearch",
        "source": corpus.source.name,
        "splitter": str(corpus.splitter),
        "analyzer": analyzer,
        "format": FORMAT,
        "build": {**corpus.identity, "shards": shards, "k1": k1, "b": b},
    }
    if encoder is not None:
        meta["vectors"] = _identity(encoder, passage_prefix)
    with access.connect(max(server.request_s("elasticsearch"), 60.0)) as client:
        builder = _Builder(
            client, access, server.retries, name, corpus, meta, encoder, passage_prefix, on_progress
        )
        return builder.build(overwrite)


def _identity(encoder: Encoder, passage_prefix: str) -> dict[str, object]:
    """The description of an index's vectors."""
    probe = encoder.probe.tolist()
    # few decimals, so that the same encoder has the same digest on most machines
    rough = [f"{number:.2f}" for number in probe]
    return {
        "encoder": encoder.name,
        "dimensions": len(probe),
        "passage_prefix": passage_prefix,
        "probe": probe,
        "version": digest(encoder.name, passage_prefix, *rough),
    }


@dataclass
class _Builder:
    client: Elasticsearch
    access: Access
    retries: int
    name: str
    corpus: Corpus
    meta: dict[str, Any]
    encoder: Encoder | None
    passage_prefix: str
    on_progress: Callable[..., None] | None

    def __post_init__(self) -> None:
        self.reached = self.saved = Mark()

    def build(self, overwrite: bool) -> IndexInfo:
        mark = self._prepare(overwrite)
        failures, reached = 0, -1
        while True:
            try:
                mark = self._load(mark)
                break
            except Unavailable as fault:
                mark = self.reached
                failures = 1 if mark.passages > reached else failures + 1
                reached = mark.passages
                if failures > max(self.retries, 1):
                    raise ToolError(
                        f"{self.access.label} failed {failures} times after passage "
                        f"{mark.passages:,} ({fault}). Once it works again, the same command "
                        "resumes there."
                    ) from None
                remark(
                    f"{self.access.label} failed after passage {mark.passages:,} ({fault}); "
                    "resuming there"
                )
                time.sleep(pause_s(failures + 2, fault))
        return self._finish(mark)

    def _do(self, request: Callable[[], T]) -> T:
        return call(self.access, request, max(self.retries, 2))

    def _prepare(self, overwrite: bool) -> Mark:
        """Make the index, or return the mark of an interrupted build."""
        check_version(self.client, self.access, 2)
        indices = self.client.indices
        if self._do(lambda: indices.exists(index=self.name)):
            meta = describe(self.client, self.access, self.name, 2)
            progress = meta.pop("progress", None)
            if progress and not overwrite and self._is_of_this_build(meta):
                remark(f"resuming index {self.name!r} after passage {progress['passages']:,}")
                return Mark(**progress)
            if not overwrite:
                exists = "holds another, unfinished build" if progress else "exists already"
                raise ToolError(
                    f"index {self.name!r} at {self.access.label} {exists}. Add --overwrite to "
                    "rebuild it, or choose another name."
                )
            self._do(lambda: indices.delete(index=self.name))
        settings_of_build = self.meta["build"]
        text = {
            "type": "text",
            "analyzer": self.meta["analyzer"],
            "similarity": "turnrl",
            "index_options": "freqs",
        }
        mappings: dict[str, Any] = {
            "dynamic": "strict",
            "_meta": {"turnrl": {**self.meta, "progress": asdict(Mark())}},
            "properties": {
                # one field for both, as in the embedded index: words of titles weigh no more
                "title": {"type": "text", "index": False, "copy_to": "contents"},
                "text": {"type": "text", "index": False, "copy_to": "contents"},
                "contents": text,
            },
        }
        if self.encoder is not None:
            mappings["properties"][VECTOR] = {
                "type": "dense_vector",
                "dims": len(self.encoder.probe),
                "index": True,
                "similarity": "cosine",
                "index_options": {"type": "int8_hnsw"},
            }
            # only a search needs these numbers, and they would make up most of each answer
            mappings["_source"] = {"excludes": [VECTOR]}
        settings = {
            "number_of_shards": settings_of_build["shards"],
            "number_of_replicas": 0,
            "refresh_interval": "-1",
            "similarity": {
                "turnrl": {
                    "type": "BM25",
                    "k1": settings_of_build["k1"],
                    "b": settings_of_build["b"],
                }
            },
        }
        self._do(lambda: indices.create(index=self.name, mappings=mappings, settings=settings))
        return Mark()

    def _is_of_this_build(self, meta: dict[str, Any]) -> bool:
        """True if an index's description belongs to this build. The vector of its encoder's probe
        may differ in the last digits."""
        from turnrl_wiki_search.encoding import agrees

        held, wanted = meta.get("vectors"), self.meta.get("vectors")
        if held and wanted and self.encoder and agrees(self.encoder, held["probe"]):
            names = ("encoder", "passage_prefix")
            return {**meta, "vectors": wanted} == self.meta and all(
                held[n] == wanted[n] for n in names
            )
        return meta == self.meta

    def _encode(self, passages: Sequence[Passage], read: int) -> list[list[float]]:
        """Vectors of passages; the last passage is number `read` of the corpus."""
        from turnrl_wiki_search.encoding import unit

        if self.encoder is None:
            return []

        def report(encoded: int) -> None:
            if self.on_progress:
                self.on_progress(read - len(passages) + encoded, read=read)

        texts = [f"{self.passage_prefix}{p.title}\n{p.text}".strip() for p in passages]
        vectors: list[list[float]] = unit(self.encoder(texts, "passage", report)).tolist()
        return vectors

    def _load(self, start: Mark) -> Mark:
        """Send everything after `start`. `reached` follows the server's acknowledgements."""
        self.reached = self.saved = start
        sent: collections.deque[tuple[Mark, Future[None]]] = collections.deque()
        # the client's own `parallel_bulk` sends the whole rest of the corpus before it raises the
        # error of one chunk; this stops with the chunks in flight
        with ThreadPoolExecutor(_LOADERS) as pool:
            try:
                for chunk, mark in self.corpus.chunks(start):
                    vectors = self._encode(chunk, mark.passages)
                    sent.append((mark, pool.submit(self._send, chunk, vectors)))
                    while sent and (sent[0][1].done() or len(sent) > 2 * _LOADERS):
                        self._acknowledge(*sent[0])
                        sent.popleft()
                while sent:
                    self._acknowledge(*sent[0])
                    sent.popleft()
            finally:
                failed = any(future.done() and future.exception() for _, future in sent)
                # encoded passages are still sent, unless it was the server that failed
                pool.shutdown(cancel_futures=failed or self.encoder is None)
                self._keep(sent)
        return self.reached

    def _send(self, chunk: list[Passage], vectors: list[list[float]]) -> None:
        from elasticsearch import helpers

        fields = [{VECTOR: vector} for vector in vectors] or [{}] * len(chunk)
        actions = (
            {"_index": self.name, "_id": p.id, "title": p.title, "text": p.text, **vector}
            for p, vector in zip(chunk, fields, strict=True)
        )
        try:
            helpers.bulk(
                self.client, actions, chunk_size=len(chunk), max_chunk_bytes=_LONGEST_BULK_BYTES
            )
        except helpers.BulkIndexError as error:
            raise self._refusal(error.errors[0]) from None
        except Exception as error:
            raise translate(error, self.access) from None

    def _acknowledge(self, mark: Mark, sent: Future[None]) -> None:
        sent.result()
        self.reached = mark
        if self.on_progress and self.encoder is None:
            self.on_progress(mark.passages)
        # encoding a chunk costs more than saving a mark
        chunks = 1 if self.encoder else _SAVE_EVERY_CHUNKS
        if mark.passages - self.saved.passages >= chunks * self.corpus.chunk:
            self.saved = mark
            self._save({**self.meta, "progress": asdict(mark)})

    def _keep(self, sent: Sequence[tuple[Mark, Future[None]]]) -> None:
        """Save the place that a build has reached, before it ends early."""
        for mark, future in sent:
            if future.cancelled() or future.exception() is not None:
                break
            self.reached = mark
        if sent and self.encoder is not None and self.reached != self.saved:
            with contextlib.suppress(
                ToolError
            ):  # the server is away, and the error under way reports it
                self._save({**self.meta, "progress": asdict(self.reached)})

    def _refusal(self, item: dict[str, Any]) -> Exception:
        (reply,) = item.values()
        reason = self.access.clean(reply.get("error"))
        if reply.get("status") in RETRIED:
            return Unavailable(f"status {reply['status']}: {reason}")
        return ToolError(f"{self.access.label} refused passage {reply.get('_id')!r} ({reason}).")

    def _save(self, meta: dict[str, object]) -> None:
        self._do(lambda: self.client.indices.put_mapping(index=self.name, meta={"turnrl": meta}))

    def _finish(self, mark: Mark) -> IndexInfo:
        self._do(lambda: self.client.indices.refresh(index=self.name))
        held = self._do(lambda: self.client.count(index=self.name))["count"]
        if held != mark.passages:
            raise ToolError(
                f"{mark.passages:,} passages were read from {self.corpus.source.name!r}, but "
                f"index {self.name!r} holds {held:,}. Fewer means that some share an id: make ids "
                "unique, and build again with --overwrite."
            )
        self._merge(mark)
        settings = {"refresh_interval": None, "auto_expand_replicas": "0-1"}
        self._do(lambda: self.client.indices.put_settings(index=self.name, settings=settings))
        analyzer = self.meta["analyzer"]
        k1, b, shards = (self.meta["build"][n] for n in ("k1", "b", "shards"))
        # each shard weighs words by its own passages
        split = "" if shards == 1 else f"-{shards}-shards"
        meta = {
            **self.meta,
            "version": f"elasticsearch-{mark.digest}-{analyzer}-{k1:g}-{b:g}{split}",
            "passages": mark.passages,
            "built": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._save(meta)
        info = described(meta, "elasticsearch", self.name, f"index {self.name!r}")
        return replace(info, encoder=self.encoder.name) if self.encoder else info

    def _merge(self, mark: Mark) -> None:
        """Merge the finished index into one segment, which saves a quarter of the work per query.

        An unmerged index is complete too, so a failure is only printed.
        """
        if mark.passages > _LONG_MERGE:
            remark(f"index {self.name!r} has all passages; the server merges it for some minutes")
        patient = self.client.options(request_timeout=_LONGEST_MERGE_S)
        try:
            patient.indices.forcemerge(index=self.name, max_num_segments=1)
        except Exception as error:
            meaning = translate(error, self.access)
            if meaning is error:
                raise
            remark(f"index {self.name!r} was not merged, so it is slower ({meaning})")
