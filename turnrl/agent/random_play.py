"""Random play: demonstrations of a turn scheme's form, for any tools, that know nothing else.

A turn calls a random tool with arguments that fit its schema. Where questions have answers, it
reads one off the results if they hold it, and else gives words of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

from turnrl.agent.json_values import SchemaValues
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
        ends = ((Reading(answer=answer), _ANSWER) for answer in _answers(attempt, rng))
        acts = ((call, _CALL) for call in calls)
        # the other kind where the scheme has no form for the first, as for an answer in `Action`
        for reading, thought in chain(*((ends, acts) if answers else (acts, ends))):
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
    values = SchemaValues(spec.parameters, lambda: _words(_read(attempt), rng), rng)
    for _ in range(_TRIES):
        if (arguments := values.mapping(None)) is not None:
            return ToolCall(spec.name, arguments)
    raise RecipeError(
        f"random play finds no arguments that the parameters of the tool {spec.name!r} allow. Give "
        "'turnrl warmup' texts of your own with --by."
    )


def _shuffled(attempt: Attempt, rng: random.Random) -> list[ToolSpec]:
    return rng.sample(attempt.tools, len(attempt.tools))


def _results(attempt: Attempt) -> list[str]:
    return [result.content for turn in attempt.turns for result in turn.results if result.ok]


def _read(attempt: Attempt) -> str:
    """What the policy has read last: a result, or the question."""
    return next(filter(str.strip, reversed(_results(attempt))), attempt.question.text)


def _words(text: str, rng: random.Random) -> str:
    """Words that follow each other in a text."""
    words: Sequence[str] = text.replace("<", " ").split() or ["?"]
    first = rng.randrange(len(words))
    return " ".join(words[first : first + rng.randint(1, _LONGEST)])[:_WIDEST]


def _answers(attempt: Attempt, rng: random.Random) -> Iterator[str]:
    """Answers to give: accepted ones that a result holds, whole words of it; then words of the last
    result. An accepted answer that nothing was read of would be recited, so it is only taken where
    there is nothing to read."""
    results = _results(attempt)
    accepted = [one.strip() for one in attempt.question.answers if one.strip()]
    yield from (a for a in accepted if not results or contained_answer("\n".join(results), [a]))
    yield _words(_read(attempt), rng)
