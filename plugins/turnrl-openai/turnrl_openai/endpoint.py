"""`Endpoint`: asks a server for one turn at a time.

It reads a reply while the server writes it, and ends the reply at a stop string itself. So it also
works with servers that take no stop strings, or that do not report the one that ended the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from turnrl import Message, Sampling
from turnrl.engines import MessageSampler, Reply
from turnrl.plugin.errors import EngineError
from turnrl_openai.reply import Gathered
from turnrl_openai.server import EndpointServer

if TYPE_CHECKING:
    from httpx2 import Response

_logger = logging.getLogger(__name__)

_LIMITS = ("length", "model_length", "max_tokens", "max_output_tokens")
"""Reasons for the end of a reply that reached its limit; other vendors have other words."""
_ENDINGS = (
    *_LIMITS,
    *("stop", "tool_calls", "function_call", "tool_use", "end_turn", "complete"),
    *("eos", "eos_token", "stop_sequence"),  # of servers that report how a reply stopped
)
"""Reasons for the end of a complete reply, or of a reply that reached its limit."""
_BREAKS = ("error", "abort", "cancelled", "insufficient_system_resource")
"""Reasons for the end of a reply that the server could not finish."""


class EndpointError(EngineError):
    """The server of a model is away, or refuses."""


@final
class Endpoint(MessageSampler):
    """A model behind a server that speaks OpenAI's chat completions.

    The key is read from the environment, and struck out of every message. Samples cannot be
    reproduced, because no seed is sent.

    Args:
        server: The server.
    """

    def __init__(self, server: EndpointServer) -> None:
        # imported late, because rewards import this package
        from turnrl_openai.connection import Connection

        self.server = server
        self.capacity = server.concurrency
        self._thinks = False
        self._connection = Connection(
            server,
            f"{server.model!r} at {server.base_url}",
            EndpointError,
            "Correct model or extra, or lower model.rollout.max_turn_tokens.",
        )

    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """See `MessageSampler.reply`. While the server is away, requests are repeated.

        Raises:
            EndpointError: If the server is away for `patience_s`, refuses, sends no reply, or ends
                a reply for its own reason, such as `content_filter`.
        """
        body = self._body(messages, sampling)
        return await self._connection.ask(
            body, lambda response: self._reply(response, sampling.stop)
        )

    async def drain(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, object]:
        return self.server.request(
            messages,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stream=True,
        )

    async def _reply(self, response: Response, stop: Sequence[str]) -> Reply:
        from turnrl.plugin.patience import Unavailable

        reply, connection = Gathered(), self._connection
        kind = response.headers.get("content-type", "")
        text = Stopped(stop)
        if "json" in kind:  # a server that does not stream
            text.add(self._read(reply, await connection.whole(response)))
        else:
            async for line in connection.lines(response):
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    text.add(self._read(reply, line.removeprefix("data:")))
                if text.ends is not None:  # the server stops writing when the connection closes
                    break
        if reply.thinks and not self._thinks:
            self._thinks = True
            _logger.warning(
                "%s sends its reasoning beside its replies. Turns do not contain it, except where "
                "a reply is nothing else, so a turn scheme that requires a thought finds none.",
                connection.label,
            )
        if text.ends is not None:
            return Reply(reply.text(text.ends))
        if reply.ended is None and not reply.text() and "event-stream" not in kind:
            raise connection.fault(
                f"answered with {kind or 'no content type'}, which is not a stream of events. "
                "Correct base_url."
            )
        ended = str(reply.ended).lower()
        if reply.ended is None or ended in _BREAKS:
            raise Unavailable("the reply broke off")
        if ended not in _ENDINGS:
            raise connection.fault(
                f"ended a reply with {connection.clean(reply.ended)!r}, so the model did not "
                "finish it. Leave the question out, or ask another model."
            )
        return Reply(reply.text(), cut=ended in _LIMITS)

    def _read(self, reply: Gathered, data: str | bytes) -> str:
        """Add an event, or a whole completion, to a reply. Returns the text in it."""
        try:
            return reply.add(self._connection.parsed(data))
        except ValueError as error:
            sent = data if isinstance(data, str) else data.decode(errors="replace")
            raise self._connection.fault(
                f"sent {self._connection.clean(sent)!r}, which is not an event of a chat "
                f"completion: {self._connection.clean(error)}. Correct base_url or model."
            ) from error


class Stopped:
    """A text that comes in pieces, searched for stop strings in time that grows with its length.

    Args:
        stop: The stop strings.

    Attributes:
        ends: Where the first stop string ends; None if there is none yet.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=1)
        self._before, self._length = "", 0
        self.ends: int | None = None

    def add(self, piece: str) -> None:
        """Search the next piece."""
        window = self._before + piece  # a stop string may have begun before the piece
        begin = self._length - len(self._before)
        found = [window.index(string) + len(string) for string in self._stop if string in window]
        self.ends = begin + min(found) if found else None
        self._length += len(piece)
        self._before = window[max(len(window) - self._longest + 1, 0) :]
