"""A function as a tool: binds a call's arguments to it, and turns its return value into a
result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence, Set, ValuesView
from numbers import Real
from typing import Any, final

from turnrl.agent.functions import described, hint_of, name_of, parameters_of, with_functions
from turnrl.agent.mistakes import is_of_threads, mistake_of
from turnrl.agent.running import (
    post_to_waiting_thread,
    resolve,
    result_of,
    took_too_long,
)
from turnrl.plugin.errors import (
    ArgumentTypeError,
    Ended,
    RecipeError,
    ToolError,
    TrajectoryLost,
    TurnRLError,
    at_least,
    kind_of,
    place_of,
)
from turnrl.plugin.text import visible
from turnrl.types import Question, Tool, ToolCall, ToolResult, Toolset

_logger = logging.getLogger(__name__)

_WAITS_S = 0.01
"""A function that does nothing for longer waits for something, such as a server."""
_AT_ONCE = 32
"""The most threads that call such a function at the same time."""
_QUESTION = "question"
"""The parameter that gets the attempt's question."""


@final
class FunctionTool(Tool):
    """A typed function as a tool; `rollout.tools` takes the function itself, too. Its docstring is
    the description, its annotations are the JSON Schema, and a parameter `question` gets the
    `turnrl.Question`.

    Args:
        function: The function, plain or async. A plain one may be called in several threads.
        name: The name the policy calls it by; the function's own by default.
        timeout_s: A call that takes longer than this many seconds stops the run.
        thread_safe: False to make all calls of a plain function one after another in the thread
            that waits for the attempts, as a rule the main thread. A function that fails because of
            its thread is called there anyway.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        timeout_s: float = 60.0,
        thread_safe: bool = True,
    ) -> None:
        if isinstance(function, type):
            raise ArgumentTypeError(
                f"FunctionTool.function is the class {function.__name__}. Give a function, or put "
                "an instance of a Tool or Toolset into model.rollout.tools."
            )
        function_name = name_of(function)
        self._label = f"the function {function_name}"
        self._takes_question = _takes_question(function, function_name)
        skip = (_QUESTION,) if self._takes_question else ()
        description = described(function, skip=skip, name=name or "")
        self.name, self.description = description.spec.name, description.spec.description
        self.parameters = description.spec.parameters
        self.timeout_s, self.thread_safe = timeout_s, thread_safe
        at_least(1e-3, "FunctionTool.", self, "timeout_s", optional=False)
        self._function, self._bind = function, description.bind
        self._warned: set[str] = set()
        if inspect.iscoroutinefunction(function):
            if not thread_safe:
                raise RecipeError(
                    f"{self} is async, and with thread_safe: false calls are made one after "
                    "another in one thread. Write it without async, or leave thread_safe out."
                )
            vars(self)["run"] = self._run_async  # needs no thread

    def __str__(self) -> str:
        return self._label

    @property
    def timed(self) -> bool:
        """True if it holds each call to `timeout_s` itself. Coroutines all begin at once, so the
        limit of their batch is enough."""
        return not inspect.iscoroutinefunction(self._function)

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Make the calls in threads, each within `timeout_s` of its beginning."""
        return await _Batch(self, calls).replies()

    async def _run_async(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        if len(calls) == 1:  # a task of its own would cost as much as the rest
            return [await self._awaited(calls[0])]
        return await asyncio.gather(*map(self._awaited, calls))

    async def _awaited(self, call: ToolCall) -> ToolResult | TrajectoryLost:
        try:
            return self._result(await self._function(**self._bound(call)), call)
        except (Exception, SystemExit) as error:
            return self._fault(error, call)

    def _reply(self, call: ToolCall, batch: _Batch) -> ToolResult | TrajectoryLost:
        try:
            value = self._called(call, batch)
            if inspect.isawaitable(value):  # of a plain function around an async one
                value = batch.awaited(value)
            return self._result(value, call)
        except (Exception, SystemExit) as error:
            return self._fault(error.cause if isinstance(error, Ended) else error, call)

    def _called(self, call: ToolCall, batch: _Batch) -> object:
        """The function's value, from a call in this thread, or in the one that waits for it."""
        if self.thread_safe:
            try:
                return self._function(**self._bound(call))
            except Exception as error:
                if not is_of_threads(error):
                    raise
                self._warn(
                    "thread",
                    f"{self} raised {type(error).__name__}: {error}{place_of(error)}. From now on "
                    "it is called in the thread that waits for the attempts, one call after "
                    "another: set thread_safe: false of FunctionTool to begin so.",
                )
                self.thread_safe = False
        return batch.made_elsewhere(self._function, self._bound(call))

    def _bound(self, call: ToolCall) -> dict[str, object]:
        bound = self._bind(call.arguments)
        if self._takes_question:
            bound[_QUESTION] = call.question
        return bound

    def _result(self, value: object, call: ToolCall) -> ToolResult:
        if value is None:
            self._warn(
                "None",
                f"{self} returned None on the arguments {_arguments(call)}, so the policy reads "
                "'None'. Return a text that tells it something, such as 'done'.",
            )
        return as_result(value, self._label)

    def _fault(self, error: BaseException, call: ToolCall) -> ToolResult | TrajectoryLost:
        """The reply for an exception: a result that the policy reads, or a lost trajectory, which
        begins again. Any other exception is raised as a fault of the world."""
        if isinstance(error, TrajectoryLost):
            return error
        if isinstance(error, TurnRLError):
            raise error
        where = f"on the arguments {_arguments(call)}{place_of(error)}"
        what = f"{self} raised {type(error).__name__}: {error} {where}"
        if (mistake := mistake_of(error, self._function, call.arguments)) is not None:
            if mistake is error:
                return ToolResult(str(mistake), ok=False)
            self._warn(
                type(error).__name__ + place_of(error),
                f"{what}. The policy reads this as its own mistake. If it is not, fix the "
                "function, or raise turnrl.ToolError.",
            )
            return ToolResult(str(mistake), ok=False, metadata={"raised": type(error).__name__})
        raise ToolError(
            f"{what}. Fix it; for a mistake of the policy, it raises turnrl.PolicyMistake with a "
            "text for the policy to read."
        ) from error

    def _warn(self, about: str, message: str) -> None:
        """Warn once about each thing."""
        if about not in self._warned:
            self._warned.add(about)
            _logger.warning("%s", visible(message))


class _Batch:
    """A batch of calls of a plain function, made in daemon threads: a pool's threads would keep a
    process alive.

    Args:
        tool: The tool.
        calls: The calls.
    """

    def __init__(self, tool: FunctionTool, calls: Sequence[ToolCall]) -> None:
        self._tool, self._calls = tool, calls
        self._post, self._loop = post_to_waiting_thread(), asyncio.get_running_loop()
        self._todo = iter(enumerate(calls))
        self._replies: dict[int, ToolResult | TrajectoryLost] = {}
        self._faults: list[BaseException] = []
        self._began: dict[int, float] = {}  # by thread, of the call that it makes
        self._made: dict[int, ToolCall] = {}

    async def replies(self) -> Sequence[ToolResult | TrajectoryLost]:
        """The reply to each call, in order.

        Raises:
            ToolError: If a call takes too long, or shows that the world is broken.
        """
        work = asyncio.ensure_future(result_of(self.work_through))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=self._left_s())
        except BaseException as error:
            self._faults.append(error)  # ends the threads
            work.cancel()
            raise
        return work.result()

    def _left_s(self) -> float:
        """Seconds until the longest call under way takes too long."""
        limit, now = self._tool.timeout_s, time.monotonic()
        thread, began = min([*self._began.items()], key=lambda pair: pair[1], default=(0, now))
        if (left := began + limit - now) <= 0:
            raise took_too_long(self._tool, "run", f" on {shown_call(self._made[thread])}")
        return left

    def work_through(self) -> Sequence[ToolResult | TrajectoryLost]:
        """Make the calls one by one; as soon as one waits, make the rest at the same time.
        Computing and garbage collection do not count as waiting: threads would not speed them
        up."""
        for _ in self._calls:
            began = time.perf_counter() - time.thread_time()
            if not self._make_next():
                break
            if time.perf_counter() - time.thread_time() - began > _WAITS_S and self._left:
                self._make_rest_in_threads()
                break
        if self._faults:
            raise self._faults[0]
        return [self._replies[number] for number in range(len(self._calls))]

    @property
    def _left(self) -> int:
        return len(self._calls) - len(self._replies)

    def _make_rest_in_threads(self) -> None:
        def work() -> None:
            while self._make_next():
                pass

        threads = [
            threading.Thread(target=work, daemon=True, name="turnrl-tool")
            for _ in range(min(self._left, _AT_ONCE) if self._tool.thread_safe else 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _make_next(self) -> bool:
        """Make the next call; False if there is none, or if another one failed."""
        if self._faults or (numbered := next(self._todo, None)) is None:
            return False
        thread, (number, call) = threading.get_ident(), numbered
        self._made[thread], self._began[thread] = call, time.monotonic()
        try:
            self._replies[number] = self._tool._reply(call, self)
        except BaseException as fault:
            self._faults.append(fault)
        self._began.pop(thread, None)
        return True

    def made_elsewhere(
        self, function: Callable[..., object], arguments: dict[str, object]
    ) -> object:
        """A call's result, made in the thread that waits for the attempts. Its time begins when
        that thread gets to it."""
        thread = threading.get_ident()
        self._began.pop(thread, None)
        done: concurrent.futures.Future[object] = concurrent.futures.Future()

        def made() -> object:
            self._began[thread] = time.monotonic()
            return function(**arguments)

        self._post(functools.partial(resolve, done, made))
        return done.result()

    def awaited(self, work: Awaitable[object]) -> object:
        """The result of an awaitable, awaited on the event loop of the collection."""

        async def result() -> object:
            return await work

        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()


def shown_call(call: ToolCall) -> str:
    """A call in short, for messages."""
    return f"{call.name} with arguments {_arguments(call)}"


def _arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False, default=str)[:200]


def as_result(value: object, who: str) -> ToolResult:
    """A function's return value as the result of a call: a text as it is, a number, a list or
    another value that JSON can hold as JSON, and anything else as `str` writes it.

    Args:
        value: The value.
        who: The function, for the message.
    Raises:
        ToolError: If the value has no text that says anything, as an `object()` has none.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if value is None or isinstance(value, float):  # JSON has no nan
        return ToolResult(str(value))
    if isinstance(value, set | frozenset):  # in the same order in every process
        value = sorted(value, key=str)
    from pydantic_core import to_jsonable_python

    try:
        plain = to_jsonable_python(value, fallback=_native)
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    except Exception:  # of a value's own code, too
        return _as_written(value, who)
    return ToolResult(text)


def _native(value: Any) -> object:
    """Numbers and lists in place of those of numpy and torch, and texts in place of the rest."""
    of = str(getattr(value, "dtype", ""))
    if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist"):
        if of.startswith(("datetime64", "timedelta64")):  # whose number is in nanoseconds
            return str(value)
        number = value.tolist()  # None of a masked one
        # a float32 of 0.1 is 0.1, and not 0.10000000149011612
        return float(str(value)) if isinstance(value, Real) and number % 1 else number
    is_array = hasattr(value, "tolist") and not hasattr(value, "to_dict")  # no table of pandas
    if is_array and of.endswith(("float64", "int64", "bool")):  # a million at once
        return value.tolist()
    if is_array or isinstance(value, Sequence | Set | ValuesView):
        return [*value]
    return _text_of(value)


def _as_written(value: object, who: str) -> ToolResult:
    """The result of a value that JSON cannot hold."""
    try:
        text = _text_of(value)
    except (ValueError, RecursionError):  # a number of a million digits, a list in a list in ...
        what = f"the result, {kind_of(value)}, is too long or too deeply nested to be written"
        return ToolResult(what, ok=False)
    except TypeError as error:
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nobody awaited it
        raise ToolError(
            f"{who} returned {kind_of(value)}, {value!r:.60}, which is neither text nor JSON. "
            "Return a text, a turnrl.ToolResult, or numbers, texts, lists and mappings."
        ) from error
    return ToolResult(text)


def _text_of(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if " at 0x" in (text := str(value)):
        raise TypeError("it has no text")
    return text


def _takes_question(function: Callable[..., object], function_name: str) -> bool:
    """True if a function has a parameter for the question.

    Raises:
        RecipeError: If the parameter's type is not `turnrl.Question`.
    """
    for parameter in parameters_of(function):
        if parameter.name == _QUESTION:
            kind = parameter.annotation
            # the class may be imported for type checkers only, so its name alone counts as well
            named = isinstance(kind, str) and kind.strip("'\"").rpartition(".")[2] == "Question"
            untyped = kind is parameter.empty
            if not untyped and (named or hint_of(function, parameter) is Question):
                return True
            has = "has no type" if untyped else f"is of another type, {parameter}"
            raise RecipeError(
                f"the parameter 'question' of the function {function_name} {has}. It gets the "
                "question that is being answered: write 'question: turnrl.Question'. If the policy "
                "should fill it in, give it another name, such as 'query'."
            )
    return False


def toolsets_of(tools: Sequence[Toolset | Callable[..., object]]) -> tuple[Toolset, ...]:
    """The toolsets of a list that may also contain functions.

    Raises:
        ArgumentTypeError: If `tools` is not a list of tools and functions.
        RecipeError: If the policy could not call one of the functions.
    """
    return tuple(with_functions(Toolset, "tools", tools, FunctionTool, "Tool or Toolset"))
