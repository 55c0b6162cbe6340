"""Demonstrations: a demonstrator writes the turns, and a rollout plays them as a policy's turns.

Tools, limits and tokens are the same as in a run, so the trajectory is the one that a policy would
have made if it had written these texts.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import final

from turnrl import types
from turnrl.agent.attempt import Attempt
from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout
from turnrl.plugin.errors import PluginError, RecipeError, blaming, describe_value
from turnrl.types import (
    Completion,
    Engine,
    Question,
    Reading,
    Reply,
    SampledPolicy,
    Sampling,
    Segmenter,
    Session,
    ToolResult,
    Trajectory,
)

Says = str | Reading
"""A demonstrated turn: its text, or a `Reading`, which the segmenter writes as text."""
Demonstrator = Callable[[types.Attempt, random.Random], Says | Awaitable[Says]]
"""Gives the next turn of an attempt. The random numbers belong to the attempt and the turn."""


def play_demonstrations(
    rollout: Rollout,
    demonstrate: Demonstrator,
    chat: ChatFormat,
    questions: Sequence[Question],
    key: Sequence[int],
    group_size: int = 1,
    at_once: int | None = None,
    description: str | None = None,
) -> list[list[Trajectory]]:
    """Play attempts whose turns a demonstrator writes; see `Rollout.play`.

    Args:
        rollout: The rules of the attempts; it has a segmenter.
        demonstrate: Gives the turns.
        chat: The policy's chat format.
        questions: What to ask.
        key: Integers that name the random streams.
        group_size: Attempts at each question.
        at_once: The most attempts under way at a time; None for any number.
        description: Label of a progress bar; None for none.
    Raises:
        PluginError: If the demonstrator raises, or gives no text.
        RecipeError: If a turn is longer than a policy's may be.
    """
    scheme, sampling = rollout.segmenter_loop, rollout.sampling

    async def write_turn(attempt: Attempt) -> Reply:
        text = await _write(demonstrate, attempt, scheme.plugin)
        turn, (conversation,) = len(attempt.turns), attempt.conversations
        ids = chat.encode_turn(text, sampling.stop, _next_role(scheme.plugin, text, turn))
        if len(ids) > sampling.max_tokens:
            raise RecipeError(
                f"the demonstrator gave a turn of {len(ids)} tokens on question "
                f"{attempt.question.id!r}, more than model.rollout.max_turn_tokens = "
                f"{sampling.max_tokens}. Raise it, or write less."
            )
        return await attempt.take_turn(conversation, sampling.stop, ids)

    return rollout.begin(
        _Copying(at_once),
        chat,
        questions,
        group_size,
        key,
        0,
        description=description,
        driver=replace(scheme, take_turn=write_turn),
    ).result()[0]


async def _write(demonstrate: Demonstrator, attempt: Attempt, segmenter: Segmenter) -> str:
    """The text of an attempt's next turn.

    Raises:
        PluginError: If the demonstrator raises, or gives no text.
    """
    turn, question_id = len(attempt.turns), attempt.question.id
    rng = random.Random(repr((attempt.key, turn)))
    with blaming(PluginError, f"the demonstrator on question {question_id!r}", "Fix it."):
        shown = demonstrate(attempt, rng)
        shown = await shown if inspect.isawaitable(shown) else shown
    text = segmenter.write(shown) if isinstance(shown, Reading) else shown
    if not isinstance(text, str) or not text.strip():
        raise PluginError(
            f"the demonstrator gave {text!r:.80} ({describe_value(text)}) for turn {turn + 1} of "
            f"question {question_id!r}. Return the text of the turn, or a turnrl.Reading."
        )
    return text


@final
class _Copying(Engine):
    """Samples the tokens that it is forced to take. Without weights it has nothing to do.

    Args:
        capacity: The most attempts under way at a time; None for any number.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity

    def start(self, policy: SampledPolicy, max_tokens: int) -> None: ...

    def sync(self, version: int) -> None: ...

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return _Copied()

    async def drain(self) -> None: ...

    def close(self) -> None: ...


def _next_role(scheme: Segmenter, text: str, turn: int) -> str:
    """Role of the message that follows a turn."""
    with blaming(PluginError, f"{type(scheme).__name__} on {text[:200]!r}", "Fix it."):
        reading = scheme.read(text, turn, False)
        if reading.answer is not None:
            return "user"
        return scheme.observe(reading, [ToolResult("") for _ in reading.calls])[0]["role"]


class _Copied(Session):
    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        ids = sampling.forced_ids[: sampling.max_tokens]
        whole = len(ids) == len(sampling.forced_ids)
        return Completion(ids, (0.0,) * len(ids), "stop" if whole else "length", 0)

    def fork(self) -> Session:
        return _Copied()

    def close(self) -> None:
        """Nothing to give back."""
