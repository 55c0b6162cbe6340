"""The toolbox: calls are checked, gathered into batches, run within their time, and what comes back
is made safe to read.

A mistake of the policy becomes a result that it reads. A fault of the world is a `ToolError`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, TypeVar, final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from turnrl.agent.batches import Batcher
from turnrl.agent.function_tools import toolsets_of
from turnrl.agent.running import on_loop, run_tool, to_its_end
from turnrl.errors import (
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


def check_tools(toolsets: Sequence[Toolset]) -> None:
    """Refuse tools that no policy could call.

    Raises:
        RecipeError: If one lacks an attribute, two share a name or a figure, parameters are no JSON
            Schema, or `open` would never be called.
    """
    owners: dict[str, Toolset] = {}
    give: dict[str, Toolset] = {}
    for toolset in toolsets:
        if isinstance(toolset, Tool):
            check_attributes(f"the tool {type(toolset).__name__}", toolset, _ATTRIBUTES)
        # a method that its contract does not know
        if hasattr(toolset, "open") and not isinstance(toolset, Stateful):
            kind = "Tool" if isinstance(toolset, Tool) else "Toolset"
            wanted = f"class {type(toolset).__name__}(turnrl.Stateful, turnrl.{kind})"
            raise RecipeError(
                f"{toolset} has open, but is not Stateful: no session would be opened. "
                f"Write `{wanted}`."
            )
        for spec in toolset.specs:
            if spec.name in owners:
                both = f"in {owners[spec.name]} and in {toolset}"
                what = f"two tools are called {spec.name!r}, {both}; no policy can tell"
                raise RecipeError(f"{what}. Rename one; FunctionTool and WikiSearch take a 'name'.")
            owners[spec.name] = toolset
            _check_schema(spec, toolset, RecipeError)
        for figure in toolset.figure_names:
            if figure in give:
                raise RecipeError(
                    f"{give[figure]} and {toolset} both hand over the figure {figure!r} of an "
                    "attempt, so they do not go together. Leave one of them out of "
                    "model.rollout.tools."
                )
            give[figure] = toolset


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
        make_safe: Cuts and neutralises what the policy is to read.
        max_calls: The most calls of one turn that are run; the policy reads that the others were
            too many.
    """

    def __init__(
        self, toolsets: Sequence[Toolset], make_safe: Callable[[str], str], max_calls: int
    ) -> None:
        self.batchers = [Batcher(toolset) for toolset in toolsets]
        self.tools = {s.name: _Tool(s, b) for b in self.batchers for s in b.toolset.specs}
        self.make_safe = make_safe
        self.max_calls = max_calls

    def close(self) -> None:
        """Let go of batches that nobody waits for any more."""
        for batcher in self.batchers:
            for batch in batcher.batches:
                batch.cancel()


class _Tool:
    """A tool, and where calls of it arrive.

    Args:
        spec: Its description.
        batcher: Where its toolset's calls arrive.
    """

    def __init__(self, spec: ToolSpec, batcher: Batcher) -> None:
        self.spec, self.batcher = spec, batcher
        self._schema = Draft202012Validator(spec.parameters)

    def problem(self, call: ToolCall) -> str | None:
        """Fault of a call's arguments; None if it can be run."""
        error = best_match(self._schema.iter_errors(dict(call.arguments)))
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
        """Open the sessions, in the order of the toolsets. Whoever calls it closes them, also where
        this fails.

        Raises:
            ToolError: If a toolset's world is broken.
        """
        self._question = question
        for batcher in self._box.batchers:
            if isinstance(batcher.toolset, Stateful):
                columns = ", ".join(map(str, question.columns))
                on = f" for question {question.id!r} (its columns: {columns})"
                await self._keep(batcher, "open", batcher.toolset.open, question, on=on)

    @property
    def prompt(self) -> str:
        """Text that the sessions add to the question."""
        return "\n\n".join(filter(None, self._prompts))

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools that this trajectory can call, its sessions' own included."""
        return tuple(tool.spec for tool in self._tools.values())

    def acts(self, calls: Sequence[ToolCall]) -> bool:
        """True if running one of the calls changes the world; see `Toolset.acts`."""
        tools = (self._tools.get(call.name) for call in calls if call.error is None)
        return any(tool.batcher.toolset.acts for tool in tools if tool is not None)

    async def answer(
        self, calls: Sequence[ToolCall], turn: int = 0, earlier: int = 0, unread: bool = False
    ) -> tuple[ToolResult, ...]:
        """One result per call of a turn, in order, as the policy reads them.

        Args:
            calls: The calls.
            turn: The turn's number.
            earlier: How many calls of the turn were answered before.
            unread: Nobody will read the results, so readable calls that change nothing in the world
                are not run. They do not count towards `max_calls`.
        Raises:
            ToolError: If a tool's world is broken.
        """
        # all in one tick, so that a session's calls leave in one batch
        numbers = itertools.count(earlier)
        replies = (
            self._not_run()
            if unread and call.error is None and not self.acts([call])
            else self._reply(call, next(numbers), turn)
            for call in calls
        )
        return tuple(await asyncio.gather(*replies))

    async def _not_run(self) -> ToolResult:
        why = "not run: this was the last turn, so nobody would read its result"
        return ToolResult(why, ok=False)

    async def _reply(self, call: ToolCall, number: int, turn: int) -> ToolResult:
        """The tool's reply, or what is wrong with the call, as the policy reads it."""
        problem = self._problem(call, number)
        if problem is not None:
            result = ToolResult(problem, ok=False)
        else:
            batcher = self._tools[call.name].batcher
            session = self._sessions.get(batcher)
            call = replace(call, session=session, turn=turn, question=self._question)
            result = await batcher.call(call)
        ok = result.ok and call.mended is None
        return replace(result.shown_as(self._box.make_safe(result.content)), ok=ok)

    def _problem(self, call: ToolCall, number: int) -> str | None:
        """Fault of a call, the `number`-th of its turn from 0; None if it can be run."""
        if number >= (most := self._box.max_calls):
            return f"too many calls: at most {most} a turn"
        if call.error is not None:
            return call.error
        if (tool := self._tools.get(call.name)) is None:
            return f"no tool {call.name[:40]!r}; there is {', '.join(self._tools) or 'none'}"
        return tool.problem(call)

    async def _keep(
        self, batcher: Batcher, verb: str, make: Callable[..., Any], *arguments: Any, on: str = ""
    ) -> None:
        """Have a toolset make a session, and keep it; its making is not cut short, unless the
        toolset can do that, because whatever comes of it has to be closed like any other."""

        async def work() -> None:
            session = await run_tool(batcher.toolset, verb, make, *arguments, on=on)
            if not isinstance(session, ToolSession) or not isinstance(session.prompt, str):
                wanted = "it gives a ToolSession, whose prompt is a text"
                raise ToolError(f"{batcher.toolset} gave {session!r} from {verb}; {wanted}.")
            self._sessions[batcher] = session
            self._prompts += (session.prompt,)
            self._add(batcher, session.specs)

        tool = batcher.toolset
        can = verb == "open" and isinstance(tool, Stateful) and tool.interruptible
        await (work() if can else to_its_end(work()))

    def _add(self, batcher: Batcher, specs: Sequence[ToolSpec]) -> None:
        """Add the tools that a session brings."""
        for spec in specs:
            if spec.name in self._tools:
                raise ToolError(
                    f"a session of {batcher.toolset} brings a tool {spec.name!r}, and there is one "
                    "of that name already. Rename one."
                )
            _check_schema(spec, batcher.toolset, ToolError)
            self._tools = {**self._tools, spec.name: _Tool(spec, batcher)}

    async def fork(self) -> ToolSessions:
        """The place of a branch: every session copied.

        Raises:
            ToolError: If a session cannot be copied.
        """
        branch = ToolSessions(self._box)
        branch._question = self._question
        try:
            for batcher, session in self._sessions.items():
                if not isinstance(session, ForkableToolSession):
                    what = f"{batcher.toolset} keeps a {type(session).__name__} for each trajectory"
                    advice = "Make it a ForkableToolSession, or take an estimator without probes."
                    raise ToolError(f"{what}, which cannot be copied. {advice}")
                await branch._keep(batcher, "fork", session.fork)
        except BaseException:
            await branch.close()
            raise
        return branch

    async def close(self) -> ToolFigures:
        """Close every session, also when one of them fails to.

        Returns:
            The figures that they hand over.
        Raises:
            ToolError: If one fails to, or hands over what are no figures.
        """
        sessions, self._sessions = self._sessions, {}
        closings = (
            run_tool(batcher.toolset, "close", session.close)
            for batcher, session in sessions.items()
        )
        given = await to_its_end(asyncio.gather(*closings, return_exceptions=True))
        figures: dict[str, float | Sequence[float]] = {}
        for batcher, some in zip(sessions, given, strict=True):
            if isinstance(some, BaseException):
                raise some
            new = _figures(batcher.toolset, some) if some is not None else {}
            if twice := figures.keys() & new.keys():
                what = f"{batcher.toolset} gave the figure {min(twice)!r} from close"
                raise ToolError(f"{what}, and so did a toolset before it. Rename one.")
            figures |= new
        return figures


def _figures(toolset: Toolset, given: Any) -> ToolFigures:
    """Figures that a session handed over, as floats."""
    figures: dict[str, float | Sequence[float]] = {}
    for name, value in given.items() if isinstance(given, Mapping) else [("", given)]:
        several = value if isinstance(value, list | tuple) else [value]
        if not name or not all(map(is_finite, several)):
            gave = f"{toolset} gave {given!r} from close"
            raise ToolError(f"{gave}; it gives finite numbers by name, or None.")
        figures[str(name)] = tuple(map(float, several)) if several is value else float(value)
    return figures


class Live(AbstractContextManager[None]):
    """Toolsets that are started within it. It is no generator, which would run code on whatever
    thread collects it as garbage."""

    def __init__(self, toolsets: Sequence[Toolset]) -> None:
        self._toolsets = toolsets
        self._begun: list[Toolset] = []

    def __enter__(self) -> None:
        try:
            for toolset in self._toolsets:
                self._begun.append(toolset)
                self._run(toolset, "start", toolset.start)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stops:  # all of them, also if one fails
            while self._begun:
                toolset = self._begun.pop(0)
                stops.callback(self._run, toolset, "stop", toolset.stop)

    def _run(self, toolset: Toolset, verb: str, work: Callable[[], object]) -> None:
        on_loop(run_tool(toolset, verb, work))


async def call_tools(
    tools: Sequence[Toolset | Callable[..., Any]],
    question: Question,
    calls: Sequence[Sequence[ToolCall]],
) -> list[tuple[ToolResult, ...]]:
    """Answer the calls of several trajectories as a rollout does, without a policy: checked,
    batched, each batch within `timeout_s`, and the sessions opened before and closed after.

    In a notebook, for example: `await call_tools([Notes()], question, [[ToolCall("note", {})]])`.

    Args:
        tools: The tools, toolsets and functions.
        question: The question of all trajectories; `open` gets it.
        calls: The calls of one turn, for each trajectory.
    Returns:
        One result per call, its text as the tool gave it.
    Raises:
        RecipeError: If no policy could call the tools, because two share a name, for example.
        ToolError: If a tool raises, hangs, or gives something other than results.
    """
    toolsets = toolsets_of(tools)
    check_tools(toolsets)
    box = Toolbox(toolsets, str, max(map(len, calls), default=0))
    several = [ToolSessions(box) for _ in calls]
    try:
        for sessions in several:
            await sessions.open(question)
        results = await asyncio.gather(*map(ToolSessions.answer, several, calls))
    finally:
        closed = await asyncio.gather(*map(ToolSessions.close, several), return_exceptions=True)
    for error in closed:
        if isinstance(error, BaseException):
            raise error
    return results
