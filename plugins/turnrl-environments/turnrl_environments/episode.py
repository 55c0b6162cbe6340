"""An attempt in an environment: its steps, its time, and its end.

An environment's own code is called one thing at a time, and never beside a call that has not ended,
even if nobody waits for that one any more: an environment that hangs is left to itself, and closed
when the late call is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from turnrl import (
    ForkableToolSession,
    ToolCall,
    ToolError,
    ToolFigures,
    ToolResult,
    ToolSession,
    TrajectoryLost,
    blaming,
    in_short,
    result_of,
)
from turnrl_environments.randomness import OwnRandom, Turn

T = TypeVar("T")

FIGURES = ("steps", "earned", "ended", "outcome")
"""What an attempt keeps of its episode."""
STEP = "environment_step"
"""Key of a result's metadata: the number of the step, from 1. Only an environment's results have
it."""
OVER = "the environment has ended, so nothing was done"
_ADVICE = (
    "An attempt begins again at most rollout.max_restarts times. Fix the environment; for a "
    "mistake of the policy it should return a turnrl.ToolResult with ok=False."
)
_ADVICE_ON_RESET = (
    "An attempt begins again at most rollout.max_restarts times. Fix the environment; if it "
    "serves only so many attempts at once, set its capacity."
)


class Place(Protocol):
    """What an episode needs of its world; its text names the world in messages.

    Attributes:
        step_timeout_s: The most seconds of a turn, of a beginning and of an end.
        under_way: Calls of environments' own code that have not ended, those that nobody waits for
            too.
    """

    step_timeout_s: float
    under_way: set[asyncio.Task[Any]]


class Episode(ToolSession, ABC):
    """One attempt in an environment.

    Args:
        world: What it is an episode of.
    Attributes:
        steps: Steps so far.
        earned: What they paid.
        ended: Whether the environment has ended it.
        lost: Whether the environment broke, so that nothing more is asked of it.
        random: Its own random numbers, in which calls take turns; None if the world is thread-safe.
    """

    def __init__(self, world: Place) -> None:
        self.world = world
        self.steps, self.earned, self.ended, self.lost = 0, 0.0, False, False
        self._until = 0.0
        self._last: asyncio.Task[Any] | None = None
        self.random: OwnRandom | None = None

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
        if self.ended:
            return ToolResult(OVER, ok=False, done=True)
        result = await self.act(call)
        self.steps += 1
        self.earned += result.reward
        self.ended = result.done
        return replace(result, metadata={**result.metadata, STEP: self.steps})

    async def close(self) -> ToolFigures:
        """Leave the environment.

        Returns:
            `steps`, the number of steps; `earned`, what they paid; `ended`, 1 if the environment
            ended the attempt; and `outcome`, if it pays for the attempt as a whole.
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
        figures = {"steps": self.steps, "earned": self.earned, "ended": float(self.ended)}
        return figures if paid is None else {**figures, "outcome": paid}

    # ------------------------------------------------------------------ its time

    def limit(self) -> None:
        """Begin to count `step_timeout_s`, which the calls until the next `limit` share."""
        self._until = asyncio.get_running_loop().time() + self.world.step_timeout_s

    async def do(self, verb: str, function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
        """Run an environment's own code: what blocks in a thread, and coroutines on the event loop.

        Args:
            verb: What is done, for messages.
            function: Its code.
            arguments: What it is called with.
        Raises:
            TrajectoryLost: If it raises, or if the time is up. What leaves the environment is begun
                even then, and is not stopped.
            ToolError: If it takes turns, and the call whose turn it is hangs.
        """
        what, loop = f"{self.world} in {verb}", asyncio.get_running_loop()
        left_s, leaves = self._until - loop.time(), function == self.leave
        if left_s > 0 or leaves:
            work, turn = self._begun(what, function, *arguments)
            try:
                if turn is not None:  # to wait for a turn takes nothing of an environment's time
                    joined, come = loop.time(), asyncio.wrap_future(turn.come)
                    await asyncio.wait([work, come], return_when=asyncio.FIRST_COMPLETED)
                    self._until += loop.time() - joined
                await asyncio.wait([work], timeout=max(left_s, 0.0))
            finally:
                late = not work.done()
                if late:
                    stops = asyncio.iscoroutinefunction(function)  # a thread cannot be stopped
                    if turn is not None:
                        stops, turn.late = not turn.come.done(), True
                    if stops and not leaves:
                        work.cancel()
            if not late:
                advice = _ADVICE_ON_RESET if verb == "reset" else _ADVICE
                if work.cancelled():
                    raise TrajectoryLost(f"{what} was cancelled from within. {advice}")
                with blaming(TrajectoryLost, what, advice):
                    return cast(T, work.result())
        raise TrajectoryLost(
            f"{what} took longer than step_timeout_s = {self.world.step_timeout_s:g}. Raise it, or "
            "find out why the environment hangs."
        )

    def _begun(
        self, what: str, function: Callable[..., Any], *arguments: Any
    ) -> tuple[asyncio.Task[Any], Turn | None]:
        """Code that is run once the call before it has ended; and its turn, if it takes one."""
        before, turn = self._last, None
        if self.random is not None and not asyncio.iscoroutinefunction(function):
            turn = Turn(what, self.world.step_timeout_s)
            function = functools.partial(self.random.run, turn, function)

        async def work() -> Any:
            if before is not None and not before.done():
                await asyncio.wait([before])
            if turn is not None:
                await turn.taken()
            return await result_of(function, *arguments)

        self._last = asyncio.create_task(work())
        self.world.under_way.add(self._last)
        self._last.add_done_callback(self._done)
        return self._last, turn

    def _done(self, work: asyncio.Task[Any]) -> None:
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


class OwnEpisode(Episode, ForkableToolSession):
    """An episode whose environment is an object of this process.

    Attributes:
        environment: The object; None as long as it is not made.
    """

    environment: Any = None

    @abstractmethod
    def twin(self) -> OwnEpisode:
        """An episode of the same kind, without an environment."""

    def leave(self) -> object:
        """Close the environment, if it can be closed."""
        close = getattr(self.environment, "close", None)
        return close() if callable(close) else None

    async def fork(self) -> OwnEpisode:
        """An episode with an environment of its own, in the same state.

        Raises:
            TrajectoryLost: If to copy the environment takes too long.
            ToolError: If it cannot be copied.
        """
        branch = self.twin()
        branch.prompt, branch.steps = self.prompt, self.steps
        branch.earned, branch.ended = self.earned, self.ended

        branch.random = self.random and self.random.copied()

        def copied() -> None:
            branch.environment = _copied(self.world, self.environment)

        self.limit()
        try:
            await self.do("copy", copied)
        except BaseException:
            self.lost, branch._last = True, self._last
            branch._until = self._until
            await branch._left()
            raise
        return branch


def _copied(world: Place, environment: T) -> T:
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
