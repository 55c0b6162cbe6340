"""A segmenter that reads a script's next action, whatever the policy writes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from turnrl import Message, Question, Reading, Rollout, Segmenter, ToolCall, ToolResult, ToolSpec


class Staged(Segmenter):
    """The recipe's segmenter, which reads every text as the next thing to try: calls, right and
    wrong answers, and turns without either.

    Args:
        rollout: The recipe's rollout.
        real: Its segmenter, which writes the messages.
        question: The question.
        calls: The calls to make.
    """

    def __init__(
        self, rollout: Rollout, real: Segmenter, question: Question, calls: Sequence[ToolCall]
    ) -> None:
        self._rollout = rollout
        self.max_turns, self.stop, self.tags = real.max_turns, real.stop, real.tags
        self.tools_in_template = real.tools_in_template
        right = Reading(answer=next(iter(question.answers), "an answer"))
        wrong, nothing = Reading(answer="a wrong answer"), Reading(format_error="nothing was done")
        acts = Reading(tuple(calls)) if calls else nothing
        self._earlier = itertools.cycle((acts, acts, right, nothing))
        self._last = itertools.cycle((right, wrong, nothing, right))

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        return self._rollout.segmenter_loop.prompt(question, tools)

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        self._rollout.segmenter_loop.read(text, turn, cut)
        return next(self._last if turn + 1 == self.max_turns else self._earlier)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        return self._rollout.segmenter_loop.observe(reading, results)
