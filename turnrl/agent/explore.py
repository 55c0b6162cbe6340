"""Attempts side by side, with tools running beside generation.

`Exploration.run` is a collection from beginning to end. When there is a place for it, an attempt is
begun in `_begin`. It is forked for its probes and moved on in `_play`, a turn at a time unless it
has a player, and closed in `_advance` when it ends. An attempt that the world lost begins again in
`_again`. Whatever was cancelled is closed in `_close`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, final

from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.agent import Agent
from turnrl.agent.attempt import Attempt
from turnrl.agent.running import first_error
from turnrl.errors import TrajectoryLost, WorldError


@dataclass(eq=False)
class _Track:
    """An attempt or a probe on its way.

    Args:
        number: The attempt's number in the collection; a probe has its parent's.
        attempt: Where it stands now.
        probe: True if it branched off another attempt.
        restarts: How often it was begun again.
        lost: Why it has to begin again.
        counted: Whether the bar counts it as ended.
    """

    number: int
    attempt: Attempt
    probe: bool = False
    restarts: int = 0
    lost: TrajectoryLost | None = None
    counted: bool = False


@final
@dataclass(eq=False)
class Exploration:
    """One collection: attempts with their probes, until all have ended.

    Args:
        agent: Begins attempts and moves them on; closed at the end.
        at_once: Gives the number of attempts that may be under way.
        questions: What to ask.
        group_size: G, attempts per question.
        seed: Integers that name the collection; the numbers of question and attempt are added.
        probes: Branches from the beginning of each turn of each attempt.
        max_restarts: How often one attempt may be begun again after the world lost it.
        bar: Counts the attempts that have ended; closed at the end.
    """

    agent: Agent
    at_once: Callable[[], int | None]
    questions: Sequence[types.Question]
    group_size: int
    seed: tuple[int, ...]
    probes: int
    max_restarts: int
    bar: tqdm[NoReturn]
    _attempts: list[_Track] = field(init=False)
    _branches: list[_Track] = field(init=False, default_factory=list)
    _restarted: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._attempts = [
            _Track(
                n * self.group_size + member,
                self.agent.attempt(question, (*self.seed, n, member)),
            )
            for n, question in enumerate(self.questions)
            for member in range(self.group_size)
        ]

    async def run(self, lockstep: bool) -> types.Attempts:
        """Play all attempts to their ends.

        Args:
            lockstep: Play them in waves; otherwise each begins as soon as there is a place.
        Returns:
            The trajectories of each question, and their probes.
        """
        try:
            await (self._in_waves() if lockstep else self._as_places_come())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            await self._close()
        done, size = [track.attempt.trajectory for track in self._attempts], self.group_size
        collected = [done[i : i + size] for i in range(0, len(done), size)]
        tried: list[list[types.Probe]] = [[] for _ in collected]
        for track in self._branches:
            probe = types.Probe(track.number % size, track.attempt.trajectory)
            tried[track.number // size].append(probe)
        return types.Attempts(collected, tried, self._restarted)

    def _most(self) -> int:
        """Number of attempts that may be under way now; it may grow as the engine learns."""
        return self.at_once() or len(self._attempts)

    async def _in_waves(self) -> None:
        """Play as many as fit together, and the next when all of them have ended."""
        begun = 0
        while begun < len(self._attempts):
            end = begun + (most := self._most())
            if most >= self.group_size:  # the first waves may have been smaller
                end -= end % self.group_size
            await self._play(self._attempts[begun:end])
            begun = end

    async def _as_places_come(self) -> None:
        """Begin an attempt whenever another has ended, or several, if the engine then has more
        places than it knew of."""
        playing: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as crowd:
            for track in self._attempts:
                while len(playing) >= self._most():
                    _, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                playing.add(crowd.create_task(self._play([track])))

    async def _play(self, members: Sequence[_Track]) -> None:
        """Begin the members; then move them on, all together, until they and their probes end."""
        await self._begin(members)
        while members := [track for track in members if track.attempt.ended_by is None]:
            for track in [track for track in members if not track.probe]:
                members += await self._fork(track)
            gone = {track.number for track in members if track.lost}
            async with asyncio.TaskGroup() as crowd:
                for track in members:
                    if track.number not in gone:
                        crowd.create_task(self._advance(track))
            if lost := {track.number: track.lost for track in members if track.lost}:
                anew = [self._attempts[number] for number in lost]
                for track in anew:
                    await self._again(track, lost[track.number])
                await self._begin(anew)
                members = [track for track in members if track.number not in lost] + anew

    async def _begin(self, members: Sequence[_Track]) -> None:
        """Open the members' places at the tools, all together, then their conversations in order,
        so that batches do not depend on how fast tools open."""
        async with asyncio.TaskGroup() as crowd:
            for track in members:
                crowd.create_task(self._open(track))
        self.agent.begin([track.attempt for track in members])

    async def _open(self, track: _Track) -> None:
        while True:
            try:
                return await track.attempt.sessions.open(track.attempt.asked)
            except TrajectoryLost as lost:
                await self._again(track, lost)

    async def _fork(self, parent: _Track) -> list[_Track]:
        """Branch off the probes of an attempt's next turn."""
        attempt, probes = parent.attempt, list[_Track]()
        try:
            for n in range(self.probes):
                forked = await attempt.fork((*attempt.seed, len(attempt.turns), n))
                probes.append(_Track(parent.number, forked, probe=True))
                self._branches.append(probes[-1])
        except TrajectoryLost as lost:
            parent.lost = lost
        return probes

    async def _advance(self, track: _Track) -> None:
        """Move it on; close what has ended, and begin anew what the world lost."""
        attempt = track.attempt
        try:
            await self.agent.advance(attempt)
            if attempt.ended_by is not None:
                await attempt.close()
        except TrajectoryLost as lost:
            if self.probes:  # once they stand still, it begins again together with its probes
                track.lost = lost
            else:
                await self._again(track, lost)
                await self._begin([track])
                await self._advance(track)
            return
        if attempt.ended_by is not None and not track.probe:
            self.bar.update()
            track.counted = True

    async def _again(self, track: _Track, lost: TrajectoryLost) -> None:
        """Put a new attempt in the place of one that the world lost, with the same random numbers:
        others would bias the sample if the loss depends on what the policy did. Its probes go too,
        because the new one may do something else where they left it."""
        if track.restarts >= self.max_restarts:
            times = f"{track.restarts + 1} times" if track.restarts else "once"
            raise TrajectoryLost(f"{lost} The attempt was lost {times}: the run stops.") from lost
        old = track.attempt
        gone = [probe for probe in self._branches if probe.number == track.number]
        for attempt in (old, *(probe.attempt for probe in gone)):
            with contextlib.suppress(WorldError):
                await attempt.close()
        self._branches = [probe for probe in self._branches if probe not in gone]
        self.bar.update(-track.counted)
        track.counted = False
        track.attempt, track.lost = self.agent.attempt(old.asked, old.seed), None
        track.restarts += 1
        self._restarted += 1

    async def _close(self) -> None:
        """Give back what all attempts hold, those that were cancelled too."""
        self.bar.close()
        tracks = (*self._attempts, *self._branches)
        closings = (track.attempt.close() for track in tracks)
        await asyncio.gather(*closings, return_exceptions=True)
        await self.agent.close()
