"""The part that all environments share: a world for all attempts of a run, with an episode for each
attempt, and the handling of faults.

A fault in one episode loses only its attempt, which begins again (`TrajectoryLost`). A broken
contract, such as a text in place of a reward, stops the run (`ToolError`), because every attempt
would meet it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from turnrl.agent.mistakes import is_thread_error
from turnrl.agent.running import run_function
from turnrl.plugin.errors import TrajectoryLost, blaming, check_at_least, is_finite
from turnrl.types import ToolFigures, ToolSession
from turnrl_environments.threads import OneThread

T = TypeVar("T")
W = TypeVar("W", bound="World")

_BATCH_S = 86_400.0
"""Limit of a batch: its calls may wait for many others, and each has its own limit."""
TRUNCATED = "truncated"
"""Key of a result's metadata: the environment ended the attempt because its time was up."""
FIGURES = ("steps", "earned", "ended", "truncated", "outcome")
"""The figures that an attempt keeps of its episode."""
STEP = "environment_step"
"""Key of a result's metadata: the number of the step, from 1. Only an environment's results have
it."""
OVER = "the environment has ended, so nothing was done"
_ADVICE = (
    "An attempt begins again at most model.rollout.max_restarts times. Fix the environment, or set "
    "its capacity if it serves only so many attempts at once; for a mistake of the policy it "
    "should return a turnrl.ToolResult with ok=False."
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
            for a call.
        thread_safe: True if episodes side by side do not disturb each other. Otherwise one thread
            makes all their calls.
    """

    acts = interruptible = True
    figure_names = FIGURES

    def __init__(
        self, name: str, capacity: int | None, step_timeout_s: float, thread_safe: bool = True
    ) -> None:
        self.name, self.step_timeout_s = name, step_timeout_s
        self.capacity = capacity
        kind = f"{type(self).__name__}."
        check_at_least(1, kind, self, "capacity", whole=True)
        check_at_least(1e-3, kind, self, "step_timeout_s", optional=False)
        self.timeout_s = _BATCH_S
        self.thread = None if thread_safe else OneThread()

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
        """Take the steps of one episode."""
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

    async def do(
        self, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: object
    ) -> T:
        """Run an environment's own code: blocking code in a thread, coroutines on the event loop.

        Args:
            verb: The operation, for messages.
            function: The code.
            arguments: Its arguments.
        Raises:
            TrajectoryLost: If the code raises, or takes too long. A `leave` that takes too long is
                not stopped.
            PolicyMistake: If the code raises it.
            ToolError: If the world is not thread-safe, and this call hangs, or one before it.
        """
        label, thread = f"{self.world} in {verb}", self.world.thread
        limit_s = self.world.step_timeout_s
        async with thread.turn(label) if thread else contextlib.nullcontext():
            work = self._start_work(function, *arguments)
            try:
                await asyncio.wait([work], timeout=limit_s)
            finally:
                late = not work.done()
                if late and asyncio.iscoroutinefunction(function) and function != self.leave:
                    work.cancel()  # a thread cannot be stopped
            if not late:
                return cast(T, self._finish(label, work))
            too_long = (
                f"{label} took longer than step_timeout_s = {limit_s:g}. Raise it, or find out why "
                "the environment hangs."
            )
            if thread is None:
                raise TrajectoryLost(too_long)
            thread.hangs = True
            raise ToolError(too_long)

    def _finish(self, label: str, work: asyncio.Task[object]) -> object:
        """The result of a call that has ended; see `do` for what it raises."""
        if work.cancelled():
            raise TrajectoryLost(f"{label} was cancelled from within. {_ADVICE}")
        if isinstance(error := work.exception(), PolicyMistake):
            raise error
        with blaming(
            TrajectoryLost, label, _ADVICE_ON_THREADS if is_thread_error(error) else _ADVICE
        ):
            return work.result()

    def _start_work(
        self, function: Callable[..., object], *arguments: object
    ) -> asyncio.Task[object]:
        """Start code that runs once the call before it has ended."""
        before, thread = self._work, self.world.thread

        async def work() -> object:
            if before is not None and not before.done():
                await asyncio.wait([before])
            if thread is not None:
                return await thread.result_of(function, *arguments)
            return await run_function(function, *arguments)

        self._work = asyncio.create_task(work())
        # else asyncio reports an exception that nobody waits for
        self._work.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._work

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


def question_seed(question: Question) -> object:
    """The seed of a question: its column `seed`, or a number computed from its id. Files of CSV
    hold a number as a text, and pandas may hold it as a float, and a gap as NaN."""
    seed = question.metadata.get("seed")
    text = str(seed).strip()
    if re.fullmatch(r"-?[0-9]+(?:\.0*)?", text):
        return int(text.partition(".")[0])
    return zlib.crc32(question.id.encode()) if text in ("", "None", "nan", "<NA>") else seed


def parse_reward(world: World, verb: str, reward: Any) -> float:
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


def check_text(world: World, verb: str, observation: object) -> str:
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


def missing_columns_error(world: World, columns: str, question: Question) -> DataError:
    """The error about a question that lacks columns that an environment begins with."""
    has = ", ".join(map(str, question.columns))
    return DataError(
        f"{world} needs {columns} to begin, and question {question.id!r} does not say it (its "
        f"columns: {has}). Take data that have it, or give it a default in reset."
    )
