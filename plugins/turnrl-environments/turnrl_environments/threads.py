"""The thread that makes all calls of environments that are not thread-safe, one after another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, final

from turnrl import ToolError
from turnrl.agent.running import resolve

T = TypeVar("T")


@final
@dataclass(eq=False)
class Queued(Generic[T]):
    """A call that the thread makes after all earlier calls."""

    function: Callable[[], T]
    begun: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    done: concurrent.futures.Future[T] = field(default_factory=concurrent.futures.Future)

    async def wait_for_turn(self, label: str) -> None:
        """Wait until the call begins.

        Raises:
            ToolError: If a call before it hangs.
        """
        begun = asyncio.wrap_future(self.begun)
        while not begun.done():
            if THREAD.hangs:
                raise ToolError(
                    f"{label} cannot begin: with thread_safe: false nothing is called before the "
                    "call that hangs has ended. Find out why it hangs, or raise step_timeout_s."
                )
            await asyncio.wait([begun], timeout=0.05)

    async def result(self) -> T:
        """The function's result; if that is awaitable, the result of awaiting it."""
        result: Any = await asyncio.wrap_future(self.done)
        return cast(T, await result if isinstance(result, Awaitable) else result)


@final
class OneThread:
    """A daemon thread that makes calls in their order.

    Attributes:
        hangs: True while a call runs that took too long.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the thread and its calls, because a forked process does not have the thread."""
        self.hangs = False
        self._calls: queue.SimpleQueue[Queued[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Queued[T]:
        """Add a call to the queue."""
        call = Queued(function)
        self._calls.put(call)
        if self._thread is None:
            name = "turnrl-environment"
            self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
            self._thread.start()
        return call

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            if call.done.set_running_or_notify_cancel():
                call.begun.set_result(None)
                resolve(call.done, call.function)
                self.hangs = False
            del call  # else its objects would live until the next call comes


THREAD = OneThread()
os.register_at_fork(after_in_child=THREAD.begin_anew)
