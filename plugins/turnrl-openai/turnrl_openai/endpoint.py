"""`Endpoint`: asks a server for one turn at a time.

It ends a reply at a stop string itself. So it also works with servers that take no stop strings, or
that do not report the one that ended the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from turnrl import Message, Sampling
from turnrl.engines import MessageSampler, Reply
from turnrl.plugin.errors import EngineError
from turnrl_openai.reply import read_completion
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
        body = self.server.request(
            messages, temperature=sampling.temperature, max_tokens=sampling.max_tokens
        )

        async def read(response: Response) -> Reply:
            return self._reply(await self._connection.read_body(response), sampling.stop)

        return await self._connection.ask(body, read)

    async def drain(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def _reply(self, sent: bytes, stop: Sequence[str]) -> Reply:
        from turnrl.plugin.patience import Unavailable

        connection = self._connection
        try:
            text, ended, thinks = read_completion(connection.parse(sent))
        except ValueError as error:
            shown = connection.clean(sent.decode(errors="replace"))
            raise connection.make_error(
                f"sent {shown!r}, which is no chat completion: {connection.clean(error)}. Correct "
                "base_url or model."
            ) from error
        if thinks and not self._thinks:
            self._thinks = True
            _logger.warning(
                "%s sends its reasoning beside its replies. Turns do not contain it, except where "
                "a reply is nothing else, so a segmenter that requires a thought finds none.",
                connection.label,
            )
        if ends := [text.index(string) + len(string) for string in stop if string in text]:
            return Reply(text[: min(ends)])
        if not ended or ended.lower() in _BREAKS:
            raise Unavailable("the reply broke off")
        if ended.lower() not in _ENDINGS:
            raise connection.make_error(
                f"ended a reply with {connection.clean(ended)!r}, so the model did not finish it. "
                "Leave the question out, or ask another model."
            )
        return Reply(text, cut=ended.lower() in _LIMITS)
