"""The two forms in which a starter policy writes its turns, and demonstrations as tokens.

    TwoTurn   system: Tools: [search(query)]           <reasoning> <tool> {"name", "args"} <result>
    ReAct     system: <tools>[search(query)]</tools>   <think> <tool_call> {"name", "arguments"}

The system message shows the policy which form to use. It lists tools with the names of their
arguments, without descriptions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from turnrl import Message, Question, Segmenter, ToolResult, ToolSpec
from turnrl.agent.chat import ChatFormat
from turnrl_segmenters import ReAct
from turnrl_segmenters.two_turn import TwoTurn
from turnrl_wiki_search import WikiSearch

SEARCH = WikiSearch("atlas").specs[0]
"""The tool of Atlas."""


def listing(tools: Sequence[ToolSpec]) -> str:
    """The system message of `TwoTurn` for these tools, for `TwoTurn.instructions` in a recipe."""
    # no space before a name, so that it has the same tokens as in a call
    described = (f"[{tool.name}({','.join(arguments(tool))})]" for tool in tools)
    return f"Tools: {' '.join(described)}"


def arguments(tool: ToolSpec) -> list[str]:
    """The names of a tool's arguments."""
    return list(tool.parameters["properties"])


Turn = tuple[str, tuple[Message, ...]]
"""The text of a turn, and the messages that follow it; none after the last."""


@dataclass(frozen=True)
class Trace:
    """A demonstration.

    Args:
        prompt: The opening messages.
        turns: The turns.
        tools: The tools that the chat template describes.
    """

    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True)
class Form:
    """Format in which a policy writes its turns under a segmenter.

    Args:
        segmenter: The scheme.
        thought: Tag of a thought.
        action: Tag of a call.
        key: Key of a call's arguments.
    """

    segmenter: Segmenter
    thought: str
    action: str
    key: str

    def trace(self, question: str, tools: Sequence[ToolSpec], *turns: Turn) -> Trace:
        """A demonstration on a question with these tools."""
        segmenter = self.offering(tools)
        prompt = segmenter.prompt(Question("asked", question, ("",)), tools)
        return Trace(tuple(prompt), turns, tuple(tools) if segmenter.tools_in_template else ())

    def offering(self, tools: Sequence[ToolSpec]) -> Segmenter:
        """The scheme, with a system message that lists the tools if the template does not."""
        if self.segmenter.tools_in_template:
            return self.segmenter
        return TwoTurn(instructions=listing(tools))

    def calling(self, thought: str, call: str, result: ToolResult) -> Turn:
        """A turn that calls, and the messages that follow it."""
        text = f"{self.thinking(thought)}<{self.action}>{call}</{self.action}>"
        reading = self.segmenter.read(text, 0, False)
        return text, tuple(self.segmenter.observe(reading, [result]))

    def answering(self, thought: str, value: str) -> Turn:
        """A turn that answers."""
        # with the space, a value has the same tokens as in a page, which makes copying easy
        return f"{self.thinking(thought)}<answer> {value}</answer>", ()

    def call(self, tool: ToolSpec, given: Mapping[str, str]) -> str:
        """A call that works."""
        return json.dumps({"name": tool.name, self.key: given})

    def malformed(
        self,
        tool: ToolSpec,
        given: Mapping[str, str],
        tools: Sequence[ToolSpec],
        rng: random.Random,
    ) -> tuple[str, ToolResult]:
        """A call that cannot work, and its result."""
        good, (argument, *_) = self.call(tool, given), given
        renamed = {f"{argument}s" if name == argument else name: given[name] for name in given}
        call = rng.choice(
            (
                good.removesuffix("}"),
                good.replace(f'"{self.key}": ', f'"{argument}": '),
                self.call(tool, renamed),
                good.replace(f'"name": "{tool.name}"', '"name": "find"'),
            )
        )
        text = f"{self.thinking('?')}<{self.action}>{call}</{self.action}>"
        (reading,) = self.segmenter.read(text, 0, False).calls
        names = ", ".join(tool.name for tool in tools)
        message = reading.error or (
            f"no tool 'find'; there is {names}"
            if reading.name == "find"
            else f"bad arguments: {argument!r} is a required property"
        )
        return call, ToolResult(message, ok=False)

    def thinking(self, thought: str) -> str:
        """A thought."""
        return f"<{self.thought}>{thought}</{self.thought}>"


TWO_TURN = Form(TwoTurn(), "reasoning", "tool", "args")
REACT = Form(ReAct(instructions=""), "think", "tool_call", "arguments")
FORMS = (TWO_TURN, REACT)


def markup() -> list[str]:
    """The tags of both forms, which are tokens of the starter policy."""
    tags = dict.fromkeys(tag for form in FORMS for tag in form.segmenter.tags)
    return [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]


def encode(chat: ChatFormat, trace: Trace) -> tuple[list[int], list[bool]]:
    """Token ids of a trace, made as in a rollout, and for each id True if it is the assistant's."""
    ids = list(chat.encode_prompt(trace.prompt, trace.tools))
    is_assistant = [False] * len(ids)
    end = cast("int", chat.tokenizer.eos_token_id)
    for text, seen in trace.turns:
        spoken = [*chat.tokenizer.encode(text, add_special_tokens=False), end]
        read = chat.encode_observation(seen, after=end) if seen else ()
        ids += [*spoken, *read]
        is_assistant += [True] * len(spoken) + [False] * len(read)
    return ids, is_assistant
