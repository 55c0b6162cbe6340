"""Tries tools: calls them with arguments that they allow, and judges their replies."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnrl import (
    Finding,
    Question,
    ToolCall,
    ToolError,
    ToolResult,
    Toolset,
    ToolSpec,
    call_tools,
    on_loop,
)
from turnrl_doctor.arguments import arguments_of

_SHOWN = 60
"""The most characters shown of a call, and of a result."""


class StandIn(Toolset):
    """Answers in place of tools that failed, so that later parts can still be rehearsed."""

    def __init__(self, toolset: Toolset) -> None:
        self._specs = toolset.specs

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [ToolResult("a result") for _ in calls]


def judged(name: str, tools: Toolset, replies: list[tuple[ToolCall, ToolResult]]) -> Finding:
    """The finding about tools that were called."""
    if not replies:
        return Finding("pass", name, "has nothing to call")
    good = [reply for reply in replies if reply[1].ok]
    call, result = (good or replies)[0]
    shown = f"{call.name} {_cut(json.dumps(dict(call.arguments), ensure_ascii=False, default=str))}"
    answer, verdict = _cut(" ".join(result.content.split())), f"{len(good)} of {len(replies)}"
    if good and not any(result.content.strip() for _, result in good):
        text = f"{verdict} calls succeed, but every result is empty, for example from {shown}"
        step = "Return text that the policy can read: it learns nothing from an empty result."
        return Finding("warn", name, text, step)
    if good:
        return Finding("pass", name, f"{verdict} calls succeed, for example {shown}: {answer}")
    text = f"no call succeeds, for example {shown}: {answer}"
    if any(spec.examples for spec in tools.specs):
        return Finding("warn", name, text, "Correct its examples, or the tool.")
    return Finding("pass", name, text)


def replies_of(
    tools: Toolset, question: Question, calls: list[ToolCall]
) -> list[tuple[ToolCall, ToolResult]]:
    """Each call with its reply, twice: in two sessions, so that calls come in batches, as in a run.

    Raises:
        ToolError: If the world of the tools is broken; it names a single call if one call alone
            fails.
    """
    try:
        answers = on_loop(call_tools([tools], question, [calls, calls]))
    except ToolError:
        for call in calls:
            on_loop(call_tools([tools], question, [[call]]))
        raise
    return [pair for results in answers for pair in zip(calls, results, strict=True)]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def calls_of(toolset: Toolset, question: Question) -> list[ToolCall]:
    return [
        ToolCall(spec.name, dict(arguments))
        for spec in toolset.specs
        for arguments in arguments_of(spec, question.text)
    ]
