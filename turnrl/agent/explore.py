"""The agent loop: trajectories side by side, with tools running beside generation.

`Exploration.run` is a collection from beginning to end. A trajectory is begun in `run`, forked for
its probes and moved on turn by turn in `_play`, and closed in `_take_turn` when it ends. Whatever
was cancelled is closed in `_close`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar, final

from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.toolbox import Bench, Toolbox

T = TypeVar("T")

_SHUTDOWN_S = 30.0
"""After Ctrl-C, how long the forward pass under way may take to end."""


@dataclass(frozen=True)
class State:
    """Where a trajectory stands between two turns.

    Args:
        question: What is asked.
        prompt_ids: Token ids of the rendered prompt.
        session: The engine's; its history is the prompt and all turns, up to `new_ids`.
        bench: The trajectory's place at the tools.
        seed: Integers that name the trajectory's random streams; the turn's number is added.
        turns: The turns so far.
        new_ids: Ids to append before the next turn is sampled.
        room: Tokens left, `new_ids` taken off.
        stop: Why it ended, if it has.
        begins: The turn at which a probe branched off; None of a trajectory.
    """

    question: types.Question
    prompt_ids: tuple[int, ...]
    session: types.Session
    bench: Bench
    seed: tuple[int, ...]
    room: int
    turns: tuple[types.Turn, ...] = ()
    new_ids: tuple[int, ...] = ()
    stop: types.Stop | None = None
    begins: int | None = None

    async def fork(self, seed: tuple[int, ...]) -> State:
        """A branch that goes on from here with random streams of its own.

        Raises:
            ToolError: If a tool's session cannot be copied.
        """
        bench = await self.bench.fork()
        try:
            session = self.session.fork()
        except BaseException:
            await bench.close()
            raise
        return replace(self, session=session, bench=bench, seed=seed, begins=len(self.turns))

    async def close(self) -> None:
        """Give back what the engine and the tools hold for the trajectory."""
        self.session.close()  # at once: what it keeps on the device is large
        await self.bench.close()

    @property
    def trajectory(self) -> types.Trajectory:
        """Trajectory that came of it, once it has ended."""
        assert self.stop is not None, "the trajectory goes on"
        begins = self.begins or 0
        return types.Trajectory(self.question, self.prompt_ids, self.turns, self.stop, begins)


@dataclass(eq=False)
class _Track:
    """A trajectory or a probe on its way.

    Args:
        state: Where it stands now.
        number: Of the trajectory in the collection; a probe has its parent's.
    """

    state: State
    number: int


@final
@dataclass(eq=False)
class Exploration:
    """One collection: trajectories with their probes, until all have ended.

    Args:
        turn: Takes a trajectory's next turn.
        at_once: Gives the number of trajectories that may be under way; see `Rollout.at_once`.
        tools: The trajectories' tools; closed at the end.
        engine: What samples; drained at the end.
        group_size: G, trajectories per question.
        probes: Branches from the beginning of each turn of each trajectory.
        bar: Counts the trajectories that have ended; closed at the end.
    """

    turn: Callable[[State], Awaitable[State]]
    at_once: Callable[[types.Engine, int], int | None]
    tools: Toolbox
    engine: types.Engine
    group_size: int
    probes: int
    bar: tqdm[NoReturn]
    _trajectories: list[_Track] = field(init=False, default_factory=list)
    _branches: list[_Track] = field(init=False, default_factory=list)
    _places: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(0))
    _opened: int = field(init=False, default=0)

    async def run(
        self, groups: Iterable[Sequence[State]], lockstep: bool
    ) -> tuple[list[list[types.Trajectory]], list[list[types.Probe]]]:
        """Begin the groups one by one, then play all trajectories to their ends.

        Args:
            groups: The states from which each question's trajectories start.
            lockstep: Play them in waves; otherwise each begins as soon as there is a place.
        Returns:
            The trajectories of each group, and its probes.
        """
        try:
            for number, state in enumerate(state for group in groups for state in group):
                self._trajectories.append(_Track(state, number))
            await (self._in_waves() if lockstep else self._as_places_come())
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from None
        finally:
            await self._close()
        done, size = [track.state.trajectory for track in self._trajectories], self.group_size
        collected = [done[i : i + size] for i in range(0, len(done), size)]
        tried: list[list[types.Probe]] = [[] for _ in collected]
        for track in self._branches:
            probe = types.Probe(track.number % size, track.state.trajectory)
            tried[track.number // size].append(probe)
        return collected, tried

    def _most(self) -> int:
        """Number of trajectories that may be under way now; it may grow as the engine learns."""
        return self.at_once(self.engine, self.probes) or len(self._trajectories)

    async def _in_waves(self) -> None:
        """Play as many as fit together, and the next when all of them have ended."""
        begun = 0
        while begun < len(self._trajectories):
            end = begun + (most := self._most())
            if most >= self.group_size:  # the first waves may have been smaller
                end -= end % self.group_size
            await self._play(self._trajectories[begun:end])
            begun = end

    async def _as_places_come(self) -> None:
        """Begin a trajectory whenever another has ended."""
        self._open_places()
        async with asyncio.TaskGroup() as crowd:
            for track in self._trajectories:
                crowd.create_task(self._in_a_place(track))

    async def _in_a_place(self, track: _Track) -> None:
        async with self._places:
            await self._play([track])
        self._open_places()

    def _open_places(self) -> None:
        """Open the places that the engine turns out to have beyond those it knew of."""
        most = self._most()
        while self._opened < most:
            self._opened += 1
            self._places.release()

    async def _play(self, members: Sequence[_Track]) -> None:
        """Take one turn after the other, all members together, until they and their probes end."""
        while members := [track for track in members if track.state.stop is None]:
            parents = [track for track in members if track.state.begins is None]
            forked = [await self._fork(track, n) for track in parents for n in range(self.probes)]
            async with asyncio.TaskGroup() as crowd:
                for track in (members := [*members, *forked]):
                    crowd.create_task(self._take_turn(track))

    async def _fork(self, parent: _Track, n: int) -> _Track:
        """Branch off the n-th probe of a trajectory's next turn."""
        state = parent.state
        forked = await state.fork((*state.seed, len(state.turns), n))
        self._branches.append(probe := _Track(forked, parent.number))
        return probe

    async def _take_turn(self, track: _Track) -> None:
        """Take the next turn; close what has ended."""
        track.state = await self.turn(track.state)
        if track.state.stop is not None:
            await track.state.close()
            self.bar.update(track.state.begins is None)

    async def _close(self) -> None:
        """Give back what all trajectories hold, those that were cancelled too."""
        self.bar.close()
        states = [track.state for track in (*self._trajectories, *self._branches)]
        for state in states:
            state.session.close()  # at once: what it keeps on the device is large
        await asyncio.gather(*(state.bench.close() for state in states), return_exceptions=True)
        self.tools.close()
        await self.engine.drain()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a user should see of a group in which one failure cancelled the rest."""
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all collections, in a thread of its own: it works inside a notebook, whose
    own is running already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="turnrl-rollout").start()
    return loop


# a forked process has the loop but not its thread; it begins with one of its own
os.register_at_fork(after_in_child=_loop.cache_clear)


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop and wait for it; Ctrl-C cancels it first."""
    ended = threading.Event()

    async def supervised() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(supervised(), _loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(_SHUTDOWN_S)  # a cancelled future is done at once; the work behind it is not
        raise
