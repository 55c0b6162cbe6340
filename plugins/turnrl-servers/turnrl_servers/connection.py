"""`Connection`: sends requests to one server, and reads its answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, final

import httpx2

from turnrl.plugin.patience import Unavailable, error_message, raise_if_unavailable, short_reason

SHORT_S = 60.0
"""Time limit of a request that samples nothing, in seconds."""
_HEALTH_S = 5.0


class RequestRefused(Exception):
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
    """The way to one server. No request goes through a proxy.

    Args:
        url: The server's address.
        key: Sent with every request, and struck out of every message; empty for none.
        refusals: Matches errors with status 500 that concern one request, from a server that is
            otherwise well; None if it gives no such errors.
    """

    def __init__(self, url: str, key: str, refusals: re.Pattern[str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._key, self._refusals = key, refusals
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        within_s: float = SHORT_S,
    ) -> Any:
        """Send a request.

        Returns:
            The parsed JSON; None if the answer is empty.
        Raises:
            Unavailable: If there is no answer, or a later attempt may succeed.
            RequestRefused: If the server refuses.
        """
        try:
            async with asyncio.timeout(within_s):
                response = await self._client().request(method, self.url + path, json=body)
        except TimeoutError:
            raise Unavailable(f"no answer within {within_s:g} s") from None
        except httpx2.RequestError as error:
            raise Unavailable(self._clean(error)) from None
        return self._read(response)

    async def is_up(self) -> bool:
        """True if it answers now."""
        try:
            await self.ask("GET", "/health", within_s=_HEALTH_S)
        except (Unavailable, RequestRefused):
            return False
        return True

    async def close(self) -> None:
        """Close the connections of the running event loop; the next request opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # servers close connections that were idle for 5 s, and a request would notice too late
            limits = httpx2.Limits(max_connections=None, keepalive_expiry=2.0)
            self._clients[loop] = httpx2.AsyncClient(
                headers=self._headers, limits=limits, timeout=None, trust_env=False
            )
        return self._clients[loop]

    def _read(self, response: httpx2.Response) -> object:
        status = response.status_code
        if response.is_success:
            try:
                return response.json() if response.content else None
            except (ValueError, RecursionError):
                if response.text.lstrip().startswith("<"):  # a page: another kind of server
                    raise RequestRefused(status, "an answer that is no JSON") from None
                return response.text  # a sentence: what was asked is done
        problem = self._clean(error_message(response))
        if self._refusals is None or not self._refusals.search(problem):
            raise_if_unavailable(status, f"status {status}: {problem}", response.headers)
        raise RequestRefused(status, problem)

    def _clean(self, text: object) -> str:
        """A text in one short line, without the key."""
        return short_reason(text, (self._key,))
