"""Attempts side by side: tools run while other attempts generate.

`Exploration.run` is a collection from beginning to end. `_begin` begins attempts as places become
free. `_play` forks them for their probes and moves them on, one turn at a time unless a player
drives. `_advance` closes an attempt when it ends. `_restart` begins anew what the world lost.
`_close` closes whatever was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, final

from tqdm.auto import tqdm

from turnrl import types
from turnrl.agent.agent import SampledAgent
from turnrl.agent.agent_loop import AgentLoop
from turnrl.agent.attempt import Attempt
from turnrl.agent.running import first_error
from turnrl.plugin.errors import TrajectoryLost, WorldError


@dataclass(eq=False)
class _Track:
    """An attempt or a probe under way.

    Args:
        number: The attempt's number in the collection; a probe has its parent's number.
        attempt: The attempt; a restart replaces it.
        probe: True if it branched off another attempt.
        restarts: How many times it was restarted.
        lost: The reason why it has to restart; None if it need not.
        counted: True if the bar counts it as ended.
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
        driver: Begins attempts and moves them on.
        agent: The model, the tools and the limits; closed at the end.
        at_once: Returns the number of attempts that may be under way; None for any number.
        questions: What to ask.
        group_size: G, attempts per question.
        key: Integers that name the collection; the numbers of question and attempt are added.
        probes: Branches from the beginning of each turn of each attempt.
        max_restarts: How many times one attempt may restart after the world lost it.
        bar: Counts the attempts that have ended; closed at the end.
    """

    driver: AgentLoop
    agent: SampledAgent
    at_once: Callable[[], int | None]
    questions: Sequence[types.Question]
    group_size: int
    key: tuple[int, ...]
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
                Attempt(self.agent, question, (*self.key, n, member)),
            )
            for n, question in enumerate(self.questions)
            for member in range(self.group_size)
        ]

    async def run(self, lockstep: bool) -> types.Attempts:
        """Play all attempts to their ends.

        Args:
            lockstep: Play them in waves; otherwise each begins as soon as a place is free.
        Returns:
            The trajectories of each question, and their probes.
        """
        try:
            await (self._play_in_waves() if lockstep else self._play_as_room_frees())
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

    def _capacity(self) -> int:
        """Number of attempts that may be under way now. It grows if the engine finds more room."""
        return self.at_once() or len(self._attempts)

    async def _play_in_waves(self) -> None:
        """Play as many attempts as fit at once; begin the next wave when all of them have ended."""
        begun = 0
        while begun < len(self._attempts):
            places = self._capacity()
            end = begun + places
            if places >= self.group_size:  # end with a whole group; earlier waves may be smaller
                end -= end % self.group_size
            await self._play(self._attempts[begun:end])
            begun = end

    async def _play_as_room_frees(self) -> None:
        """Begin an attempt whenever another ends, or several if the engine has found more room by
        then."""
        playing: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            for track in self._attempts:
                while len(playing) >= self._capacity():
                    _, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                playing.add(tasks.create_task(self._play([track])))

    async def _play(self, tracks: Sequence[_Track]) -> None:
        """Begin the tracks, then move them on together until they and their probes have ended."""
        await self._begin(tracks)
        while tracks := [track for track in tracks if track.attempt.ended_by is None]:
            for track in [track for track in tracks if not track.probe]:
                tracks += await self._fork(track)
            lost_in_fork = {track.number for track in tracks if track.lost}
            async with asyncio.TaskGroup() as tasks:
                for track in tracks:
                    if track.number not in lost_in_fork:
                        tasks.create_task(self._advance(track))
            if lost := {track.number: track.lost for track in tracks if track.lost}:
                restarted = [self._attempts[number] for number in lost]
                for track in restarted:
                    await self._restart(track, lost[track.number])
                await self._begin(restarted)
                tracks = [track for track in tracks if track.number not in lost] + restarted

    async def _begin(self, tracks: Sequence[_Track]) -> None:
        """Open the tracks' tool sessions all at once, then their conversations in order, so that
        batches do not depend on how fast tools open."""
        async with asyncio.TaskGroup() as tasks:
            for track in tracks:
                tasks.create_task(self._open(track))
        self.driver.begin([track.attempt for track in tracks], self.agent.chat)

    async def _open(self, track: _Track) -> None:
        while True:
            try:
                return await track.attempt.sessions.open(track.attempt.asked)
            except TrajectoryLost as lost:
                await self._restart(track, lost)

    async def _fork(self, parent: _Track) -> list[_Track]:
        """Branch off the probes of an attempt's next turn."""
        attempt, probes = parent.attempt, list[_Track]()
        try:
            for n in range(self.probes):
                forked = await attempt.fork((*attempt.key, len(attempt.turns), n))
                probes.append(_Track(parent.number, forked, probe=True))
                self._branches.append(probes[-1])
        except TrajectoryLost as lost:
            parent.lost = lost
        return probes

    async def _advance(self, track: _Track) -> None:
        """Move a track on. Close it if it ends; restart it if the world lost it."""
        attempt = track.attempt
        try:
            await self.driver.advance(attempt)
            if attempt.ended_by is not None:
                await attempt.close()
        except TrajectoryLost as lost:
            if self.probes:  # `_play` restarts it once all tracks have ended their turns
                track.lost = lost
            else:
                await self._restart(track, lost)
                await self._begin([track])
                await self._advance(track)
            return
        if attempt.ended_by is not None and not track.probe:
            self.bar.update()
            track.counted = True

    async def _restart(self, track: _Track, lost: TrajectoryLost) -> None:
        """Replace an attempt that the world lost by a new one with the same random numbers: other
        numbers would bias the sample if losing an attempt depends on what the policy did. The
        probes of the old attempt are dropped, because the new one may act differently where they
        branched off."""
        if track.restarts >= self.max_restarts:
            times = f"{track.restarts + 1} times" if track.restarts else "once"
            raise TrajectoryLost(f"{lost} The attempt was lost {times}: the run stops.") from lost
        old = track.attempt
        dropped = [probe for probe in self._branches if probe.number == track.number]
        for attempt in (old, *(probe.attempt for probe in dropped)):
            with contextlib.suppress(WorldError):
                await attempt.close()
        self._branches = [probe for probe in self._branches if probe not in dropped]
        self.bar.update(-track.counted)
        track.counted = False
        track.attempt, track.lost = Attempt(self.agent, old.posed, old.key), None
        track.restarts += 1
        self._restarted += 1

    async def _close(self) -> None:
        """Free what all attempts hold, including cancelled ones."""
        self.bar.close()
        tracks = (*self._attempts, *self._branches)
        closings = (track.attempt.close() for track in tracks)
        await asyncio.gather(*closings, return_exceptions=True)
        await self.agent.close()
