"""What all environments share: a world of all attempts of a run, with an episode for each of them,
and what happens when an environment breaks.

What goes wrong in one episode loses that attempt alone, which begins again (`TrajectoryLost`); a
broken contract, such as a text in the place of a reward, stops the run (`ToolError`), because every
attempt has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from turnrl import (
    DataError,
    PolicyMistake,
    Question,
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
    is_finite,
    result_of,
)
from turnrl_environments.worker import Call, OwnRandom

T = TypeVar("T")
W = TypeVar("W", bound="World")

_MARGIN_S = 30.0
"""How much longer than `step_timeout_s` a whole batch may take; an episode never does."""
_IN_LINE_S = 86_400.0
"""A batch of calls that take turns may wait for many others, each within limits of its own."""
_STOP_S = 5.0
"""How long the end of a run waits for environments that answer too late, to close them."""
TRUNCATED = "truncated"
"""Key of a result's metadata: the environment ended the attempt because its time was up."""
FIGURES = ("steps", "earned", "ended", "truncated", "outcome")
"""What an attempt keeps of its episode."""
STEP = "environment_step"
"""Key of a result's metadata: the number of the step, from 1. Only an environment's results have
it."""
OVER = "the environment has ended, so nothing was done"
_ADVICE = (
    "An attempt begins again at most model.rollout.max_restarts times. Fix the environment; for a "
    "mistake of the policy it should return a turnrl.ToolResult with ok=False."
)
_ADVICE_ON_RESET = (
    "An attempt begins again at most model.rollout.max_restarts times. Fix the environment; if it "
    "serves only so many attempts at once, set its capacity."
)


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
        self.under_way: set[asyncio.Task[object]] = set()

    def __str__(self) -> str:
        return f"environment {self.name}"

    @abstractmethod
    def episode(self, question: Question) -> Episode[Any]:
        """An episode that has not begun.

        Raises:
            DataError: If the question lacks what it begins with.
        """

    async def open(self, question: Question) -> Episode[Any]:
        """An episode at its first observation.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it does not keep its contract.
        """
        episode = self.episode(question)
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


class Episode(ToolSession, ABC, Generic[W]):
    """One attempt in an environment. An environment's own code is called one thing at a time, and
    never beside a call that has not ended, even if nobody waits for that one any more: an
    environment that hangs is left to itself, and closed when the late call is done.

    Args:
        world: What it is an episode of.
        question: The question of the attempt.
    Attributes:
        steps: Steps so far.
        earned: What they paid.
        over: Whether the environment has ended it, or truncated it.
        truncated: Whether the environment ended it because its time was up.
        lost: Whether the environment broke, so that nothing more is asked of it.
        random: Its own random numbers, with which calls run on the worker; None if the world is
            thread-safe.
    """

    def __init__(self, world: W, question: Question) -> None:
        self.world = world
        self.steps, self.earned = 0, 0.0
        self.over = self.truncated = self.lost = False
        self.random: OwnRandom | None = None
        if not world.thread_safe:
            self.random = OwnRandom(zlib.crc32(f"{seed_of(question)}".encode()))
        self._until = 0.0
        self._last: asyncio.Task[object] | None = None

    # ------------------------------------------------------------------ what an environment does

    @abstractmethod
    async def enter(self) -> str:
        """Begin. What an environment's own code does stands in `do`.

        Returns:
            The first observation, which the policy reads below the question.
        """

    @abstractmethod
    async def act(self, call: ToolCall) -> ToolResult:
        """What the environment makes of a call."""

    @abstractmethod
    def leave(self) -> object:
        """Give back what the environment holds, if it holds anything. It is called as `do` calls
        code: in a thread, or on the event loop if it is a coroutine's."""

    async def outcome(self) -> float | None:
        """What the environment pays for the attempt as a whole; None if it says nothing."""
        return None

    # ------------------------------------------------------------------ its life

    async def begin(self) -> None:
        """Enter the environment; leave it if that fails.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it does not keep its contract.
        """
        self.limit()
        try:
            self.prompt = await self.enter()
        except BaseException:
            await self._left()
            raise

    async def step(self, call: ToolCall) -> ToolResult:
        """Take a step, unless the environment has ended.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it does not keep its contract.
        """
        if self.over:
            return ToolResult(OVER, ok=False, done=True)
        try:
            result = await self.act(call)
        except PolicyMistake as mistake:
            result = ToolResult(str(mistake), ok=False)
        self.steps += 1
        self.earned += result.reward
        self.over = result.done
        self.truncated = bool(result.metadata.get(TRUNCATED))
        return replace(result, metadata={**result.metadata, STEP: self.steps})

    async def close(self) -> ToolFigures:
        """Leave the environment.

        Returns:
            `steps`, the number of steps; `earned`, what they paid; `ended`, 1 if the environment
            ended the attempt; `truncated`, 1 if it did because its time was up, and `ended` is 0
            then; and `outcome`, if it pays for the attempt as a whole.
        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
        """
        self.limit()
        paid: float | None = None
        if self.lost or self._hangs:
            await self._left()
        else:
            try:
                paid = await self.outcome()
            except BaseException:
                await self._left()
                raise
            await self.do("close", self.leave)
        figures = {
            "steps": self.steps,
            "earned": self.earned,
            "ended": float(self.over and not self.truncated),
            "truncated": float(self.truncated),
        }
        return figures if paid is None else {**figures, "outcome": paid}

    # ------------------------------------------------------------------ its time

    def limit(self) -> None:
        """Begin to count `step_timeout_s`, which the calls until the next `limit` share."""
        self._until = asyncio.get_running_loop().time() + self.world.step_timeout_s

    async def do(
        self, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: object
    ) -> T:
        """Run an environment's own code: what blocks in a thread, and coroutines on the event loop.

        Args:
            verb: What is done, for messages.
            function: Its code.
            arguments: What it is called with.
        Raises:
            TrajectoryLost: If it raises, or if the time is up. What leaves the environment is begun
                even then, and is not stopped.
            PolicyMistake: If it raises that.
            ToolError: If it is to run on the worker, where a call before it hangs.
        """
        what, loop = f"{self.world} in {verb}", asyncio.get_running_loop()
        left_s, leaves = self._until - loop.time(), function == self.leave
        if left_s > 0 or leaves:
            work, call = self._begun(what, function, *arguments)
            try:
                if call is not None:  # to wait for others takes nothing of an environment's time
                    joined = loop.time()
                    await call.begins()
                    self._until += loop.time() - joined
                await asyncio.wait([work], timeout=max(left_s, 0.0))
            finally:
                late = not work.done()
                if late and call is not None:
                    call.leave(drop=not leaves)
                elif late and asyncio.iscoroutinefunction(function) and not leaves:
                    work.cancel()  # a thread cannot be stopped
            if not late:
                advice = _ADVICE_ON_RESET if verb == "reset" else _ADVICE
                if work.cancelled():
                    raise TrajectoryLost(f"{what} was cancelled from within. {advice}")
                if isinstance(mistake := work.exception(), PolicyMistake):
                    raise mistake
                with blaming(TrajectoryLost, what, advice):
                    return cast(T, work.result())
        raise TrajectoryLost(
            f"{what} took longer than step_timeout_s = {self.world.step_timeout_s:g}. Raise it, or "
            "find out why the environment hangs."
        )

    def _begun(
        self, what: str, function: Callable[..., object], *arguments: object
    ) -> tuple[asyncio.Task[object], Call[object] | None]:
        """Code that runs once the call before it has ended; and its call, if the worker runs it."""
        before, call = self._last, None
        if self.random is not None and not asyncio.iscoroutinefunction(function):
            given = functools.partial(function, *arguments)
            call = Call(what, self.world.step_timeout_s, self.random, given)

        async def work() -> object:
            if before is not None and not before.done():
                await asyncio.wait([before])
            return await (result_of(function, *arguments) if call is None else call.result())

        self._last = asyncio.create_task(work())
        self.world.under_way.add(self._last)
        self._last.add_done_callback(self._done)
        return self._last, call

    def _done(self, work: asyncio.Task[object]) -> None:
        self.world.under_way.discard(work)
        if not work.cancelled():
            work.exception()  # else asyncio would report one that nobody waits for

    @property
    def _hangs(self) -> bool:
        """True while a call has not ended that nobody waits for."""
        return self._last is not None and not self._last.done()

    async def _left(self) -> None:
        """Leave because something else failed, whose error is the one to see. If a call has not
        ended, the environment is left when it has, and nobody waits for that."""
        if self._hangs:
            self._begun(f"{self.world} in close", self.leave)
        else:
            with contextlib.suppress(Exception):
                await self.do("close", self.leave)


def seed_of(question: Question) -> object:
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


def text_of(world: World, verb: str, observation: object) -> str:
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
