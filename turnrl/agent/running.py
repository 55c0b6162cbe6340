"""Runs coroutines and other people's code: on the event loop of all collections or in a thread,
within a time limit, and to the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import json
import os
import queue
import threading
import time
from abc import ABC
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar, cast, final

from turnrl.plugin.errors import HeldException, ToolError, TurnRLError, locate_error
from turnrl.types import ToolCall, ToolSession, Toolset

T = TypeVar("T")

_SHUTDOWN_S = 30.0
"""Time that the forward pass under way has to end after Ctrl-C."""
_MOST_IDLE = 128
"""The most idle threads that are kept for later calls."""
_BUSY, _IDLE = "turnrl-tool", "turnrl-idle"
"""Names of a thread that runs a tool's code, and of one that waits for more."""


async def run_to_end(work: Awaitable[T]) -> T:
    """Await work to its end even if the caller is cancelled, for example because another trajectory
    failed. The cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(TurnRLError):
            await task
        raise


async def run_tool(
    tool: Toolset,
    verb: str,
    function: Callable[..., T | Awaitable[T]],
    *arguments: object,
    on: str = "",
    timed: bool = True,
) -> T:
    """Run a tool's own code within a time limit; see `run_function`.

    Args:
        tool: The tool.
        verb: What the code does, for messages: `run` or `open`, for example.
        function: The tool's code.
        arguments: The function's arguments.
        on: What the code works on, for messages; begins with a space.
        timed: True to hold the code to the tool's `timeout_s`; False if it does so itself.
    Raises:
        ToolError: If the code raises, or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.timeout(tool.timeout_s if timed else None) as clock:
            return await run_function(function, *arguments)
    except TurnRLError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if clock.expired():
            raise ToolError(
                f"{tool} did not answer to {verb}{on} within timeout_s = {tool.timeout_s:g}. Raise "
                "its timeout_s, or find out why it hangs."
            ) from error
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        advice = "Fix the tool; for a mistake of the policy it should return ToolResult(ok=False)."
        if verb == "open":
            advice = "Fix the tool, or name data that have what it needs."
        cause = error.cause if isinstance(error, HeldException) else error
        what = f"{tool} raised {type(cause).__name__}: {cause} in {verb}{on}{locate_error(cause)}"
        raise ToolError(f"{what}. {advice}") from cause


async def run_function(function: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """The result of a function that may block, or be async.

    A plain function runs in a daemon thread, which does not keep an interrupted program alive. It
    may still return an awaitable, which is then awaited.

    Args:
        function: A plain or an async function.
        arguments: The function's arguments.
    """
    plain = not asyncio.iscoroutinefunction(function)
    result: object = (
        await _in_daemon_thread(function, *arguments) if plain else function(*arguments)
    )
    return cast(T, await result if isinstance(result, Awaitable) else result)


async def _in_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run a function in a daemon thread: a hanging tool cannot be killed, only abandoned, and must
    not keep the process alive."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    _threads().run(functools.partial(resolve, done, function, *arguments))
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        done.add_done_callback(functools.partial(_close_late, loop=asyncio.get_running_loop()))
        raise


def resolve(
    done: concurrent.futures.Future[T], function: Callable[..., T], *arguments: object
) -> None:
    """Call a function, and resolve a future with its result or its exception. An exception that no
    future can raise, such as StopIteration, is wrapped in `HeldException`, as its `cause`.

    Args:
        done: The future.
        function: The function.
        arguments: The function's arguments.
    """
    try:
        # a context of its own: threads are reused, and the next call must not see this one's
        done.set_result(contextvars.Context().run(function, *arguments))
    except BaseException as error:
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        done.set_exception(error if plain else HeldException(error))
        in_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main:  # Ctrl-C
            raise


@final
class _Threads:
    """Daemon threads that are reused, because starting a thread costs several times as much as a
    short call. Nothing waits for a thread that hangs: the next call gets another one."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # waiting threads, minus the work that is queued for them

    def run(self, work: Callable[[], None]) -> None:
        """Run a call at once, in an idle thread or in a new one."""
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
            del work  # else its objects would stay alive until the next work comes
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
    """Close a session that arrives after its caller has gone, or a coroutine that nobody will
    await."""
    late = None if done.exception() else done.result()
    if asyncio.iscoroutine(late):
        late.close()
    if isinstance(late, ToolSession) and not loop.is_closed():
        asyncio.run_coroutine_threadsafe(run_function(late.close), loop)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all collections, in a thread of its own. So it works in a notebook too,
    where another loop runs already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), daemon=True, name="turnrl-rollout").start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:  # a SystemExit in a task stops the loop; whoever awaits the task gets it anyway
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


# a forked process inherits the loop and the queue but not their threads, so it makes new ones
os.register_at_fork(after_in_child=_loop.cache_clear)
os.register_at_fork(after_in_child=_threads.cache_clear)


@final
class BackgroundTask(Generic[T]):
    """A coroutine under way on the event loop of all collections.

    Args:
        work: The coroutine.
    Attributes:
        seconds: The time that the coroutine took, once it has ended.
    Raises:
        RuntimeError: If the caller is on that loop, which would wait for itself.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        if asyncio._get_running_loop() is _loop():
            work.close()
            what = "this waits for work on the event loop that it runs on"
            raise RuntimeError(f"{what}. Await the work.")
        self._began, self.seconds = time.perf_counter(), 0.0
        self._ended = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._supervise(work), _loop())

    async def _supervise(self, work: Coroutine[object, object, T]) -> T:
        try:
            return await work
        finally:
            self.seconds = time.perf_counter() - self._began
            self._ended.set()

    def result(self) -> T:
        """Wait for the coroutine's result. Ctrl-C cancels it, and waits at most 30 s for its
        end."""
        try:
            return self._future.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the coroutine, and wait at most 30 s for its end."""
        self._future.cancel()
        self._ended.wait(_SHUTDOWN_S)  # a cancelled future is done at once, the coroutine is not


def on_loop(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on the event loop of all collections, and wait for it. The calling thread may
    have a running loop of its own. Ctrl-C cancels the coroutine, and waits at most 30 s for it.

    Args:
        work: The coroutine.
    Returns:
        The coroutine's result.
    Raises:
        RuntimeError: If the caller is on that loop, which would wait for itself.
    """
    return BackgroundTask(work).result()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception to show to a user, from a group in which one failure cancelled the rest."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


class TimesCalls(ABC):  # noqa: B024
    """A toolset that holds each of its calls to `timeout_s` by itself."""


def format_call(call: ToolCall) -> str:
    """A call in short, for messages."""
    return f"{call.name} with arguments {shown_arguments(call)}"


def shown_arguments(call: ToolCall) -> str:
    """The arguments of a call in short, for messages."""
    return json.dumps(dict(call.arguments), ensure_ascii=False, default=str)[:200]
