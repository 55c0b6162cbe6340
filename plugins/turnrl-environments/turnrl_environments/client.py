"""A client of OpenEnv's server: a WebSocket for each session, and the page `/schema`.

    ->  {"type": "reset" | "step", "data": {...}}, {"type": "state"}, {"type": "close"}
    <-  {"type": "observation", "data": {"observation": {...}, "reward": -0.1, "done": false}}
    <-  {"type": "state", "data": {...}}
    <-  {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

A full server still accepts the connection, sends the error unasked, and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from turnrl import RecipeError, ToolError
from turnrl.plugin.patience import Unavailable, is_loopback, raise_if_unavailable, short_reason

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_LONGEST_MESSAGE_BYTES = 100 * 2**20
_PING_EVERY_S = 20.0
"""Pings keep a connection alive while the policy writes and sends nothing."""
_CLOSE_S = 5.0


class RequestRefused(Exception):
    """An error in the server's answer.

    Args:
        code: Its code.
        message: Its message.
        fields: The fields that it reports as wrong.
    """

    def __init__(self, code: str, message: str, fields: Sequence[str] = ()) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.message, self.fields = code, message, fields


class ConnectionBroken(Exception):
    """The connection broke, so the session is gone."""


@final
class Connection:
    """A session of the server, one request at a time.

    Args:
        socket: Its WebSocket.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._lost = False

    @classmethod
    async def open(cls, url: str, timeout_s: float) -> Connection:
        """A session that the server has accepted.

        Args:
            url: The server's address, with http or https.
            timeout_s: The most seconds to wait for it.
        Raises:
            RequestRefused: If it cannot make an environment.
            Unavailable: If it has no place or cannot be reached now, but may later.
        """
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = cls(await _connect(f"ws{url.removeprefix('http')}/ws"))
                try:
                    await connection.ask("state")
                except RequestRefused as refused:
                    if refused.code == "CAPACITY_REACHED":
                        raise Unavailable(refused.message) from None
                    if refused.code != "EXECUTION_ERROR":  # the answer to `state` before a reset
                        raise
            return connection
        except BaseException as error:
            if connection is not None:
                connection.drop()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"no session within {timeout_s:g} s") from None
            if isinstance(error, ConnectionBroken):
                raise Unavailable(str(error)) from None
            raise

    async def ask(self, kind: str, data: Mapping[str, object] | None = None) -> dict[str, object]:
        """Send a request, and read its answer. If this is cancelled, the session is lost: the
        answer may come later, and would be taken for the answer to another request.

        Returns:
            The data of the answer.
        Raises:
            RequestRefused: If it answers with an error.
            ConnectionBroken: If the connection breaks.
            ToolError: If its answer is no message of OpenEnv's.
        """
        from websockets.exceptions import ConnectionClosed

        request = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        was_lost, self._lost = self._lost, True
        if was_lost:
            raise ConnectionBroken("the connection was dropped")
        try:
            # an answer that came before the connection was closed can still be read
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(json.dumps(request))
            answer = _answer(await self._socket.recv())
        except (ConnectionClosed, OSError) as error:
            raise ConnectionBroken(
                f"the connection broke ({error or type(error).__name__})"
            ) from None
        self._lost = False
        if answer["type"] != "error":
            return dict(answer["data"])
        raise _error(answer["data"])

    async def close(self) -> None:
        """End the session, and wait until the server has ended it; drop a session that is lost."""
        from websockets.exceptions import ConnectionClosed

        if not self._lost:
            with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._socket.send('{"type": "close"}')
                    await self._socket.wait_closed()
        self.drop()

    def drop(self) -> None:
        """Cut the connection."""
        self._lost = True
        self._socket.transport.abort()


def _answer(text: str | bytes) -> dict[str, Any]:
    """The server's message.

    Raises:
        ToolError: If it is no message of OpenEnv's.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if (
        not isinstance(answer, dict)
        or answer.get("type") not in ("observation", "state", "error")
        or not isinstance(answer.get("data"), dict)
    ):
        raise ToolError(
            f"an OpenEnv server answered with {str(text)!r:.200}, which is none of its messages. "
            "Correct OpenEnv.url, or see what the server printed."
        )
    return answer


def _error(data: Mapping[str, object]) -> RequestRefused:
    """The exception for an error message of the server."""
    code, message = str(data.get("code")), str(data.get("message", ""))
    errors = data.get("errors")
    listed = errors if isinstance(errors, list) else []
    faults = [fault for fault in listed if isinstance(fault, dict)]
    where = [[str(part) for part in fault.get("loc", ())] for fault in faults]
    problems = [
        f"{'.'.join(path)}: {fault.get('msg')}" for path, fault in zip(where, faults, strict=True)
    ]
    fields = [path[0] for path in where if path]
    return RequestRefused(code, "; ".join(problems)[:300] or message, fields)


async def _connect(address: str) -> ClientConnection:
    """A WebSocket.

    Raises:
        RecipeError: If the package is not installed.
        ToolError: If the server has no WebSocket at this address.
        Unavailable: If it cannot be reached.
    """
    client = import_websockets()
    from websockets.exceptions import InvalidStatus, WebSocketException

    try:
        # no time limit for a ping's answer, because an environment may keep its server busy
        connection: ClientConnection = await client.connect(
            address,
            max_size=_LONGEST_MESSAGE_BYTES,
            ping_interval=_PING_EVERY_S,
            ping_timeout=None,
            open_timeout=None,
            close_timeout=_CLOSE_S,
            proxy=None if is_loopback(address) else True,
        )
        return connection
    except InvalidStatus as error:
        status = error.response.status_code
        raise_if_unavailable(status, f"status {status}", error.response.headers)
        raise ToolError(
            f"{address} is no WebSocket of OpenEnv (status {status}). Correct OpenEnv.url: the "
            "server's address without /ws."
        ) from None
    except (OSError, WebSocketException) as error:
        raise Unavailable(short_reason(error)) from None


def import_websockets() -> Any:
    """The client of the package websockets.

    Raises:
        RecipeError: If it is not installed.
    """
    try:
        import websockets.asyncio.client as client
    except ImportError as error:
        raise RecipeError(
            "OpenEnv needs the package websockets, which is not installed. Run "
            "\"pip install '.[openenv]'\" in your clone of turnrl."
        ) from error
    return client


def fetch_schema(url: str, timeout_s: float) -> object:
    """The content of the server's page `/schema`.

    Raises:
        Unavailable: If it cannot be reached.
        ToolError: If there is no such page.
    """
    import httpx2

    try:
        page = httpx2.get(
            f"{url}/schema",
            timeout=timeout_s,
            follow_redirects=True,
            trust_env=not is_loopback(url),
        )
    except httpx2.RequestError as error:
        raise Unavailable(short_reason(error)) from None
    raise_if_unavailable(page.status_code, f"status {page.status_code}", page.headers)
    try:
        return page.json() if page.is_success else None
    except (ValueError, RecursionError):
        return None
