"""The thread that environments which are not thread-safe live in, and random numbers of an
attempt's own.

Some environments hold what only the thread that made it may use. Some seed `random` and
`numpy.random` at `reset` and draw from them: attempts side by side would then draw from each
other's numbers, and the attempts of a group would not even begin in the same state.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import os
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast, final

from turnrl import ToolError, settle

T = TypeVar("T")

_HANGS = 2.0
"""A call that takes longer than this many times its limit hangs, and nobody waits for it to end."""


@final
class OwnRandom:
    """Random numbers of one attempt.

    Args:
        seed: What they begin with, until the environment seeds them: below 2**32.
    """

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    def copied(self) -> OwnRandom:
        """The same numbers, which go their own way from here."""
        return copy.copy(self)  # states are never changed

    def lend(self, call: Call[T]) -> T:
        """Run a call that draws from them, in place of the process's."""
        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            return call.function()
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            if not call.late:  # else others have drawn in the meantime, and would draw the same
                random.setstate(python)
                np.random.set_state(numpy)


@final
class Call(Generic[T]):
    """A call on the worker of this process, which runs it after those that came before it.

    Args:
        what: What is called, for messages.
        limit_s: The most seconds that it may take.
        own: The random numbers that it draws from.
        function: What is called.
    Attributes:
        late: Whether nobody waits for it any more though it has begun.
    """

    def __init__(
        self, what: str, limit_s: float, own: OwnRandom, function: Callable[[], T]
    ) -> None:
        self.what, self.limit_s, self.own, self.function = what, limit_s, own, function
        self.late, self._since = False, 0.0
        self._begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[T] = concurrent.futures.Future()
        _WORKER.add(self)

    async def begins(self) -> None:
        """Wait until it begins.

        Raises:
            ToolError: If a call before it hangs.
        """
        begun = asyncio.wrap_future(self._begun)
        while not begun.done():
            await asyncio.wait([begun], timeout=self._left_s())

    async def result(self) -> T:
        """What the function returns, or what that gives if it is awaitable."""
        given: Any = await asyncio.wrap_future(self._done)
        return cast(T, await given if isinstance(given, Awaitable) else given)

    def result_here(self) -> T:
        """What the function returns, while the calling thread waits.

        Raises:
            ToolError: If a call before it hangs.
        """
        try:
            while not self._begun.done():
                concurrent.futures.wait([self._begun], timeout=self._left_s())
            return self._done.result()
        finally:
            self.leave(drop=True)

    def leave(self, drop: bool) -> None:
        """Wait for it no longer, and `drop` it unless it has begun."""
        self.late = self._done.running()
        if drop:
            self._done.cancel()

    def run(self) -> None:
        """Run it, unless it was dropped. Only the worker does."""
        self._since = time.monotonic()
        if self._done.set_running_or_notify_cancel():
            self._begun.set_result(None)
            settle(self._done, self.own.lend, self)

    def _left_s(self) -> float:
        """Seconds until the call that runs counts as hanging.

        Raises:
            ToolError: If it does now.
        """
        now = _WORKER.call
        if now is None or now is self or not now._done.running():
            return 0.01  # one is about to begin
        took_s = time.monotonic() - now._since
        if (left_s := _HANGS * now.limit_s - took_s) > 0:
            return left_s
        raise ToolError(
            f"{now.what} has not ended for {took_s:.3g} s, and with thread_safe: false nothing "
            f"else is called before it ends, so {self.what} cannot begin. Find out why it hangs, "
            "or raise step_timeout_s."
        )


@final
class _Worker:
    """A daemon thread that runs calls in their order.

    Attributes:
        call: The one that runs.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the thread and its calls: a forked process has no other thread than its own."""
        self.call: Call[object] | None = None
        self._calls: queue.SimpleQueue[Call[object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, call: Call[Any]) -> None:
        self._calls.put(call)
        with self._lock:
            if self._thread is None:
                name = "turnrl-environment"
                self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
                self._thread.start()

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _serve(self) -> None:
        while True:
            self.call = self._calls.get()
            self.call.run()
            self.call = None  # else it would keep what it holds until the next one comes


_WORKER = _Worker()
on_worker = _WORKER.is_here
"""True in the worker's thread."""
os.register_at_fork(after_in_child=_WORKER.begin_anew)
