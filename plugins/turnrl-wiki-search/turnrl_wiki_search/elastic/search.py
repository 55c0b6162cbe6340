"""Searches an index on a server. A search returns complete answers or raises."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from turnrl import Passage, ToolError, on_loop, result_of
from turnrl.servers import Patience, Unavailable
from turnrl_wiki_search.elastic.access import MAJORS, Access
from turnrl_wiki_search.elastic.asking import Asking
from turnrl_wiki_search.elastic.examining import (
    dimensions,
    examine_fields,
    examine_text,
    examine_vectors,
)
from turnrl_wiki_search.elastic.faults import RETRIED, call, translate
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex, build_command, described
from turnrl_wiki_search.server import REPLAY, RESUME, SearchServer

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

    from turnrl_wiki_search.encoding import Encoder, Vectors

_BATCH = 64
_PAGE = 1000
"""Passages per request when reading all of them."""
_LANES = 2
"""Requests in flight at once: the server works on one while we read the answers to another."""


@dataclass(frozen=True)
class _Examined:
    """The result of examining an index.

    Args:
        info: Its description.
        unit: True if the length of a query's vector has no meaning, so that it is made 1.
    """

    info: IndexInfo
    unit: bool = True


class ElasticIndex(SearchIndex):
    """An index on a server. It connects on the first `info` or `search`.

    Args:
        server: Settings of the server and its searches.
        index: Name of the index.
        of_run: True if a run searches; then messages explain how to resume or replay it.
    """

    def __init__(self, server: SearchServer, index: str, of_run: bool = True) -> None:
        self._access = Access.of(server)
        self._server, self._of_run = server, of_run
        self._timeout_s = server.request_s("elasticsearch")
        self._clients = {os.getpid(): self._access.connect(self._timeout_s)}
        self._retries = server.retries
        self._name = index
        self._asking = Asking.of(server)
        self._examined: _Examined | None = None
        self._examining = threading.Lock()
        self._free = threading.Semaphore(_LANES)
        name, wait_s = self._access.label, server.wait_s
        self._patience = Patience(name, wait_s, self._away, server.retries, setting="wait_s")

    @property
    def _client(self) -> Elasticsearch:
        """The client of this process. On its parent's connections, a fork would read answers to the
        parent's requests."""
        if (client := self._clients.get(os.getpid())) is None:
            client = self._access.connect(self._timeout_s)
            client = self._clients.setdefault(os.getpid(), client)
        return client

    @cached_property
    def _encoder(self) -> Encoder:
        """The encoder of queries. It computes on the CPU, because the run plans to use all of a
        GPU."""
        from turnrl_wiki_search.encoding import open_encoder

        return open_encoder(str(self._server.encoder), "cpu")

    def info(self) -> IndexInfo:
        """See `SearchIndex.info`. It is called before a run, so it does not wait for a server that
        is away."""
        return self._examine().info

    def _examine(self) -> _Examined:
        with self._examining:
            retries = min(self._retries, 2)
            self._examined = self._foreign(retries) if self._server.fields else self._own(retries)
            return self._examined

    def _own(self, retries: int) -> _Examined:
        meta = describe(self._client, self._access, self._name, retries, self._of_run)
        where = f"index {self._name!r} at {self._access.label}"
        if "progress" in meta:
            raise ToolError(
                f"{where} is unfinished: "
                f"{meta['progress']['passages']:,} passages so far. Finish it with "
                f"'{build_command('elasticsearch', self._name, str(meta['source']))}'."
            )
        vectors = meta.get("vectors")
        info = described(meta, "elasticsearch", self._name, where)
        info = replace(info, encoder=vectors["encoder"] if vectors else "none")
        if self._server.ranking == "bm25":
            return _Examined(info)
        examine_vectors(meta, where, self._name, self._encoder)
        way = digest(str(meta["vectors"]["version"]), *self._server.searched_by())
        return _Examined(replace(info, version=f"{info.version}-{self._server.ranking}-{way}"))

    def _foreign(self, retries: int) -> _Examined:
        """Describe an index that turnrl did not build; the settings name its fields."""
        client, access, server = self._client, self._access, self._server
        fields, encoder, unit = server.fields or {}, "unknown", True
        check_version(client, access, retries, self._of_run)
        quiet = client.options(ignore_status=[404])
        count = call(access, lambda: quiet.count(index=self._name), retries, self._of_run)
        if count.meta.status == 404:
            raise _absent(client, access, self._name, retries, "Correct 'index'.")
        examine_fields(client, access, self._name, fields, retries)
        examine_text(client, access, self._name, fields["text"], retries)
        if server.ranking != "bm25":
            encoder, field = self._encoder.name, fields["vector"]
            unit = dimensions(client, access, self._name, field, self._encoder, retries)
        how = digest(self._name, *server.searched_by())
        version = server.version and f"elasticsearch-{server.version}-{how}"
        passages = count["count"]
        info = IndexInfo("elasticsearch", self._name, version, passages=passages, encoder=encoder)
        return _Examined(info, unit)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        vectors: Sequence[Vectors | None] = [None] * len(queries)
        # an index that turnrl built is searched by words without an examination
        if self._asking != Asking("bm25", None):
            examined = self._examined or self._examine()
            vectors = self._encoded(queries, examined.unit)
        starts = range(0, len(queries), _BATCH)
        if len(starts) == 1:
            return self._answer(queries, vectors, k)

        # a pool would not do: its threads are no daemons, so Ctrl-C could not end a run that waits
        # for a dead server
        async def answers() -> list[list[list[Hit]]]:
            parts = [slice(start, start + _BATCH) for start in starts]
            requests = [result_of(self._answer, queries[part], vectors[part], k) for part in parts]
            replies = await asyncio.gather(*requests, return_exceptions=True)  # wait for all
            if error := next((r for r in replies if isinstance(r, BaseException)), None):
                raise error
            return cast("list[list[list[Hit]]]", replies)

        return [hits for batch in on_loop(answers()) for hits in batch]

    def _encoded(self, queries: Sequence[str], as_unit: bool) -> Sequence[Vectors | None]:
        """The vector of each query, of length 1 if `as_unit`; None if the ranking does not use
        vectors, or the vector is zero."""
        if self._server.ranking == "bm25":
            return [None] * len(queries)
        from turnrl_wiki_search.encoding import unit

        prefix = self._server.query_prefix
        vectors = self._encoder([f"{prefix}{query}" for query in queries], "query")
        rows = [(unit(row) if as_unit else row) if row.any() else None for row in vectors]
        return cast("list[Vectors | None]", rows)

    def passages(self) -> Iterator[Passage]:
        """Every passage, in the order in which the server stores them. A fault ends the reading,
        because the place reached is lost."""
        from elasticsearch import helpers

        count, expected = 0, self.info().passages
        pages = helpers.scan(
            self._client,
            query=self._asking.shown,
            index=self._name,
            size=_PAGE,
            allow_partial_search_results=False,
        )
        try:
            for hit in pages:
                count += 1
                yield self._asking.passage(hit)
        except helpers.ScanError as error:
            raise self._broke_off(count, self._access.clean(error)) from None
        except Exception as error:
            fault = translate(error, self._access)
            if not isinstance(fault, Unavailable):
                raise fault from None
            raise self._broke_off(count, str(fault)) from None
        if (
            count != expected and self._server.fields is None
        ):  # an index of somebody else may have grown
            raise self._broke_off(count, f"the index should have {expected} passages")

    def _broke_off(self, count: int, reason: str) -> ToolError:
        return ToolError(
            f"reading index {self._name!r} at {self._access.label} broke off after {count:,} "
            f"passages ({reason}). Run the command again once the server works."
        )

    def close(self) -> None:
        self._client.close()

    def _answer(
        self, queries: Sequence[str], vectors: Sequence[Vectors | None], k: int
    ) -> list[list[Hit]]:
        """Answer a batch; only failed queries are sent again."""
        answers: dict[int, list[Hit]] = {}
        request = self._patience.request()
        searches = [*map(partial(self._asking.bodies, k=k), queries, vectors)]
        with self._free:
            request.ask(lambda: self._ask(queries, searches, k, answers))
        return [answers[i] for i in range(len(queries))]

    def _away(self, problem: str) -> ToolError:
        return ToolError(
            f"the search server {self._access.label} {problem} Start it, or correct 'url'"
            f"{RESUME if self._of_run else ''}.{REPLAY if self._of_run else ''}"
        )

    def _ask(
        self,
        queries: Sequence[str],
        searches: Sequence[list[dict[str, object]]],
        k: int,
        answers: dict[int, list[Hit]],
    ) -> None:
        """Send one request, store its answers, and raise if some are missing."""
        waiting = [i for i in range(len(searches)) if i not in answers]
        lines: list[dict[str, object]] = []
        for i in waiting:
            # copies of a shard may differ in their deleted documents, and so in their scores. So a
            # query always goes to the same copies, while different queries use all of them
            where: dict[str, object] = {"index": self._name, "preference": digest(queries[i])}
            # a missing shard would silently shorten the answer, so partial results are refused
            where["allow_partial_search_results"] = False
            lines += [line for body in searches[i] for line in (where, body)]
        try:
            replies = self._client.msearch(searches=lines)["responses"] if lines else []
        except Exception as error:
            raise translate(error, self._access) from None
        fault: Unavailable | None = None
        remaining = iter(replies)
        for i in waiting:
            of_query = [*islice(remaining, len(searches[i]))]
            faults = [reply_fault for reply in of_query if (reply_fault := self._fault(reply))]
            if faults:
                fault = faults[0]
            else:
                answers[i] = self._asking.hits([reply["hits"]["hits"] for reply in of_query], k)
        if fault is not None:
            raise fault

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
        reason = self._access.clean(
            next(filter(None, [*causes, error.get("reason")]), "some shards did not answer")
        )
        if status == 404:
            gone = f"index {self._name!r} is gone from {self._access.label} ({reason})."
            if self._server.fields:
                raise ToolError(f"{gone} Correct 'index'.")
            command = build_command("elasticsearch", self._name, encoder=self._server.encoder)
            raise ToolError(f"{gone} Build it with '{command}'.")
        if status not in (200, *RETRIED):
            raise ToolError(f"{self._access.label} refused a search (status {status}: {reason}).")
        return Unavailable(f"status {status}: {reason}")


def digest(*parts: str) -> str:
    """A short name for settings."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def check_version(
    client: Elasticsearch, access: Access, retries: int, of_run: bool = False
) -> None:
    """Raise if a node has a major version that the client does not support.

    An API key that may not ask for versions is fine.
    """
    quiet = client.options(ignore_status=[403])
    response = call(
        access, lambda: quiet.nodes.info(filter_path="nodes.*.version"), retries, of_run
    )
    for node in response.get("nodes", {}).values():
        if int(node["version"].split(".")[0]) not in MAJORS:
            raise ToolError(
                f"{access.label} runs Elasticsearch {node['version']}, but turnrl works with "
                f"servers of major {' and '.join(map(str, MAJORS))}. Upgrade the server."
            )


def describe(
    client: Elasticsearch, access: Access, name: str, retries: int, of_run: bool = False
) -> dict[str, Any]:
    """The description that turnrl wrote into an index's mapping."""
    check_version(client, access, retries, of_run)
    quiet = client.options(ignore_status=[404])
    response = call(access, lambda: quiet.indices.get_mapping(index=name), retries, of_run)
    if response.meta.status == 404:
        command = build_command("elasticsearch", name)
        step = f"Build it with '{command}', or correct 'index'."
        raise _absent(client, access, name, retries, step)
    meta = [m["mappings"].get("_meta", {}).get("turnrl") for m in response.values()]
    if len(meta) != 1 or not isinstance(meta[0], dict):
        raise ToolError(
            f"index {name!r} at {access.label} was not built by turnrl: its mapping has no "
            "description. To search it as it is, name its fields: fields, as {text: body, title: "
            "headline}. Or choose another name, and build it with "
            f"'{build_command('elasticsearch', 'NAME')}'."
        )
    return dict(meta[0])


def _absent(client: Elasticsearch, access: Access, name: str, retries: int, step: str) -> ToolError:
    names = sorted(n for n in _names(client, access, retries) if not n.startswith("."))
    indices = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "none"
    return ToolError(f"no index {name!r} at {access.label} (found: {indices}). {step}")


def _names(client: Elasticsearch, access: Access, retries: int) -> list[str]:
    quiet = client.options(ignore_status=[403])
    response = call(
        access,
        lambda: quiet.indices.get_settings(index="*", filter_path="*.settings.index.uuid"),
        retries,
    )
    return [] if response.meta.status == 403 else list(response)
