"""Asking a judge: many requests at once, what a server's faults mean, and how an outage is waited
out.

The key is read from the environment when a server is asked, lives in the client alone, and is
struck out of every message. What an outage produced is never a verdict: it is tried again, or it is
a `RewardError`, which stops the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from turnrl import RewardError
from turnrl_turn_rewards.server import Server

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

_LONGEST_BACKOFF_S = 8.0
_LONGEST_PAUSE_S = 60.0
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
        self._answered = time.monotonic()
        self._said = False

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
            response = await self._answer(client, prompt)
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
        """The server's answer to a request, tried again while there is hope."""
        import httpx2

        failures, since = 0, None
        while True:
            wish_s = 0.0
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    response = await client.post(self._server.url, json=self._server.body(prompt))
            except (httpx2.RequestError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                cause = f"no answer within {self._server.timeout_s:g} s" if late else error
                told = self._clean(cause) or type(error).__name__
            else:
                if response.is_success:
                    self._arrived()
                    return response
                told = f"status {response.status_code}: {self._clean(_complaint(response))}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    raise self._refused(response.status_code, told)
                wish_s = _seconds(response.headers.get("retry-after"))
            failures += 1
            since = time.monotonic() if since is None else since
            await self._pause(told, failures, since, wish_s)

    def _arrived(self) -> None:
        self._answered = time.monotonic()
        if self._said:
            self._said = False
            _say(f"{self._label} answers again; the run goes on")

    async def _pause(self, told: str, failures: int, since: float, wish_s: float) -> None:
        """Wait before another attempt, or give up. While others are answered there is hope."""
        patience_s = self._server.patience_s
        quiet_since = max(since, self._answered)
        left = quiet_since + patience_s - time.monotonic()
        if left <= 0:
            waited = f" It was waited for, {patience_s:g} s." if patience_s else ""
            raise self._fault(
                f"does not answer ({told}).{waited}",
                "Start it, correct 'base_url', or raise 'patience_s' to wait longer.",
            )
        if not self._said and time.monotonic() - quiet_since > _QUIET_S:
            self._said = True
            _say(f"{self._label} does not answer ({told}); the run waits, {patience_s:g} s at most")
        backoff_s = min(_LONGEST_BACKOFF_S, 0.25 * 2.0 ** min(failures - 1, 10))
        pause_s = max(backoff_s * random.uniform(0.5, 1.0), min(wish_s, _LONGEST_PAUSE_S))
        await asyncio.sleep(min(pause_s, left))

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

    @property
    def _label(self) -> str:
        return f"the judge {self._server.model!r} at {self._server.base_url}"

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


def _seconds(header: str | None) -> float:
    """Seconds that a `Retry-After` header asks for; 0 without one, or if it is a date."""
    return float(header) if header and re.fullmatch(r"\d{1,9}", header.strip()) else 0.0


def _say(message: str) -> None:
    print(f"turnrl: {message}", file=sys.stderr, flush=True)


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
