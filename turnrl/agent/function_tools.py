"""A function as a tool: binds a call's arguments to it, and turns its return value into a
result."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, final

from turnrl.agent.functions import described, hint_of, name_of, parameters_of
from turnrl.agent.mistakes import mistake_of
from turnrl.agent.running import TimesCalls, result_of, run_tool, shown_arguments, shown_call
from turnrl.plugin.errors import (
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
        self._warned: set[str] = set()

    def __str__(self) -> str:
        return self._label

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Make the calls side by side, each within `timeout_s` of its beginning."""
        at_once = len(calls) if inspect.iscoroutinefunction(self._function) else _AT_ONCE
        free = asyncio.Semaphore(at_once)

        async def reply(call: ToolCall) -> ToolResult | TrajectoryLost:
            async with free:
                return await run_tool(self, "run", self._reply, call, on=f" on {shown_call(call)}")

        return await asyncio.gather(*map(reply, calls))

    async def _reply(self, call: ToolCall) -> ToolResult | TrajectoryLost:
        try:
            # a value that was awaited is not a result yet
            return as_result(await result_of(self._call, call), self._label)
        except (Exception, SystemExit) as error:
            return self._fault(error.cause if isinstance(error, Ended) else error, call)

    def _call(self, call: ToolCall) -> Any:
        """The function's result, or the awaitable that it returns."""
        bound = self._bind(call.arguments)
        if self._takes_question:
            bound[_QUESTION] = call.question
        value = self._function(**bound)
        return value if inspect.isawaitable(value) else as_result(value, self._label)

    def _fault(self, error: BaseException, call: ToolCall) -> ToolResult | TrajectoryLost:
        """The reply for an exception: a result that the policy reads, or a lost trajectory, which
        begins again. Any other exception is raised as a fault of the world."""
        if isinstance(error, TrajectoryLost):
            return error
        if isinstance(error, TurnRLError):
            raise error
        what = (
            f"{self} raised {type(error).__name__}: {error} on the arguments "
            f"{shown_arguments(call)}{place_of(error)}"
        )
        mistake = mistake_of(error, self._function)
        if mistake is None:
            raise ToolError(
                f"{what}. Fix it; for a mistake of the policy, it raises turnrl.PolicyMistake with "
                "a text for the policy to read."
            ) from error
        if mistake is error:
            return ToolResult(str(mistake), ok=False)
        about = type(error).__name__ + place_of(error)
        if about not in self._warned:
            self._warned.add(about)
            warning = (
                f"{what}. The policy reads this as its own mistake. If it is not, fix the "
                "function, or raise turnrl.ToolError."
            )
            _logger.warning("%s", visible(warning))
        return ToolResult(str(mistake), ok=False, metadata={"raised": type(error).__name__})


def as_result(value: object, who: str) -> ToolResult:
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
        return ToolResult(f"the result, {kind_of(value)}, cannot be written: {error}", ok=False)
    except TypeError as error:
        raise ToolError(
            f"{who} returned {kind_of(value)}, {value!r:.60}, which is neither text nor JSON. "
            "Return a text, a turnrl.ToolResult, or numbers, texts, lists and mappings."
        ) from error
    return ToolResult(text)


def _list_or_text(value: Any) -> object:
    """The numbers of an array of numpy or torch, and the text of any other object."""
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
    parameter = next((p for p in parameters_of(function) if p.name == _QUESTION), None)
    if parameter is None:
        return False
    kind = parameter.annotation
    # the class may be imported for type checkers only, so its name alone counts as well
    named = isinstance(kind, str) and kind.strip("'\"").rpartition(".")[2] == "Question"
    if not named and (kind is parameter.empty or hint_of(function, parameter) is not Question):
        raise RecipeError(
            f"the parameter {str(parameter)!r} of the function {function_name} gets the question "
            "that is being answered: write 'question: turnrl.Question'. If the policy should fill "
            "it in, give it another name, such as 'query'."
        )
    return True
