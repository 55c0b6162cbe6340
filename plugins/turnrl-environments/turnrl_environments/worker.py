"""The threads for environments that not every thread may call, and each attempt's own random
numbers.

Some environments hold objects that only the thread that made them may use. Some seed `random` and
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

from turnrl import ToolError, post_to_waiting_thread, resolve

T = TypeVar("T")

_HANGS = 2.0
"""A call that takes longer than this many times its limit hangs; then nobody waits for it."""


@final
class OwnRandom:
    """Random numbers of one attempt.

    Args:
        seed: Their seed until the environment seeds them: below 2**32.
    """

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    def copied(self) -> OwnRandom:
        """A copy in the same state, which is independent from here on."""
        return copy.copy(self)  # states are never changed

    def lend(self, call: Call[T]) -> T:
        """Run a call that draws from these numbers instead of the process's own."""
        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            return call.function()
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            if not call.late:  # else others drew meanwhile, and would draw the same again
                random.setstate(python)
                np.random.set_state(numpy)


@final
class Call(Generic[T]):
    """A call on the worker of this process, which runs it after all earlier calls.

    Args:
        label: Its name in messages.
        limit_s: The most seconds that it may take.
        random_numbers: The random numbers that it draws from.
        function: The function to call.
    Attributes:
        late: True if it has begun, but nobody waits for it any more.
    """

    def __init__(
        self, label: str, limit_s: float, random_numbers: OwnRandom, function: Callable[[], T]
    ) -> None:
        self.label, self.limit_s, self.function = label, limit_s, function
        self.random_numbers = random_numbers
        self.late, self._since = False, 0.0
        self._begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[T] = concurrent.futures.Future()
        _WORKER.add(self)

    async def begins(self) -> None:
        """Wait until the call begins.

        Raises:
            ToolError: If a call before it hangs.
        """
        begun = asyncio.wrap_future(self._begun)
        while not begun.done():
            await asyncio.wait([begun], timeout=self._left_s())

    async def result(self) -> T:
        """The function's result; if that is awaitable, the result of awaiting it."""
        result: Any = await asyncio.wrap_future(self._done)
        return cast(T, await result if isinstance(result, Awaitable) else result)

    def result_here(self) -> T:
        """The function's result. The calling thread waits for it.

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
        """Stop waiting for the call, and if `drop`, drop it unless it has begun."""
        self.late = self._done.running()
        if drop:
            self._done.cancel()

    def run(self) -> None:
        """Run the call unless it was dropped. Only the worker calls this."""
        self._since = time.monotonic()
        if self._done.set_running_or_notify_cancel():
            self._begun.set_result(None)
            resolve(self._done, self.random_numbers.lend, self)

    def _left_s(self) -> float:
        """Seconds until the running call counts as hanging.

        Raises:
            ToolError: If it hangs already.
        """
        running = _WORKER.call
        if running is None or running is self or not running._done.running():
            return 0.01  # a call is about to begin
        took_s = time.monotonic() - running._since
        if (left_s := _HANGS * running.limit_s - took_s) > 0:
            return left_s
        raise ToolError(
            f"{running.label} has not ended for {took_s:.3g} s, and with thread_safe: false "
            f"nothing else is called before it ends, so {self.label} cannot begin. Find out why it "
            "hangs, or raise step_timeout_s."
        )


@final
class Errand(Generic[T]):
    """A call of the thread that waits for the attempts, as a rule the main thread.

    Args:
        function: The function to call.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self._begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[T] = concurrent.futures.Future()
        post_to_waiting_thread()(self._run)

    async def begins(self) -> None:
        """Wait until the call begins."""
        await asyncio.wrap_future(self._begun)

    async def result(self) -> T:
        """See `Call.result`."""
        result: Any = await asyncio.wrap_future(self._done)
        return cast(T, await result if isinstance(result, Awaitable) else result)

    def leave(self, drop: bool) -> None:
        """See `Call.leave`."""
        if drop:
            self._done.cancel()

    def _run(self) -> None:
        if self._done.set_running_or_notify_cancel():
            self._begun.set_result(None)
            resolve(self._done, self.function)


@final
class _Worker:
    """A daemon thread that runs calls in their order.

    Attributes:
        call: The running call, if any.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the thread and its calls, because a forked process does not have the thread."""
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
            self.call = None  # else its objects would live until the next call comes


_WORKER = _Worker()
on_worker = _WORKER.is_here
"""True in the worker's thread."""
os.register_at_fork(after_in_child=_WORKER.begin_anew)
