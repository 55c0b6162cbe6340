"""The paper's agent (Zeng et al., arXiv 2505.11821): one tool call, then the answer.

    turn 1   <reasoning>...</reasoning><tool>{"name": "search", "args": {"query": "..."}}</tool>
    reply    <result>...</result>, or <error>...</error>
    turn 2   <reasoning>...</reasoning><answer>...</answer>

Turn 1 may answer at once, which ends the trajectory.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import final

from turnrl import Message, Reading, RecipeError, ToolCall, ToolResult, ToolSpec, read_call
from turnrl.plugin.text import is_blank
from turnrl_segmenters.prompted import MUST_ANSWER, THOUGHT, PromptedSegmenter, format_call

_logger = logging.getLogger(__name__)
_TAG = re.compile(r"<(/?)(reasoning|tool|result|answer|error)>")

_ACTIONS = ("tool", "answer")

_INSTRUCTIONS = Path(__file__).with_name("instructions.txt").read_text(encoding="utf-8")


@final
class TwoTurn(PromptedSegmenter):
    """One tool call, then the answer, in the paper's tags.

    Args:
        instructions: The system message, word for word; empty for none. By default it explains the
            task, the tags and the tools.
    """

    max_turns = 2
    stop = ("</tool>", "</answer>")
    tags = ("reasoning", "tool", "result", "answer", "error")

    def __init__(self, instructions: str | None = None) -> None:
        self.instructions = instructions

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Warn about a tool that the recipe's own instructions do not name."""
        if self.instructions is None:
            return
        unnamed = [tool.name for tool in tools if tool.name not in self.instructions]
        if unnamed:
            _logger.warning(
                f"the instructions of TwoTurn do not name the tool {unnamed[0]!r}, so the policy "
                "cannot know about it. Name the tool there, or remove your instructions: the "
                "default ones describe every tool."
            )

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        listing = "\n\n".join(map(_describe, tools))
        example = _example(tools[0]) if tools else '{"name": "...", "args": {}}'
        return _INSTRUCTIONS.format(
            example=example, tools=f"Tools:\n\n{listing}" if tools else "There are no tools."
        )

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Read the call or the answer of one turn.

        The first closed `<tool>` or `<answer>` counts, because sampling stops there. It counts
        despite any other format error, except if there are tags inside. A block that is never
        closed does not count. A call that cannot be used still counts as attempted, with an
        `error`. A call in the second turn is only a format error, because no turn is left in which
        the policy could read its result.
        """
        kind, body, end = _action(text)
        error = _form_error(text, kind, body, end)
        if kind == "answer" and body is not None and not is_blank(body):
            return Reading(answer=body.strip(), format_error=error)
        if kind != "tool":
            return Reading(format_error=error)
        if self.is_last(turn):
            return Reading(format_error=error or MUST_ANSWER)
        unusable = ToolCall("", error="tags inside tool, or it is not closed")
        call = unusable if body is None else read_call(body, ("args", "arguments"))
        return Reading(calls=(call,), format_error=error or call.error)

    def write(self, reading: Reading, thought: str = "") -> str:
        """A thought, then the answer or the call; a turn has room for only one call."""
        if reading.answer is not None:
            act = f"<answer>{reading.answer}</answer>"
        elif len(reading.calls) != 1:
            raise RecipeError(
                f"a turn of TwoTurn has one call, and not {len(reading.calls)}. Demonstrate one."
            )
        else:
            (call,) = reading.calls
            act = f"<tool>{format_call(call, 'args')}</tool>"
        return f"<reasoning>{thought or THOUGHT}</reasoning>{act}"

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """A user message with the result or error of each call, or with the turn's format error."""
        replies = [("result" if result.ok else "error", result.content) for result in results]
        replies = replies or [("error", reading.format_error or "no tool call or answer")]
        text = "\n".join(f"<{tag}>{content}</{tag}>" for tag, content in replies)
        return [{"role": "user", "content": text}]


def _action(text: str) -> tuple[str | None, str | None, int]:
    """Action of a turn: "tool", "answer" or None; its content, None if unusable; its end."""
    tags = list(_TAG.finditer(text))
    close = next((n for n, tag in enumerate(tags) if tag[1] and tag[2] in _ACTIONS), None)
    if close is None:
        opened = next((tag[2] for tag in tags if not tag[1] and tag[2] in _ACTIONS), None)
        return opened, None, len(text)
    kind, end = tags[close][2], tags[close].end()
    if f"<{kind}>" not in (tag.group() for tag in tags[:close]):
        return None, None, end
    opening = tags[close - 1]
    body = text[opening.end() : tags[close].start()] if opening.group() == f"<{kind}>" else None
    return kind, body, end


def _form_error(text: str, kind: str | None, body: str | None, end: int) -> str | None:
    """The worst format error of a turn, or None."""
    tags = [tag.group() for tag in _TAG.finditer(text)]
    if any(tag in tags for tag in ("<result>", "</result>", "<error>", "</error>")):
        return "results are not yours to write"
    if kind is None:
        return "no tool call or answer"
    if body is None:
        closed = text[:end].endswith(f"</{kind}>")
        return f"tags inside {kind}" if closed else f"{kind} is not closed"
    if kind == "answer" and is_blank(body):
        return "the answer is empty"
    if text[end:].strip():
        return f"text after the {kind}"
    expected = ["<reasoning>", "</reasoning>", f"<{kind}>", f"</{kind}>"]
    if tags != expected:
        return "misplaced tags" if "<reasoning>" in tags else "no reasoning"
    before, reasoning, between = re.split(r"</?reasoning>", text[: text.index(expected[2])])
    if before.strip() or between.strip():
        return "text outside the tags"
    return None if reasoning.strip() else "the reasoning is empty"


def _describe(tool: ToolSpec) -> str:
    return (
        f"{tool.name}: {tool.description}\n"
        f"Arguments (JSON Schema): {json.dumps(tool.parameters, ensure_ascii=False)}\n"
        f"Example: <tool>{_example(tool)}</tool>"
    )


def _example(tool: ToolSpec) -> str:
    """A call with a tool's required arguments, or with all if none is required."""
    # loads jsonschema, which most commands do without
    from turnrl.sft.json_values import SchemaValues

    args = SchemaValues(tool.parameters, lambda: "...").mapping(None) or {}
    return json.dumps({"name": tool.name, "args": args}, ensure_ascii=False)
