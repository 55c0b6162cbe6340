"""Waiting for a server that is away.

    Patience              decides for all callers of a server when to try again and when to give up
    Request               one caller's request, with its attempts
    Unavailable           raised by an attempt that may succeed later
    raise_if_unavailable  raises it for the HTTP statuses that mean so
    short_reason          a server's text, or an error, in one line without secrets
    is_loopback           whether an address is of this machine, which no proxy may serve
    error_message         the clearest message in an error response

Libraries that retry (tenacity, stamina, backoff) serve one caller. Here all callers share an
outage: they wait together, one of them tries, and the first answer releases everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import ipaddress
import math
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar, final
from urllib.parse import urlsplit

from turnrl.plugin.errors import WorldError
from turnrl.plugin.text import make_visible, say

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0
"""Longer `Retry-After` headers count as this."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 8.0
_PROBE_EVERY_S = 2.0
_LOOK_EVERY_S = 0.1
"""Waiting callers check this often whether the server is back or the wait is over."""


class Unavailable(Exception):
    """The server cannot answer now, and may later.

    Args:
        reason: The cause, in one line and without secrets, because it is printed.
        retry_after: The `Retry-After` header: seconds or a date (RFC 9110, 10.2.3). Anything else
            is ignored.
    """

    def __init__(self, reason: str, retry_after: str | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = min(_seconds(retry_after or ""), LONGEST_PAUSE_S)


def _seconds(header: str) -> float:
    if header.strip().isdecimal():
        return float(header)
    try:
        when = email.utils.parsedate_to_datetime(header)
        return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return 0.0


def raise_if_unavailable(status: int, reason: str, headers: Mapping[str, str]) -> None:
    """Raise `Unavailable` for an HTTP status that a later attempt may not get: the server's own
    faults, and requests to come back later.

    Args:
        status: The status of an answer.
        reason: The text to print, in one line and without secrets.
        headers: The headers of the answer. The mapping decides if the case of a name matters.
    """
    if status in (408, 425, 429) or status >= 500:
        raise Unavailable(reason, headers.get("retry-after"))


def is_loopback(address: str) -> bool:
    """True if an address is of this machine. A request to it, with its key, must not go to a proxy:
    nothing there answers for this machine."""
    host = (urlsplit(address).hostname or "").rstrip(".")
    with contextlib.suppress(ValueError):
        number = ipaddress.ip_address(host)
        mapped = getattr(number, "ipv4_mapped", None) or number
        return mapped.is_loopback or mapped.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """`text` without the secrets; those that are not set (None or empty) are ignored."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def short_reason(text: object, secrets: Iterable[str | None] = ()) -> str:
    """A server's text, or an error's, in one line of at most 300 characters, without secrets; for
    an error without a text, its class."""
    line = " ".join(str(text).split())
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    return redact(line, secrets)[:300]


def error_message(response: httpx2.Response) -> object:
    """The clearest message in a server's error response."""
    faults = (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError)
    with contextlib.suppress(*faults):
        answer = response.json()
        names = ("error", "detail", "error_message", "message")
        error = next(answer[name] for name in names if answer.get(name))
        return error["message"] if isinstance(error, Mapping) else error
    if response.text.lstrip().startswith("<"):  # a page, of another kind of server
        return response.reason_phrase
    return response.text or response.headers.get("location", "")


def retry_pause_s(failures: int, fault: Unavailable) -> float:
    """Seconds to wait before a retry: between half and all of 0.25, 0.5, 1, 2, 4, 8, 8 ... after 1,
    2, 3 ... failures in a row, or the `Retry-After` of the fault if that is longer."""
    return max(_backoff_s(failures) * random.uniform(0.5, 1.0), fault.retry_after_s)


def _backoff_s(failures: int) -> float:
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10))


@final
class Patience:
    """The state of a server, shared by all its callers, in several threads and event loops.

    A request that fails is sent again (see `retry_pause_s`). If it fails more than `retries` times
    while nobody else gets an answer, the server counts as away for everybody. Then one request is
    sent at a time, at intervals that grow to 2 s, until one is answered. After `patience_s` every
    waiting caller gets the error; later callers start afresh.

    Args:
        name: The server's name in printed lines.
        patience_s: The most seconds that it may be away.
        error: Makes the error to raise after that. Its argument is a text such as `does not answer
            (status 503). turnrl waited 300 s for it.`, which needs a name and a next step.
        retries: Attempts after a first failure, before the server counts as away.
        setting: The setting that holds `patience_s`, printed so that users can change it.
    """

    def __init__(
        self,
        name: str,
        patience_s: float,
        error: Callable[[str], WorldError],
        retries: int = 0,
        setting: str = "",
    ) -> None:
        self._setting = f" ({setting})" if setting else ""
        self._name, self._patience_s, self._error = name, patience_s, error
        self._retries = retries
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._answered_s = -math.inf
        self._next_s = self._gap_s = 0.0
        self._reason = ""
        self._announced = False
        self._given_up_s = -math.inf

    def request(self) -> Request:
        """Begin a request that you may send later. If the server is given up while it waits in your
        queue, it fails with the others."""
        return Request(self)

    def ask(self, attempt: Callable[[], T]) -> T:
        """Begin a request and send it; see `Request.ask`."""
        return self.request().ask(attempt)

    async def ask_async(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Begin a request and send it; see `Request.ask_async`."""
        return await self.request().ask_async(attempt)

    def _wait_s(self, request: Request) -> float:
        """Seconds until a request should check again; 0 if it is its turn to be sent."""
        with self._lock:
            now, ready_s = time.monotonic(), request._ready_s
            if self._away_since is not None and now >= self._away_since + self._patience_s:
                # not `now`: if all waiting callers were cancelled, a later one must still try
                self._given_up_s = self._away_since + self._patience_s
                self._away_since, self._announced = None, False
            if request._begun_s <= self._given_up_s:
                waited = (
                    f" turnrl waited {self._patience_s:g} s for it." if self._patience_s else ""
                )
                raise self._error(f"does not answer ({self._reason}).{waited}")
            if self._away_since is not None:
                ready_s = max(ready_s, self._next_s)
                if now >= ready_s:  # its turn, and nobody else's for a while
                    self._gap_s = min(2 * self._gap_s, _PROBE_EVERY_S)
                    self._next_s = now + self._gap_s
            return min(max(0.0, ready_s - now), _LOOK_EVERY_S)

    def _record_failure(self, request: Request, fault: Unavailable) -> None:
        with self._lock:
            now = time.monotonic()
            request._failures += 1
            request._ready_s = now + retry_pause_s(request._failures, fault)
            alone = self._answered_s < request._tried_s
            request._tried_s, request._in_vain = now, request._in_vain + 1 if alone else 0
            if self._away_since is None:
                if request._in_vain <= self._retries:
                    return
                self._away_since = now
                self._gap_s = min(_backoff_s(request._failures), _PROBE_EVERY_S)
                self._next_s = now + self._gap_s
            self._next_s = max(self._next_s, now + fault.retry_after_s)
            self._reason = str(fault)
            if self._patience_s and not self._announced:
                self._announced = True
                self._print(
                    f"does not answer ({fault}); the run waits for it, "
                    f"{self._patience_s:g} s at most{self._setting}"
                )

    def _record_answer(self) -> None:
        with self._lock:
            self._answered_s = time.monotonic()
            if self._announced and self._away_since is not None:
                away_s = self._answered_s - self._away_since
                self._print(f"answers again after {away_s:.0f} s; the run continues")
            self._away_since, self._announced = None, False

    def _print(self, news: str) -> None:
        say(f"turnrl: {self._name} {make_visible(news)}", sys.stderr)


@final
class Request:
    """A request to a server that may be away. `Patience.request` makes it."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._begun_s = self._tried_s = time.monotonic()
        self._ready_s = 0.0
        self._failures = 0
        self._in_vain = 0
        """Failures in a row during which nobody else got an answer either."""

    def ask(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it stops raising `Unavailable`, blocking in between.

        Returns:
            The value that `attempt` returned.
        Raises:
            WorldError: The patience's error, if the server has been away for too long.
        """
        while True:
            while wait_s := self._patience._wait_s(self):
                time.sleep(wait_s)
            with self._attempt():
                return attempt()

    async def ask_async(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Like `ask`, for a coroutine function: the event loop keeps running in between."""
        while True:
            while wait_s := self._patience._wait_s(self):
                await asyncio.sleep(wait_s)
            with self._attempt():
                return await attempt()

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Record the end of one attempt. If the server was unavailable, another follows."""
        try:
            yield
        except Unavailable as fault:
            self._patience._record_failure(self, fault)
        else:
            self._patience._record_answer()
