"""A function as a tool: binds a call's arguments to it, and turns its return value into a
result."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from turnrl.agent.functions import described, hint_of, name_of, parameters_of, with_functions
from turnrl.errors import (
    ArgumentTypeError,
    PolicyMistake,
    RecipeError,
    ToolError,
    TrajectoryLost,
    TurnRLError,
    at_least,
    kind_of,
    place_of,
)
from turnrl.types import Question, Tool, ToolCall, ToolResult, Toolset

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
        timeout_s: A batch of calls that takes longer than this many seconds stops the run.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, timeout_s: float = 60.0
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
        self.timeout_s = timeout_s
        at_least(1e-3, "FunctionTool.", self, "timeout_s", optional=False)
        self._function, self._bind = function, description.bind
        if inspect.iscoroutinefunction(function):
            vars(self)["run"] = self._run_async  # needs no thread

    def __str__(self) -> str:
        return self._label

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Run the calls one by one; as soon as one waits, run the rest at the same time. Computing
        and garbage collection do not count as waiting: threads would not speed them up."""
        if len(calls) == 1:
            return [self._reply(calls[0])]
        replies: list[ToolResult | TrajectoryLost] = []
        for number, call in enumerate(calls[:-1], 1):
            began = time.perf_counter() - time.thread_time()
            replies.append(self._reply(call))
            if time.perf_counter() - time.thread_time() - began > _WAITS_S:
                return [*replies, *self._in_threads(calls[number:])]
        return [*replies, self._reply(calls[-1])]

    async def _run_async(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        if len(calls) == 1:  # a task of its own would cost as much as the rest
            return [await self._awaited(calls[0])]
        return await asyncio.gather(*map(self._awaited, calls))

    def _in_threads(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Run the calls in daemon threads, which do not keep a process alive as a pool's would."""
        todo = iter(enumerate(calls))
        replies: dict[int, ToolResult | TrajectoryLost] = {}
        faults: list[BaseException] = []

        def work() -> None:
            try:
                while not faults and (numbered := next(todo, None)) is not None:
                    number, call = numbered
                    replies[number] = self._reply(call)
            except BaseException as fault:
                faults.append(fault)

        threads = [
            threading.Thread(target=work, daemon=True, name="turnrl-tool")
            for _ in range(min(len(calls), _AT_ONCE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return [replies[number] for number in range(len(calls))]

    def _reply(self, call: ToolCall) -> ToolResult | TrajectoryLost:
        try:
            return as_result(self._function(**self._bound(call)), self._label)
        except (Exception, SystemExit) as error:
            return self._fault(error, call)

    async def _awaited(self, call: ToolCall) -> ToolResult | TrajectoryLost:
        try:
            return as_result(await self._function(**self._bound(call)), self._label)
        except (Exception, SystemExit) as error:
            return self._fault(error, call)

    def _bound(self, call: ToolCall) -> dict[str, object]:
        bound = self._bind(call.arguments)
        if self._takes_question:
            bound[_QUESTION] = call.question
        return bound

    def _fault(self, error: BaseException, call: ToolCall) -> ToolResult | TrajectoryLost:
        """The reply for an exception: a result that the policy reads, or a lost trajectory, which
        begins again. Any other exception is raised as a fault of the world."""
        if isinstance(error, PolicyMistake):
            return ToolResult(str(error), ok=False)
        if isinstance(error, TrajectoryLost):
            return error
        if isinstance(error, TurnRLError):
            raise error
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)[:200]
        raise ToolError(
            f"{self} raised {type(error).__name__}: {error} on the arguments {arguments}"
            f"{place_of(error)}. Fix it; for a mistake of the policy, it raises "
            "turnrl.PolicyMistake with a text for the policy to read."
        ) from error


def as_result(value: object, who: str) -> ToolResult:
    """A function's return value as the result of a call: a text as it is, any other value as JSON.

    Args:
        value: A text, a `ToolResult`, or numbers, texts, lists, mappings, dataclasses, models.
        who: The function, for the message.
    Raises:
        ToolError: If the value is none of these.
    """
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, ToolResult):
        return value
    if value is None:
        raise ToolError(
            f"{who} returned None, which tells the policy nothing. Return a text, such as 'done'."
        )
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        plain = to_jsonable_python(value)
        return ToolResult(json.dumps(plain, ensure_ascii=False, allow_nan=False))
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nobody awaited it
        raise ToolError(
            f"{who} returned {kind_of(value)}, {value!r:.60}, which is neither text nor JSON. "
            "Return a text, a turnrl.ToolResult, or numbers, texts, lists and mappings."
        ) from error


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
