"""What all environments share: a world of all attempts of a run, with an episode for each of them
(`episode`), and what happens when an environment breaks.

What goes wrong in one episode loses that attempt alone, which begins again (`TrajectoryLost`); a
broken contract, such as a text in the place of a reward, stops the run (`ToolError`), because every
attempt has it.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from turnrl import (
    DataError,
    Question,
    Stateful,
    ToolCall,
    ToolError,
    ToolResult,
    Toolset,
    TrajectoryLost,
    at_least,
    is_finite,
)
from turnrl_environments.episode import FIGURES, Episode
from turnrl_environments.randomness import OwnRandom

T = TypeVar("T")

_MARGIN_S = 30.0
"""How much longer than `step_timeout_s` a whole batch may take; an episode never does."""
_IN_LINE_S = 86_400.0
"""A batch of calls that take turns may wait for many others, each within limits of its own."""
_STOP_S = 5.0
"""How long the end of a run waits for environments that answer too late, to close them."""
TRUNCATED = "truncated"
"""Key of a result's metadata: the environment ended the attempt because its time was up."""


class World(Stateful, Toolset, ABC):
    """Environments with an episode for each attempt.

    Args:
        name: What messages call it.
        capacity: How many attempts it can serve at once; None for any number.
        step_timeout_s: An attempt whose environment takes longer than this many seconds for a turn,
            or to begin, or to close, is lost.
        thread_safe: Whether episodes side by side do not disturb each other.
    """

    acts = interruptible = True
    figure_names = FIGURES

    def __init__(
        self, name: str, capacity: int | None, step_timeout_s: float, thread_safe: bool = True
    ) -> None:
        self.name, self.step_timeout_s, self.thread_safe = name, step_timeout_s, thread_safe
        self.capacity = capacity
        kind = f"{type(self).__name__}."
        at_least(1, kind, self, "capacity", whole=True)
        at_least(1e-3, kind, self, "step_timeout_s", optional=False)
        self.timeout_s = step_timeout_s + _MARGIN_S if thread_safe else _IN_LINE_S
        self.under_way: set[asyncio.Task[Any]] = set()

    def __str__(self) -> str:
        return f"environment {self.name}"

    @abstractmethod
    def episode(self, question: Question) -> Episode:
        """An episode that has not begun.

        Raises:
            DataError: If the question lacks what it begins with.
        """

    async def open(self, question: Question) -> Episode:
        """An episode at its first observation.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it does not keep its contract.
        """
        episode = self.episode(question)
        if not self.thread_safe:
            episode.random = OwnRandom(zlib.crc32(f"{seed_of(question)}".encode()))
        await episode.begin()
        return episode

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """The episodes' steps: those of an episode in order, and episodes side by side."""
        of: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            of.setdefault(id(call.session), []).append(place)
        some = [[calls[place] for place in places] for places in of.values()]
        done = await asyncio.gather(*map(self._steps, some))
        results = {
            place: result
            for places, theirs in zip(of.values(), done, strict=True)
            for place, result in zip(places, theirs, strict=True)
        }
        return [results[place] for place in range(len(calls))]

    async def _steps(self, calls: Sequence[ToolCall]) -> list[ToolResult | TrajectoryLost]:
        """Steps of one episode, within one limit."""
        episode = calls[0].session
        assert isinstance(episode, Episode)
        results: list[ToolResult | TrajectoryLost] = []
        episode.limit()
        for call in calls:
            try:
                results.append(await episode.step(call))
            except TrajectoryLost as lost:
                episode.lost = True
                return [*results, *[lost] * (len(calls) - len(results))]
        return results

    async def stop(self) -> None:
        """Wait a little for environments that answer too late, which are then closed."""
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=_STOP_S)


def seed_of(question: Question) -> Any:
    """The seed of a question: its column `seed`, or a number made of its id."""
    return question.metadata.get("seed", zlib.crc32(question.id.encode()))


def paid(world: World, verb: str, reward: Any) -> float:
    """A reward as a number.

    Raises:
        ToolError: If it is none.
    """
    if not is_finite(reward):
        raise ToolError(
            f"{world} gave the reward {reward!r:.80} from {verb}. Return a finite number, 0.0 "
            "where a step pays nothing."
        )
    return float(reward)


def text_of(world: World, verb: str, observation: Any) -> str:
    """An observation that has to be a text.

    Raises:
        ToolError: If it is none.
    """
    if not isinstance(observation, str):
        raise ToolError(
            f"{world} gave {observation!r:.80} from {verb}, which is no text. Return a text, the "
            "words that the policy reads."
        )
    return observation


def missing(world: World, columns: str, question: Question) -> DataError:
    """The error about data that lack what an environment begins with."""
    has = ", ".join(map(str, question.columns))
    return DataError(
        f"{world} needs {columns} to begin, and question {question.id!r} does not say it (its "
        f"columns: {has}). Take data that have it, or give it a default in reset."
    )
