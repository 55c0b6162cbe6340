"""`Endpoint`: asks a server for one turn after the other.

A reply is read as it is written. So it ends at a stop string wherever the server would go on, also
where a server takes no stop strings, or does not say which one it met.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from turnrl import Message, MessageSampler, Reply, Sampling, TurnRLError
from turnrl_endpoint.server import Server

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


class EndpointError(TurnRLError, RuntimeError):
    """The server of a model is away, or refuses."""

    exit_code = 1


class _Away(Exception):
    """No answer now; the server may give one later."""


@final
class Endpoint(MessageSampler):
    """A model behind a server that speaks OpenAI's chat completions.

    The key is read from the environment when the server is asked, and struck out of every message.
    Samples cannot be repeated: no seed is sent.

    Args:
        server: How to reach it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.capacity = server.concurrency
        self._client: AsyncClient | None = None

    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """See `MessageSampler.reply`. While the server is away, it is asked again.

        Raises:
            EndpointError: If it is away for `patience_s`, refuses, or sends what is no reply.
        """
        import asyncio  # not before it is needed: rewards import this package too

        server, body = self.server, self._body(messages, sampling)
        until, pause_s = time.monotonic() + server.patience_s, _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(server.timeout_s):
                    return await self._ask(body, sampling.stop)
            except _Away as away:
                cause = str(away)
            except TimeoutError:
                cause = f"no whole answer within timeout_s = {server.timeout_s:g}"
            if time.monotonic() + pause_s > until:
                what = f"does not answer ({cause}), after {server.patience_s:g} s of waiting"
                raise self._fault(f"{what}. Start it, correct base_url, or raise patience_s.")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def drain(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        cuts = {"top_k": sampling.top_k, "min_p": sampling.min_p, "top_p": sampling.top_p}
        return self.server.asks(
            messages,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stream=True,
            **(cuts if sampling.truncated else {}),
        )

    async def _ask(self, body: Mapping[str, Any], stop: Sequence[str]) -> Reply:
        import httpx2

        text, ended = "", None
        try:
            async with self._connected().stream("POST", self.server.url, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    self._refuse(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    more, reason = self._read(line.removeprefix("data:"))
                    text, ended = text + more, reason or ended
                    ends = [text.index(one) + len(one) for one in stop if one in text]
                    if ends:  # the server stops writing when the connection is closed
                        return Reply(text[: min(ends)])
        except httpx2.RequestError as error:
            raise _Away(self._clean(error) or type(error).__name__) from error
        if ended is None:
            raise _Away("the reply broke off")
        return Reply(text, cut=ended == "length")

    def _read(self, data: str) -> tuple[str, str | None]:
        """The text in an event, and why the reply ended, if it did."""
        try:
            choices = json.loads(data)["choices"]
            if not choices:  # a last event tells the usage
                return "", None
            return choices[0]["delta"].get("content") or "", choices[0].get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"sent {self._clean(data)!r}, which is no event of a chat completion"
            raise self._fault(f"{what}. Correct base_url or model.") from error

    def _connected(self) -> AsyncClient:
        import httpx2

        if self._client is None:
            if not re.fullmatch(r"[!-~]*", self._key):  # the client would show what it cannot send
                variable = self.server.api_key_env
                raise self._fault(f"cannot be asked: {variable} holds no key. Correct it.")
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            # each request is timed as a whole instead
            self._client = httpx2.AsyncClient(headers=headers, timeout=None)
        return self._client

    def _refuse(self, response: Response) -> None:
        """Raise what a response that is no success means."""
        status = response.status_code
        told = f"status {status}: {self._clean(response.text)}"
        if status in (408, 429) or status >= 500:
            raise _Away(told)
        advice = "Correct model or extra, or lower rollout.max_turn_tokens."
        if status in (401, 403):
            variable = self.server.api_key_env
            held = "holds the wrong key" if self._key else "is not set"
            named = f"the environment variable {variable} {held}" if variable else "no key is sent"
            advice = f"Correct it: {named} (api_key_env)."
        elif status in (404, 405):
            advice = "Correct base_url, or model."
        raise self._fault(f"refused a request ({told}). {advice}")

    @property
    def _key(self) -> str:
        return os.environ.get(self.server.api_key_env or "", "").strip()

    def _clean(self, text: object) -> str:
        """A text in one line, short and without the key."""
        shown = " ".join(str(text).split())
        return (shown.replace(self._key, "***") if self._key else shown)[:300]

    def _fault(self, what: str) -> EndpointError:
        return EndpointError(f"{self.server.model!r} at {self.server.base_url} {what}")
