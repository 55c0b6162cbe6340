"""Random play: demonstrations of a turn scheme's form, for any tools, that know nothing else.

A turn calls a random tool with arguments that fit its schema. Where questions have answers, it
reads one off the last results if they hold it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from turnrl.errors import RecipeError
from turnrl.types import Attempt, Reading, Segmenter, ToolCall, ToolSpec

_CALL, _ANSWER = "I will look.", "This answers it."
_LONGEST = 6
"""Words of a text that is taken out of what the policy has read."""


class RandomPlay:
    """A demonstrator (see `turnrl.Demonstrator`) of the form alone.

    Args:
        scheme: The turn scheme, which writes the turns.
    """

    def __init__(self, scheme: Segmenter) -> None:
        self.scheme = scheme

    def __call__(self, attempt: Attempt, rng: random.Random) -> str:
        """A call, or an answer if the question has one and a call was made: in the last turn in any
        case, before it in every second.

        Raises:
            RecipeError: If the scheme does not read what it wrote.
        """
        turn, has_answers = len(attempt.turns), bool(attempt.question.answers)
        last = turn + 1 == self.scheme.max_turns
        answers = has_answers and (last or (turn > 0 and rng.random() < 0.5))
        if attempt.tools and not answers:
            call = random_call(attempt, rng)
            text = self.scheme.write(Reading((call,)), _CALL)
            read = self.scheme.read(text, turn, False)
            if read.calls == (call,) and read.format_error is None:
                return text
            if not last:
                raise self._unread(text, read)
        answer = _answer(attempt, rng)
        text = self.scheme.write(Reading(answer=answer), _ANSWER)
        read = self.scheme.read(text, turn, False)
        if read.answer != answer or read.format_error is not None:
            raise self._unread(text, read)
        return text

    def _unread(self, text: str, read: Reading) -> RecipeError:
        return RecipeError(
            f"{type(self.scheme).__name__} writes {text!r:.200} and reads it as {read!r:.200}. Fix "
            "its write, or give 'turnrl warmup' texts of your own with --by."
        )


def random_call(attempt: Attempt, rng: random.Random) -> ToolCall:
    """A call of one of the attempt's tools with arguments that fit its schema."""
    spec: ToolSpec = rng.choice(attempt.tools)
    return ToolCall(spec.name, _object(spec.parameters, attempt, rng))


def _object(schema: Mapping[str, Any], attempt: Attempt, rng: random.Random) -> dict[str, Any]:
    """An object with what its schema requires, or with all of it if nothing is required."""
    parts: Mapping[str, Mapping[str, Any]] = schema.get("properties", {})
    names = schema.get("required") or list(parts)
    return {name: _value(parts.get(name, {}), attempt, rng) for name in names}


def _value(schema: Mapping[str, Any], attempt: Attempt, rng: random.Random) -> Any:
    """A value that fits a JSON Schema."""
    for some in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if some:
            return rng.choice(some)
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return _value(rng.choice(either), attempt, rng)
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else rng.choice(kind)
    if kind in ("integer", "number"):
        least = schema.get("minimum", 0)
        most = max(least, schema.get("maximum", least + 9))
        whole = kind == "integer"
        return rng.randint(-int(-least // 1), int(most)) if whole else rng.uniform(least, most)
    if kind == "object":
        return _object(schema, attempt, rng)
    if kind == "array":
        length = max(1, schema.get("minItems", 1))
        return [_value(schema.get("items", {}), attempt, rng) for _ in range(length)]
    return {"boolean": rng.random() < 0.5, "null": None}.get(kind, _words(_read(attempt), rng))


def _read(attempt: Attempt) -> str:
    """What the policy has read last: a result, or the question."""
    shown = [result.content for turn in attempt.turns for result in turn.results if result.ok]
    return next(filter(str.strip, reversed(shown)), attempt.question.text)


def _words(text: str, rng: random.Random) -> str:
    """Words that follow each other in a text."""
    words: Sequence[str] = text.replace("<", " ").split() or ["?"]
    first = rng.randrange(len(words))
    return " ".join(words[first : first + rng.randint(1, _LONGEST)])


def _answer(attempt: Attempt, rng: random.Random) -> str:
    """An accepted answer that a result holds; or else any accepted one; or else words of the last
    result."""
    read = "\n".join(result.content for turn in attempt.turns for result in turn.results)
    answers = [answer for answer in attempt.question.answers if answer.strip()]
    found = [answer for answer in answers if answer in read]
    return (found or answers or [_words(_read(attempt), rng)])[0].strip()
