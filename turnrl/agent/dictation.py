"""Demonstrations: a demonstrator dictates turns, and a rollout plays them as it plays a policy's.

Tools, limits and tokens are the same as in a run, so the trajectory is the one that a policy would
have made if it had written these texts.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import final

from turnrl.agent.chat import ChatFormat
from turnrl.errors import PluginError, RecipeError, blaming, kind_of
from turnrl.types import (
    Attempt,
    Completion,
    Engine,
    Reading,
    SampledPolicy,
    Sampling,
    Segmenter,
    Session,
    ToolResult,
)

Says = str | Reading
"""A demonstrated turn: its text, or a `Reading`, which the turn scheme writes as text."""
Demonstrator = Callable[[Attempt, random.Random], Says | Awaitable[Says]]
"""Gives the next turn of an attempt. The random numbers belong to the attempt and the turn."""


@final
class Dictation(Engine):
    """Takes the place of an engine in `Rollout.play`: a demonstrator writes the turns.

    Args:
        demonstrate: Gives the turns.
        at_once: The most attempts under way at a time; None for any number.
    """

    def __init__(self, demonstrate: Demonstrator, at_once: int | None = None) -> None:
        self.demonstrate, self.capacity = demonstrate, at_once

    async def turn(
        self,
        attempt: Attempt,
        key: tuple[int, ...],
        scheme: Segmenter,
        sampling: Sampling,
        chat: ChatFormat,
    ) -> tuple[int, ...]:
        """The token ids of an attempt's next turn, which the turn scheme writes if the
        demonstrator gives a `Reading`.

        Raises:
            PluginError: If the demonstrator raises, or gives no text.
            RecipeError: If the turn is longer than a policy's may be.
        """
        turn, question_id = len(attempt.turns), attempt.question.id
        rng = random.Random(repr((key, turn)))
        with blaming(PluginError, f"the demonstrator on question {question_id!r}", "Fix it."):
            shown = self.demonstrate(attempt, rng)
            shown = await shown if inspect.isawaitable(shown) else shown
        text = scheme.write(shown) if isinstance(shown, Reading) else shown
        if not isinstance(text, str) or not text.strip():
            raise PluginError(
                f"the demonstrator gave {text!r:.80} ({kind_of(text)}) for turn {turn + 1} of "
                f"question {question_id!r}. Return the text of the turn, or a turnrl.Reading."
            )
        ids = chat.turn(text, sampling.stop, _next_role(scheme, text, turn))
        if len(ids) > sampling.max_tokens:
            raise RecipeError(
                f"the demonstrator gave a turn of {len(ids)} tokens on question {question_id!r}, "
                f"more than model.rollout.max_turn_tokens = {sampling.max_tokens}. Raise it, or "
                "write less."
            )
        return ids

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Nothing to do."""

    def sync(self, version: int) -> None:
        """Nothing to do: the turns do not depend on weights."""

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return _Dictated()

    async def drain(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to give back."""


def _next_role(scheme: Segmenter, text: str, turn: int) -> str:
    """Role of the message that follows a turn."""
    with blaming(PluginError, f"{type(scheme).__name__} on {text[:200]!r}", "Fix it."):
        reading = scheme.read(text, turn, False)
        if reading.answer is not None:
            return "user"
        return scheme.observe(reading, [ToolResult("") for _ in reading.calls])[0]["role"]


class _Dictated(Session):
    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        ids = sampling.forced_ids[: sampling.max_tokens]
        whole = len(ids) == len(sampling.forced_ids)
        return Completion(ids, (0.0,) * len(ids), "stop" if whole else "length", 0)

    def fork(self) -> Session:
        return _Dictated()

    def close(self) -> None:
        """Nothing to give back."""
