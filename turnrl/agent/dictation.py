"""Demonstrations: turns that a demonstrator dictates, played through a rollout as a policy's are.

Tools, limits and tokens are those of a run, so a trajectory of demonstrations is what a policy that
wrote these texts would have made.
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
)

Says = str | Reading
"""A turn as it is demonstrated: its text, or what it does, which the turn scheme writes."""
Demonstrator = Callable[[Attempt, random.Random], Says | Awaitable[Says]]
"""Gives the next turn of an attempt. The random numbers belong to the attempt and the turn."""


@final
class Dictation(Engine):
    """Takes the place of an engine in `Rollout.play`, and has a demonstrator write the turns.

    Args:
        demonstrate: Gives the turns.
        at_once: The most attempts that are under way at a time; None for any number.
    """

    def __init__(self, demonstrate: Demonstrator, at_once: int | None = None) -> None:
        self.demonstrate, self.capacity = demonstrate, at_once

    async def turn(
        self,
        attempt: Attempt,
        seed: tuple[int, ...],
        scheme: Segmenter,
        sampling: Sampling,
        chat: ChatFormat,
    ) -> tuple[int, ...]:
        """The tokens of an attempt's next turn, written by a turn scheme.

        Raises:
            PluginError: If the demonstrator raises, or gives no text.
            RecipeError: If the turn is longer than a policy's may be.
        """
        turn, asked, most = len(attempt.turns), attempt.question.id, sampling.max_tokens
        what = "the demonstrator"
        rng = random.Random(repr((seed, turn)))
        with blaming(PluginError, f"{what} on question {asked!r}", "Fix it."):
            shown = self.demonstrate(attempt, rng)
            shown = await shown if inspect.isawaitable(shown) else shown
        text = scheme.write(shown) if isinstance(shown, Reading) else shown
        if not isinstance(text, str) or not text.strip():
            raise PluginError(
                f"{what} gave {text!r:.80} ({kind_of(text)}) for turn {turn + 1} of question "
                f"{asked!r}. Return the text of the turn, or a turnrl.Reading."
            )
        ids = chat.turn(text, sampling.stop)
        if len(ids) > most:
            raise RecipeError(
                f"{what} gave a turn of {len(ids)} tokens on question {asked!r}, more than "
                f"model.rollout.max_turn_tokens = {most}. Raise it, or write less."
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


class _Dictated(Session):
    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        ids = sampling.forced_ids[: sampling.max_tokens]
        whole = len(ids) == len(sampling.forced_ids)
        return Completion(ids, (0.0,) * len(ids), "stop" if whole else "length", 0)

    def fork(self) -> Session:
        return _Dictated()

    def close(self) -> None:
        """Nothing to give back."""
