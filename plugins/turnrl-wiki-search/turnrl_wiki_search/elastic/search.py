"""Searching an index on a server. A search returns complete answers or raises."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from turnrl import Passage, ToolError, on_loop, result_of
from turnrl.servers import Patience, Unavailable
from turnrl_wiki_search.elastic.access import MAJORS, Access
from turnrl_wiki_search.elastic.faults import RETRIED, call, translate
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex, build_command, described
from turnrl_wiki_search.server import Server

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

_BATCH = 64
_PAGE = 1000
"""Passages per request when all are read."""
_LANES = 2
"""Requests in flight at once: the server works on one while we read the answers to another."""


class ElasticIndex(SearchIndex):
    """An index on a server. It connects on the first `info` or `search`.

    Args:
        server: The server.
        index: Name of the index.
    """

    def __init__(self, server: Server, index: str) -> None:
        self._access = Access.of(server)
        self._timeout_s = server.request_s("elasticsearch")
        self._clients = {os.getpid(): self._access.connect(self._timeout_s)}
        self._retries = server.retries
        self._name = index
        self._free = threading.Semaphore(_LANES)
        name, wait_s = self._access.label, server.wait_s
        self._patience = Patience(name, wait_s, self._away, server.retries, setting="wait_s")

    @property
    def _client(self) -> Elasticsearch:
        """The client of this process. On its parent's connections, a fork would read the answers to
        its parent's requests."""
        if (client := self._clients.get(os.getpid())) is None:
            client = self._access.connect(self._timeout_s)
            client = self._clients.setdefault(os.getpid(), client)
        return client

    def info(self) -> IndexInfo:
        """Its description. Asked before a run, so it does not wait for a server that is away."""
        meta = describe(self._client, self._access, self._name, min(self._retries, 2))
        where = f"index {self._name!r} at {self._access.label}"
        if "progress" in meta:
            raise ToolError(
                f"{where} is unfinished: "
                f"{meta['progress']['passages']:,} passages so far. Finish it with "
                f"'{build_command('elasticsearch', self._name, str(meta['source']))}'."
            )
        return described(meta, "elasticsearch", self._name, where)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        batches = [queries[start : start + _BATCH] for start in range(0, len(queries), _BATCH)]
        if len(batches) == 1:
            return self._answer(queries, k)

        # not a pool: its threads are no daemons, so Ctrl-C could not end a run that waits for a
        # dead server
        async def answers() -> list[list[list[Hit]]]:
            requests = [result_of(self._answer, batch, k) for batch in batches]
            replies = await asyncio.gather(*requests, return_exceptions=True)  # wait for all
            if error := next((r for r in replies if isinstance(r, BaseException)), None):
                raise error
            return cast("list[list[list[Hit]]]", replies)

        return [hits for found in on_loop(answers()) for hits in found]

    def passages(self) -> Iterator[Passage]:
        """Every passage, read in the order in which the server stores them. A fault ends the
        reading, because the place reached is lost with it."""
        from elasticsearch import helpers

        count, expected = 0, self.info().passages
        pages = helpers.scan(
            self._client, index=self._name, size=_PAGE, allow_partial_search_results=False
        )
        try:
            for hit in pages:
                count += 1
                yield Passage(hit["_id"], hit["_source"]["title"], hit["_source"]["text"])
        except helpers.ScanError as error:
            raise self._broke_off(count, self._access.clean(error)) from None
        except Exception as error:
            fault = translate(error, self._access)
            if not isinstance(fault, Unavailable):
                raise fault from None
            raise self._broke_off(count, str(fault)) from None
        if count != expected:
            raise self._broke_off(count, f"the index should have {expected} passages")

    def _broke_off(self, count: int, reason: str) -> ToolError:
        return ToolError(
            f"reading index {self._name!r} at {self._access.label} broke off after {count:,} "
            f"passages ({reason}). Run the command again once the server works."
        )

    def close(self) -> None:
        self._client.close()

    def _answer(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Answer a batch; only failed queries are sent again."""
        answers: dict[int, list[Hit]] = {}
        request = self._patience.request()
        with self._free:
            request.ask(lambda: self._ask(queries, k, answers))
        return [answers[i] for i in range(len(queries))]

    def _away(self, problem: str) -> ToolError:
        return ToolError(
            f"the search server {self._access.label} {problem} Start it, or correct 'url'; then "
            "resume the run from its last checkpoint with --ckpt_path, or raise 'wait_s' to wait "
            "longer. With 'cache' and 'offline: true' a finished run replays without a server."
        )

    def _ask(self, queries: Sequence[str], k: int, answers: dict[int, list[Hit]]) -> None:
        """Send one request, store its answers, and raise if some are missing."""
        waiting = [i for i in range(len(queries)) if i not in answers]
        # a missing shard would silently shorten the answer, so partial results are refused
        where = {"index": self._name, "allow_partial_search_results": False}
        how = {"size": k, "track_total_hits": False}
        searches: list[dict[str, object]] = []
        for i in waiting:
            searches += [where, {"query": {"match": {"contents": {"query": queries[i]}}}, **how}]
        try:
            response = self._client.msearch(searches=searches)
        except Exception as error:
            raise translate(error, self._access) from None
        replies = response["responses"]
        fault: Unavailable | None = None
        for i, reply in zip(waiting, replies, strict=True):
            status = reply.get("status", 200)
            partial = reply.get("timed_out") or reply.get("_shards", {}).get("failed")
            if status == 200 and not partial:
                answers[i] = [
                    Hit(Passage(h["_id"], h["_source"]["title"], h["_source"]["text"]), h["_score"])
                    for h in reply["hits"]["hits"]
                ]
                continue
            reason = self._access.clean(
                reply.get("error", {}).get("reason") or "some shards did not answer"
            )
            if status == 404:
                raise ToolError(
                    f"index {self._name!r} is gone from {self._access.label} ({reason}). Build it "
                    f"with '{build_command('elasticsearch', self._name)}'."
                )
            if status not in (200, *RETRIED):
                raise ToolError(
                    f"{self._access.label} refused a search (status {status}: {reason})."
                )
            fault = Unavailable(f"status {status}: {reason}")
        if fault is not None:
            raise fault


def check_version(client: Elasticsearch, access: Access, retries: int) -> None:
    """Raise if a node has a major version that the client does not support.

    An API key that may not ask for versions is fine.
    """
    quiet = client.options(ignore_status=[403])
    response = call(access, lambda: quiet.nodes.info(filter_path="nodes.*.version"), retries)
    for node in response.get("nodes", {}).values():
        if int(node["version"].split(".")[0]) not in MAJORS:
            raise ToolError(
                f"{access.label} runs Elasticsearch {node['version']}, but turnrl works with "
                f"servers of major {' and '.join(map(str, MAJORS))}. Upgrade the server."
            )


def describe(client: Elasticsearch, access: Access, name: str, retries: int) -> dict[str, Any]:
    """The description that turnrl wrote into an index's mapping."""
    check_version(client, access, retries)
    quiet = client.options(ignore_status=[404])
    response = call(access, lambda: quiet.indices.get_mapping(index=name), retries)
    if response.meta.status == 404:
        names = sorted(n for n in _names(client, access, retries) if not n.startswith("."))
        indices = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "none"
        raise ToolError(
            f"no index {name!r} at {access.label} (found: {indices}). Build it with "
            f"'{build_command('elasticsearch', name)}', or correct 'index'."
        )
    meta = [m["mappings"].get("_meta", {}).get("turnrl") for m in response.values()]
    if len(meta) != 1 or not isinstance(meta[0], dict):
        raise ToolError(
            f"index {name!r} at {access.label} was not built by turnrl: its mapping has no "
            "description. Choose another name, and build it with "
            f"'{build_command('elasticsearch', 'NAME')}'."
        )
    return dict(meta[0])


def _names(client: Elasticsearch, access: Access, retries: int) -> list[str]:
    quiet = client.options(ignore_status=[403])
    response = call(
        access,
        lambda: quiet.indices.get_settings(index="*", filter_path="*.settings.index.uuid"),
        retries,
    )
    return [] if response.meta.status == 403 else list(response)
