"""An index on an Elasticsearch server: batching, retries, outages, secrets, and how it is built.

Three rules hold throughout. What an outage produced never leaves this module as an answer: a search
returns whole answers or raises. Secrets are read from the environment when a connection is made,
live in the client alone, and are struck out of every message. And the official client does the
talking; it is imported here only when a connection is made.
"""

from __future__ import annotations

import base64
import binascii
import collections
import datetime
import email.utils
import itertools
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from turnrl import Passage, RecipeError, ToolError
from turnrl_wiki_search.index import FORMAT, Analyzer, Hit, IndexInfo, SearchIndex, build_command
from turnrl_wiki_search.sources import Corpus, Mark

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

MAJORS = (8, 9)
"""Server versions that a client of major 8 can talk to."""

_RETRIED = (429, 502, 503, 504)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_LONGEST_BACKOFF_S = 8.0
_LONGEST_PAUSE_S = 60.0
_PROBE_EVERY_S = 2.0
_MARGIN_S = 60.0
_LANES = 2
_BATCH = 64
_GATHER_S = 0.002
_SAVE_EVERY = 50_000
_LOADERS = 2
_LONG_MERGE = 2_000_000
_LONGEST_MERGE_S = 24 * 3600.0
_LONGEST_BULK_BYTES = 20_000_000


@dataclass(frozen=True)
class Server:
    """How to reach an Elasticsearch server, without any secret in it: this is what a recipe holds.

    The three secrets are given as `${NAME}`, which names an environment variable; a literal is
    refused, so that none can be saved with a run. What is not given comes from the environment (see
    `WikiSearch`).

    Args:
        url: Address, or addresses of one cluster.
        api_key: `${NAME}` of the API key.
        username: User for basic authentication.
        password: `${NAME}` of the password.
        cloud_id: `${NAME}` of the id of an Elastic Cloud deployment.
        ca_certs: File with the certificates to trust.
        timeout_s: Seconds that one request may take.
        retries: Attempts after a first failure, before the server counts as out of reach.
        wait_s: Seconds that a caller then waits for it to come back.
    Raises:
        RecipeError: If a secret is written out, two ways of access are mixed, or a number makes no
            sense.
    """

    url: str | list[str] | None = None
    api_key: str | None = None
    username: str | None = None
    password: str | None = None
    cloud_id: str | None = None
    ca_certs: str | None = None
    timeout_s: float = 10.0
    retries: int = 5
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("api_key", "password", "cloud_id"):
            value = getattr(self, name)
            if value is not None and not _REFERENCE.fullmatch(value):
                raise RecipeError(
                    f"{name} must name an environment variable, as '${{NAME}}' (in quotes on a "
                    "command line); what it holds now is not shown, for it may be the secret "
                    "itself. Recipes are saved with every run."
                )
        if self.url is not None and self.cloud_id is not None:
            raise RecipeError(
                "url and cloud_id are two ways to name one server. Leave one of them out."
            )
        if self.api_key is not None and self.password is not None:
            raise RecipeError(
                "api_key and password are two ways to sign in. Leave one of them out."
            )
        if self.timeout_s <= 0 or self.retries < 0 or self.wait_s < 0:
            raise RecipeError(
                f"timeout_s is {self.timeout_s}, retries {self.retries} and wait_s {self.wait_s}; "
                "the first must be above 0, the others 0 or more."
            )
        for url in [self.url] if isinstance(self.url, str) else self.url or []:
            _check_url(url, "url")

    @property
    def longest_answer_s(self) -> float:
        """No search takes longer: all attempts, the wait, and a margin for its turn."""
        attempts = (self.retries + 2) * (self.timeout_s + _LONGEST_PAUSE_S)
        return attempts + self.wait_s + _PROBE_EVERY_S + _MARGIN_S


def _check_url(url: str, name: str) -> None:
    parts = urlsplit(url)
    if "@" in url:
        raise RecipeError(
            f"{name} holds a user or password. Give the address alone, and the password as "
            f"'${{NAME}}' in 'password'."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RecipeError(f"{name} is {url!r}; it must look like http://localhost:9200.")


@dataclass(frozen=True)
class _Access:
    """A server with the secrets that open it; it is never printed."""

    label: str
    options: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    credentials: str

    @classmethod
    def of(cls, server: Server) -> _Access:
        options: dict[str, Any] = {}
        secrets: list[str] = []
        environment = os.environ

        def secret(name: str) -> tuple[str | None, str]:
            """A secret and the variable it comes from."""
            reference = getattr(server, name)
            variable = reference[2:-1] if reference else f"TURNRL_ES_{name.upper()}"
            value = environment.get(variable)
            if reference and not value:
                raise RecipeError(
                    f"{name} names the environment variable {variable}, which is not set. Set it."
                )
            if value:
                secrets.append(value)
            return value or None, variable

        cloud_id, variable = secret("cloud_id") if server.url is None else (None, "")
        if cloud_id:
            options["cloud_id"] = cloud_id
            label = f"the Elastic Cloud deployment in ${{{variable}}}"
            secrets += _cloud_hosts(cloud_id)
        else:
            urls = server.url or environment.get("TURNRL_ES_URL") or "http://localhost:9200"
            hosts = urls.split(",") if isinstance(urls, str) else list(urls)
            for url in hosts:
                _check_url(url, "url" if server.url else "TURNRL_ES_URL")
            options["hosts"] = [_with_port(url) for url in hosts]
            label = ", ".join(hosts)
        api_key, variable = secret("api_key") if server.password is None else (None, "")
        credentials = "no credentials (set TURNRL_ES_API_KEY or TURNRL_ES_PASSWORD)"
        if api_key:
            options["api_key"] = api_key
            credentials = f"the API key in ${{{variable}}}"
        else:
            password, variable = secret("password")
            username = server.username or environment.get("TURNRL_ES_USERNAME") or "elastic"
            if password:
                options["basic_auth"] = (username, password)
                secrets.append(base64.b64encode(f"{username}:{password}".encode()).decode())
                credentials = f"user {username!r} with the password in ${{{variable}}}"
            elif server.username:
                raise RecipeError(
                    f"username is {username!r}, and there is no password: {variable} is not set. "
                    "Set it."
                )
        ca_certs = server.ca_certs or environment.get("TURNRL_ES_CA_CERTS")
        if ca_certs and not os.path.isfile(ca_certs):  # noqa: PTH113
            raise RecipeError(f"no file {ca_certs!r} with certificates to trust. Correct ca_certs.")
        if ca_certs and (cloud_id or all(url.startswith("https:") for url in options["hosts"])):
            options["ca_certs"] = ca_certs
        elif server.ca_certs:
            raise RecipeError(
                f"ca_certs is {ca_certs!r}, and {label} is not https. Leave it out, or use https."
            )
        return cls(label, options, tuple(secrets), credentials)

    def connect(self, timeout_s: float) -> Elasticsearch:
        import elasticsearch

        if elasticsearch.__version__[0] != 8:
            found = ".".join(map(str, elasticsearch.__version__))
            raise ToolError(
                f"the Python client elasticsearch {found} is installed, and turnrl needs one of "
                "major 8, which serves servers of major 8 and 9. Install it: pip install "
                "'elasticsearch>=8.19,<9'"
            )
        _silence(self.secrets)
        try:
            return elasticsearch.Elasticsearch(
                **self.options,
                request_timeout=timeout_s,
                max_retries=0,
                retry_on_timeout=False,
                connections_per_node=2 * _LANES,
            )
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.label}: {self.clean(error)}") from None

    def clean(self, error: object) -> str:
        """An error's text, short and without secrets."""
        return _strike(" ".join(str(error).split()), self.secrets)[:300]


def _cloud_hosts(cloud_id: str) -> list[str]:
    """What tells as much as a cloud id: its encoded part, and the host names in that."""
    encoded = cloud_id.rpartition(":")[2]
    try:
        domain, *names = base64.b64decode(encoded).decode().split("$")
    except (binascii.Error, UnicodeDecodeError):
        return [encoded]
    return [encoded, *(f"{name}.{domain.partition(':')[0]}" for name in names if name)]


def _with_port(url: str) -> str:
    """`url` with the port that the client insists on: 9200 for http, 443 for https."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 9200
    return parts._replace(netloc=f"{parts.netloc}:{port}").geturl()


def _strike(text: str, secrets: Sequence[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


class _Striker(logging.Filter):
    """Strikes secrets out of the client's log lines, which name hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        struck = _strike(message, tuple(self.secrets))
        if struck != message or record.exc_info:
            record.msg, record.args, record.exc_info, record.exc_text = struck, (), None, None
        return True


_striker = _Striker()
_LOGGERS = (
    "elastic_transport.node",
    "elastic_transport.node_pool",
    "elastic_transport.transport",
    "elasticsearch",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)


def _silence(secrets: Sequence[str]) -> None:
    _striker.secrets.update(secrets)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_striker)


class _Unavailable(Exception):
    """The server cannot answer now, and may later."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def _translate(error: Exception, access: _Access) -> Exception:
    """What an error of the client's means: `_Unavailable` if the same request may succeed later."""
    import elastic_transport
    import elasticsearch

    what = access.clean(_cause(error))
    if isinstance(error, elasticsearch.UnsupportedProductError):
        return ToolError(
            f"{access.label} answers, but not as an Elasticsearch server ({what}). Correct the url."
        )
    if isinstance(error, elasticsearch.ApiError):
        status = error.meta.status
        if status in _RETRIED:
            return _Unavailable(
                f"status {status}: {what}", _retry_after_s(error.meta.headers.get("retry-after"))
            )
        if status == 406 or "media_type_header_exception" in what or "media-type" in what:
            return ToolError(
                f"{access.label} does not speak the protocol of the Elasticsearch 8 client "
                f"({what}). turnrl works with servers of major {' and '.join(map(str, MAJORS))}; "
                "upgrade the server."
            )
        if status in (401, 403):
            return ToolError(
                f"{access.label} refused {access.credentials} (status {status}: {what}). Correct "
                "them, or grant 'monitor' on the cluster and 'read' and 'view_index_metadata' on "
                "the index; building needs 'manage' and 'write' on it too."
            )
        return ToolError(f"{access.label} refused a request (status {status}: {what}).")
    if isinstance(error, elastic_transport.TlsError) and "CERTIFICATE" in what.upper():
        return ToolError(
            f"the certificate of {access.label} is not trusted ({what}). Set ca_certs, or "
            "TURNRL_ES_CA_CERTS, to the file with the certificate that signed it."
        )
    if isinstance(error, elastic_transport.SerializationError):
        return ToolError(
            f"{access.label} sent something that is not JSON ({what}). Correct the url."
        )
    if isinstance(error, elastic_transport.TransportError):
        return _Unavailable(what)
    return error


def _cause(error: Exception) -> object:
    """What an error of the client's says at its fullest; its own text leaves the cause out."""
    import elastic_transport

    if isinstance(error, elastic_transport.TransportError):
        return error.message
    body = getattr(error, "body", None)
    told = body.get("error") if isinstance(body, dict) else None
    return (told.get("reason") or told) if isinstance(told, dict) else error


def _retry_after_s(header: str | None) -> float:
    """Seconds that a `Retry-After` header asks for, given as a number or a date; 0 without one."""
    if not header:
        return 0.0
    if header.strip().isdigit():
        return float(header)
    try:
        when = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())


def _backoff_s(attempt: int) -> float:
    """Half to all of 0.25, 0.5, 1, 2, 4, 8, 8 ... seconds, for attempts 1, 2, 3 ..."""
    return min(_LONGEST_BACKOFF_S, 0.25 * 2.0 ** min(attempt - 1, 10)) * random.uniform(0.5, 1.0)


def _pause_s(attempt: int, fault: _Unavailable) -> float:
    """The pause before another attempt: the server's wish up to a minute, or our own."""
    return max(_backoff_s(attempt), min(fault.retry_after_s, _LONGEST_PAUSE_S))


class _Breaker:
    """Opens when the server is out of reach, for all threads at once; closes with the first answer.

    While it is open nobody sends, but for one request every two seconds, which is somebody's own.
    """

    def __init__(self, label: str, wait_s: float) -> None:
        self._label = label
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self._since: float | None = None
        self._next_probe = 0.0
        self._reason = ""

    @property
    def is_open(self) -> bool:
        return self._since is not None

    def enter(self) -> None:
        """Let a new request in; one that comes after an outage was given up starts afresh."""
        with self._condition:
            if self._since is not None and time.monotonic() >= self._since + self._wait_s:
                self._since = None
        self.wait()

    def trip(self, reason: str) -> None:
        with self._condition:
            self._reason = reason
            if self._since is None:
                self._since = time.monotonic()
                self._next_probe = self._since + _PROBE_EVERY_S
                if self._wait_s:
                    _say(
                        f"{self._label} does not answer ({reason}); the run waits for it, "
                        f"{self._wait_s:g} s at most"
                    )

    def wait(self) -> None:
        """Return when the server is back, or when it is this caller's turn to try.

        Raises:
            ToolError: If it has been away for too long.
        """
        with self._condition:
            while self._since is not None:
                now = time.monotonic()
                end = self._since + self._wait_s
                if now >= end:
                    waited = f" It was waited for, {self._wait_s:g} s." if self._wait_s else ""
                    raise ToolError(
                        f"the search server {self._label} does not answer "
                        f"({self._reason}).{waited} Start it, or correct 'url'; then resume the "
                        "run from its last checkpoint with --ckpt_path, or raise 'wait_s' to wait "
                        "longer. With 'cache' and 'offline: true' a finished run replays without "
                        "a server."
                    )
                if now >= self._next_probe:
                    self._next_probe = now + _PROBE_EVERY_S
                    return
                self._condition.wait(min(end, self._next_probe) - now)

    def close(self) -> None:
        if self._since is None:
            return
        with self._condition:
            if self._since is not None:
                away = time.monotonic() - self._since
                self._since = None
                if self._wait_s:
                    _say(f"{self._label} answers again after {away:.0f} s; the run goes on")
                self._condition.notify_all()


class _Batcher:
    """Joins what threads ask within two milliseconds, or while earlier requests are out.

    Lanes are threads that exist only while there is work. They are daemons: a run that is
    interrupted while a lane waits for a dead server must be able to end.
    """

    def __init__(self, send: Callable[[list[tuple[str, int]]], list[list[Hit]]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[tuple[str, int], Future[list[Hit]]]] = (
            collections.deque()
        )
        self._lanes = 0

    def ask(self, items: Sequence[tuple[str, int]]) -> list[list[Hit]]:
        futures: list[Future[list[Hit]]] = [Future() for _ in items]
        with self._lock:
            self._queue.extend(zip(items, futures, strict=True))
            if self._lanes < _LANES:
                self._lanes += 1
                threading.Thread(target=self._lane, name="turnrl-search", daemon=True).start()
        return [future.result() for future in futures]

    def _lane(self) -> None:
        while True:
            if len(self._queue) < _BATCH // 2:
                time.sleep(_GATHER_S)
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                if not batch:
                    self._lanes -= 1
                    return
            try:
                answers = self._send([item for item, _ in batch])
            except BaseException as error:  # every caller must hear of it, whatever it is
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    future.set_result(answer)


class ElasticIndex(SearchIndex):
    """An index on a server. Nothing is asked until `info` or `search`.

    Args:
        server: How to reach it.
        index: Name of the index.
    """

    def __init__(self, server: Server, index: str) -> None:
        self._access = _Access.of(server)
        self._client = self._access.connect(server.timeout_s)
        self._retries = server.retries
        self._name = index
        self._breaker = _Breaker(self._access.label, server.wait_s)
        self._batcher = _Batcher(self._search)

    def info(self) -> IndexInfo:
        """Its description. A server that is away is not waited for: this is asked before a run."""
        meta = _describe(self._client, self._access, self._name, min(self._retries, 2))
        if meta.get("format") != FORMAT:
            raise ToolError(
                f"index {self._name!r} at {self._access.label} has format {meta.get('format')}, "
                f"and this turnrl-wiki-search reads format {FORMAT}. Build it again: "
                f"'{build_command('elasticsearch', self._name, str(meta.get('source', 'SOURCE')))} "
                "--overwrite'."
            )
        if "progress" in meta:
            raise ToolError(
                f"index {self._name!r} at {self._access.label} is unfinished: "
                f"{meta['progress']['passages']:,} passages so far. Finish it with "
                f"'{build_command('elasticsearch', self._name, str(meta['source']))}'."
            )
        return _info(meta, self._name)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return self._batcher.ask([(query, k) for query in queries])

    def close(self) -> None:
        self._client.close()

    def _search(self, items: list[tuple[str, int]]) -> list[list[Hit]]:
        """Answer a batch, whatever it takes; only what failed is asked again."""
        answers: dict[int, list[Hit]] = {}
        failures = 0
        self._breaker.enter()
        while True:
            waiting = [i for i in range(len(items)) if i not in answers]
            try:
                self._ask(items, waiting, answers)
            except _Unavailable as fault:
                failures += 1
                if failures <= self._retries and not self._breaker.is_open:
                    time.sleep(_pause_s(failures, fault))
                else:
                    self._breaker.trip(str(fault))
                    self._breaker.wait()
                    if not self._breaker.is_open:
                        failures = 0
            else:
                self._breaker.close()
                return [answers[i] for i in range(len(items))]

    def _ask(
        self, items: list[tuple[str, int]], waiting: list[int], answers: dict[int, list[Hit]]
    ) -> None:
        """One request; fills in the answers that came, and raises for the first that did not."""
        searches: list[dict[str, Any]] = []
        for i in waiting:
            query, k = items[i]
            # a shard that is missing would silently shorten the answer, so partial results are
            # refused
            searches.append({"index": self._name, "allow_partial_search_results": False})
            searches.append(
                {
                    "query": {"match": {"contents": {"query": query}}},
                    "size": k,
                    "track_total_hits": False,
                }
            )
        try:
            response = self._client.msearch(searches=searches)
        except Exception as error:
            raise _translate(error, self._access) from None
        replies = response["responses"]
        fault: _Unavailable | None = None
        for i, reply in zip(waiting, replies, strict=True):
            status = reply.get("status", 200)
            if (
                status == 200
                and not reply.get("timed_out")
                and not reply.get("_shards", {}).get("failed")
            ):
                hits = reply.get("hits", {}).get("hits", [])
                answers[i] = [
                    Hit(Passage(h["_id"], h["_source"]["title"], h["_source"]["text"]), h["_score"])
                    for h in hits
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
            if status not in (200, *_RETRIED):
                raise ToolError(
                    f"{self._access.label} refused a search (status {status}: {reason})."
                )
            fault = _Unavailable(f"status {status}: {reason}")
        if fault is not None:
            raise fault


def _call(
    access: _Access, request: Callable[[], Any], retries: int, what: str = "does not answer"
) -> Any:
    """One administrative request, tried again a few times."""
    for attempt in itertools.count(1):
        try:
            return request()
        except Exception as error:
            meaning = _translate(error, access)
            if not isinstance(meaning, _Unavailable):
                if meaning is error:
                    raise
                raise meaning from None
            if attempt > retries:
                raise ToolError(
                    f"the search server {access.label} {what} ({meaning}). Start it, or correct "
                    "'url' (TURNRL_ES_URL). With 'cache' and 'offline: true' a finished run "
                    "replays without a server."
                ) from None
            time.sleep(_pause_s(attempt, meaning))
    raise AssertionError("unreachable")


def _check_version(client: Elasticsearch, access: _Access, retries: int) -> None:
    """Raise if a node is of a major version that the client does not serve.

    An API key may not be allowed to ask, which is no fault.
    """
    quiet = client.options(ignore_status=[403])
    response = _call(access, lambda: quiet.nodes.info(filter_path="nodes.*.version"), retries)
    for node in response.get("nodes", {}).values():
        if int(node["version"].split(".")[0]) not in MAJORS:
            raise ToolError(
                f"{access.label} runs Elasticsearch {node['version']}, and turnrl works with "
                f"servers of major {' and '.join(map(str, MAJORS))}. Upgrade the server."
            )


def _describe(client: Elasticsearch, access: _Access, name: str, retries: int) -> dict[str, Any]:
    """What turnrl wrote into an index's mapping."""
    _check_version(client, access, retries)
    quiet = client.options(ignore_status=[404])
    response = _call(access, lambda: quiet.indices.get_mapping(index=name), retries)
    if response.meta.status == 404:
        names = sorted(n for n in _names(client, access, retries) if not n.startswith("."))
        found = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "none"
        raise ToolError(
            f"no index {name!r} at {access.label} (found: {found}). Build it with "
            f"'{build_command('elasticsearch', name)}', or correct 'index'."
        )
    meta = [m["mappings"].get("_meta", {}).get("turnrl") for m in response.values()]
    if len(meta) != 1 or not isinstance(meta[0], dict):
        raise ToolError(
            f"index {name!r} at {access.label} was not built by turnrl: its mapping carries no "
            "description. Choose another name, and build it with "
            f"'{build_command('elasticsearch', 'NAME')}'."
        )
    return dict(meta[0])


def _names(client: Elasticsearch, access: _Access, retries: int) -> list[str]:
    quiet = client.options(ignore_status=[403])
    response = _call(
        access,
        lambda: quiet.indices.get_settings(index="*", filter_path="*.settings.index.uuid"),
        retries,
    )
    return [] if response.meta.status == 403 else list(response)


def _info(meta: dict[str, Any], name: str) -> IndexInfo:
    fields = IndexInfo.__dataclass_fields__
    return IndexInfo(**{**{k: v for k, v in meta.items() if k in fields}, "index": name})


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
    """Build an index on a server, or take up an interrupted build of the same corpus.

    Passages are stored under their own ids, so what is sent twice is there once. The place reached
    is kept in the index's mapping; a server that goes away is waited for, and loading goes on from
    that place.

    Args:
        server: How to reach the server.
        name: Name of the index.
        corpus: Its passages.
        analyzer: How text becomes terms.
        overwrite: Delete an index of this name first, if turnrl built it.
        on_progress: Called with the number of passages indexed so far.
        shards: Primary shards.
        k1: BM25's saturation of term frequency.
        b: BM25's normalisation by length.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the index is there already, the server stays away, or the index does not hold
            what was read.
    """
    access = _Access.of(server)
    client = access.connect(max(server.timeout_s, 60.0))
    try:
        return _Builder(
            client, access, server, name, corpus, analyzer, (shards, k1, b), on_progress
        ).build(overwrite)
    finally:
        client.close()


class _Builder:
    def __init__(
        self,
        client: Elasticsearch,
        access: _Access,
        server: Server,
        name: str,
        corpus: Corpus,
        analyzer: Analyzer,
        settings: tuple[int, float, float],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._client, self._access, self._server = client, access, server
        self._name, self._corpus, self._analyzer = name, corpus, analyzer
        self._shards, self._k1, self._b = settings
        self._on_progress = on_progress
        self._meta: dict[str, Any] = {
            "backend": "elasticsearch",
            "source": corpus.source.name,
            "splitter": str(corpus.splitter),
            "analyzer": analyzer,
            "format": FORMAT,
            "build": {**corpus.identity, "shards": self._shards, "k1": self._k1, "b": self._b},
        }

    def build(self, overwrite: bool) -> IndexInfo:
        mark = self._prepare(overwrite)
        failures, reached = 0, -1
        while True:
            try:
                mark = self._load(mark)
                break
            except _Unavailable as fault:
                mark = self._reached
                failures = 1 if mark.passages > reached else failures + 1
                reached = mark.passages
                if failures > max(self._server.retries, 1):
                    raise ToolError(
                        f"{self._access.label} failed {failures} times after passage "
                        f"{mark.passages:,} ({fault}). When it is well again, the same command "
                        "goes on from there."
                    ) from None
                _say(
                    f"{self._access.label} failed after passage {mark.passages:,} ({fault}); "
                    "trying again from there"
                )
                time.sleep(_pause_s(failures + 2, fault))
        return self._finish(mark)

    def _do(self, request: Callable[[], Any]) -> Any:
        return _call(self._access, request, max(self._server.retries, 2))

    def _prepare(self, overwrite: bool) -> Mark:
        """Make the index, or find the place that an interrupted build reached."""
        _check_version(self._client, self._access, 2)
        indices = self._client.indices
        if self._do(lambda: indices.exists(index=self._name)):
            meta = _describe(self._client, self._access, self._name, 2)
            progress = meta.pop("progress", None)
            if progress and not overwrite and meta == self._meta:
                _say(f"going on with index {self._name!r} after passage {progress['passages']:,}")
                return Mark(**progress)
            if not overwrite:
                state = "an unfinished build of something else" if progress else "there already"
                raise ToolError(
                    f"index {self._name!r} at {self._access.label} is {state}. Add --overwrite to "
                    "build it anew, or choose another name."
                )
            self._do(lambda: indices.delete(index=self._name))
        text = {
            "type": "text",
            "analyzer": self._analyzer,
            "similarity": "turnrl",
            "index_options": "freqs",
        }
        mappings = {
            "dynamic": "strict",
            "_meta": {"turnrl": {**self._meta, "progress": Mark().as_dict()}},
            "properties": {
                # one field holds both, as in the embedded index: a title's words weigh like any
                # other
                "title": {"type": "text", "index": False, "copy_to": "contents"},
                "text": {"type": "text", "index": False, "copy_to": "contents"},
                "contents": text,
            },
        }
        settings = {
            "number_of_shards": self._shards,
            "number_of_replicas": 0,
            "refresh_interval": "-1",
            "similarity": {"turnrl": {"type": "BM25", "k1": self._k1, "b": self._b}},
        }
        self._do(lambda: indices.create(index=self._name, mappings=mappings, settings=settings))
        return Mark()

    def _load(self, start: Mark) -> Mark:
        """Send everything after `start`; `_reached` follows what the server has acknowledged."""
        self._reached = self._saved = start
        sent: collections.deque[tuple[Mark, Future[None]]] = collections.deque()
        # the client's own `parallel_bulk` sends the whole rest of the corpus before it raises the
        # error of one chunk; this one stops with the chunks that are under way
        with ThreadPoolExecutor(_LOADERS) as pool:
            try:
                for chunk, mark in self._corpus.chunks(start):
                    sent.append((mark, pool.submit(self._send, chunk)))
                    if len(sent) > 2 * _LOADERS:
                        self._acknowledge(*sent.popleft())
                while sent:
                    self._acknowledge(*sent.popleft())
            finally:
                pool.shutdown(cancel_futures=True)
        return self._reached

    def _send(self, chunk: list[Passage]) -> None:
        from elasticsearch import helpers

        actions = (
            {"_index": self._name, "_id": p.id, "title": p.title, "text": p.text} for p in chunk
        )
        try:
            _, faults = helpers.bulk(
                self._client,
                actions,
                chunk_size=len(chunk),
                max_chunk_bytes=_LONGEST_BULK_BYTES,
                raise_on_error=False,
                raise_on_exception=True,
            )
        except Exception as error:
            raise _translate(error, self._access) from None
        for fault in faults if isinstance(faults, list) else []:
            self._refuse(fault)

    def _acknowledge(self, mark: Mark, sent: Future[None]) -> None:
        sent.result()
        self._reached = mark
        if self._on_progress:
            self._on_progress(mark.passages)
        if mark.passages - self._saved.passages >= _SAVE_EVERY:
            self._saved = mark
            self._save({**self._meta, "progress": mark.as_dict()})

    def _refuse(self, item: dict[str, Any]) -> None:
        (reply,) = item.values()
        reason = self._access.clean(reply.get("error"))
        if reply.get("status") in _RETRIED:
            raise _Unavailable(f"status {reply['status']}: {reason}")
        raise ToolError(f"{self._access.label} refused passage {reply.get('_id')!r} ({reason}).")

    def _save(self, meta: dict[str, Any]) -> None:
        self._do(lambda: self._client.indices.put_mapping(index=self._name, meta={"turnrl": meta}))

    def _finish(self, mark: Mark) -> IndexInfo:
        self._do(lambda: self._client.indices.refresh(index=self._name))
        held = self._do(lambda: self._client.count(index=self._name))["count"]
        if held != mark.passages:
            raise ToolError(
                f"{mark.passages:,} passages were read from {self._corpus.source.name!r}, and "
                f"index {self._name!r} holds {held:,}. Fewer means that some share an id: make ids "
                "unique, and build again with --overwrite."
            )
        self._merge(mark)
        settings = {"refresh_interval": None, "auto_expand_replicas": "0-1"}
        self._do(lambda: self._client.indices.put_settings(index=self._name, settings=settings))
        meta = {
            **self._meta,
            "version": f"elasticsearch-{mark.digest}-{self._analyzer}-{self._k1:g}-{self._b:g}",
            "passages": mark.passages,
            "built": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._save(meta)
        return _info(meta, self._name)

    def _merge(self, mark: Mark) -> None:
        """Put the index, which never changes again, into one segment: a quarter less work a query.

        An index that could not be merged is whole all the same, so that is said and no error.
        """
        if mark.passages > _LONG_MERGE:
            _say(
                f"all passages are in index {self._name!r}; the server merges it, for some minutes"
            )
        patient = self._client.options(request_timeout=_LONGEST_MERGE_S)
        try:
            patient.indices.forcemerge(index=self._name, max_num_segments=1)
        except Exception as error:
            meaning = _translate(error, self._access)
            if meaning is error:
                raise
            _say(f"index {self._name!r} was not merged, which makes it slower ({meaning})")


def _say(message: str) -> None:
    print(f"turnrl: {message}", file=sys.stderr, flush=True)
