"""The turns of Search-R1 (Jin et al., arXiv 2503.09516).

    turn        <think>...</think> <search>a query</search>
    reply       <information>...</information>
    last turn   <think>...</think> <answer>...</answer>

The original answers every mistake with the same sentence. Here the policy reads which mistake it
made, and a reply cannot close the tags around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from turnrl import Message, Reading, RecipeError, ToolCall, ToolResult, ToolSpec
from turnrl.plugin.errors import check_one_of
from turnrl.plugin.text import is_blank
from turnrl_segmenters.prompted import MUST_ANSWER, PromptedSegmenter, expected_thought

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")

_INSTRUCTIONS = """\
Answer the question. You have {turns}. Begin each turn with a thought {think}, then do one of two \
things.

Search for what you do not know, and read what is found inside <information> tags:
{opening}...</think> <search>a query</search>

Or give the answer, in few words. This ends your work. The last turn must do it:
{opening}...</think> <answer>...</answer>"""
_THINK = {"required": "inside <think> tags", "opened": "and close it with </think>"}


@final
@dataclass(eq=False, repr=False)
class SearchR1(PromptedSegmenter):
    """A thought, then a search in plain words, until an answer takes its place; Search-R1's tags.

    Args:
        max_turns: The most turns; the last one must answer.
        tool: The name of the tool that a search calls.
        argument: The tool's argument for the query.
        instructions: The system message, word for word; empty for none. By default it explains the
            task and the tags.
        think: `required` if the policy opens its thought, `opened` if the chat template does.
    """

    stop = ("</search>", "</answer>")
    tags = ("think", "search", "information", "answer")

    max_turns: int = 4
    tool: str = "search"
    argument: str = "query"
    instructions: str | None = None
    think: Literal["required", "opened"] = "required"

    def __post_init__(self) -> None:
        check_one_of(_THINK, "SearchR1.", self, "think")
        self.opened_thought = expected_thought(self.think)

    def check(self, tools: Sequence[ToolSpec]) -> None:
        called = {tool.name: tool for tool in tools}.get(self.tool)
        if called is None:
            names = ", ".join(tool.name for tool in tools) or "none"
            raise RecipeError(
                f"SearchR1.tool is {self.tool!r}, but model.rollout.tools has {names}. Name "
                "the tool that a search calls."
            )
        arguments = list(called.parameters.get("properties", {}))
        if self.argument not in arguments:
            raise RecipeError(
                f"SearchR1.argument is {self.argument!r}, but {self.tool!r} takes "
                f"{', '.join(arguments) or 'none'}. Name the argument for the query."
            )

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        opening = "" if self.opened_thought else "<think>"
        return _INSTRUCTIONS.format(turns=self.allowance, think=_THINK[self.think], opening=opening)

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Read the search or the answer of one turn.

        The first closed `<search>` or `<answer>` counts, because sampling stops there. It counts
        despite any other format error, except if there are tags inside. A search that cannot be
        used still counts as attempted, with an `error`. A search in the last turn does not count,
        nor does anything in a thought that the chat template opened.
        """
        if self.opened_thought:
            thought, closed, text = text.partition("</think>")
            if not closed:
                return Reading(format_error="the thought is not closed")
            # a thought may mention any tag
            text = f"<think>{'...' if thought.strip() else ''}</think>{text}"
        tags = [*_TAG.finditer(text)]
        written = [tag.group() for tag in tags]
        close = next((n for n, tag in enumerate(written) if tag in self.stop), None)
        if close is None or f"<{tags[close][2]}>" not in written[:close]:
            opened = next((tag for tag in ("<search>", "<answer>") if tag in written), None)
            wrong = f"{opened[1:-1]} is not closed" if opened else "no search or answer"
            return Reading(format_error=_find_forgery(written) or wrong)
        kind, opening = tags[close][2], tags[close - 1]
        body = text[opening.end() : tags[close].start()].strip()
        fault = f"the {kind} is empty" if is_blank(body) else None
        if kind == "search" and body.encode("utf-8", "replace").decode() != body:
            fault = "half a surrogate pair is not text"
        if opening.group() != f"<{kind}>":
            fault = f"tags inside {kind}"
        error = _find_forgery(written) or fault or _form_error(text, tags[: close + 1])
        if kind == "answer":
            return Reading(answer=None if fault else body, format_error=error)
        if self.is_last(turn):
            return Reading(format_error=error or MUST_ANSWER)
        call = ToolCall("", error=fault) if fault else ToolCall(self.tool, {self.argument: body})
        return Reading(calls=(call,), format_error=error or fault)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """A user message with the results, and with any error of the search or its format."""
        lines = [
            f"<information>{r.content}</information>" if r.ok else f"Error: {r.content}."
            for r in results
        ]
        wrong = reading.format_error
        if not lines or (wrong and wrong not in (r.content for r in results)):
            lines.append(f"Format error: {wrong or 'no search or answer'}.")
        return [{"role": "user", "content": "\n".join(lines)}]


def _find_forgery(written: Sequence[str]) -> str | None:
    forged = "<information>" in written or "</information>" in written
    return "information is not yours to write" if forged else None


def _form_error(text: str, tags: Sequence[re.Match[str]]) -> str | None:
    """A format error outside a turn's action, or None.

    Args:
        text: The turn.
        tags: Its tags up to the end of the action.
    """
    kind = tags[-1][2]
    if text[tags[-1].end() :].strip():
        return f"text after the {kind}"
    written = [tag.group() for tag in tags]
    if "<think>" not in written:
        return "no thought"
    if "</think>" not in written:
        return "the thought is not closed"
    if written != ["<think>", "</think>", f"<{kind}>", f"</{kind}>"]:
        return "misplaced tags"
    begin, end, act, _ = tags
    if text[: begin.start()].strip() or text[end.end() : act.start()].strip():
        return "text outside the tags"
    return None if text[begin.end() : end.start()].strip() else "the thought is empty"
