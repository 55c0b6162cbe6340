"""A function as a tool: binds a call's arguments to it, and turns its return value into a
result."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, final

from turnrl.agent.functions import describe_function, get_parameters, name_function, resolve_hint
from turnrl.agent.mistakes import find_mistake
from turnrl.agent.running import (
    TimesCalls,
    first_error,
    format_call,
    run_function,
    run_tool,
    shown_arguments,
)
from turnrl.plugin.errors import (
    HeldException,
    RecipeError,
    ToolError,
    TrajectoryLost,
    TurnRLError,
    check_at_least,
    describe_value,
    locate_error,
)
from turnrl.plugin.text import make_visible
from turnrl.types import Question, Tool, ToolCall, ToolResult

_logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""The most threads that call a function at the same time."""
_QUESTION = "question"
"""The parameter that gets the attempt's question."""


@final
class FunctionTool(Tool, TimesCalls):
    """A typed function as a tool; `rollout.tools` takes the function itself, too. Its docstring is
    the description, its annotations are the JSON Schema, and a parameter `question` gets the
    `turnrl.Question`.

    Args:
        function: The function, plain or async. A plain one is called in several threads.
        name: The name the policy calls it by; the function's own by default.
        timeout_s: A call that takes longer than this many seconds stops the run.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, timeout_s: float = 60.0
    ) -> None:
        function_name = name_function(function)
        self._label = f"the function {function_name}"
        self._takes_question = _takes_question(function, function_name)
        skip = (_QUESTION,) if self._takes_question else ()
        description = describe_function(function, skip=skip, name=name or "")
        self.name, self.description = description.spec.name, description.spec.description
        self.parameters = description.spec.parameters
        self.timeout_s = timeout_s
        check_at_least(1e-3, "FunctionTool.", self, "timeout_s", optional=False)
        self._function, self._bind = function, description.bind
        self._warned: set[str] = set()

    def __str__(self) -> str:
        return self._label

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Make the calls side by side, each within `timeout_s` of its beginning."""
        at_once = len(calls) if inspect.iscoroutinefunction(self._function) else _AT_ONCE
        free = asyncio.Semaphore(at_once)

        async def reply(call: ToolCall) -> ToolResult | TrajectoryLost:
            async with free:
                return await run_tool(self, "run", self._reply, call, on=f" on {format_call(call)}")

        try:
            async with asyncio.TaskGroup() as group:  # after a fault, no further call is made
                replies = [group.create_task(reply(call)) for call in calls]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [each.result() for each in replies]

    async def _reply(self, call: ToolCall) -> ToolResult | TrajectoryLost:
        try:
            # a value that was awaited is not a result yet
            return to_result(await run_function(self._call, call), self._label)
        except (Exception, SystemExit) as error:
            return self._reply_to_error(
                error.cause if isinstance(error, HeldException) else error, call
            )

    def _call(self, call: ToolCall) -> Any:
        """The function's result, or the awaitable that it returns."""
        bound = self._bind(call.arguments)
        if self._takes_question:
            bound[_QUESTION] = call.question
        value = self._function(**bound)
        return value if inspect.isawaitable(value) else to_result(value, self._label)

    def _reply_to_error(self, error: BaseException, call: ToolCall) -> ToolResult | TrajectoryLost:
        """The reply for an exception: a result that the policy reads, or a lost trajectory, which
        begins again. Any other exception is raised as a fault of the world."""
        if isinstance(error, TrajectoryLost):
            return error
        if isinstance(error, TurnRLError):
            raise error
        what = (
            f"{self} raised {type(error).__name__}: {error} on the arguments "
            f"{shown_arguments(call)}{locate_error(error)}"
        )
        mistake = find_mistake(error, self._function)
        if mistake is None:
            raise ToolError(
                f"{what}. Fix it; for a mistake of the policy, it raises turnrl.PolicyMistake with "
                "a text for the policy to read."
            ) from error
        if mistake is error:
            return ToolResult(str(mistake), ok=False)
        about = type(error).__name__ + locate_error(error)
        if about not in self._warned:
            self._warned.add(about)
            warning = (
                f"{what}. The policy reads this as its own mistake. If it is not, fix the "
                "function, or raise turnrl.ToolError."
            )
            _logger.warning("%s", make_visible(warning))
        return ToolResult(str(mistake), ok=False, metadata={"raised": type(error).__name__})


def to_result(value: object, who: str) -> ToolResult:
    """A function's return value as the result of a call: a text as it is, a number, a list or
    another value that JSON can hold as JSON, and anything else as `str` writes it. A number or a
    list that is too long or too deep to be written is the policy's mistake.

    Args:
        value: The value.
        who: The function, for the message.
    Raises:
        ToolError: If the value has no text that says anything, as an `object()` has none.
    """
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str | float):  # JSON has no nan
        return ToolResult(str(value))
    if isinstance(value, set | frozenset):  # in the same order in every process
        value = sorted(value, key=str)
    from pydantic_core import to_jsonable_python

    try:
        plain = to_jsonable_python(value, fallback=_list_or_text)
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        return ToolResult(
            f"the result, {describe_value(value)}, cannot be written: {error}", ok=False
        )
    except TypeError as error:
        raise ToolError(
            f"{who} returned {describe_value(value)}, {value!r:.60}, which is neither text nor "
            "JSON. Return a text, a turnrl.ToolResult, or numbers, texts, lists and mappings."
        ) from error
    return ToolResult(text)


def _list_or_text(value: Any) -> object:
    """The numbers of an array of numpy or torch, and the text of any other object."""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if hasattr(value, "tolist"):
        return value.tolist()
    if " at 0x" in (text := str(value)):
        raise TypeError("it has no text")
    return text


def _takes_question(function: Callable[..., object], function_name: str) -> bool:
    """True if a function has a parameter for the question.

    Raises:
        RecipeError: If the parameter's type is not `turnrl.Question`.
    """
    parameter = next((p for p in get_parameters(function) if p.name == _QUESTION), None)
    if parameter is None:
        return False
    kind = parameter.annotation
    # the class may be imported for type checkers only, so its name alone counts as well
    named = isinstance(kind, str) and kind.strip("'\"").rpartition(".")[2] == "Question"
    if not named and (kind is parameter.empty or resolve_hint(function, parameter) is not Question):
        raise RecipeError(
            f"the parameter {str(parameter)!r} of the function {function_name} gets the question "
            "that is being answered: write 'question: turnrl.Question'. If the policy should fill "
            "it in, give it another name, such as 'query'."
        )
    return True
