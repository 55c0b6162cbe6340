"""Asking a judge: many requests at once, and what a server's faults mean.

The key is read from the environment when a server is asked, lives in the client alone, and is
struck out of every message. What an outage produced is never a verdict: it is tried again, or it is
a `RewardError`, which stops the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from turnrl_servers import Patience, Unavailable

from turnrl import RewardError
from turnrl_turn_rewards.server import Server

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

_QUIET_S = 5.0
"""An outage that is over before is not worth a line."""


def ask_all(
    server: Server,
    prompts: Mapping[bytes, str],
    read: Callable[[str], float | None],
    keep: Callable[[bytes, float], None],
) -> None:
    """Ask a judge about prompts, `server.concurrency` of them at a time.

    Args:
        server: Whom to ask.
        prompts: What to ask, by keys.
        read: The verdict in a reply, or None if it holds none.
        keep: Called with the key and the verdict of each prompt, as they come, in another thread.
    Raises:
        RewardError: If the server is away for too long, refuses, or twice gives no verdict. What
            came before it was kept.
    """
    line, todo = _Line(server), iter(prompts.items())

    async def lane(client: AsyncClient) -> None:
        for key, prompt in todo:  # lanes take from one iterator, each what comes next
            keep(key, await line.verdict(client, prompt, read))

    async def work() -> None:
        async with line.client() as client:
            count = min(server.concurrency, len(prompts))
            lanes = [asyncio.create_task(lane(client)) for _ in range(count)]
            try:
                await asyncio.gather(*lanes)
            finally:
                for one in lanes:
                    one.cancel()
                await asyncio.gather(*lanes, return_exceptions=True)

    _aside(work())


class _Line:
    """A server while a batch of questions is asked.

    Args:
        server: How to reach it.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._key = os.environ.get(server.api_key_env or "", "").strip()
        self._label = f"the judge {server.model!r} at {server.base_url}"
        advice = "Start it, correct 'base_url', or raise 'patience_s' to wait longer."
        self._patience = Patience(
            self._label, server.patience_s, lambda told: self._fault(told, advice), 0, _QUIET_S
        )

    def client(self) -> AsyncClient:
        """A client for all requests of the batch."""
        import httpx2

        if not re.fullmatch(r"[!-~]*", self._key):  # the client would show what it cannot send
            raise self._fault(
                f"cannot be asked: the environment variable {self._server.api_key_env} holds "
                "something that is no key.",
                "Correct it.",
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx2.Limits(max_connections=self._server.concurrency)
        # each request is timed as a whole instead: a server that sends a byte now and then would
        # never be late
        return httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def verdict(
        self, client: AsyncClient, prompt: str, read: Callable[[str], float | None]
    ) -> float:
        """The judge's verdict on a prompt, whatever it takes."""
        answer = ""
        for _ in range(2):
            response = await self._patience.ask_async(lambda: self._answer(client, prompt))
            answer, reply = self._clean(response.text), _content(response)
            found = None if reply is None else read(reply)
            if found is not None:
                return found
        raise self._fault(
            f"was asked twice and gave no verdict; it sent {answer!r}.",
            "Ask for one in 'prompt' as JSON ({\"score\": 0.5}), raise 'max_tokens' if the reply "
            "is cut, or take another model.",
        )

    async def _answer(self, client: AsyncClient, prompt: str) -> Response:
        """The server's answer to one request."""
        import httpx2

        try:
            async with asyncio.timeout(self._server.timeout_s):
                response = await client.post(self._server.url, json=self._server.body(prompt))
        except TimeoutError:
            raise Unavailable(f"no answer within {self._server.timeout_s:g} s") from None
        except httpx2.RequestError as error:
            raise Unavailable(self._clean(error) or type(error).__name__) from None
        if response.is_success:
            return response
        told = f"status {response.status_code}: {self._clean(_complaint(response))}"
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise Unavailable(told, response.headers.get("retry-after"))
        raise self._refused(response.status_code, told)

    def _refused(self, status: int, told: str) -> RewardError:
        variable = self._server.api_key_env
        advice = "Correct 'model', 'max_tokens' or 'extra'."
        if status in (401, 403):
            held = "holds the wrong key" if self._key else "is not set"
            named = f"the environment variable {variable} {held}" if variable else "no key is sent"
            advice = f"Correct it: {named} (api_key_env)."
        elif status in (404, 405) or 300 <= status < 400:
            advice = "Correct 'base_url', or 'model'."
        return self._fault(f"refused a request ({told}).", advice)

    def _fault(self, what: str, advice: str) -> RewardError:
        return RewardError(f"{self._label} {what} {advice}")

    def _clean(self, text: object) -> str:
        """A text in one line, short and without the key."""
        shown = " ".join(str(text).split())
        return (shown.replace(self._key, "***") if self._key else shown)[:300]


def _content(response: Response) -> str | None:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _complaint(response: Response) -> object:
    """Clearest message of a response that is an error."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        told = response.json()["error"]
        return told["message"] if isinstance(told, Mapping) else told
    return response.text or response.headers.get("location", "")


def _aside(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on an event loop of its own, in a thread of its own: so it does
    not matter whether the caller's thread has a loop, and Ctrl-C is heard at once.

    If the caller is interrupted, the coroutine is cancelled; it is not waited for longer than a
    second.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    done: Future[None] = Future()

    async def settle() -> None:
        try:
            await task
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(settle())

    # a daemon: what hangs must not keep a program that is interrupted
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        done.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed when the work is done
            loop.call_soon_threadsafe(task.cancel)
        thread.join(1.0)
