"""The parts that all segmenters of this package share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence

from turnrl import Message, Question, Segmenter, ToolCall, ToolSpec

MUST_ANSWER = "the last turn must give an answer"
THOUGHT = "I go step by step."
"""The thought that `write` adds where the form requires one and the caller passes none."""


def expected_thought(think: str) -> str:
    """`Segmenter.opened_thought` of a scheme with this `think`."""
    return "<think>" if think == "opened" else ""


def format_call(call: ToolCall, key: str) -> str:
    """A call as JSON that holds no tag.

    Args:
        call: The call.
        key: Key of its arguments.
    """
    content = {"name": call.name, key: dict(call.arguments)}
    return json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")


class PromptedSegmenter(Segmenter):
    """A segmenter with a system message, which users can replace.

    Attributes:
        instructions: The system message, word for word; empty for none. None explains the scheme.
    """

    instructions: str | None

    @abstractmethod
    def explain(self, tools: Sequence[ToolSpec]) -> str:
        """The default system message."""

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        """The instructions as system message (none if empty), the question as user message."""
        system = self.explain(tools) if self.instructions is None else self.instructions
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, {"role": "user", "content": question.text}]

    def is_last(self, turn: int) -> bool:
        """True if no turn follows in which the policy could read a result."""
        return turn >= self.max_turns - 1

    @property
    def allowance(self) -> str:
        """The number of turns in words: `4 turns`."""
        return "one turn" if self.max_turns == 1 else f"{self.max_turns} turns"
