"""What all environments share: an episode for each attempt, steps that pay, and what happens when
an environment breaks.

A world is what all attempts of a run share, and an episode is one attempt's. What goes wrong in one
episode loses that attempt alone, which begins again (`TrajectoryLost`); a broken contract, such as
a text in the place of a reward, stops the run (`ToolError`), because every attempt has it.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from turnrl import (
    DataError,
    Question,
    RecipeError,
    Stateful,
    ToolCall,
    ToolError,
    ToolFigures,
    ToolResult,
    ToolSession,
    Toolset,
    TrajectoryLost,
    at_least,
    blaming,
    in_short,
    is_finite,
    result_of,
)

T = TypeVar("T")

_CLOSING_S = 30.0
"""How much longer than a step the whole of a batch may take."""
OVER = "the environment has ended, so nothing was done"
TRUNCATED = "truncated"
"""Key of a result's metadata: the environment ended the attempt because its time was up."""


class World(Stateful, Toolset, ABC):
    """Environments with an episode for each attempt.

    Args:
        name: What messages call it.
        capacity: How many attempts it can serve at once; None for any number.
        step_timeout_s: An attempt whose environment takes longer than this many seconds for a turn,
            or to begin, is lost.
    """

    acts = True

    def __init__(self, name: str, capacity: int | None, step_timeout_s: float) -> None:
        self.name, self.capacity, self.step_timeout_s = name, capacity, step_timeout_s
        kind = f"{type(self).__name__}."
        at_least(1, kind, self, "capacity", whole=True)
        at_least(1e-3, kind, self, "step_timeout_s", optional=False)
        self.timeout_s = step_timeout_s + _CLOSING_S

    def __str__(self) -> str:
        return f"environment {self.name}"

    @abstractmethod
    async def begin(self, question: Question) -> Episode:
        """Begin an episode. What an environment's own code does stands in `within`."""

    async def open(self, question: Question) -> Episode:
        """An episode at its first observation.

        Raises:
            TrajectoryLost: If the environment raises.
            ToolError: If it does not keep its contract.
        """
        return await self.begin(question)

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
        """Steps of one episode."""
        episode = calls[0].session
        assert isinstance(episode, Episode)
        results: list[ToolResult | TrajectoryLost] = []
        for call in calls:
            try:
                results.append(await episode.step(call))
            except TrajectoryLost as lost:
                episode.lost = True
                return [*results, *[lost] * (len(calls) - len(results))]
        return results

    async def within(
        self, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: Any
    ) -> T:
        """Run an environment's own code: what blocks in a thread, and coroutines on the event loop.

        Args:
            verb: What is done, for messages.
            function: Its code.
            arguments: What it is called with.
        Raises:
            TrajectoryLost: If it raises, or takes too long.
        """
        what = f"{self} in {verb}"
        advice = (
            "The attempt begins again, at most rollout.max_restarts times. Fix the environment; "
            "for a mistake of the policy it should return a turnrl.ToolResult with ok=False."
        )
        if verb == "reset":
            advice = (
                "The attempt begins again, at most rollout.max_restarts times. Fix the "
                "environment; if it serves only so many attempts at once, set its capacity."
            )
        with blaming(TrajectoryLost, what, advice):
            try:
                async with asyncio.timeout(self.step_timeout_s) as clock:
                    return await result_of(function, *arguments)
            except TimeoutError as error:
                if not clock.expired():
                    raise
                raise TrajectoryLost(
                    f"{what} took longer than step_timeout_s = {self.step_timeout_s:g}. Raise it, "
                    "or find out why the environment hangs."
                ) from error


class Episode(ToolSession, ABC):
    """One attempt in an environment.

    Args:
        world: What it is an episode of.
        prompt: The first observation, which the policy reads below the question.
    Attributes:
        steps: Steps so far.
        earned: What they paid.
        ended: Whether the environment has ended it.
        lost: Whether the environment broke, so that nothing more is asked of it.
    """

    def __init__(self, world: World, prompt: str) -> None:
        self.world, self.prompt = world, prompt
        self.steps, self.earned, self.ended, self.lost = 0, 0.0, False, False

    async def step(self, call: ToolCall) -> ToolResult:
        """Take a step, unless the environment has ended.

        Raises:
            TrajectoryLost: If the environment raises.
            ToolError: If it does not keep its contract.
        """
        if self.ended:
            return ToolResult(OVER, ok=False, done=True)
        result = await self.act(call)
        self.steps += 1
        self.earned += result.reward
        self.ended = result.done
        return result

    @abstractmethod
    async def act(self, call: ToolCall) -> ToolResult:
        """What the environment makes of a call."""

    @abstractmethod
    async def leave(self) -> None:
        """Give back what the environment holds."""

    async def outcome(self) -> float | None:
        """What the environment pays for the attempt as a whole; None if it says nothing."""
        return None

    async def close(self) -> ToolFigures:
        """Leave the environment.

        Returns:
            `steps`, the number of steps; `earned`, what they paid; `ended`, 1 if the environment
            ended the attempt; and `outcome`, if it pays for the attempt as a whole.
        Raises:
            TrajectoryLost: If the environment raises.
        """
        try:
            paid = None if self.lost else await self.outcome()
        finally:
            await self.leave()
        figures = {"steps": self.steps, "earned": self.earned, "ended": float(self.ended)}
        return figures if paid is None else {**figures, "outcome": paid}


def copied(world: World, environment: T) -> T:
    """A copy of an environment, for a branch of its attempt.

    Raises:
        ToolError: If it cannot be copied.
    """
    try:
        return copy.deepcopy(environment)
    except Exception as error:
        raise ToolError(
            f"{world} cannot be copied for a branch ({in_short(error)}). Give its class a "
            "__deepcopy__, or take an estimator without probes."
        ) from error


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


def named(setting: str, value: str | Callable[..., T]) -> Callable[..., T]:
    """The function or class that a recipe names.

    Args:
        setting: The setting, for messages.
        value: Its path, such as `my_module.Guess`; from Python, the thing itself.
    Raises:
        RecipeError: If there is none.
    """
    found: Any = value
    if isinstance(value, str):
        module, _, attribute = value.rpartition(".")
        if not module:
            raise RecipeError(
                f"{setting} is {value!r}, which is no path. Give the module too, such as "
                f"my_module.{value or 'MyEnvironment'}."
            )
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise RecipeError(
                f"{setting} is {value!r}, which cannot be imported ({in_short(error)}). The module "
                "has to be installed, or lie in the current folder."
            ) from error
    if not callable(found):
        raise RecipeError(
            f"{setting} is {value!r:.80}, which cannot be called. Give a class or a function."
        )
    return cast("Callable[..., T]", found)


def missing(world: World, columns: str, question: Question) -> DataError:
    """The error about data that lack what an environment begins with."""
    has = ", ".join(map(str, question.metadata)) or "none"
    return DataError(
        f"{world} needs {columns} to begin, and question {question.id!r} does not say it (its "
        f"further columns: {has}). Take data that have it, or give it a default in reset."
    )
