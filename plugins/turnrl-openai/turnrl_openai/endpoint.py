"""`Endpoint`: asks a server for one turn after the other.

A reply is read as it is written. So it ends at a stop string wherever the server would go on, also
where a server takes no stop strings, or does not say which one it met.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from turnrl import EngineError, Message, MessageSampler, Reply, Sampling
from turnrl_openai.server import Server

if TYPE_CHECKING:
    from httpx2 import Response


_ENDINGS = (
    *("stop", "length", "tool_calls", "function_call"),
    *("eos_token", "stop_sequence"),  # of servers that say how a reply stopped
)
"""Endings of a reply that the model wrote to its end, or as far as it may."""


class EndpointError(EngineError):
    """The server of a model is away, or refuses."""


@final
class Endpoint(MessageSampler):
    """A model behind a server that speaks OpenAI's chat completions.

    The key is read from the environment when the server is asked, and struck out of every message.
    Samples cannot be repeated: no seed is sent.

    Args:
        server: How to reach it.
    """

    def __init__(self, server: Server) -> None:
        # not before it is needed: rewards import this package
        from turnrl_openai.connection import Connection

        self.server = server
        self.capacity = server.concurrency
        self._connection = Connection(
            server,
            f"{server.model!r} at {server.base_url}",
            EndpointError,
            "Correct model or extra, or lower rollout.max_turn_tokens.",
        )

    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """See `MessageSampler.reply`. While the server is away, it is asked again.

        Raises:
            EndpointError: If it is away for `patience_s`, refuses, sends what is no reply, or ends
                one for a reason of its own, such as `content_filter`.
        """
        body = self._body(messages, sampling)
        return await self._connection.ask(body, lambda got: self._reply(got, sampling.stop))

    async def drain(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
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
            more, reason = self._read(line.removeprefix("data:"))
            text, ended = text + more, reason or ended
            ends = [text.index(one) + len(one) for one in stop if one in text]
            if ends:  # the server stops writing when the connection is closed
                return Reply(text[: min(ends)])
        kind = response.headers.get("content-type", "")
        if ended is None and not text and "event-stream" not in kind:
            what = f"answered with {kind or 'no content type'}, which is no stream of events"
            raise self._connection.fault(f"{what}. Correct base_url.")
        if ended is None:
            raise Unavailable("the reply broke off")
        if ended not in _ENDINGS:
            how = self._connection.clean(str(ended))
            what = f"ended a reply by {how!r}, so the model did not write it to its end"
            raise self._connection.fault(f"{what}. Leave the question out, or ask another model.")
        return Reply(text, cut=ended == "length")

    def _read(self, data: str) -> tuple[str, str | None]:
        """The text in an event, and why the reply ended, if it did."""
        try:
            choices = json.loads(data)["choices"]
            if not choices:  # a last event tells the usage
                return "", None
            return choices[0]["delta"].get("content") or "", choices[0].get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            sent = self._connection.clean(data)
            what = f"sent {sent!r}, which is no event of a chat completion"
            raise self._connection.fault(f"{what}. Correct base_url or model.") from error
