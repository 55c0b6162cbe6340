"""The parts of a chat completion: its text, and what vendors put beside it.

    content             a text, or a list of parts
    refusal             the model's own words for no, so part of the text
    tool_calls          calls in the vendor's form, added to the text in that of Hermes
    reasoning_content   the thoughts of a reply, which no turn contains (`reasoning`, `thinking`)

A reply of thoughts alone has them as its text, in <think> tags, so that people can see what it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the thoughts in messages and in parts of a content."""
_BESIDE = ("reference", "citation")
"""Parts of a content that say where the text comes from."""


class Gathered:
    """A reply that comes in one message, or in pieces.

    Attributes:
        ended: Why the reply ended; None while it goes on.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[object, list[str]] = {}

    def add(self, event: object) -> str:
        """Add a whole completion, or an event of its stream.

        Returns:
            The text in it.
        Raises:
            ValueError: If it is no completion, or holds what a text cannot.
        """
        choices = event.get("choices") if isinstance(event, Mapping) else None
        if not isinstance(choices, list):
            raise ValueError("it has no choices")
        if not choices:  # the last event may have only the usage
            return ""
        choice = choices[0]
        if not isinstance(choice, Mapping):
            raise ValueError("its choice is not an object")
        self.ended = choice.get("finish_reason") or self.ended
        message = choice.get("delta") or choice.get("message") or {}
        if not isinstance(message, Mapping):
            raise ValueError("its message is not an object")
        new = "".join([*self._content(message.get("content")), *_texts(message, "refusal")])
        self._text.append(new)
        self._thoughts += [t for n in _THOUGHTS if isinstance(t := message.get(n), str)]
        self._add_calls(message)
        return new

    @property
    def thinks(self) -> bool:
        """True if thoughts came beside the text."""
        return any(self._thoughts)

    def text(self, end: int | None = None) -> str:
        """The text up to an end, or all of it and the calls after it."""
        if end is not None:
            return _whole_characters("".join(self._text)[:end])
        calls = (
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n'
            "</tool_call>"
            for name, arguments in self._calls.values()
        )
        text = "\n".join(filter(None, ["".join(self._text), *calls]))
        if not text and self.thinks:
            text = f"<think>{''.join(self._thoughts)}</think>"
        return _whole_characters(text)

    def _content(self, content: object) -> Iterator[str]:
        if content is None or isinstance(content, str):
            yield content or ""
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping):
                    raise ValueError("a part of its content is not an object")
                if part.get("type") in _THOUGHTS:
                    thought = part.get(part["type"])
                    kept = [part] if isinstance(thought, str) else thought or []
                    self._thoughts += [t for p in kept for t in _texts(p, "text", *_THOUGHTS)]
                elif part.get("type") in ("text", "output_text", "refusal"):
                    yield from _texts(part, "text", "refusal")
                elif part.get("type") not in _BESIDE:
                    raise ValueError(f"its content has a part of type {part.get('type')!r:.80}")
        else:
            raise ValueError(f"its content is {content!r:.80}, not a text")

    def _add_calls(self, message: Mapping[str, Any]) -> None:
        """Add the calls in a message; a call may come in pieces, by its index."""
        calls = message.get("tool_calls") or []
        if old := message.get("function_call"):
            calls = [{"index": "function_call", "function": old}]
        if not isinstance(calls, list):
            raise ValueError("its tool_calls are not a list")
        for number, call in enumerate(calls):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise ValueError("a call of it has no function")
            whole = self._calls.setdefault(str(call.get("index", number)), ["", ""])
            arguments = function.get("arguments") or ""
            whole[0] += "".join(_texts(function, "name"))
            whole[1] += arguments if isinstance(arguments, str) else json.dumps(arguments)


def _whole_characters(text: str) -> str:
    """The text with halves of surrogate pairs joined, or replaced if they are alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _texts(owner: object, *names: str) -> list[str]:
    """The values with these names that are texts.

    Raises:
        ValueError: If one is neither a text nor missing.
    """
    if not isinstance(owner, Mapping):
        raise ValueError("a part of it is not an object")
    values = [owner[name] for name in names if owner.get(name) is not None]
    if odd := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"it has {odd[0]!r:.80} where a text belongs")
    return values
