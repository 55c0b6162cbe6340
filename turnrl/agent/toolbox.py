"""The toolbox: checks calls, gathers them into batches, runs them within a time limit, and makes
the results safe to read.

A mistake of the policy becomes a result that it reads. A fault of the world is a `ToolError`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from turnrl.agent.batches import Batcher
from turnrl.agent.parts import as_toolsets
from turnrl.agent.running import on_loop, run_to_end, run_tool
from turnrl.plugin.errors import (
    RecipeError,
    ToolError,
    TurnRLError,
    check_attributes,
    is_finite,
)
from turnrl.types import (
    ForkableToolSession,
    Question,
    Stateful,
    Tool,
    ToolCall,
    ToolFigures,
    ToolResult,
    ToolSession,
    Toolset,
    ToolSpec,
)

T = TypeVar("T")

_ATTRIBUTES = {
    "name": '"search"',
    "description": '"Search an encyclopaedia."',
    "parameters": '{"type": "object", "properties": {"query": {"type": "string"}}}',
}
"""Attributes that a tool must have, with an example of each."""
_MOST_ERRORS = 100
"""The most errors in a call's arguments among which the one to show is chosen."""


def check_tools(toolsets: Sequence[Toolset]) -> None:
    """Refuse tools that no policy could call, as far as that is known before they start.

    Raises:
        RecipeError: If one lacks an attribute, two share a name or a figure, parameters are not a
            JSON Schema, or `open` would never be called.
    """
    plain = [toolset for toolset in toolsets if type(toolset).start is Toolset.start]
    figure_owners: dict[str, Toolset] = {}
    for toolset in toolsets:
        if isinstance(toolset, Tool):
            check_attributes(f"the tool {type(toolset).__name__}", toolset, _ATTRIBUTES)
        # its contract has no such method
        if hasattr(toolset, "open") and not isinstance(toolset, Stateful):
            kind = "Tool" if isinstance(toolset, Tool) else "Toolset"
            wanted = f"class {type(toolset).__name__}(turnrl.Stateful, turnrl.{kind})"
            raise RecipeError(
                f"{toolset} has open, but is not Stateful: no session would be opened. "
                f"Write `{wanted}`."
            )
        for figure in toolset.figure_names:
            if figure in figure_owners:
                raise RecipeError(
                    f"{figure_owners[figure]} and {toolset} both hand over the figure {figure!r} "
                    "of an attempt, so they do not go together. Leave one of them out of "
                    "model.rollout.tools."
                )
            figure_owners[figure] = toolset
    check_specs(plain)


def check_specs(toolsets: Sequence[Toolset]) -> tuple[ToolSpec, ...]:
    """The tools of toolsets that have started.

    Raises:
        RecipeError: If two share a name, or parameters are not a JSON Schema.
    """
    owners: dict[str, Toolset] = {}
    specs: list[ToolSpec] = []
    for toolset in toolsets:
        for spec in toolset.specs:
            if spec.name in owners:
                raise RecipeError(
                    f"two tools are called {spec.name!r}, in {owners[spec.name]} and in {toolset}; "
                    "no policy can tell. Rename one; FunctionTool and WikiSearch take a 'name'."
                )
            owners[spec.name] = toolset
            _check_schema(spec, toolset, RecipeError)
            specs.append(spec)
    return tuple(specs)


def _check_schema(spec: ToolSpec, toolset: Toolset, fault: type[TurnRLError]) -> None:
    try:
        Draft202012Validator.check_schema(spec.parameters)
    except SchemaError as error:
        of = "" if isinstance(toolset, Tool) else f"{spec.name!r} of "
        what = f"{of}{toolset} has parameters that are no JSON Schema"
        raise fault(f"{what}: {error.message}") from error


@final
class Toolbox:
    """The tools of one collection, shared by its trajectories.

    Args:
        toolsets: The tools.
        make_safe: Cuts and neutralises a text before the policy reads it.
        max_calls: The most calls of one turn that are run. For each call beyond it, the policy
            reads that there were too many.
    """

    def __init__(
        self, toolsets: Sequence[Toolset], make_safe: Callable[[str], str], max_calls: int
    ) -> None:
        self.batchers = [Batcher(toolset) for toolset in toolsets]
        self.tools = {s.name: _Tool(s, b) for b in self.batchers for s in b.toolset.specs}
        self.make_safe = make_safe
        self.max_calls = max_calls

    def close(self) -> None:
        """Cancel the batches that nobody waits for any more."""
        for batcher in self.batchers:
            for batch in batcher.batches:
                batch.cancel()


class _Tool:
    """A tool, and the batcher that takes its calls.

    Args:
        spec: The tool's description.
        batcher: The batcher of its toolset.
    """

    def __init__(self, spec: ToolSpec, batcher: Batcher) -> None:
        self.spec, self.batcher = spec, batcher
        self._schema = Draft202012Validator(spec.parameters)

    def find_problem(self, call: ToolCall) -> str | None:
        """What is wrong with a call's arguments; None if it can be run."""
        # a list of thousands of values has as many errors, which take long to compare
        errors = itertools.islice(self._schema.iter_errors(dict(call.arguments)), _MOST_ERRORS)
        error = best_match(errors)
        return None if error is None else f"bad arguments: {error.message[:120]}"


@final
class ToolSessions:
    """One trajectory's place at the tools, with a session of each stateful toolset.

    Args:
        box: The tools.
    """

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._tools = box.tools
        self._sessions: dict[Batcher, ToolSession] = {}
        self._prompts: tuple[str, ...] = ()  # kept when the sessions are closed
        self._question: Question | None = None

    async def open(self, question: Question) -> None:
        """Open the sessions, in the order of the toolsets. The caller has to close them, even if
        this fails.

        Raises:
            ToolError: If a toolset's world is broken.
        """
        self._question = question
        for batcher in self._box.batchers:
            if isinstance(batcher.toolset, Stateful):
                columns = ", ".join(map(str, question.columns))
                on = f" for question {question.id!r} (its columns: {columns})"
                await self._open_session(batcher, "open", batcher.toolset.open, question, on=on)

    @property
    def prompt(self) -> str:
        """Text that the sessions add to the question."""
        return "\n\n".join(filter(None, self._prompts))

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools that this trajectory can call, including those that its sessions bring."""
        return tuple(tool.spec for tool in self._tools.values())

    def has_acting_call(self, calls: Sequence[ToolCall]) -> bool:
        """True if running one of the calls changes the world; see `Toolset.acts`."""
        tools = (self._tools.get(call.name) for call in calls if call.error is None)
        return any(tool.batcher.toolset.acts for tool in tools if tool is not None)

    async def answer_calls(
        self, calls: Sequence[ToolCall], turn: int = 0, earlier: int = 0, unread: bool = False
    ) -> tuple[ToolResult, ...]:
        """One result per call of a turn, in order, as the policy reads them.

        Args:
            calls: The calls.
            turn: The turn's number.
            earlier: Number of calls of the turn that were answered before.
            unread: Nobody will read the results, so readable calls that change nothing in the world
                are not run. They do not count towards `max_calls`.
        Raises:
            ToolError: If a tool's world is broken.
        """
        # all started at once, so that a session's calls join one batch
        numbers = itertools.count(earlier)
        replies = (
            self._skipped_result()
            if unread and call.error is None and not self.has_acting_call([call])
            else self._reply(call, next(numbers), turn)
            for call in calls
        )
        return tuple(await asyncio.gather(*replies))

    async def _skipped_result(self) -> ToolResult:
        why = "not run: this was the last turn, so nobody would read its result"
        return ToolResult(why, ok=False)

    async def _reply(self, call: ToolCall, number: int, turn: int) -> ToolResult:
        """The tool's reply, or the mistake in the call, as the policy reads it."""
        problem = self._find_problem(call, number)
        if problem is not None:
            result = ToolResult(problem, ok=False)
        else:
            batcher = self._tools[call.name].batcher
            session = self._sessions.get(batcher)
            call = replace(call, session=session, turn=turn, question=self._question)
            result = await batcher.call(call)
        return result.shown_as(self._box.make_safe(result.content))

    def _find_problem(self, call: ToolCall, number: int) -> str | None:
        """What is wrong with the `number`-th call of a turn (from 0); None if it can be run."""
        if number >= (limit := self._box.max_calls):
            return f"too many calls: at most {limit} a turn"
        if call.error is not None:
            return call.error
        if (tool := self._tools.get(call.name)) is None:
            return f"no tool {call.name[:40]!r}; there is {', '.join(self._tools) or 'none'}"
        return tool.find_problem(call)

    async def _open_session(
        self, batcher: Batcher, verb: str, make: Callable[..., Any], *arguments: Any, on: str = ""
    ) -> None:
        """Have a toolset make a session, and keep it. Unless the toolset is `interruptible`, a
        cancellation waits until the session is made, because it then has to be closed."""

        async def work() -> None:
            session = await run_tool(batcher.toolset, verb, make, *arguments, on=on)
            if not isinstance(session, ToolSession) or not isinstance(session.prompt, str):
                wanted = "it gives a ToolSession, whose prompt is a text"
                raise ToolError(f"{batcher.toolset} gave {session!r} from {verb}; {wanted}.")
            self._sessions[batcher] = session
            self._prompts += (session.prompt,)
            self._add_tools(batcher, session.specs)

        tool = batcher.toolset
        interruptible = verb == "open" and isinstance(tool, Stateful) and tool.interruptible
        await (work() if interruptible else run_to_end(work()))

    def _add_tools(self, batcher: Batcher, specs: Sequence[ToolSpec]) -> None:
        """Add the tools that a session brings."""
        for spec in specs:
            if spec.name in self._tools:
                raise ToolError(
                    f"a session of {batcher.toolset} brings a tool {spec.name!r}, and there is one "
                    "of that name already. Rename one."
                )
            _check_schema(spec, batcher.toolset, ToolError)
            self._tools = {**self._tools, spec.name: _Tool(spec, batcher)}

    async def fork(self, question: Question) -> ToolSessions:
        """The sessions of a branch: a copy of every session.

        Args:
            question: The branch's own copy of the question.
        Raises:
            ToolError: If a session cannot be copied.
        """
        branch = ToolSessions(self._box)
        branch._question = question
        try:
            for batcher, session in self._sessions.items():
                if not isinstance(session, ForkableToolSession):
                    what = f"{batcher.toolset} keeps a {type(session).__name__} for each trajectory"
                    advice = "Make it a ForkableToolSession, or take an estimator without probes."
                    raise ToolError(f"{what}, which cannot be copied. {advice}")
                await branch._open_session(batcher, "fork", session.fork)
        except BaseException:
            await branch.close()
            raise
        return branch

    async def close(self) -> ToolFigures:
        """Close every session, even if closing one of them fails.

        Returns:
            The figures that the sessions hand over.
        Raises:
            ToolError: If a session fails to close, or hands over anything but figures.
        """
        sessions, self._sessions = self._sessions, {}
        closings = (
            run_tool(batcher.toolset, "close", session.close)
            for batcher, session in sessions.items()
        )
        outcomes = await run_to_end(asyncio.gather(*closings, return_exceptions=True))
        figures: dict[str, float | Sequence[float]] = {}
        for batcher, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            new = _figures(batcher.toolset, outcome) if outcome is not None else {}
            if twice := figures.keys() & new.keys():
                what = f"{batcher.toolset} gave the figure {min(twice)!r} from close"
                raise ToolError(f"{what}, and so did a toolset before it. Rename one.")
            figures |= new
        return figures


def _figures(toolset: Toolset, returned: Any) -> ToolFigures:
    """The figures that a session handed over, as floats."""
    figures: dict[str, float | Sequence[float]] = {}
    for name, value in returned.items() if isinstance(returned, Mapping) else [("", returned)]:
        numbers = value if isinstance(value, list | tuple) else [value]
        if not name or not all(map(is_finite, numbers)):
            gave = f"{toolset} gave {returned!r} from close"
            raise ToolError(f"{gave}; it gives finite numbers by name, or None.")
        figures[str(name)] = tuple(map(float, numbers)) if numbers is value else float(value)
    return figures


class RunningToolsets(AbstractContextManager[None]):
    """Inside this block toolsets run. Blocks may be nested: a toolset starts with the first block
    that has it, and stops with the last. It is not a generator, because garbage collection would
    run a generator's code on any thread."""

    _blocks: ClassVar[Counter[int]] = Counter()
    """The number of blocks around each toolset that runs, by its id."""
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, toolsets: Sequence[Toolset]) -> None:
        self._toolsets = toolsets
        self._begun: list[Toolset] = []

    def __enter__(self) -> None:
        try:
            for toolset in self._toolsets:
                self._begun.append(toolset)
                with self._lock:
                    self._blocks[id(toolset)] += 1
                    if self._blocks[id(toolset)] == 1:
                        on_loop(_run(toolset, "start", toolset.start))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stops:  # stops all of them, even if one fails
            while self._begun:
                toolset = self._begun.pop(0)
                stops.callback(self._stop, toolset)

    def _stop(self, toolset: Toolset) -> None:
        with self._lock:
            self._blocks[id(toolset)] -= 1
            if not self._blocks[id(toolset)]:
                del self._blocks[id(toolset)]
                on_loop(_run(toolset, "stop", toolset.stop))


async def _run(toolset: Toolset, verb: str, work: Callable[[], object]) -> None:
    await run_tool(toolset, verb, work)


async def call_tools(
    tools: Sequence[Toolset | Callable[..., Any]],
    question: Question,
    calls: Sequence[Sequence[ToolCall]],
) -> list[tuple[ToolResult, ...]]:
    """Answer the calls of several trajectories as a rollout does, without a policy: calls are
    checked and batched, each batch has `timeout_s`, the toolsets are started and sessions opened
    before, and both are ended after.

    In a notebook, for example: `await call_tools([Notes()], question, [[ToolCall("note", {})]])`.

    Args:
        tools: The tools, toolsets and functions.
        question: The question of all trajectories; `open` gets it.
        calls: The calls of one turn, for each trajectory.
    Returns:
        One result per call, its text as the tool gave it.
    Raises:
        RecipeError: If no policy could call the tools, for example because two share a name.
        ToolError: If a tool raises, hangs, or gives something other than results.
    """
    toolsets = as_toolsets(tools)
    check_tools(toolsets)
    trajectories: list[ToolSessions] = []
    begun = list[Toolset]()
    try:
        for toolset in toolsets:
            begun.append(toolset)
            await _run(toolset, "start", toolset.start)
        check_specs(toolsets)
        box = Toolbox(toolsets, str, max(map(len, calls), default=0))
        trajectories = [ToolSessions(box) for _ in calls]
        for sessions in trajectories:
            await sessions.open(question.copied())
        results = await asyncio.gather(*map(ToolSessions.answer_calls, trajectories, calls))
    finally:
        closings = map(ToolSessions.close, trajectories)
        outcomes: list[object] = await asyncio.gather(*closings, return_exceptions=True)
        stops = (_run(toolset, "stop", toolset.stop) for toolset in begun)
        outcomes += await asyncio.gather(*stops, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return results
