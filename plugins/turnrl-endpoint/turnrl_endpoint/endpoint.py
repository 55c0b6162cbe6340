"""`Endpoint`: asks a server for one turn after the other.

A reply is read as it is written. So it ends at a stop string wherever the server would go on, also
where a server takes no stop strings, or does not say which one it met.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from turnrl import EngineError, Message, MessageSampler, Reply, Sampling
from turnrl_endpoint.server import Server

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response


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
        from turnrl_servers import Patience  # not before it is needed: rewards import this package

        self.server = server
        self.capacity = server.concurrency
        self._label = f"{server.model!r} at {server.base_url}"
        self._patience = Patience(self._label, server.patience_s, self._gave_up)
        self._client: AsyncClient | None = None

    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """See `MessageSampler.reply`. While the server is away, it is asked again.

        Raises:
            EndpointError: If it is away for `patience_s`, refuses, or sends what is no reply.
        """
        body = self._body(messages, sampling)
        return await self._patience.ask_async(lambda: self._attempt(body, sampling.stop))

    async def _attempt(self, body: Mapping[str, Any], stop: Sequence[str]) -> Reply:
        import asyncio

        from turnrl_servers import Unavailable

        try:
            async with asyncio.timeout(self.server.timeout_s):
                return await self._ask(body, stop)
        except TimeoutError:
            late = f"no whole answer within timeout_s = {self.server.timeout_s:g}"
            raise Unavailable(late) from None

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
        from turnrl_servers import Unavailable

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
            raise Unavailable(self._clean(error) or type(error).__name__) from error
        if ended is None:
            raise Unavailable("the reply broke off")
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
        from turnrl_servers import Unavailable

        status = response.status_code
        told = f"status {status}: {self._clean(response.text)}"
        if status in (408, 429) or status >= 500:
            raise Unavailable(told, response.headers.get("retry-after"))
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

    def _gave_up(self, told: str) -> EndpointError:
        waited = f"{self.server.patience_s:g} s"
        what = f"{told.removesuffix(f'. It was waited for, {waited}.')}, after {waited} of waiting"
        return self._fault(f"{what}. Start it, correct base_url, or raise patience_s.")

    def _fault(self, what: str) -> EndpointError:
        return EndpointError(f"{self._label} {what}")
