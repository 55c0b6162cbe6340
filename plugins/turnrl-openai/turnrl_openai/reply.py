"""A chat completion as one text, with what vendors put beside it.

    content             a text, or a list of parts, whose texts are joined
    refusal             the model's own words for no, in place of a content
    tool_calls          calls in the vendor's form, added to the text in that of Hermes
    reasoning_content   the thought of a reply (`reasoning` of others), which no turn contains

A reply of a thought alone has it as its text, in <think> tags, so that people can see what it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Completion(NamedTuple):
    """A whole reply.

    Args:
        text: Its text.
        ended: Why it ended, in the server's words; empty if it does not say.
        thinks: True if a thought came beside the text.
    """

    text: str
    ended: str
    thinks: bool


def read_completion(value: object) -> Completion:
    """Read the JSON of a chat completion.

    Raises:
        ValueError: If it is no completion, or has something other than text.
    """
    match value:
        case {"choices": [{"message": Mapping() as message, **choice}, *_]}:
            thoughts = (message.get(name) for name in ("reasoning_content", "reasoning"))
            thought = next((text for text in thoughts if isinstance(text, str)), "")
            text = "\n".join(filter(None, [_text(message), *_calls(message)]))
            if thought and not text:
                text = f"<think>{thought}</think>"
            # halves of surrogate pairs are joined, or replaced if they are alone
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return Completion(whole, str(choice.get("finish_reason") or ""), bool(thought))
    raise ValueError("it has no choices with a message")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or message.get("refusal") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    match parts:
        case [*_] if all(isinstance(part, Mapping) for part in parts):
            texts = [part.get("text") for part in parts if part.get("type") == "text"]
            if all(isinstance(text, str) for text in texts):
                return "".join(map(str, texts))
    raise ValueError(f"its content is {content!r:.80}, not a text")


def _calls(message: Mapping[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        match call:
            case {"function": {"name": str(name), **function}}:
                given = function.get("arguments") or "{}"
                arguments = given if isinstance(given, str) else json.dumps(given)
                written = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
                yield f"<tool_call>\n{written}\n</tool_call>"
            case _:
                raise ValueError(f"it has the call {call!r:.80}")
