"""The toolbox: calls are checked, gathered into batches, run within their time, and what comes back
is made safe to read.

A mistake of the policy becomes a result that it reads. A fault of the world is a `ToolError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar, cast, final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from turnrl.errors import (
    RecipeError,
    ToolError,
    TurnRLError,
    instances_of,
    kind_of,
    place_of,
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
)

T = TypeVar("T")

MAX_RESULT_CHARACTERS = 1_000_000
"""A tool that returns more than this is broken; below it, results are cut to a token budget."""
_GATHER_S = 0.003
"""Calls of one toolset that arrive within this time leave as one batch."""
_ATTRIBUTES = {
    "name": '"search"',
    "description": '"Search an encyclopaedia."',
    "parameters": '{"type": "object", "properties": {"query": {"type": "string"}}}',
}
"""Attributes that a tool must have, with an example of each."""


def check_tools(toolsets: Sequence[Toolset]) -> None:
    """Refuse tools that no policy could call.

    Raises:
        RecipeError: If they are no list of tools, one lacks an attribute, two share a name,
            parameters are no JSON Schema, or `open` would never be called.
    """
    instances_of(Toolset, "tools", toolsets, "Tool or Toolset")
    owners: dict[str, Toolset] = {}
    for toolset in toolsets:
        for attribute, example in _ATTRIBUTES.items() if isinstance(toolset, Tool) else ():
            if not hasattr(toolset, attribute):
                raise RecipeError(
                    f"the tool {type(toolset).__name__} has no {attribute}. Set it in the class: "
                    f"{attribute} = {example}"
                )
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
                raise RecipeError(f"{what}. Rename one.")
            owners[spec.name] = toolset
            try:
                Draft202012Validator.check_schema(spec.parameters)
            except SchemaError as error:
                of = "" if isinstance(toolset, Tool) else f"{spec.name!r} of "
                what = f"{of}{toolset} has parameters that are no JSON Schema"
                raise RecipeError(f"{what}: {error.message}") from error


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
        self.batchers = [_Batcher(toolset) for toolset in toolsets]
        self.by_name = {name: batcher for batcher in self.batchers for name in batcher.schemas}
        self.make_safe = make_safe
        self._max_calls = max_calls

    def close(self) -> None:
        """Let go of batches that nobody waits for any more."""
        for batcher in self.batchers:
            for batch in batcher.batches:
                batch.cancel()

    def problem(self, call: ToolCall, number: int) -> str | None:
        """Fault of a call, the `number`-th of its turn from 0; None if it can be run."""
        if number >= self._max_calls:
            return f"too many calls: at most {self._max_calls} a turn"
        if call.error is not None:
            return call.error
        if call.name not in self.by_name:
            return f"no tool {call.name[:40]!r}; there is {', '.join(self.by_name) or 'none'}"
        schema = self.by_name[call.name].schemas[call.name]
        error = best_match(schema.iter_errors(dict(call.arguments)))
        return None if error is None else f"bad arguments: {error.message[:120]}"


@final
class ToolSessions:
    """One trajectory's place at the tools, with a session of each stateful toolset.

    Args:
        box: The tools.
    """

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._sessions: dict[_Batcher, ToolSession] = {}

    async def open(self, question: Question) -> None:
        """Open the sessions, in the order of the toolsets. Whoever calls it closes them, also where
        this fails.

        Raises:
            ToolError: If a toolset's world is broken.
        """
        for batcher in self._box.batchers:
            if isinstance(batcher.toolset, Stateful):
                columns = ", ".join(map(str, question.metadata)) or "none"
                on = f" for question {question.id!r} (further columns: {columns})"
                await self._keep(batcher, "open", batcher.toolset.open, question, on=on)

    @property
    def prompt(self) -> str:
        """Text that the sessions add to the question."""
        return "\n\n".join(session.prompt for session in self._sessions.values() if session.prompt)

    async def answer(self, calls: Sequence[ToolCall], turn: int = 0) -> tuple[ToolResult, ...]:
        """One result per call of a turn, in order, as the policy reads them.

        Raises:
            ToolError: If a tool's world is broken.
        """
        # all in one tick, so that a session's calls leave in one batch
        replies = (self._reply(call, number, turn) for number, call in enumerate(calls))
        return tuple(await asyncio.gather(*replies))

    async def _reply(self, call: ToolCall, number: int, turn: int) -> ToolResult:
        """The tool's reply, or what is wrong with the call, as the policy reads it."""
        problem = self._box.problem(call, number)
        if problem is not None:
            result = ToolResult(problem, ok=False)
        else:
            batcher = self._box.by_name[call.name]
            call = replace(call, session=self._sessions.get(batcher), turn=turn)
            result = await batcher.call(call)
        ok = result.ok and call.mended is None
        content = self._box.make_safe(result.content)
        return replace(result, content=content, ok=ok, metadata=_read(result, len(content)))

    async def _keep(
        self, batcher: _Batcher, verb: str, make: Callable[..., Any], *arguments: Any, on: str = ""
    ) -> None:
        """Have a toolset make a session, and keep it; its making is not cut short, because whatever
        comes of it has to be closed like any other."""

        async def work() -> None:
            session = await run_tool(batcher.toolset, verb, make, *arguments, on=on)
            if not isinstance(session, ToolSession) or not isinstance(session.prompt, str):
                wanted = "it gives a ToolSession, whose prompt is a text"
                raise ToolError(f"{batcher.toolset} gave {session!r} from {verb}; {wanted}.")
            self._sessions[batcher] = session

        await _to_its_end(work())

    async def fork(self) -> ToolSessions:
        """The place of a branch: every session copied.

        Raises:
            ToolError: If a session cannot be copied.
        """
        branch = ToolSessions(self._box)
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
        closings = (run_tool(d.toolset, "close", kept.close) for d, kept in sessions.items())
        given = await _to_its_end(asyncio.gather(*closings, return_exceptions=True))
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
        if not name or not all(isinstance(n, Real) and math.isfinite(n) for n in several):
            gave = f"{toolset} gave {given!r} from close"
            raise ToolError(f"{gave}; it gives finite numbers by name, or None.")
        figures[str(name)] = tuple(map(float, several)) if several is value else float(value)
    return figures


async def call_tools(
    tools: Sequence[Toolset], question: Question, calls: Sequence[Sequence[ToolCall]]
) -> list[tuple[ToolResult, ...]]:
    """Answer the calls of several trajectories as a rollout does, without a policy: checked,
    batched, each batch within `timeout_s`, and the sessions opened before and closed after.

    In a notebook, for example: `await call_tools([Notes()], question, [[ToolCall("note", {})]])`.

    Args:
        tools: The tools and toolsets.
        question: The question of all trajectories; `open` gets it.
        calls: The calls of one turn, for each trajectory.
    Returns:
        One result per call, its text as the tool gave it.
    Raises:
        RecipeError: If no policy could call the tools, because two share a name, for example.
        ToolError: If a tool raises, hangs, or gives something other than results.
    """
    check_tools(tools)
    box = Toolbox(tools, str, max(map(len, calls), default=0))
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


def _read(result: ToolResult, characters: int) -> Mapping[str, Any]:
    """The metadata of a result of which the policy reads so many characters: without the passages
    that begin after them. Of passages whose beginnings are not told, the first is the one read."""
    ids = result.metadata.get("passage_ids")
    if characters >= len(result.content) or not isinstance(ids, list | tuple):
        return result.metadata
    starts = result.metadata.get("passage_starts", (0,))
    shown = [i for i, start in zip(ids, starts, strict=False) if start < characters]
    return {**result.metadata, "passage_ids": shown}


class _Batcher:
    """Where the calls of one toolset arrive, and leave in batches."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset
        self.schemas = {s.name: Draft202012Validator(s.parameters) for s in toolset.specs}
        self.batches: set[asyncio.Task[Sequence[ToolResult]]] = set()
        self._calls: list[ToolCall] = []

    async def call(self, call: ToolCall) -> ToolResult:
        if not self._calls:
            self._batch = asyncio.create_task(self._run(self._calls))
            self.batches.add(self._batch)
            self._batch.add_done_callback(self._done)
        batch, place = self._batch, len(self._calls)
        self._calls.append(call)
        await asyncio.wait([batch])  # a caller that is cancelled leaves the batch to the others
        return batch.result()[place]

    def _done(self, batch: asyncio.Task[Sequence[ToolResult]]) -> None:
        self.batches.discard(batch)
        if not batch.cancelled():
            batch.exception()  # else asyncio would report one that no caller is left to raise

    async def _run(self, calls: list[ToolCall]) -> Sequence[ToolResult]:
        await asyncio.sleep(_GATHER_S)
        self._calls = []
        example = json.dumps(dict(calls[0].arguments), ensure_ascii=False, default=str)[:200]
        one = f"{calls[0].name} with arguments {example}"
        on = f" on {one}" if len(calls) == 1 else f" on {len(calls)} calls; the first is {one}"
        results = await run_tool(self.toolset, "run", self.toolset.run, calls, on=on)
        what = f"{self.toolset} returned"
        if not isinstance(results, Sequence) or len(results) != len(calls):
            count = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise ToolError(f"{what} {count} for {len(calls)} calls; run() gives one result each.")
        for result in results:
            if not isinstance(result, ToolResult):
                raise ToolError(f"{what} {type(result).__name__}; run() gives ToolResults of text.")
            if not isinstance(result.content, str):
                content = f"a ToolResult whose content is {kind_of(result.content)}"
                raise ToolError(f"{what} {content}; it must be a text.")
            if len(result.content) > MAX_RESULT_CHARACTERS:
                long = f"{len(result.content):,} characters for arguments {example}"
                most = f"at most {MAX_RESULT_CHARACTERS:,} are accepted. Cut them there."
                raise ToolError(f"{what} a result of {long}; {most}")
        return results


async def _to_its_end(work: Awaitable[T]) -> T:
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
    *arguments: Any,
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
        cause = error.cause if isinstance(error, _Ended) else error
        what = f"{tool} raised {type(cause).__name__}: {cause} in {verb}{on}{place_of(cause)}"
        raise ToolError(f"{what}. {advice}") from cause


async def result_of(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """Result of a function that may block, or be a coroutine's.

    A plain one runs in a daemon thread, which does not keep a program that is interrupted. What it
    returns may be awaitable all the same.

    Args:
        function: A plain function, or a coroutine's.
        arguments: What it is called with.
    """
    plain = not asyncio.iscoroutinefunction(function)
    result: Any = await _in_daemon_thread(function, *arguments) if plain else function(*arguments)
    return cast(T, await result if isinstance(result, Awaitable) else result)


class _Ended(RuntimeError):
    """Holds what a thread raised that cannot be raised out of a future, as a StopIteration, or is
    to end the run and not the event loop, as a SystemExit."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


async def _in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run in a thread that does not keep the process alive: a hanging tool cannot be killed, only
    left.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if plain else _Ended(error))

    threading.Thread(target=work, daemon=True, name="turnrl-tool").start()
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        done.add_done_callback(functools.partial(_close_late, loop=asyncio.get_running_loop()))
        raise


def _close_late(done: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Close a session that comes when nobody waits for it any more."""
    late = None if done.exception() else done.result()
    if isinstance(late, ToolSession) and not loop.is_closed():
        asyncio.run_coroutine_threadsafe(result_of(late.close), loop)
