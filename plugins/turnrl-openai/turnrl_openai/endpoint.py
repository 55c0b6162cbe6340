"""`Endpoint`: asks a server for one turn at a time.

It reads a reply while the server writes it, and ends the reply at a stop string itself. So it also
works with servers that take no stop strings, or that do not report the one that ended the reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from turnrl import EngineError, Message, MessageSampler, Reply, Sampling
from turnrl_openai.server import EndpointServer

if TYPE_CHECKING:
    from httpx2 import Response


_ENDINGS = (
    *("stop", "length", "tool_calls", "function_call"),
    *("eos_token", "stop_sequence"),  # of servers that report how a reply stopped
)
"""Reasons for the end of a complete reply, or of a reply that reached its limit."""


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
        cuts = {"top_k": sampling.top_k, "min_p": sampling.min_p, "top_p": sampling.top_p}
        return self.server.request(
            messages,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stream=True,
            **(cuts if sampling.cuts_distribution else {}),
        )

    async def _reply(self, response: Response, stop: Sequence[str]) -> Reply:
        from turnrl.servers import Unavailable

        text, ended = "", None
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            piece, reason = self._read(line.removeprefix("data:"))
            text, ended = text + piece, reason or ended
            ends = [text.index(string) + len(string) for string in stop if string in text]
            if ends:  # the server stops writing when the connection is closed
                return Reply(text[: min(ends)])
        kind = response.headers.get("content-type", "")
        if ended is None and not text and "event-stream" not in kind:
            raise self._connection.fault(
                f"answered with {kind or 'no content type'}, which is not a stream of events. "
                "Correct base_url."
            )
        if ended is None:
            raise Unavailable("the reply broke off")
        if ended not in _ENDINGS:
            raise self._connection.fault(
                f"ended a reply with {self._connection.clean(ended)!r}, so the model did not "
                "finish it. Leave the question out, or ask another model."
            )
        return Reply(text, cut=ended == "length")

    def _read(self, data: str) -> tuple[str, str | None]:
        """The text in an event, and the reason why the reply ended, if it did."""
        try:
            choices = json.loads(data)["choices"]
            if not choices:  # a last event has only the usage
                return "", None
            return choices[0]["delta"].get("content") or "", choices[0].get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._connection.fault(
                f"sent {self._connection.clean(data)!r}, which is not an event of a chat "
                "completion. Correct base_url or model."
            ) from error
