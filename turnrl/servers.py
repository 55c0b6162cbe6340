"""Waiting for a server that is away: when to try again, when to stop, and the lines that say so.

    Patience      a server, as all who ask it see it
    Request       one of their requests, with its attempts
    Unavailable   raised by an attempt that may succeed later

Libraries that retry (tenacity, stamina, backoff) know one caller. Here all callers share an outage:
they wait for it together, one of them tries, and the first answer brings back all.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import math
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, final

from turnrl.errors import WorldError
from turnrl.text import visible

__all__ = ["LONGEST_PAUSE_S", "Patience", "Request", "Unavailable", "pause_s"]

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0
"""The longest `Retry-After` that is heeded."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 8.0
_PROBE_EVERY_S = 2.0
_LOOK_EVERY_S = 0.1
"""How soon those who wait see that the server is back, or that the wait is over."""


class Unavailable(Exception):
    """The server cannot answer now, and may later.

    Args:
        reason: The cause, in one line and without secrets: it is printed.
        retry_after: The `Retry-After` header: seconds or a date (RFC 9110, 10.2.3). Anything else
            counts as none.
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


def pause_s(failures: int, fault: Unavailable) -> float:
    """Seconds until a request is sent again: half to all of 0.25, 0.5, 1, 2, 4, 8, 8 ... after 1,
    2, 3 ... failures in a row, or as long as the server asks for, if that is longer."""
    return max(_backoff_s(failures) * random.uniform(0.5, 1.0), fault.retry_after_s)


def _backoff_s(failures: int) -> float:
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10))


@final
class Patience:
    """A server, as all who ask it see it. Safe to use from several threads and event loops.

    A request that fails is sent again (see `pause_s`). When it has failed more than `retries` times
    and nobody was answered meanwhile, the server counts as away, for everybody: one request is sent
    at a time, whoever's it is, soon every 2 s. The first answer ends that. After `patience_s`
    everybody who waits gets the error, and whoever comes later begins afresh.

    Args:
        name: The server, for the lines that are printed.
        patience_s: Seconds that it may be away.
        error: Makes the error to raise then, of a text such as `does not answer (status 503). It
            was waited for, 300 s.`, which a name goes before and a next step after.
        retries: Attempts after a first failure, before the server counts as away.
        quiet_s: An outage shorter than this is not worth a line.
        setting: The setting that `patience_s` is the value of, for the line that says how long is
            waited.
    """

    def __init__(
        self,
        name: str,
        patience_s: float,
        error: Callable[[str], WorldError],
        retries: int = 0,
        quiet_s: float = 0.0,
        setting: str = "",
    ) -> None:
        self._setting = f" ({setting})" if setting else ""
        self._name, self._patience_s, self._error = name, patience_s, error
        self._retries, self._quiet_s = retries, quiet_s
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._answered_s = -math.inf
        self._next_s = self._gap_s = 0.0
        self._reason = ""
        self._said = False
        self._given_up_s = -math.inf

    def request(self) -> Request:
        """A request that begins now and may be sent later. If it waits in a queue of yours while
        the server is given up, it ends with the others."""
        return Request(self)

    def ask(self, attempt: Callable[[], T]) -> T:
        """`Request.ask`, of a request that begins now."""
        return self.request().ask(attempt)

    async def ask_async(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`Request.ask_async`, of a request that begins now."""
        return await self.request().ask_async(attempt)

    def _wait_s(self, request: Request) -> float:
        """Seconds until a request may look again; 0 if it is to be sent now."""
        with self._lock:
            now, ready_s = time.monotonic(), request._ready_s
            if self._away_since is not None and now >= self._away_since + self._patience_s:
                # not `now`: if all who waited were cancelled, whoever comes much later is to try
                self._given_up_s = self._away_since + self._patience_s
                self._away_since, self._said = None, False
            if request._begun_s <= self._given_up_s:
                waited = f" It was waited for, {self._patience_s:g} s." if self._patience_s else ""
                raise self._error(f"does not answer ({self._reason}).{waited}")
            if self._away_since is not None:
                ready_s = max(ready_s, self._next_s)
                if now >= ready_s:  # its turn, and nobody else's for a while
                    self._gap_s = min(2 * self._gap_s, _PROBE_EVERY_S)
                    self._next_s = now + self._gap_s
            return min(max(0.0, ready_s - now), _LOOK_EVERY_S)

    def _failed(self, request: Request, fault: Unavailable) -> None:
        with self._lock:
            now = time.monotonic()
            request._failures += 1
            request._ready_s = now + pause_s(request._failures, fault)
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
            if self._patience_s and not self._said and now - self._away_since >= self._quiet_s:
                self._said = True
                most = f"{self._patience_s:g} s at most{self._setting}"
                self._say(f"does not answer ({fault}); the run waits for it, {most}")

    def _answered(self) -> None:
        with self._lock:
            self._answered_s = time.monotonic()
            if self._said and self._away_since is not None:
                away_s = self._answered_s - self._away_since
                self._say(f"answers again after {away_s:.0f} s; the run goes on")
            self._away_since, self._said = None, False

    def _say(self, news: str) -> None:
        print(f"turnrl: {self._name} {visible(news)}", file=sys.stderr, flush=True)


@final
class Request:
    """A request to a server that may be away; made by `Patience.request`."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._begun_s = self._tried_s = time.monotonic()
        self._ready_s = 0.0
        self._failures = 0
        self._in_vain = 0
        """Failures in a row, between which nobody else was answered either."""

    def ask(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it no longer raises `Unavailable`, and block in between.

        Returns:
            What it returned.
        Raises:
            WorldError: The patience's error, if the server has been away for too long.
        """
        while True:
            while wait_s := self._patience._wait_s(self):
                time.sleep(wait_s)
            with self._attempt():
                return attempt()

    async def ask_async(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """As `ask`, of a coroutine function: the event loop goes on in between."""
        while True:
            while wait_s := self._patience._wait_s(self):
                await asyncio.sleep(wait_s)
            with self._attempt():
                return await attempt()

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Note the end of one attempt; if the server was unavailable, another follows."""
        try:
            yield
        except Unavailable as fault:
            self._patience._failed(self, fault)
        else:
            self._patience._answered()
