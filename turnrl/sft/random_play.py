"""Random play: demonstrations for any tools, which know nothing but the form of a segmenter.

A turn calls a random tool with arguments that fit its schema. If the questions have answers, a turn
may also answer once a call has worked: with an accepted answer if the results contain one, or else
with words of the last result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

from turnrl.plugin.errors import RecipeError
from turnrl.rewards.answers import usable_answers
from turnrl.sft.json_values import SchemaValues
from turnrl.types import Attempt, Phrase, Reading, Segmenter, ToolCall, ToolSpec, Trajectory

_CALL, _ANSWER = "I will look.", "This answers it."
_LONGEST, _WIDEST = 6, 60
"""The most words and characters of a text that is copied from what the policy has read."""
_TRIES = 50


class RandomPlay:
    """A demonstrator (see `turnrl.sft.forced_play`) that shows the form of turns and nothing else.

    Args:
        scheme: The segmenter, which writes the turns.
    """

    def __init__(self, scheme: Segmenter) -> None:
        self.scheme = scheme

    def __call__(self, attempt: Attempt, rng: random.Random) -> str:
        """A call, or an answer if the question has answers: always in the last turn, and with
        probability 1/2 in each turn before it by which a call has worked.

        Raises:
            RecipeError: If the scheme has no form for a call or an answer, or reads it differently.
        """
        turn = len(attempt.turns)
        last = turn + 1 == self.scheme.max_turns
        early = turn > 0 and rng.random() < 0.5 and (bool(_results(attempt)) or not attempt.tools)
        answers = bool(attempt.question.answers) and (last or early)
        calls = (
            Reading((random_call(spec, attempt, rng),)) for spec in _shuffle_tools(attempt, rng)
        )
        ends = ((Reading(answer=answer), _ANSWER) for answer in _answers(attempt, rng))
        acts = ((call, _CALL) for call in calls)
        # fall back to the other kind if the scheme has no form for the first: `Action` for answers
        for reading, thought in chain(*((ends, acts) if answers else (acts, ends))):
            text = self._write_turn(reading, thought, turn)
            if text is not None:
                return text
        raise RecipeError(
            f"random play finds no turn {turn + 1} that {type(self.scheme).__name__} can write and "
            f"reads again, on question {attempt.question.id!r}. Try turnrl.testing.check_segmenter "
            "on it, or give 'turnrl warmup' texts of your own with --by."
        )

    def _write_turn(self, reading: Reading, thought: str, turn: int) -> str | None:
        """The text of a turn; None if the scheme has no form for it, or reads it differently."""
        try:
            text = self.scheme.write(reading, thought)
        except RecipeError:
            if type(self.scheme).write is Segmenter.write:
                raise
            return None
        return text if self.scheme.read(text, turn, False) == reading else None


def is_unfounded(trajectory: Trajectory) -> bool:
    """True if a demonstration calls tools and answers although none of its calls worked."""
    called = any(turn.results for turn in trajectory.turns)
    worked = any(result.ok for result in trajectory.results)
    return called and not worked and trajectory.answer is not None


def random_call(spec: ToolSpec, attempt: Attempt, rng: random.Random) -> ToolCall:
    """A call of a tool with arguments that fit its schema.

    Raises:
        RecipeError: If it finds no such arguments.
    """
    values = SchemaValues(spec.parameters, lambda: _pick_words(_last_text(attempt), rng), rng)
    for _ in range(_TRIES):
        if (arguments := values.mapping(None)) is not None:
            return ToolCall(spec.name, arguments)
    raise RecipeError(
        f"random play finds no arguments that the parameters of the tool {spec.name!r} allow. Give "
        "'turnrl warmup' texts of your own with --by."
    )


def _shuffle_tools(attempt: Attempt, rng: random.Random) -> list[ToolSpec]:
    return rng.sample(attempt.tools, len(attempt.tools))


def _results(attempt: Attempt) -> list[str]:
    return [result.content for turn in attempt.turns for result in turn.results if result.ok]


def _last_text(attempt: Attempt) -> str:
    """The text that the policy read last: a result, or the question."""
    return next(filter(str.strip, reversed(_results(attempt))), attempt.question.text)


def _pick_words(text: str, rng: random.Random) -> str:
    """Some consecutive words of a text."""
    words: Sequence[str] = text.replace("<", " ").split() or ["?"]
    first = rng.randrange(len(words))
    return " ".join(words[first : first + rng.randint(1, _LONGEST)])[:_WIDEST]


def _answers(attempt: Attempt, rng: random.Random) -> Iterator[str]:
    """Answers to give: first the accepted ones that the results contain as whole words, then words
    of the last result. All accepted answers count only if there is no tool to read from: otherwise
    the demonstration would recite an answer that the policy never read."""
    results = "\n".join(_results(attempt))
    rule = attempt.question.rule
    for answer in usable_answers(attempt.question):
        sought = rule if rule.seeks else Phrase()
        if not attempt.tools or sought.occurs_in(results, answer):
            yield answer.strip()
    yield _pick_words(_last_text(attempt), rng)
