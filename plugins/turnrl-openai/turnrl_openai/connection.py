"""`Connection`: requests to a server of chat completions, and the meaning of its faults.

The key is read from the environment for each connection. Only the client holds it, and it is struck
out of every message. An outage never becomes a reply: the request is sent again, or an error stops
the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from turnrl.plugin.errors import WorldError
from turnrl.plugin.patience import (
    Patience,
    Unavailable,
    error_message,
    is_loopback,
    raise_if_unavailable,
    short_reason,
)
from turnrl_openai.server import ChatServer

T = TypeVar("T")

MOST_BYTES = 16 * 2**20
"""The largest reply. A model's reply has a few bytes for each of its tokens."""
_MOST_OF_A_COMPLAINT = 64 * 2**10
_REFUSES = r"(?i)invalid.?request|bad.?request|context.?length|not.?found"
"""Kinds of errors that the same request will get again."""


def _error_in(reply: Mapping[str, object]) -> object:
    """The error that a reply is, or holds; None if it is none."""
    return reply.get("error") or (reply if reply.get("object") == "error" else None)


@dataclass(eq=False)
class Connection:
    """A connection that all callers share. Until `close`, it belongs to one event loop.

    Args:
        server: The server.
        label: Its name in messages.
        error: Makes the error that stops the run.
        request: The advice after a refused request if key and address are right.
    """

    server: ChatServer
    label: str
    error: Callable[[str], WorldError]
    request: str

    def __post_init__(self) -> None:
        wait_s = self.server.patience_s
        self._patience = Patience(self.label, wait_s, self._away_error, setting="patience_s")
        self._client: httpx2.AsyncClient | None = None

    async def ask(
        self, body: Mapping[str, object], read: Callable[[httpx2.Response], Awaitable[T]]
    ) -> T:
        """Send a request until it is answered.

        Args:
            body: Body of the request.
            read: Reads a successful response.
        Returns:
            The result of `read`.
        Raises:
            WorldError: If the server is away for `patience_s`, or refuses.
        """

        async def attempt() -> T:
            client, url = self._connect(), self.server.url
            in_time = asyncio.timeout(self.server.timeout_s)
            try:
                async with in_time, client.stream("POST", url, json=body) as response:
                    if response.is_success:
                        return await read(response)
                    text = await self.read_body(response, _MOST_OF_A_COMPLAINT)
            except TimeoutError:
                raise Unavailable(
                    f"no whole answer within timeout_s = {self.server.timeout_s:g}"
                ) from None
            except httpx2.RequestError as error:
                raise Unavailable(self.clean(error)) from None
            raise self._refusal(response, text)

        return await self._patience.ask_async(attempt)

    async def read_body(self, response: httpx2.Response, most: int | None = None) -> bytes:
        """The body of a response.

        Args:
            response: The response.
            most: Leave out what comes after so many bytes. By default there must not be more than
                `MOST_BYTES`.
        """
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if most is not None and len(body) >= most:
                return bytes(body[:most])
            if len(body) > MOST_BYTES:
                raise self.make_error(
                    f"sent a reply of more than {MOST_BYTES:,} bytes. Correct base_url or model, "
                    "or lower max_tokens."
                )
        return bytes(body)

    def parse(self, text: bytes) -> object:
        """The JSON of a reply; None if it is none.

        Raises:
            Unavailable: If it is an error that a later attempt may not get.
            WorldError: If it is another error.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # the latter if it is nested too deeply
            return None
        if isinstance(value, dict) and (error := _error_in(value)):
            parts = error if isinstance(error, dict) else {"message": error}
            kept = map(parts.get, ("code", "status", "type"))
            codes = [str(c) for c in kept if isinstance(c, int | str)]
            usual = 400 if any(re.search(_REFUSES, c) for c in codes) else 500
            code = next((int(c) for c in codes if re.fullmatch("[1-5][0-9]{2}", c)), usual)
            reason = f"an error in place of a reply: {self.clean(parts.get('message') or error)}"
            raise_if_unavailable(code, reason, {})
            raise self.make_error(f"sent {reason} (code {code}). {self.request}")
        return value

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connect(self) -> httpx2.AsyncClient:
        if self._client is None:
            if not re.fullmatch(r"[!-~]*", self._key):  # the client's own error would show it
                raise self.make_error(
                    f"cannot be asked: the environment variable {self.server.api_key_env} does not "
                    "hold a key. Correct it."
                )
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            limits = httpx2.Limits(max_connections=self.server.concurrency)
            # `ask` times each request as a whole, because a server that sends a byte now and then
            # would never be late
            proxies = not is_loopback(self.server.base_url)
            self._client = httpx2.AsyncClient(
                headers=headers, limits=limits, timeout=None, trust_env=proxies
            )
        return self._client

    def _refusal(self, response: httpx2.Response, text: bytes) -> Exception:
        """The meaning of an unsuccessful response with this text.

        Raises:
            Unavailable: If the same request may succeed later.
        """
        status, variable = response.status_code, self.server.api_key_env
        moved = {name: response.headers[name] for name in ["location"] if name in response.headers}
        whole = httpx2.Response(status, headers=moved, content=text)
        reason = f"status {status}: {self.clean(error_message(whole))}"
        raise_if_unavailable(status, reason, response.headers)
        advice = self.request
        if status in (401, 403):
            fault = "holds the wrong key" if self._key else "is not set"
            cause = f"the environment variable {variable} {fault}" if variable else "no key is sent"
            advice = f"Correct it: {cause} (api_key_env)."
        elif status in (404, 405) or 300 <= status < 400:
            advice = "Correct base_url, or model."
        return self.make_error(f"refused a request ({reason}). {advice}")

    def _away_error(self, problem: str) -> WorldError:
        return self.make_error(f"{problem} Start it, correct base_url, or raise patience_s.")

    @property
    def _key(self) -> str:
        return os.environ.get(self.server.api_key_env or "", "").strip()

    def clean(self, text: object) -> str:
        """A text in one short line, without the key."""
        return short_reason(text, (self._key,))

    def make_error(self, problem: str) -> WorldError:
        """The error that stops the run, for a problem of the server."""
        return self.error(f"{self.label} {problem}")
