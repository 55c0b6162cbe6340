"""The part that all environments share: a world for all attempts of a run, with an episode for each
attempt, and the handling of faults.

A fault in one episode loses only its attempt, which begins again (`TrajectoryLost`). A broken
contract, such as a text in place of a reward, stops the run (`ToolError`), because every attempt
would meet it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
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
    ToolResult,
    Toolset,
)
from turnrl.agent.mistakes import is_of_threads
from turnrl.agent.running import result_of
from turnrl.plugin.errors import TrajectoryLost, at_least, blaming, is_finite
from turnrl.types import ToolFigures, ToolSession
from turnrl_environments.threads import THREAD, Queued

T = TypeVar("T")
W = TypeVar("W", bound="World")

_MARGIN_S = 30.0
"""Seconds that a whole batch may take longer than `step_timeout_s`; an episode may not."""
_IN_LINE_S = 86_400.0
"""Limit of a batch whose calls run one after another: they may wait for many others, and each has
its own limit."""
_STOP_S = 5.0
"""Seconds that the end of a run waits for late environments, to close them."""
TRUNCATED = "truncated"
"""Key of a result's metadata: the environment ended the attempt because its time was up."""
FIGURES = ("steps", "earned", "ended", "truncated", "outcome")
"""The figures that an attempt keeps of its episode."""
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
_ADVICE_ON_THREADS = (
    "Calls run in threads, and never in the main thread. For code that is made for one thread set "
    "thread_safe: false, and make what it holds in reset."
)


class World(Stateful, Toolset, ABC):
    """Environments with an episode for each attempt.

    Args:
        name: Its name in messages.
        capacity: The most attempts that it can serve at once; None for any number.
        step_timeout_s: An attempt is lost if its environment takes longer than this many seconds
            for a turn, to begin or to close.
        thread_safe: True if episodes side by side do not disturb each other. Otherwise one thread
            makes all their calls.
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
            DataError: If the question lacks a column that the episode begins with.
        """

    async def open(self, question: Question) -> Episode[Any]:
        """An episode at its first observation.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it breaks its contract.
        """
        episode = self.episode(question)
        await episode.begin()
        return episode

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | TrajectoryLost]:
        """Take the episodes' steps: in order within an episode, and episodes side by side."""
        by_episode: dict[int, list[ToolCall]] = {}
        for call in calls:
            by_episode.setdefault(id(call.session), []).append(call)
        answers = await asyncio.gather(*map(self._steps, by_episode.values()))
        left = {key: iter(answer) for key, answer in zip(by_episode, answers, strict=True)}
        return [next(left[id(call.session)]) for call in calls]

    async def _steps(self, calls: Sequence[ToolCall]) -> list[ToolResult | TrajectoryLost]:
        """Take the steps of one episode, within one time limit."""
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
        """Wait a little for late environments, so that they can be closed."""
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=_STOP_S)


class Episode(ToolSession, ABC, Generic[W]):
    """One attempt in an environment. Calls of an environment's own code run one at a time, never
    beside a call that has not ended, even if nobody waits for that call any more: an environment
    that hangs is left alone, and closed when the late call ends.

    Args:
        world: The world of the episode.
        question: The question of the attempt.
    Attributes:
        steps: Number of steps so far.
        earned: Sum of their rewards.
        over: True if the environment has ended or truncated the attempt.
        truncated: True if the environment ended it because its time was up.
        lost: True if the environment broke, so that it is not used any more.
    """

    def __init__(self, world: W, question: Question) -> None:
        self.world = world
        self.steps, self.earned = 0, 0.0
        self.over = self.truncated = self.lost = False
        self._until = 0.0
        self._work: asyncio.Task[object] | None = None

    # ------------------------------------------------------------------ an environment's own part

    @abstractmethod
    async def enter(self) -> str:
        """Begin. Calls of an environment's own code go through `do`.

        Returns:
            The first observation, which the policy reads below the question.
        """

    @abstractmethod
    async def act(self, call: ToolCall) -> ToolResult:
        """The environment's result of a call."""

    @abstractmethod
    def leave(self) -> object:
        """Release everything that the environment holds. `do` calls it, in a thread, or on the
        event loop if it is a coroutine."""

    async def outcome(self) -> float | None:
        """The environment's reward for the attempt as a whole; None if it gives none."""
        return None

    # ------------------------------------------------------------------ its life

    async def begin(self) -> None:
        """Enter the environment; leave it if that fails.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it breaks its contract.
        """
        self.limit()
        try:
            self.prompt = await self.enter()
        except BaseException:
            await self._leave_quietly()
            raise

    async def step(self, call: ToolCall) -> ToolResult:
        """Take a step, unless the environment has ended.

        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
            ToolError: If it breaks its contract.
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
            `steps`, the number of steps; `earned`, the sum of their rewards; `ended`, 1 if the
            environment ended the attempt; `truncated`, 1 if it ended it because its time was up,
            and then `ended` is 0; and `outcome`, if it pays for the attempt as a whole.
        Raises:
            TrajectoryLost: If the environment raises, or takes too long.
        """
        self.limit()
        paid: float | None = None
        if self.lost or self._hangs:
            await self._leave_quietly()
        else:
            try:
                paid = await self.outcome()
            except BaseException:
                await self._leave_quietly()
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
        """Start the clock of `step_timeout_s`, which all calls until the next `limit` share."""
        self._until = asyncio.get_running_loop().time() + self.world.step_timeout_s

    async def do(
        self, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: object
    ) -> T:
        """Run an environment's own code: blocking code in a thread, coroutines on the event loop.

        Args:
            verb: The operation, for messages.
            function: The code.
            arguments: Its arguments.
        Raises:
            TrajectoryLost: If the code raises, or the time is up. Even then `leave` is started, and
                it is not stopped.
            PolicyMistake: If the code raises it.
            ToolError: If the world is not thread-safe, and the call or one before it hangs.
        """
        label, loop = f"{self.world} in {verb}", asyncio.get_running_loop()
        left_s, leaves = self._until - loop.time(), function == self.leave
        if left_s > 0 or leaves:
            work, queued = self._start_work(function, *arguments)
            try:
                if queued is not None:  # waiting for others does not count as the call's time
                    joined = loop.time()
                    await queued.wait_for_turn(label)
                    self._until += loop.time() - joined
                await asyncio.wait([work], timeout=max(left_s, 0.0))
            finally:
                late = not work.done()
                if late and not leaves:
                    if queued is not None:
                        queued.done.cancel()  # unless it has begun
                    elif asyncio.iscoroutinefunction(function):
                        work.cancel()  # a thread cannot be stopped
            if not late:
                return cast(T, self._finish(label, verb, work))
            THREAD.hangs = THREAD.hangs or queued is not None
        # nothing else can be called in a thread that hangs, unless it is one of many
        kind = TrajectoryLost if self.world.thread_safe else ToolError
        raise kind(
            f"{label} took longer than step_timeout_s = {self.world.step_timeout_s:g}. Raise it, "
            "or find out why the environment hangs."
        )

    def _finish(self, label: str, verb: str, work: asyncio.Task[object]) -> object:
        """The result of a call that has ended; see `do` for what it raises."""
        advice = _ADVICE_ON_RESET if verb == "reset" else _ADVICE
        if work.cancelled():
            raise TrajectoryLost(f"{label} was cancelled from within. {advice}")
        if isinstance(error := work.exception(), PolicyMistake):
            raise error
        of_thread = is_of_threads(error)
        try:
            with blaming(TrajectoryLost, label, _ADVICE_ON_THREADS if of_thread else advice):
                return work.result()
        except TrajectoryLost as lost:
            if not of_thread:
                raise
            raise lost from None  # it is no mistake of the policy

    def _start_work(
        self, function: Callable[..., object], *arguments: object
    ) -> tuple[asyncio.Task[object], Queued[object] | None]:
        """Start code that runs once the call before it has ended; return its task, and its place in
        the queue of the one thread if the world is not thread-safe."""
        before, queued = self._work, None
        if not self.world.thread_safe:
            queued = THREAD.submit(functools.partial(function, *arguments))

        async def work() -> object:
            if queued is not None:
                return await queued.result()
            if before is not None and not before.done():
                await asyncio.wait([before])
            return await result_of(function, *arguments)

        self._work = asyncio.create_task(work())
        self.world.under_way.add(self._work)
        self._work.add_done_callback(self._forget_work)
        return self._work, queued

    def _forget_work(self, work: asyncio.Task[object]) -> None:
        self.world.under_way.discard(work)
        if not work.cancelled():
            work.exception()  # else asyncio reports an exception that nobody waits for

    @property
    def _hangs(self) -> bool:
        """True while a call runs that nobody waits for."""
        return self._work is not None and not self._work.done()

    async def _leave_quietly(self) -> None:
        """Leave the environment after another failure, whose error is the one to show. If a call
        has not ended, `leave` runs after it, and nobody waits."""
        if self._hangs:
            self._start_work(self.leave)
        else:
            with contextlib.suppress(Exception):
                await self.do("close", self.leave)


def seed_of(question: Question) -> object:
    """The seed of a question: its column `seed`, or a number computed from its id.

    Files of CSV hold numbers as texts, and pandas holds whole numbers in a column with gaps as
    floats and the gaps as NaN. Such a seed is the number, and a gap is no seed.
    """
    seed: Any = question.metadata.get("seed")
    seed = seed.item() if hasattr(seed, "item") else seed  # of numpy
    text = str(seed).strip()
    if re.fullmatch(r"[+-]?[0-9]+(?:\.0*)?", text) and not isinstance(seed, int):
        return int(text.partition(".")[0])
    return zlib.crc32(question.id.encode()) if text in ("", "None", "nan", "<NA>") else seed


def paid(world: World, verb: str, reward: Any) -> float:
    """A reward as a number.

    Raises:
        ToolError: If it is not a finite number.
    """
    with contextlib.suppress(Exception):  # an array or a tensor of one number
        reward = reward.item()
    if not is_finite(reward):
        raise ToolError(
            f"{world} gave the reward {reward!r:.80} from {verb}. Return a finite number, 0.0 "
            "where a step pays nothing."
        )
    return float(reward)


def text_of(world: World, verb: str, observation: object) -> str:
    """Check that an observation is a text, and return it.

    Raises:
        ToolError: If it is not a text.
    """
    if not isinstance(observation, str):
        raise ToolError(
            f"{world}: {verb} returned {observation!r:.80}; it must return a string, the text "
            "that the policy reads."
        )
    return observation


def missing(world: World, columns: str, question: Question) -> DataError:
    """The error about a question that lacks columns that an environment begins with."""
    has = ", ".join(map(str, question.columns))
    return DataError(
        f"{world} needs {columns} to begin, and question {question.id!r} does not say it (its "
        f"columns: {has}). Take data that have it, or give it a default in reset."
    )
