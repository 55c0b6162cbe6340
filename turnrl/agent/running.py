"""Coroutines and other people's code: run on the event loop of all collections or on a thread,
within their time, and to their end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar, cast, final

from turnrl.errors import Ended, ToolError, TurnRLError, place_of
from turnrl.types import ToolSession, Toolset

T = TypeVar("T")

_SHUTDOWN_S = 30.0
"""After Ctrl-C, how long the forward pass under way may take to end."""
_MOST_IDLE = 128
"""Threads that are kept for later calls."""
_BUSY, _IDLE = "turnrl-tool", "turnrl-idle"
"""Names of a thread that runs a tool's code, and of one that waits for more."""


async def to_its_end(work: Awaitable[T]) -> T:
    """Await work to its end even if whoever waits is cancelled, because another trajectory failed,
    say; the cancellation is raised only then."""
    begun = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        with contextlib.suppress(TurnRLError):
            await begun
        raise


async def run_tool(
    tool: Toolset,
    verb: str,
    function: Callable[..., T | Awaitable[T]],
    *arguments: object,
    on: str = "",
) -> T:
    """Run a tool's own code within its time; see `result_of`.

    Args:
        tool: Whose code it is.
        verb: What is done, for messages.
        function: Its code.
        arguments: The function's arguments.
        on: On what it is done, for messages; begins with a space.
    Raises:
        ToolError: If it raises, or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.timeout(tool.timeout_s) as clock:
            return await result_of(function, *arguments)
    except TurnRLError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if clock.expired():
            late = f"did not answer to {verb}{on} within timeout_s = {tool.timeout_s:g}"
            advice = "Raise its timeout_s, or find out why it hangs."
            raise ToolError(f"{tool} {late}. {advice}") from error
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        advice = "Fix the tool; for a mistake of the policy it should return ToolResult(ok=False)."
        if verb == "open":
            advice = "Fix the tool, or name data that have what it needs."
        cause = error.cause if isinstance(error, Ended) else error
        what = f"{tool} raised {type(cause).__name__}: {cause} in {verb}{on}{place_of(cause)}"
        raise ToolError(f"{what}. {advice}") from cause


async def result_of(function: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """Result of a function that may block, or be a coroutine's.

    A plain one runs in a daemon thread, which does not keep a program that is interrupted. What it
    returns may be awaitable all the same.

    Args:
        function: A plain function, or a coroutine's.
        arguments: What it is called with.
    """
    plain = not asyncio.iscoroutinefunction(function)
    result: object = (
        await _in_daemon_thread(function, *arguments) if plain else function(*arguments)
    )
    return cast(T, await result if isinstance(result, Awaitable) else result)


async def _in_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run in a thread that does not keep the process alive: a hanging tool cannot be killed, only
    left.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    _threads().run(functools.partial(settle, done, function, *arguments))
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        done.add_done_callback(functools.partial(_close_late, loop=asyncio.get_running_loop()))
        raise


def settle(
    done: concurrent.futures.Future[T], function: Callable[..., T], *arguments: object
) -> None:
    """Call a function, and give a future what it returns or raises. What could not be raised out of
    a future, such as a StopIteration, is the `cause` of what it gets.

    Args:
        done: The future.
        function: What to call.
        arguments: What it is called with.
    """
    try:
        # threads are used again, and what code sets in its context is not for the next
        done.set_result(contextvars.Context().run(function, *arguments))
    except BaseException as error:
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        done.set_exception(error if plain else Ended(error))


@final
class _Threads:
    """Daemon threads, which wait for more work when theirs is done: to start one costs several
    times as much as a short call. One that hangs is not waited for; others take its place."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait, less the works that are queued for them

    def run(self, work: Callable[[], None]) -> None:
        """Run it at once, in a thread that is idle or in a new one."""
        with self._lock:
            new = self._idle == 0
            if not new:
                self._idle -= 1
        if new:
            threading.Thread(target=self._serve, args=(work,), daemon=True, name=_BUSY).start()
        else:
            self._works.put(work)

    def _serve(self, work: Callable[[], None]) -> None:
        thread = threading.current_thread()
        while True:
            work()
            del work  # else it would keep what it holds until the next one comes
            thread.name = _IDLE
            with self._lock:
                if self._idle >= _MOST_IDLE:
                    return
                self._idle += 1
            work = self._works.get()
            thread.name = _BUSY


@functools.cache
def _threads() -> _Threads:
    """The threads of all tools."""
    return _Threads()


def _close_late(done: concurrent.futures.Future[object], loop: asyncio.AbstractEventLoop) -> None:
    """Close a session that comes when nobody waits for it any more, or a coroutine that nobody will
    await."""
    late = None if done.exception() else done.result()
    if asyncio.iscoroutine(late):
        late.close()
    if isinstance(late, ToolSession) and not loop.is_closed():
        asyncio.run_coroutine_threadsafe(result_of(late.close), loop)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all collections, in a thread of its own: it works inside a notebook, whose
    own is running already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), daemon=True, name="turnrl-rollout").start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:  # a SystemExit in a task stops a loop, and whoever awaits the task gets it too
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


# a forked process has the loop and the queue but not their threads; it begins with its own
os.register_at_fork(after_in_child=_loop.cache_clear)
os.register_at_fork(after_in_child=_threads.cache_clear)


@final
class Underway(Generic[T]):
    """A coroutine on its way on the event loop of all collections.

    Args:
        work: The coroutine.
    Attributes:
        seconds: From its beginning to its end, once it has ended.
    Raises:
        RuntimeError: If it is begun on that loop, which would wait for itself.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        if asyncio._get_running_loop() is _loop():
            work.close()
            what = "this waits for work on the event loop that it runs on"
            raise RuntimeError(f"{what}. Await the work.")
        self._began, self.seconds = time.perf_counter(), 0.0
        self._ended = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._supervised(work), _loop())

    async def _supervised(self, work: Coroutine[object, object, T]) -> T:
        try:
            return await work
        finally:
            self.seconds = time.perf_counter() - self._began
            self._ended.set()

    def result(self) -> T:
        """Wait for what it returns. Ctrl-C cancels it, and waits 30 s at most for its end."""
        try:
            return self._future.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel it, and wait 30 s at most for its end."""
        self._future.cancel()
        self._ended.wait(_SHUTDOWN_S)  # a cancelled future is done at once; the work is not


def on_loop(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on the event loop of all collections, and wait for it. The calling thread may
    have a running loop of its own. Ctrl-C cancels the coroutine, and waits 30 s at most for it.

    Args:
        work: The coroutine.
    Returns:
        What it returned.
    Raises:
        RuntimeError: If it is called on that loop, which would wait for itself.
    """
    return Underway(work).result()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a user should see of a group in which one failure cancelled the rest."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
