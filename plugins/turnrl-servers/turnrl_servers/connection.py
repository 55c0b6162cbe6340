"""`Connection`: sends requests to one server, and reads its answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, final

import httpx2

from turnrl.servers import Unavailable, complaint, raise_if_away, short_reason

_HEALTH = "/health"
SHORT_S = 60.0
"""Time limit of a request that samples nothing, in seconds."""


class Refused(Exception):
    """The server answered that it will not do what was asked.

    Args:
        status: The HTTP status.
        problem: The message in its answer, in one line and without the key.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(f"status {status}: {problem}")
        self.status, self.problem = status, problem


@final
class Connection:
    """The way to one server. Its asynchronous requests belong to the event loop that is running.

    Args:
        url: The server's address.
        key: Sent with every request, and struck out of every message; empty for none.
        timeout_s: Seconds that one turn may take.
        refusals: Matches errors with status 500 that concern one request, from a server that is
            otherwise well; None if it gives no such errors.
    """

    def __init__(
        self, url: str, key: str, timeout_s: float, refusals: re.Pattern[str] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._key, self._timeout_s, self._refusals = key, timeout_s, refusals
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._calls: set[asyncio.Future[httpx2.Response]] = set()
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    @property
    def has_key(self) -> bool:
        """True if a key is sent with every request."""
        return bool(self._key)

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self._calls)

    def ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None, within_s: float = 0
    ) -> Any:
        """Send a request, and block until the answer.

        Returns:
            The parsed JSON; None if the answer is empty.
        Raises:
            Unavailable: If there is no answer, or a later attempt may succeed.
            Refused: If the server refuses.
        """
        timeout = within_s or SHORT_S
        with httpx2.Client(headers=self._headers, timeout=timeout, trust_env=False) as client:
            with self._connection_faults():
                response = client.request(method, self.url + path, json=body)
            return self._read(response)

    async def ask_async(
        self, path: str, body: Mapping[str, object], within_s: float | None = None
    ) -> object:
        """Like `ask` with POST, without blocking. The time limit is a turn's unless `within_s` is
        given."""
        client = self._connected()
        call = asyncio.ensure_future(client.post(self.url + path, json=body))
        self._calls.add(call)
        try:
            with self._connection_faults():
                async with asyncio.timeout(self._timeout_s if within_s is None else within_s):
                    response = await call
        except TimeoutError:
            limit = f"timeout_s = {self._timeout_s:g}" if within_s is None else f"{within_s:g} s"
            raise Unavailable(f"no answer within {limit}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("its health check failed") from None
        finally:
            self._calls.discard(call)
            call.cancel()
        return self._read(response)

    def is_up(self) -> bool:
        """True if it answers now. Blocks; not for the event loop's thread."""
        try:
            self.ask("GET", _HEALTH, within_s=5)
        except (Unavailable, Refused):
            return False
        return True

    async def is_well(self, within_s: float) -> bool:
        """True if its health check succeeds."""
        with contextlib.suppress(httpx2.RequestError):
            client = self._connected()
            return (await client.get(self.url + _HEALTH, timeout=within_s)).is_success
        return False

    def give_up_calls(self) -> None:
        """End the requests under way, as if the server had broken them off."""
        for call in [*self._calls]:
            call.cancel()

    async def close(self) -> None:
        """Close the connections of the running event loop; the next request opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _connected(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients = {
                other: client for other, client in self._clients.items() if not other.is_closed()
            }
            # servers close connections that were idle for 5 s, and a request would notice too late
            limits = httpx2.Limits(keepalive_expiry=2.0)
            # turns have a time limit of their own
            self._clients[loop] = httpx2.AsyncClient(
                headers=self._headers, limits=limits, timeout=None, trust_env=False
            )
        return self._clients[loop]

    @contextlib.contextmanager
    def _connection_faults(self) -> Iterator[None]:
        """Raise `Unavailable` for errors of the connection."""
        try:
            yield
        except httpx2.RequestError as error:
            raise Unavailable(self._clean(error)) from None

    def _read(self, response: httpx2.Response) -> object:
        """Parse a response.

        Raises:
            Unavailable: If a later attempt may succeed.
            Refused: If the server refuses.
        """
        status = response.status_code
        if response.is_success:
            try:
                return response.json() if response.content else None
            except (ValueError, RecursionError):
                if response.text.lstrip().startswith("<"):  # a page: another kind of server
                    raise Refused(status, "an answer that is no JSON") from None
                return response.text  # a sentence: what was asked is done
        problem = self._clean(complaint(response))
        if self._refusals is None or not self._refusals.search(problem):
            raise_if_away(status, f"status {status}: {problem}", response.headers)
        raise Refused(status, problem)

    def _clean(self, text: object) -> str:
        """A text in one short line, without the key."""
        return short_reason(text, (self._key,))
