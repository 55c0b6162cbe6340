"""Batches: calls of one toolset that arrive at the same time are run together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnrl.agent.running import TimesCalls, format_call, run_tool
from turnrl.plugin.errors import ToolError, TrajectoryLost, is_bool_like, is_finite
from turnrl.types import ToolCall, ToolResult, Toolset

MAX_RESULT_CHARACTERS = 1_000_000
"""The text of a longer result is cut to this, before all results are cut to a token budget."""
_GATHER_S = 0.003
"""Calls of one toolset that arrive within this time form one batch."""


class Batcher:
    """Gathers the calls of one toolset into batches, and runs them."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset
        self.batches: set[asyncio.Task[Sequence[ToolResult | TrajectoryLost]]] = set()
        self._calls: list[ToolCall] = []

    async def call(self, call: ToolCall) -> ToolResult:
        if not self._calls:
            self._batch = asyncio.create_task(self._run(self._calls))
            self.batches.add(self._batch)
            self._batch.add_done_callback(self._done)
        batch, index = self._batch, len(self._calls)
        self._calls.append(call)
        await asyncio.wait([batch])  # cancelling one caller does not cancel the others' batch
        result = batch.result()[index]
        if isinstance(result, TrajectoryLost):
            raise result
        return result

    def _done(self, batch: asyncio.Task[Sequence[ToolResult | TrajectoryLost]]) -> None:
        self.batches.discard(batch)
        if not batch.cancelled():
            batch.exception()  # else asyncio would report it as never retrieved, if no caller waits

    async def _run(self, calls: list[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        await asyncio.sleep(_GATHER_S)
        self._calls = []
        call = format_call(calls[0])
        on = f" on {call}" if len(calls) == 1 else f" on {len(calls)} calls; the first is {call}"
        tool = self.toolset
        timed = not isinstance(tool, TimesCalls)
        results = await run_tool(tool, "run", tool.run, calls, on=on, timed=timed)
        listed = isinstance(results, Sequence) and not isinstance(results, str)
        if not listed or len(results) != len(calls) or not all(map(_is_reply, results)):
            raise ToolError(
                f"{tool} returned {results!r:.200} for {len(calls)} calls; run() gives a list with "
                "one ToolResult per call, whose content is a text, ok and done True or False, and "
                "reward a finite number."
            )
        return [
            result
            if isinstance(result, TrajectoryLost) or len(result.content) <= MAX_RESULT_CHARACTERS
            else result.shown_as(result.content[:MAX_RESULT_CHARACTERS])
            for result in results
        ]


def _is_reply(value: object) -> bool:
    """True of a well-formed result, and of a lost trajectory."""
    if not isinstance(value, ToolResult):
        return isinstance(value, TrajectoryLost)
    flags = is_bool_like(value.ok) and is_bool_like(value.done)
    return isinstance(value.content, str) and flags and is_finite(value.reward)
