"""The toolbox: calls are checked, gathered into batches, run within their time, and what comes back
is made safe to read.

A mistake of the policy becomes a result that it reads. A fault of the world is a `ToolError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from turnrl.errors import RecipeError, ToolError, TurnRLError
from turnrl.types import Question, Tool, ToolCall, ToolResult, ToolSession

T = TypeVar("T")

MAX_RESULT_CHARACTERS = 1_000_000
"""A tool that returns more than this is broken; below it, results are cut to a token budget."""
_GATHER_S = 0.003
"""Calls of one tool that arrive within this time leave as one batch."""
_DEEPEST = 100
"""Brackets of a call within each other; many more exhaust the stack of whoever writes it down."""
_NO_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)
_ATTRIBUTES = {
    "name": '"search"',
    "description": '"Search an encyclopaedia."',
    "parameters": '{"type": "object", "properties": {"query": {"type": "string"}}}',
}
"""Attributes that a tool must have, with an example of each."""


def read_call(text: str, keys: Sequence[str] = ("arguments", "args")) -> ToolCall:
    """The call that a JSON object of a name and arguments spells, for segmenters; total.

    Args:
        text: The object, and nothing else.
        keys: What it may call the arguments, the preferred name first.
    Returns:
        The call, of which every text can be encoded; or one without a name, whose `error` says what
        is wrong.
    """
    depths = itertools.accumulate(1 if b in "[{" else -1 for b in _NO_BRACKET.sub("", text))
    if max(depths, default=0) > _DEEPEST:
        return ToolCall("", error="the call is nested too deeply")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
        # a lone surrogate ("\ud800") is valid JSON but no text, and 1e999 no finite number: neither
        # could be sent to any server
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        return ToolCall("", error=f"bad JSON at character {error.pos}")
    except (ValueError, RecursionError):
        return ToolCall("", error="bad JSON")
    if not isinstance(value, dict):
        return ToolCall("", error="the call must be a JSON object")
    key = next((key for key in keys if {*value} == {"name", key}), None)
    if key is None:
        return ToolCall("", error=f'the call must have "name" and "{keys[0]}"')
    if not isinstance(value["name"], str) or not value["name"]:
        return ToolCall("", error='"name" must be a tool name')
    if not isinstance(value[key], dict):
        return ToolCall("", error=f'"{keys[0]}" must be an object')
    return ToolCall(value["name"], value[key])


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("duplicate key")
    return value


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse tools that no policy could call.

    Raises:
        RecipeError: If one lacks an attribute, two share a name, or parameters are no JSON Schema.
    """
    for tool in tools:
        for attribute, example in _ATTRIBUTES.items():
            if not hasattr(tool, attribute):
                raise RecipeError(
                    f"the tool {type(tool).__name__} has no {attribute}. Set it in the class: "
                    f"{attribute} = {example}"
                )
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"two tools are called {twice[0]!r}; no policy can tell. Rename one.")
    for tool in tools:
        try:
            Draft202012Validator.check_schema(tool.parameters)
        except SchemaError as error:
            what = f"{tool} has parameters that are no JSON Schema: {error.message}"
            raise RecipeError(what) from error


@final
class Toolbox:
    """The tools of one collection, shared by its trajectories.

    Args:
        tools: The tools.
        make_safe: Cuts and neutralises what the policy is to read.
        max_calls: The most calls of one turn that are run; the policy reads that the others were
            too many.
    """

    def __init__(
        self, tools: Sequence[Tool], make_safe: Callable[[str], str], max_calls: int
    ) -> None:
        self.desks = {tool.name: _Desk(tool) for tool in tools}
        self.make_safe = make_safe
        self._max_calls = max_calls

    def close(self) -> None:
        """Let go of batches that nobody waits for any more."""
        for desk in self.desks.values():
            for batch in desk.batches:
                batch.cancel()

    def bench(self, question: Question) -> Bench:
        """A trajectory's place at the tools."""
        return Bench(self, question, {})

    def problem(self, call: ToolCall, number: int) -> str | None:
        """Fault of a call, the `number`-th of its turn from 0; None if it can be run."""
        if number >= self._max_calls:
            return f"too many calls: at most {self._max_calls} a turn"
        if call.error is not None:
            return call.error
        desk = self.desks.get(call.name)
        if desk is None:
            return f"no tool {call.name[:40]!r}; there is {', '.join(self.desks) or 'none'}"
        error = best_match(desk.schema.iter_errors(dict(call.arguments)))
        return None if error is None else f"bad arguments: {error.message[:120]}"


@final
@dataclass(eq=False)
class Bench:
    """One trajectory's sessions at the tools that keep something for it, opened when first used."""

    _box: Toolbox
    _question: Question
    _sessions: dict[str, ToolSession | None]

    async def answer(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """One result per call of a turn, in order, as the policy reads them.

        Raises:
            ToolError: If a tool's world is broken.
        """
        problems = [self._box.problem(call, number) for number, call in enumerate(calls)]
        for call, problem in zip(calls, problems, strict=True):
            if problem is None and call.name not in self._sessions:
                await self._open(call.name)
        # all in one tick, so that a session's calls leave in one batch
        return tuple(await asyncio.gather(*map(self._reply, calls, problems)))

    async def _reply(self, call: ToolCall, problem: str | None) -> ToolResult:
        """The tool's reply, or what is wrong with the call, as the policy reads it."""
        if problem is not None:
            result = ToolResult(problem, ok=False)
        else:
            call = replace(call, session=self._sessions[call.name])
            result = await self._box.desks[call.name].call(call)
        ok = result.ok and call.mended is None
        content = self._box.make_safe(result.content)
        return replace(result, content=content, ok=ok, metadata=_read(result, len(content)))

    async def _open(self, name: str) -> None:
        tool = self._box.desks[name].tool
        if type(tool).open is Tool.open:  # it keeps nothing, so there is nothing to wait for
            self._sessions[name] = None
        else:
            await self._keep(name, ToolSession | None, "open", tool.open, self._question)

    async def _keep(
        self, name: str, kind: Any, verb: str, make: Callable[..., Any], *arguments: Any
    ) -> None:
        """Have a tool make a session, and keep it; its making is not cut short, because whatever
        comes of it has to be closed like any other."""
        tool = self._box.desks[name].tool

        async def work() -> None:
            session = await run_tool(tool, verb, make, *arguments)
            if not isinstance(session, kind):
                wanted = "a ToolSession or None" if verb == "open" else "a ToolSession"
                raise ToolError(f"{tool} gave {session!r} from {verb}; it gives {wanted}.")
            self._sessions[name] = session

        await _to_its_end(work())

    async def fork(self) -> Bench:
        """The place of a branch: every session copied.

        Raises:
            ToolError: If a session cannot be copied.
        """
        branch = self._box.bench(self._question)
        try:
            for name, session in self._sessions.items():
                if session is None:
                    branch._sessions[name] = None
                    continue
                if type(session).fork is ToolSession.fork:
                    what = f"{self._box.desks[name].tool} keeps a {type(session).__name__}"
                    advice = "Give it a fork, or take an estimator without probes."
                    raise ToolError(f"{what} for each trajectory, without fork. {advice}")
                await branch._keep(name, ToolSession, "fork", session.fork)
        except BaseException:
            await branch.close()
            raise
        return branch

    async def close(self) -> None:
        """Close every session, also when one of them fails to."""
        opened = {name: kept for name, kept in self._sessions.items() if kept is not None}
        self._sessions, desks = {}, self._box.desks
        closings = (run_tool(desks[n].tool, "close", kept.close) for n, kept in opened.items())
        for outcome in await _to_its_end(asyncio.gather(*closings, return_exceptions=True)):
            if isinstance(outcome, BaseException):
                raise outcome


async def call_tools(
    tools: Sequence[Tool], question: Question, calls: Sequence[Sequence[ToolCall]]
) -> list[tuple[ToolResult, ...]]:
    """Answer the calls of several trajectories as a rollout does, without a policy: checked,
    batched, each batch within `timeout_s`, and the sessions opened before and closed after.

    In a notebook, for example: `await call_tools([Notes()], question, [[ToolCall("note", {})]])`.

    Args:
        tools: The tools.
        question: The question of all trajectories; `Tool.open` gets it.
        calls: The calls of one turn, for each trajectory.
    Returns:
        One result per call, its text as the tool gave it.
    Raises:
        RecipeError: If no policy could call the tools, because two share a name, for example.
        ToolError: If a tool raises, hangs, or gives something other than results.
    """
    check_tools(tools)
    box = Toolbox(tools, str, max(map(len, calls), default=0))
    benches = [box.bench(question) for _ in calls]
    try:
        results = await asyncio.gather(*map(Bench.answer, benches, calls))
    finally:
        closed = await asyncio.gather(*map(Bench.close, benches), return_exceptions=True)
    for error in filter(None, closed):
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


class _Desk:
    """Where the calls of one tool arrive, and leave in batches."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.schema = Draft202012Validator(tool.parameters)
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
        on = f" on {len(calls)} calls; the first had arguments {example}"
        results = await run_tool(self.tool, "run", self.tool.run, calls, on=on)
        what = f"{self.tool} returned"
        if not isinstance(results, Sequence) or len(results) != len(calls):
            count = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise ToolError(f"{what} {count} for {len(calls)} calls; run() gives one result each.")
        for result in results:
            if not isinstance(result, ToolResult) or not isinstance(result.content, str):
                raise ToolError(f"{what} {type(result).__name__}; run() gives ToolResults of text.")
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
        with contextlib.suppress(ToolError):
            await begun
        raise


async def run_tool(
    tool: Tool, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: Any, on: str = ""
) -> T:
    """Run a tool's own code within its time; see `result_of`.

    Args:
        tool: Whose code it is.
        verb: What is done, for messages.
        function: Its code.
        arguments: Of the function.
        on: On what it is done, for messages; begins with ` on`.
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
        advice = "Mend the tool; for a mistake of the policy it should return ToolResult(ok=False)."
        what = f"{tool} raised {type(error).__name__}: {error} in {verb}{on}"
        raise ToolError(f"{what}. {advice}") from error


async def result_of(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """Result of a function that may block, or be a coroutine's.

    A plain one runs in a daemon thread; what it returns may be awaitable all the same.
    """
    plain = not asyncio.iscoroutinefunction(function)
    found: Any = await _in_daemon_thread(function, *arguments) if plain else function(*arguments)
    return cast(T, await found if isinstance(found, Awaitable) else found)


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
            # a StopIteration cannot be raised out of a future, and a SystemExit, say, is to end the
            # run, not the event loop
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if plain else RuntimeError(f"{type(error).__name__}: {error}"))

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
