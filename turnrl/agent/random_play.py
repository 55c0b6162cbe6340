"""Random play: demonstrations of a turn scheme's form, for any tools, that know nothing else.

A turn calls a random tool with arguments that fit its schema. Where questions have answers, it
reads one off the results if they hold it, and else gives words of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from turnrl.errors import RecipeError
from turnrl.text import contained_answer
from turnrl.types import Attempt, Reading, Segmenter, ToolCall, ToolSpec

_CALL, _ANSWER = "I will look.", "This answers it."
_LONGEST, _WIDEST = 6, 60
"""Words and characters of a text that is taken out of what the policy has read."""
_TRIES = 50


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
            RecipeError: If the scheme has no form for any of them, or does not read what it wrote.
        """
        turn = len(attempt.turns)
        last = turn + 1 == self.scheme.max_turns
        answers = bool(attempt.question.answers) and (last or (turn > 0 and rng.random() < 0.5))
        calls = (Reading((random_call(spec, attempt, rng),)) for spec in _shuffled(attempt, rng))
        said = ((Reading(answer=answer), _ANSWER) for answer in _answers(attempt, rng))
        acts = ((call, _CALL) for call in calls)
        # the other kind where the scheme has no form for the first, as for an answer in `Action`
        for reading, thought in chain(*((said, acts) if answers else (acts, said))):
            text = self._written(reading, thought, turn)
            if text is not None:
                return text
        raise RecipeError(
            f"random play finds no turn {turn + 1} that {type(self.scheme).__name__} can write and "
            f"reads again, on question {attempt.question.id!r}. Try turnrl.testing.check_segmenter "
            "on it, or give 'turnrl warmup' texts of your own with --by."
        )

    def _written(self, reading: Reading, thought: str, turn: int) -> str | None:
        """The text of a turn; None if the scheme has no form for it, or reads something else."""
        try:
            text = self.scheme.write(reading, thought)
        except RecipeError:
            if type(self.scheme).write is Segmenter.write:
                raise
            return None
        return text if self.scheme.read(text, turn, False) == reading else None


def random_call(spec: ToolSpec, attempt: Attempt, rng: random.Random) -> ToolCall:
    """A call of a tool with arguments that fit its schema.

    Raises:
        RecipeError: If none is found.
    """
    valid, values = Draft202012Validator(spec.parameters), _Values(spec.parameters, attempt, rng)
    for _ in range(_TRIES):
        arguments = values.of(spec.parameters)
        if valid.is_valid(arguments):
            return ToolCall(spec.name, arguments)
    wrong = best_match(valid.iter_errors(arguments))
    raise RecipeError(
        f"random play finds no arguments for the tool {spec.name!r} ({wrong and wrong.message}). "
        "Give 'turnrl warmup' texts of your own with --by."
    )


class _Values:
    """Random values of JSON Schemas. What they do not heed, such as a pattern, is left to chance.

    Args:
        root: The whole schema, which holds definitions.
        attempt: Texts are taken out of what was read in it.
        rng: Source of the random numbers.
    """

    def __init__(self, root: Mapping[str, Any], attempt: Attempt, rng: random.Random) -> None:
        self._root, self._attempt, self._rng = root, attempt, rng

    def of(self, schema: Mapping[str, Any]) -> Any:
        """A value."""
        rng = self._rng
        if "$ref" in schema:
            return self.of(self._named(schema["$ref"]))
        if "allOf" in schema:
            parts = [self._named(one["$ref"]) if "$ref" in one else one for one in schema["allOf"]]
            return self.of(
                {k: v for part in (schema, *parts) for k, v in part.items() if k != "allOf"}
            )
        for some in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if some:
                return rng.choice(some)
        if either := schema.get("anyOf") or schema.get("oneOf"):
            return self.of(rng.choice(either))
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = kind if isinstance(kind, str) else rng.choice(kind)
        plain = {"boolean": rng.random() < 0.5, "null": None}
        if kind in plain:
            return plain[kind]
        many = {"object": self._object, "array": self._array, "string": self._text}
        return many[kind](schema) if kind in many else self._number(schema, kind == "integer")

    def _named(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step, {}) if isinstance(found, Mapping) else {}
        return found if isinstance(found, Mapping) else {}

    def _object(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """An object with what is required, or with all there is if nothing is required."""
        parts: Mapping[str, Mapping[str, Any]] = schema.get("properties", {})
        names = schema.get("required") or list(parts)
        return {name: self.of(parts.get(name, {})) for name in names}

    def _array(self, schema: Mapping[str, Any]) -> list[Any]:
        first: Sequence[Mapping[str, Any]] = schema.get("prefixItems", ())
        length = min(max(1, schema.get("minItems", 1)), schema.get("maxItems", math.inf))
        rest = schema.get("items", {})
        more = [rest] * (length - len(first)) if isinstance(rest, Mapping) else []
        return [self.of(one) for one in (*first, *more)]

    def _number(self, schema: Mapping[str, Any], whole: bool) -> float:
        step = schema.get("multipleOf", 1)
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        most = schema.get("maximum", schema.get("exclusiveMaximum"))
        if least is None:
            least = 0 if most is None or most >= 0 else most - 9 * step
        most = max(least, least + 9 * step if most is None else most)
        if whole or "multipleOf" in schema:
            low, high = math.ceil(least / step), math.floor(most / step)
            chosen: float = step * self._rng.randint(min(low, high), high)
            return chosen
        return self._rng.uniform(least, most)

    def _text(self, schema: Mapping[str, Any]) -> str:
        text = _words(_read(self._attempt), self._rng)
        while 0 < len(text) < schema.get("minLength", 0):
            text += f" {text}"
        return text[: schema.get("maxLength")]


def _shuffled(attempt: Attempt, rng: random.Random) -> list[ToolSpec]:
    return rng.sample(attempt.tools, len(attempt.tools))


def _read(attempt: Attempt) -> str:
    """What the policy has read last: a result, or the question."""
    shown = [result.content for turn in attempt.turns for result in turn.results if result.ok]
    return next(filter(str.strip, reversed(shown)), attempt.question.text)


def _words(text: str, rng: random.Random) -> str:
    """Words that follow each other in a text."""
    words: Sequence[str] = text.replace("<", " ").split() or ["?"]
    first = rng.randrange(len(words))
    return " ".join(words[first : first + rng.randint(1, _LONGEST)])[:_WIDEST]


def _answers(attempt: Attempt, rng: random.Random) -> Iterator[str]:
    """Answers to give: accepted ones that a result holds, whole words of it; then words of the last
    result. An accepted answer that nothing was read of would be recited, so it is only taken where
    there is nothing to read."""
    results = [result.content for turn in attempt.turns for result in turn.results if result.ok]
    accepted = [one.strip() for one in attempt.question.answers if one.strip()]
    yield from (a for a in accepted if not results or contained_answer("\n".join(results), [a]))
    yield _words(_read(attempt), rng)
