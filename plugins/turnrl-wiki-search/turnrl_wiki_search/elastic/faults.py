"""Meaning of a server's faults, the requests to try again and when, and the wait through an outage.

What an outage produced is never an answer: it is `Unavailable`, which is tried again, or an error.
"""

from __future__ import annotations

import datetime
import email.utils
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from turnrl import ToolError
from turnrl_wiki_search.elastic.access import MAJORS, Access, Server
from turnrl_wiki_search.index import say

RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""

LANES = 2
"""Requests that are under way at once: the server reads one while we read the other's answers."""

_LONGEST_BACKOFF_S = 8.0
_LONGEST_PAUSE_S = 60.0
_PROBE_EVERY_S = 2.0
_MARGIN_S = 60.0


def longest_answer_s(server: Server) -> float:
    """No search takes longer: all attempts, the wait, and a margin for its turn."""
    attempts = (server.retries + 2) * (server.timeout_s + _LONGEST_PAUSE_S)
    return attempts + server.wait_s + _PROBE_EVERY_S + _MARGIN_S


class Unavailable(Exception):
    """The server cannot answer now, and may later."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def translate(error: Exception, access: Access) -> Exception:
    """Translate an error of the client's: `Unavailable` if the same request may succeed later."""
    import elastic_transport
    import elasticsearch

    what = access.clean(_cause(error))
    if isinstance(error, elasticsearch.UnsupportedProductError):
        return ToolError(
            f"{access.label} answers, but not as an Elasticsearch server ({what}). Correct the url."
        )
    if isinstance(error, elasticsearch.ApiError):
        status = error.meta.status
        if status in RETRIED:
            return Unavailable(
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
        return Unavailable(what)
    return error


def _cause(error: Exception) -> object:
    """Fullest cause of an error of the client's; its own text leaves the cause out."""
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


def pause_s(attempt: int, fault: Unavailable) -> float:
    """The pause before another attempt: the server's wish up to a minute, or our own."""
    return max(_backoff_s(attempt), min(fault.retry_after_s, _LONGEST_PAUSE_S))


class Gate:
    """Through it go all searches of an index: two at a time, and as an outage allows.

    The server counts as out of reach when one caller's retries are used up, and that holds for all:
    nobody sends then but for one request every two seconds, which is somebody's own. The first
    answer ends the outage. When it has lasted `server.wait_s`, everybody who waits is told so, and
    whoever comes later begins afresh.

    Args:
        label: The server, for messages.
        server: How often a request is tried again, and how long an outage may last.
    """

    def __init__(self, label: str, server: Server) -> None:
        self._label = label
        self._retries = server.retries
        self._wait_s = server.wait_s
        self._condition = threading.Condition()
        self._free = LANES
        self._since: float | None = None
        self._next_probe = 0.0
        self._reason = ""
        self._given_up = 0

    def send(self, request: Callable[[], None]) -> None:
        """Call `request` until it no longer raises `Unavailable`.

        Raises:
            ToolError: If the server has been away for too long.
        """
        with self._condition:
            given_up = self._given_up
            while not self._free:
                self._condition.wait()
                self._still_hoped_for(given_up)
            self._free -= 1
        try:
            self._try(request, given_up)
        finally:
            with self._condition:
                self._free += 1
                self._condition.notify_all()

    def _try(self, request: Callable[[], None], given_up: int) -> None:
        failures = 0
        while True:
            self._wait(given_up)
            try:
                request()
            except Unavailable as fault:
                failures += 1
                if failures <= self._retries and self._since is None:
                    time.sleep(pause_s(failures, fault))
                else:
                    failures = 0
                    self._open(str(fault), given_up)
            else:
                self._close()
                return

    def _open(self, reason: str, given_up: int) -> None:
        with self._condition:
            self._still_hoped_for(given_up)
            self._reason = reason
            if self._since is None:
                self._since = time.monotonic()
                self._next_probe = self._since + _PROBE_EVERY_S
                if self._wait_s:
                    say(
                        f"{self._label} does not answer ({reason}); the run waits for it, "
                        f"{self._wait_s:g} s at most"
                    )

    def _wait(self, given_up: int) -> None:
        """Return when the server is back, or when it is this caller's turn to try."""
        with self._condition:
            while self._since is not None:
                now = time.monotonic()
                end = self._since + self._wait_s
                if now >= end:
                    self._since = None
                    self._given_up += 1
                    self._condition.notify_all()
                elif now >= self._next_probe:
                    self._next_probe = now + _PROBE_EVERY_S
                    return
                else:
                    self._condition.wait(min(end, self._next_probe) - now)
            self._still_hoped_for(given_up)

    def _still_hoped_for(self, given_up: int) -> None:
        if self._given_up != given_up:
            waited = f" It was waited for, {self._wait_s:g} s." if self._wait_s else ""
            raise ToolError(
                f"the search server {self._label} does not answer ({self._reason}).{waited} Start "
                "it, or correct 'url'; then resume the run from its last checkpoint with "
                "--ckpt_path, or raise 'wait_s' to wait longer. With 'cache' and 'offline: true' a "
                "finished run replays without a server."
            )

    def _close(self) -> None:
        with self._condition:
            if self._since is not None:
                away = time.monotonic() - self._since
                self._since = None
                if self._wait_s:
                    say(f"{self._label} answers again after {away:.0f} s; the run goes on")
                self._condition.notify_all()


def call(
    access: Access, request: Callable[[], Any], retries: int, what: str = "does not answer"
) -> Any:
    """One administrative request, tried again a few times."""
    for attempt in itertools.count(1):
        try:
            return request()
        except Exception as error:
            meaning = translate(error, access)
            if not isinstance(meaning, Unavailable):
                if meaning is error:
                    raise
                raise meaning from None
            if attempt > retries:
                raise ToolError(
                    f"the search server {access.label} {what} ({meaning}). Start it, or correct "
                    "'url' (TURNRL_ES_URL). With 'cache' and 'offline: true' a finished run "
                    "replays without a server."
                ) from None
            time.sleep(pause_s(attempt, meaning))
    raise AssertionError("unreachable")
