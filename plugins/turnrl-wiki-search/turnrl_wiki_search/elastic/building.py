"""Building an index on a server, and resuming after faults on either side."""

from __future__ import annotations

import collections
import datetime
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from turnrl import Passage, ToolError
from turnrl.servers import Unavailable, pause_s
from turnrl_wiki_search.elastic.access import Access
from turnrl_wiki_search.elastic.faults import RETRIED, call, translate
from turnrl_wiki_search.elastic.search import check_version, describe
from turnrl_wiki_search.index import FORMAT, Analyzer, IndexInfo, described, say
from turnrl_wiki_search.server import Server
from turnrl_wiki_search.sources import Corpus, Mark

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

T = TypeVar("T")

_SAVE_EVERY_CHUNKS = 25
_LOADERS = 2
_LONG_MERGE = 2_000_000
_LONGEST_MERGE_S = 24 * 3600.0
_LONGEST_BULK_BYTES = 20_000_000


def build(
    server: Server,
    name: str,
    corpus: Corpus,
    analyzer: Analyzer = "english",
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
    shards: int = 1,
    k1: float = 1.2,
    b: float = 0.75,
) -> IndexInfo:
    """Build an index on a server, or resume an interrupted build of the same corpus.

    Passages are stored under their own ids, so one that is sent twice is stored once. The index's
    mapping holds the place reached, where a build resumes after the server was away.

    Args:
        server: The server.
        name: Name of the index.
        corpus: The passages.
        analyzer: How text becomes terms.
        overwrite: Delete an index of this name first, if turnrl built it.
        on_progress: Called with the number of passages indexed so far.
        shards: Primary shards.
        k1: BM25's saturation of term frequency.
        b: BM25's normalisation by length.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the index exists already, the server stays away, or passages are missing.
    """
    access = Access.of(server)
    meta: dict[str, Any] = {
        "backend": "elasticsearch",
        "source": corpus.source.name,
        "splitter": str(corpus.splitter),
        "analyzer": analyzer,
        "format": FORMAT,
        "build": {**corpus.identity, "shards": shards, "k1": k1, "b": b},
    }
    with access.connect(max(server.request_s("elasticsearch"), 60.0)) as client:
        return _Builder(client, access, server.retries, name, corpus, meta, on_progress).build(
            overwrite
        )


@dataclass
class _Builder:
    client: Elasticsearch
    access: Access
    retries: int
    name: str
    corpus: Corpus
    meta: dict[str, Any]
    on_progress: Callable[[int], None] | None

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
                say(
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
            if progress and not overwrite and meta == self.meta:
                say(f"resuming index {self.name!r} after passage {progress['passages']:,}")
                return Mark(**progress)
            if not overwrite:
                exists = "holds another, unfinished build" if progress else "exists already"
                raise ToolError(
                    f"index {self.name!r} at {self.access.label} {exists}. Add --overwrite to "
                    "rebuild it, or choose another name."
                )
            self._do(lambda: indices.delete(index=self.name))
        asked = self.meta["build"]
        text = {
            "type": "text",
            "analyzer": self.meta["analyzer"],
            "similarity": "turnrl",
            "index_options": "freqs",
        }
        mappings = {
            "dynamic": "strict",
            "_meta": {"turnrl": {**self.meta, "progress": asdict(Mark())}},
            "properties": {
                # one field for both, as in the embedded index: words of titles weigh no more
                "title": {"type": "text", "index": False, "copy_to": "contents"},
                "text": {"type": "text", "index": False, "copy_to": "contents"},
                "contents": text,
            },
        }
        settings = {
            "number_of_shards": asked["shards"],
            "number_of_replicas": 0,
            "refresh_interval": "-1",
            "similarity": {"turnrl": {"type": "BM25", "k1": asked["k1"], "b": asked["b"]}},
        }
        self._do(lambda: indices.create(index=self.name, mappings=mappings, settings=settings))
        return Mark()

    def _load(self, start: Mark) -> Mark:
        """Send everything after `start`. `reached` follows the server's acknowledgements."""
        self.reached = self.saved = start
        sent: collections.deque[tuple[Mark, Future[None]]] = collections.deque()
        # the client's own `parallel_bulk` sends the whole rest of the corpus before it raises the
        # error of one chunk; this stops with the chunks in flight
        with ThreadPoolExecutor(_LOADERS) as pool:
            try:
                for chunk, mark in self.corpus.chunks(start):
                    sent.append((mark, pool.submit(self._send, chunk)))
                    if len(sent) > 2 * _LOADERS:
                        self._acknowledge(*sent.popleft())
                while sent:
                    self._acknowledge(*sent.popleft())
            finally:
                pool.shutdown(cancel_futures=True)
        return self.reached

    def _send(self, chunk: list[Passage]) -> None:
        from elasticsearch import helpers

        actions = (
            {"_index": self.name, "_id": p.id, "title": p.title, "text": p.text} for p in chunk
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
        if self.on_progress:
            self.on_progress(mark.passages)
        if mark.passages - self.saved.passages >= _SAVE_EVERY_CHUNKS * self.corpus.chunk:
            self.saved = mark
            self._save({**self.meta, "progress": asdict(mark)})

    def _refusal(self, item: dict[str, Any]) -> Exception:
        (reply,) = item.values()
        reason = self.access.clean(reply.get("error"))
        if reply.get("status") in RETRIED:
            return Unavailable(f"status {reply['status']}: {reason}")
        return ToolError(f"{self.access.label} refused passage {reply.get('_id')!r} ({reason}).")

    def _save(self, meta: dict[str, Any]) -> None:
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
        analyzer, k1, b = self.meta["analyzer"], *(self.meta["build"][n] for n in ("k1", "b"))
        meta = {
            **self.meta,
            "version": f"elasticsearch-{mark.digest}-{analyzer}-{k1:g}-{b:g}",
            "passages": mark.passages,
            "built": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._save(meta)
        return described(meta, "elasticsearch", self.name, f"index {self.name!r}")

    def _merge(self, mark: Mark) -> None:
        """Merge the finished index into one segment, which saves a quarter of the work per query.

        An unmerged index is complete too, so a failure is only printed.
        """
        if mark.passages > _LONG_MERGE:
            say(f"index {self.name!r} has all passages; the server merges it for some minutes")
        patient = self.client.options(request_timeout=_LONGEST_MERGE_S)
        try:
            patient.indices.forcemerge(index=self.name, max_num_segments=1)
        except Exception as error:
            meaning = translate(error, self.access)
            if meaning is error:
                raise
            say(f"index {self.name!r} was not merged, so it is slower ({meaning})")
