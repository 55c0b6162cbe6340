"""Check of a tool."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from turnrl.agent.parts import as_toolsets
from turnrl.agent.running import on_loop
from turnrl.agent.toolbox import RunningToolsets, call_tools
from turnrl.plugin.errors import TurnRLError, is_finite
from turnrl.testing.contract import Breach, reporting_breaches, require
from turnrl.testing.examples import QUESTION
from turnrl.types.acting import Toolset
from turnrl.types.questions import Question
from turnrl.types.trajectory import ToolCall, ToolResult

_Calls = Sequence[Mapping[str, object] | ToolCall]  # the arguments of a call, or the call itself


def check_tool(
    tool: Toolset | Callable[..., object],
    good_calls: _Calls,
    bad_calls: _Calls = (),
    question: Question = QUESTION,
) -> None:
    """Check a tool or a toolset: its description, its `check`, its sessions, its replies,
    and that `open`, `run` and `close` take no longer than `timeout_s`.

    If the tool opens sessions, each call has its own, which is closed whatever happens. As in a
    rollout, plain methods run in threads, and coroutines on one event loop.

    Args:
        tool: The tool, toolset or function. Everything it needs must be at hand.
        good_calls: Arguments of calls that must succeed; for a set of several tools, a `ToolCall`
            each.
        bad_calls: Calls that are the policy's mistake: the schema rejects them, or the result is
            not `ok` and gives the reason.
        question: The question that sessions are opened for; give one of your data if `open` reads
            its metadata.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    __tracebackhide__ = True  # for pytest: the message is enough
    (tool,) = as_toolsets([tool])
    name, limit = type(tool).__name__, tool.timeout_s
    require(good_calls, f"give check_tool a good call of {name}")
    timed = is_finite(limit) and limit > 0
    require(timed, f"{name}.timeout_s is {limit!r:.80}: give a number of seconds")
    with ExitStack() as ends:
        with reporting_breaches(f"{name}.start()"):
            ends.enter_context(RunningToolsets([tool]))
            specs = tool.specs
        with reporting_breaches(f"{name}.check()"):
            tool.check()
    for spec in specs:
        named = isinstance(spec.name, str) and re.fullmatch(r"\w[\w.-]*", spec.name)
        require(named, f"{name}.name is {spec.name!r}: use letters, digits, _, - and .")
        require(spec.description.strip(), f"{name}.description is empty")
    with reporting_breaches(f"{name}.parameters"):
        for spec in specs:
            described = spec.parameters.get("type") == "object"
            require(described, f"must be the JSON Schema of an object, not {spec.parameters!r}")
    alone = []
    for arguments in good_calls:
        alone += _replies(tool, [arguments], question)
    together = _replies(tool, good_calls, question)
    for arguments, result, batched in zip(good_calls, alone, together, strict=True):
        gave = f"{name}.run on the good call {arguments!r} gives {result!r}"
        require(result.ok and result.content, f"{gave}, which is not a success with a text")
        ordered = result.content == batched.content
        require(ordered, f"{gave}, and in a batch {batched!r}: keep the order of the calls")
    for arguments in bad_calls:
        (result,) = _replies(tool, [arguments], question)
        gave = f"{name}.run on the bad call {arguments!r} gives {result!r}"
        require(not result.ok and result.content, f"{gave}, which is not a failure with a reason")


def _replies(tool: Toolset, asked: _Calls, question: Question) -> list[ToolResult]:
    """Replies to calls that are batched in one rollout, each call from its own trajectory."""
    __tracebackhide__ = True
    calls = [[_call(tool, arguments)] for arguments in asked]
    try:
        return [reply for (reply,) in on_loop(call_tools([tool], question, calls))]
    except TurnRLError as error:  # it names the tool, the call and the exception
        raise Breach(f"{error}") from error.__cause__


def _call(tool: Toolset, call: Mapping[str, object] | ToolCall) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    name = type(tool).__name__
    require(len(tool.specs) == 1, f"{name} has several tools: give a ToolCall, not {call!r}")
    return ToolCall(tool.specs[0].name, call)
