"""The agent loop: trajectories side by side, with tools running beside generation.

`Exploration.run` is a collection from beginning to end. When there is a place for it, a trajectory
is begun in `_begin`. It is forked for its probes and moved on turn by turn in `_play`, and closed
in `_take_turn` when it ends. Whatever was cancelled is closed in `_close`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, final

from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.conversation import Conversation
from turnrl.agent.toolbox import Toolbox, ToolSessions

T = TypeVar("T")

_SHUTDOWN_S = 30.0
"""After Ctrl-C, how long the forward pass under way may take to end."""


class Opening(NamedTuple):
    """The beginning of a trajectory.

    Args:
        question: What is asked.
        sessions: Its place at the tools.
        seed: Integers that name its random streams; a turn's number is added.
    """

    question: types.Question
    sessions: ToolSessions
    seed: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """Where a trajectory stands between two turns.

    Args:
        opening: What it began with.
        conversation: Its history at what samples it: the prompt and all turns.
        turns: The turns so far.
        ended_by: Why it ended, if it has.
        begins: The turn at which a probe branched off; None of a trajectory.
        figures: Numbers that its tools' sessions handed over when it was closed.
    """

    opening: Opening
    conversation: Conversation
    turns: tuple[types.Turn, ...] = ()
    ended_by: types.Ending | None = None
    begins: int | None = None
    figures: types.ToolFigures = field(default_factory=dict)

    async def fork(self, seed: tuple[int, ...]) -> State:
        """A branch that goes on from here with random streams of its own.

        Raises:
            ToolError: If a tool's session cannot be copied.
        """
        sessions = await self.opening.sessions.fork()
        try:
            conversation = self.conversation.fork()
        except BaseException:
            await sessions.close()
            raise
        opening = self.opening._replace(sessions=sessions, seed=seed)
        return replace(self, opening=opening, conversation=conversation, begins=len(self.turns))

    async def close(self) -> State:
        """Give back what the engine and the tools hold for the trajectory.

        Returns:
            The state with the figures that the tools' sessions handed over.
        """
        self.conversation.close()  # at once: what it keeps on the device is large
        return replace(self, figures=await self.opening.sessions.close())

    @property
    def trajectory(self) -> types.Trajectory:
        """Trajectory that came of it, once it has ended."""
        assert self.ended_by is not None, "the trajectory goes on"
        question, ids = self.opening.question, self.conversation.prompt_ids
        begins = self.begins or 0
        return types.Trajectory(question, ids, self.turns, self.ended_by, begins, self.figures)


class Acts(Protocol):
    """What begins trajectories and takes their turns.

    Attributes:
        tools: The tools that all of them call.
    """

    tools: Toolbox

    def begin(self, openings: Iterable[Opening]) -> Iterator[State]:
        """The states that trajectories start from, in order."""

    async def turn(self, state: State) -> State:
        """Take one turn."""

    async def close(self) -> None:
        """Give back what all trajectories shared."""


@dataclass(eq=False)
class _Track:
    """A trajectory or a probe on its way.

    Args:
        opening: What it begins with.
        number: The trajectory's number in the collection; a probe has its parent's.
        begun: Where it stands now; None before it begins.
    """

    opening: Opening
    number: int
    begun: State | None = None

    @property
    def state(self) -> State:
        """Where it stands now."""
        assert self.begun is not None, "the trajectory has not begun"
        return self.begun


@final
@dataclass(eq=False)
class Exploration:
    """One collection: trajectories with their probes, until all have ended.

    Args:
        agent: Begins trajectories and takes turns; closed at the end.
        at_once: Gives the number of trajectories that may be under way.
        questions: What to ask.
        group_size: G, trajectories per question.
        seed: Integers that name the collection; the numbers of question and trajectory are added.
        probes: Branches from the beginning of each turn of each trajectory.
        bar: Counts the trajectories that have ended; closed at the end.
    """

    agent: Acts
    at_once: Callable[[], int | None]
    questions: Sequence[types.Question]
    group_size: int
    seed: tuple[int, ...]
    probes: int
    bar: tqdm[NoReturn]
    _trajectories: list[_Track] = field(init=False)
    _branches: list[_Track] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._trajectories = [
            _Track(
                Opening(question, ToolSessions(self.agent.tools), (*self.seed, n, member)),
                n * self.group_size + member,
            )
            for n, question in enumerate(self.questions)
            for member in range(self.group_size)
        ]

    async def run(self, lockstep: bool) -> types.Attempts:
        """Play all trajectories to their ends.

        Args:
            lockstep: Play them in waves; otherwise each begins as soon as there is a place.
        Returns:
            The trajectories of each question, and their probes.
        """
        try:
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
        return types.Attempts(collected, tried)

    def _most(self) -> int:
        """Number of trajectories that may be under way now; it may grow as the engine learns."""
        return self.at_once() or len(self._trajectories)

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
        """Begin a trajectory whenever another has ended, or several, if the engine then has more
        places than it knew of."""
        playing: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as crowd:
            for track in self._trajectories:
                while len(playing) >= self._most():
                    _, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                playing.add(crowd.create_task(self._play([track])))

    async def _play(self, members: Sequence[_Track]) -> None:
        """Begin the members; then take one turn after the other, all together, until they and their
        probes end."""
        await self._begin(members)
        while members := [track for track in members if track.state.ended_by is None]:
            parents = [track for track in members if track.state.begins is None]
            forked = [await self._fork(track, n) for track in parents for n in range(self.probes)]
            async with asyncio.TaskGroup() as crowd:
                for track in (members := [*members, *forked]):
                    crowd.create_task(self._take_turn(track))

    async def _begin(self, members: Sequence[_Track]) -> None:
        """Open the members' places at the tools, all together, then their conversations in order,
        so that batches do not depend on how fast tools open."""
        openings = [track.opening for track in members]
        async with asyncio.TaskGroup() as crowd:
            for opening in openings:
                crowd.create_task(opening.sessions.open(opening.question))
        # the states come first, so that what they share is let go after the last
        for state, track in zip(self.agent.begin(openings), members, strict=True):
            track.begun = state

    async def _fork(self, parent: _Track, n: int) -> _Track:
        """Branch off the n-th probe of a trajectory's next turn."""
        state = parent.state
        forked = await state.fork((*state.opening.seed, len(state.turns), n))
        self._branches.append(probe := _Track(forked.opening, parent.number, forked))
        return probe

    async def _take_turn(self, track: _Track) -> None:
        """Take the next turn; close what has ended."""
        track.begun = await self.agent.turn(track.state)
        if track.state.ended_by is not None:
            track.begun = await track.state.close()
            self.bar.update(track.state.begins is None)

    async def _close(self) -> None:
        """Give back what all trajectories hold, those that were cancelled too."""
        self.bar.close()
        tracks = (*self._trajectories, *self._branches)
        closings = ((track.begun or track.opening.sessions).close() for track in tracks)
        await asyncio.gather(*closings, return_exceptions=True)
        await self.agent.close()


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
    """Run a coroutine on the event loop of all collections, and wait for it. The calling thread may
    have a running loop of its own. Ctrl-C cancels the coroutine, and waits 30 s at most for it.

    Args:
        work: The coroutine.
    Returns:
        What it returned.
    Raises:
        RuntimeError: If it is called on that loop, which would wait for itself.
    """
    if asyncio._get_running_loop() is _loop():
        work.close()
        raise RuntimeError("this waits for work on the event loop that it runs on. Await the work.")
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
