"""The thread of environments that are not thread-safe."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast, final

from turnrl import ToolError
from turnrl.agent.running import resolve

T = TypeVar("T")


@final
class OneThread:
    """A daemon thread that makes all calls of a world, one after another. It does not keep an
    interrupted program alive.

    Attributes:
        hangs: True once a call has taken too long, after which nothing else can be called.
    """

    def __init__(self) -> None:
        self.hangs = False
        self._line = asyncio.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextlib.asynccontextmanager
    async def turn(self, label: str) -> AsyncIterator[None]:
        """Wait until no other call runs.

        Raises:
            ToolError: If a call hangs.
        """
        async with self._line:
            if self.hangs:
                raise ToolError(
                    f"{label} cannot begin: with thread_safe: false nothing more is called "
                    "after a call that hung. Find out why it hung, or raise step_timeout_s."
                )
            yield

    async def result_of(self, function: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
        """The function's result; if that is awaitable, the result of awaiting it."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put(functools.partial(resolve, done, function, *arguments))
        if self._thread is None:
            name = "turnrl-environment"
            self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
            self._thread.start()
        result = await asyncio.wrap_future(done)
        return cast(T, await result if isinstance(result, Awaitable) else result)

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # else its objects would live until the next call comes
