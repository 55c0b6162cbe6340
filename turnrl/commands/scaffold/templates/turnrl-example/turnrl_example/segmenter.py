"""A segmenter: what a turn is."""

import json
import re
from collections.abc import Sequence
from typing import final

from turnrl import Message, Question, Reading, Segmenter, ToolResult, ToolSpec, read_call

# The first block that is closed, whatever comes after it, so the meaning of a text does not change
# as the text grows. Nothing inside can open or close a block.
ACTION = re.compile(r"<(tool|answer)>((?:(?!</?(?:tool|answer)>).)*)</\1>", re.DOTALL)

INSTRUCTIONS = """\
Answer the question. You have {turns} turns. In each of them, think, then do one of two things:

Call a tool: <tool>{{"name": "...", "args": {{...}}}}</tool>
You will read its reply inside <result> tags, or what was wrong inside <error> tags.

Or give the answer, in few words, which ends your work: <answer>...</answer>
The last turn must give the answer.

Tools, with the JSON Schema of their args:
{tools}"""


@final
class ExampleTurns(Segmenter):
    """Turns with one tool call each, until one answers.

    Args:
        max_turns: The most turns; the last one must answer.
        instructions: The system message, word for word. By default it explains the task, the tags
            and the tools.
    """

    # sampling ends here, so a turn has one action
    stop = ("</tool>", "</answer>")
    # every tag with a meaning, so that neither a question nor a tool's result can contain it
    tags = ("tool", "answer", "result", "error")

    def __init__(self, max_turns: int = 3, instructions: str | None = None) -> None:
        self.max_turns = max_turns
        self.instructions = instructions

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        system = self.instructions
        if system is None:
            about = [f"{t.name}: {t.description} {json.dumps(dict(t.parameters))}" for t in tools]
            listing = "\n".join(about) or "none"
            system = INSTRUCTIONS.format(turns=self.max_turns, tools=listing)
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": question.text},
        ]

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        # Never raises, whatever the policy wrote. A block that a cut turn did not close does not
        # match, so half an answer is not an answer.
        match = ACTION.search(text)
        if match is None:
            return Reading(format_error="cut short" if cut else "no call or answer that is closed")
        kind, body = match[1], match[2].strip()
        forged = re.search(r"</?(result|error)>", text) is not None
        error = "results are not yours to write" if forged else None
        if kind == "answer":
            empty = None if body else "the answer is empty"
            return Reading(answer=body or None, format_error=error or empty)
        if turn + 1 >= self.max_turns:  # no call: nothing would read its result
            return Reading(format_error="the last turn must give an answer")
        # a call that cannot be read still counts as attempted: it has an error
        call = read_call(body, ("args",))
        return Reading(calls=(call,), format_error=error or call.error)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        # one result per call, unchanged; after a turn without calls, the policy reads its error
        replies = [("result" if r.ok else "error", r.content) for r in results]
        replies = replies or [("error", reading.format_error or "no call or answer")]
        text = "\n".join(f"<{tag}>{content}</{tag}>" for tag, content in replies)
        return [{"role": "user", "content": text}]
