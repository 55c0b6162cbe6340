"""Thought and action as Qwen and Hermes write them.

    turn        <think>...</think>
                <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>
    reply       a message of role `tool` for each call, which the chat template wraps
    last turn   <think>...</think> <answer>...</answer>

The first call or answer decides what a turn does; later text never changes it. After an answer,
calls are not run. After a call, an answer does not count, because the policy has not read the
result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from turnrl import Message, Reading, ToolCall, ToolResult, ToolSpec, read_call
from turnrl.plugin.errors import check_one_of
from turnrl.plugin.text import is_blank
from turnrl_segmenters.prompted import (
    MUST_ANSWER,
    THOUGHT,
    PromptedSegmenter,
    expected_thought,
    format_call,
)

_KEYS = ("arguments",)
_INSIDE = "tags inside tool_call; in the text of an argument, write < as \\u003c"

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_THINK = {
    "required": "Begin each turn with a thought inside <think> tags, then",
    "optional": "You may begin a turn with a thought inside <think> tags; then",
    "opened": "Begin each turn with a thought and close it with </think>, then",
}
_ANSWER = {
    "tag": "give the answer, in few words, inside <answer> tags: <answer>...</answer>",
    "boxed": "give the answer, in few words, inside \\boxed{...}",
    "plain": "write the answer, in few words, and nothing else",
}
_CALL = """\
do one of two things.

Call a tool, or several at once, whose replies you will then read:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>

Or """
_LAST = "\nThis ends your work. The last turn must do it."


class _Block(NamedTuple):
    """A piece of a turn: `text`, a `think`, `tool_call` or `answer` block, or a `stray` tag outside
    any block. `fault` is the reason why a block cannot be used."""

    kind: str
    body: str
    fault: str | None = None


@final
@dataclass(eq=False, repr=False)
class ReAct(PromptedSegmenter):
    """A thought, then tool calls or the answer, for models that call tools as Qwen and Hermes do.
    The chat template describes the tools.

    The model ends a turn itself. There is no stop string, because a turn may have several calls and
    a thought may mention any tag.

    Args:
        max_turns: The most turns; the last one must answer.
        answer: The place of the answer: `tag`, in `<answer>`; `boxed`, in `\\boxed{}`; `plain`,
            anything after the thought of a turn without a call.
        think: `required` if every turn must have a thought, or `optional`; `opened` if the chat
            template opens the thought, so that turns begin inside it.
        instructions: The system message, word for word; empty for none. By default it explains the
            task and the form.
    """

    tools_in_template = True

    max_turns: int = 4
    answer: Literal["tag", "boxed", "plain"] = "tag"
    think: Literal["required", "optional", "opened"] = "optional"
    instructions: str | None = None

    def __post_init__(self) -> None:
        check_one_of(_ANSWER, "ReAct.", self, "answer")
        check_one_of(_THINK, "ReAct.", self, "think")
        self.opened_thought = expected_thought(self.think)
        self._forms = ("think", "tool_call", "tool_response", *["answer"][: self.answer == "tag"])
        # a page must not open the template's list of tools either
        self.tags = (*self._forms, "tools")

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        act = _ANSWER[self.answer]
        if tools and self.max_turns > 1:
            act = f"{_CALL}{act}{_LAST}"
        return f"Answer the question. You have {self.allowance}. {_THINK[self.think]} {act}"

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Read the calls or the answer of one turn, whichever comes first, despite any other format
        error.

        A block that is not closed, or has tags inside, cannot be used. A call that cannot be used
        still counts as attempted, with an `error`. Calls in the last turn do not count.
        """
        blocks = [*self._blocks(text, cut)]
        acts = [n for n, block in enumerate(blocks) if block.kind in ("tool_call", "answer")]
        first = acts[0] if acts else len(blocks)
        wrong = [*self._faults(blocks[:first], blocks[first:])]
        if not acts:
            return Reading(format_error="; ".join([*wrong, "no tool call or answer"]))
        if blocks[first].kind == "answer":
            block = blocks[first]
            answer = None if block.fault or is_blank(block.body) else block.body.strip()
            return Reading(answer=answer, format_error="; ".join(wrong) or None)
        if self.is_last(turn):
            return Reading(format_error="; ".join([MUST_ANSWER, *wrong]))
        calls = tuple(
            ToolCall("", error=block.fault) if block.fault else read_call(block.body, _KEYS)
            for block in blocks
            if block.kind == "tool_call"
        )
        errors = [call.error for call in calls if call.error]
        return Reading(calls, format_error="; ".join(wrong or errors[:1]) or None)

    def write(self, reading: Reading, thought: str = "") -> str:
        """A thought if the form requires it or `thought` is set; then the calls or the answer."""
        if reading.answer is not None:
            place = {"tag": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}", "plain": "{}"}
            act = place[self.answer].format(reading.answer)
        else:
            calls = (format_call(call, "arguments") for call in reading.calls)
            act = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        if self.think == "optional" and not thought:
            return act
        opening = "" if self.think == "opened" else "<think>"
        return f"{opening}{thought or THOUGHT}</think>\n{act}"

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """A tool message for each result, and a user message with the format error unless a result
        has it already."""
        shown: list[Message] = [{"role": "tool", "content": result.content} for result in results]
        wrong = reading.format_error
        if shown and (wrong is None or wrong in (result.content for result in results)):
            return shown
        complaint = f"Format error: {wrong or 'no tool call or answer'}."
        return [*shown, {"role": "user", "content": complaint}]

    def _blocks(self, text: str, cut: bool) -> Iterator[_Block]:
        """The pieces of a turn from left to right."""
        if self.think == "opened":
            text = f"<think>{text}"
        pieces = [*_pieces(text, self._forms)]
        kinds = {piece.kind for piece in pieces}
        if self.answer == "boxed":
            for piece in pieces:
                yield from _boxes(piece.body) if piece.kind == "text" else [piece]
        elif self.answer == "plain" and not kinds & {"tool_call", "stray"} and not cut:
            *before, last = pieces
            yield from before
            yield last if is_blank(last.body) else last._replace(kind="answer")
        else:
            yield from pieces

    def _faults(self, before: Sequence[_Block], after: Sequence[_Block]) -> Iterator[str]:
        """Faults in a turn outside its calls or its answer.

        Args:
            before: The pieces before the first call or answer.
            after: The first call or answer, and the pieces after it.
        """
        strays = dict.fromkeys(b.body for b in (*before, *after) if b.kind == "stray")
        if any("tool_response" in tag for tag in strays):
            yield "tool_response is not yours to write"
        yield from (f"{tag[2:-1]} is closed and was not opened" for tag in strays if tag in _CLOSED)
        at = [n for n, block in enumerate(before) if block.kind == "think"]
        thoughts = [before[n] for n in at]
        if any(block.fault for block in (*thoughts, *after) if block.kind == "think"):
            yield "the thought is not closed"
        elif not thoughts and self.think == "required":
            yield "no thought"
        elif self.think != "optional" and not thoughts[0].body.strip():
            yield "the thought is empty"
        if at and any(block.body.strip() for block in before[: at[0]] if block.kind == "text"):
            yield "text before the thought"
        if len(thoughts) > 1:
            yield "more than one thought"
        if not after:
            return
        act, rest = after[0].kind, after[1:]
        spoken = act.replace("_", " ")
        if act == "answer" and after[0].fault:
            yield after[0].fault
        elif act == "answer" and is_blank(after[0].body):
            yield "the answer is empty"
        kinds = [block.kind for block in rest]
        if "think" in kinds:
            yield f"a thought after the {spoken}"
        if act == "answer" and "tool_call" in kinds:
            yield "a tool call after the answer, which is not run"
        if "answer" in kinds:
            answered = act == "answer"
            yield "more than one answer" if answered else "an answer before the result was read"
        outside = any(block.body.strip() for block in rest if block.kind == "text")
        if outside and not (act == "answer" and self.answer == "boxed"):
            yield f"text after the {spoken}"


_CLOSED = ("</think>", "</tool_call>", "</answer>")


def _pieces(text: str, forms: Sequence[str]) -> Iterator[_Block]:
    """The blocks between tags, and the text around them.

    A thought extends to its closing tag, whatever other tags it mentions. Any other block ends
    early if its tag is opened again before it is closed.
    """
    tags = [*re.finditer(rf"<(/?)({'|'.join(forms)})>", text)]
    end = n = 0
    while n < len(tags):
        closing, kind = tags[n].groups()
        yield _Block("text", text[end : tags[n].start()])
        start = end = tags[n].end()
        n += 1
        if closing or kind == "tool_response":
            yield _Block("stray", tags[n - 1].group())
            continue
        ends = (f"</{kind}>",) if kind == "think" else (f"</{kind}>", f"<{kind}>")
        close = next((m for m in range(n, len(tags)) if tags[m].group() in ends), len(tags))
        closed = close < len(tags) and bool(tags[close][1])
        end = tags[close].start() if close < len(tags) else len(text)
        fault = None if closed else f"{kind} is not closed"
        if closed and close > n and kind != "think":
            fault = _INSIDE if kind == "tool_call" else f"tags inside {kind}"
        yield _Block(kind, text[start:end], fault)
        n, end = (close + 1, tags[close].end()) if closed else (close, end)
    yield _Block("text", text[end:])


def _boxes(text: str) -> Iterator[_Block]:
    """The boxes in a text, each up to its balancing brace, and the text around them."""
    end = 0
    while (start := text.find("\\boxed{", end)) >= 0:
        yield _Block("text", text[end:start])
        depth, start = 1, start + len("\\boxed{")
        for brace in _BRACE.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if not depth:
                end = brace.end()
                yield _Block("answer", text[start : end - 1])
                break
        else:
            yield _Block("answer", text[start:], "boxed is not closed")
            return
    yield _Block("text", text[end:])
