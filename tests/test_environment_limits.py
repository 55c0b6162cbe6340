"""Environments: time limits, each attempt's random numbers, and the queue of calls that are not
thread-safe."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time

import pytest

from rollouts import SEEDED, Guess, Room, play, room, rooms
from turnrl import ToolCall, ToolError, call_tools
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import TrajectoryLost
from turnrl_environments import Environment, Gymnasium

__all__ = ["rooms"]  # fixtures

# ------------------------------------------------------------------------- time limits


class Clock:
    """An environment whose calls take as long as a test says, and which logs their order."""

    log: list[str] = []

    def __init__(self, make: float = 0, reset: float = 0, close: float = 0, pays: float = 0):
        Clock.log.append("made")
        self.takes = {"reset": reset, "close": close, "get_reward": pays}
        time.sleep(make)
        Clock.log.append("ready")

    def _spend(self, what: str, seconds: float) -> None:
        Clock.log.append(what)
        time.sleep(seconds)
        Clock.log.append(f"{what} done")

    def reset(self) -> str:
        self._spend("reset", self.takes["reset"])
        return "now"

    def wait(self, seconds: float) -> str:
        """Wait."""
        self._spend("wait", seconds)
        return "later"

    def get_reward(self) -> float:
        self._spend("get_reward", self.takes["get_reward"])
        return 1.0

    def close(self) -> None:
        self._spend("close", self.takes["close"])


def clock(limit_s, **options):
    Clock.log.clear()
    return Environment(Clock, options, step_timeout_s=limit_s)


def waits(tool, *seconds):
    """The error of a turn with these waits, and the seconds until it was raised."""
    began = time.perf_counter()
    calls = [ToolCall("wait", {"seconds": s}) for s in seconds]
    with pytest.raises(TrajectoryLost) as lost:
        on_loop(call_tools([tool], SEEDED, [calls]))
    return str(lost.value), time.perf_counter() - began


def log_until(done):
    """The log, once a thread that nobody else waits for has written this to it."""
    until = time.monotonic() + 5
    while Clock.log[-1] != done and time.monotonic() < until:
        time.sleep(0.01)
    return Clock.log


def test_close_comes_after_a_call_that_hangs_and_nothing_runs_beside_it():
    message, took_s = waits(clock(0.1), 0.5, 0.0)
    assert "in wait took longer" in message
    assert took_s < 0.4  # nobody waits for the call
    assert Clock.log[-1] == "wait"
    assert log_until("close done")[-4:] == ["wait", "wait done", "close", "close done"]
    assert "get_reward" not in Clock.log


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"make": 0.4}, ["made", "ready", "close", "close done"]),
        ({"reset": 0.4, "close": 0.2}, ["reset", "reset done", "close", "close done"]),
    ],
)
def test_an_environment_that_is_made_too_late_is_closed_at_once(options, last):
    message, took_s = waits(clock(0.1, **options), 0.0)
    assert "environment Clock in reset took longer than step_timeout_s = 0.1" in message
    assert took_s < 0.3
    assert log_until("close done")[-4:] == last


def test_a_coroutine_that_hangs_is_cancelled(chat):
    log = []

    class Sleepy:
        async def reset(self) -> str:
            return "dusk"

        async def sleep(self, n: int) -> str:
            """Sleep."""
            try:
                await asyncio.sleep(30)
            finally:
                log.append("woken")
            return "dawn"

        async def close(self) -> None:
            log.append("closed")

    tool = Environment(Sleepy, step_timeout_s=0.1)
    with pytest.raises(TrajectoryLost, match=r"in sleep took longer than step_timeout_s = 0\.1"):
        play(chat, tool, ["1"], tool_name="sleep", turns=1, max_restarts=0)
    assert log == ["woken", "closed"]


def test_an_error_in_close_does_not_hide_an_earlier_error(chat):
    def stuck():
        raise OSError("stuck")

    calls = []

    def reset():
        calls.append("reset")
        raise KeyError("no level")

    def close():
        if calls:
            calls.append("close")
            stuck()

    lost = r"in reset raised KeyError: 'no level'"
    with pytest.raises(TrajectoryLost, match=lost):
        play(chat, room(reset=reset, close=close), ["look"], max_restarts=0)
    assert calls == ["reset", "close"]

    class Bad(Guess):
        def get_reward(self) -> float:
            return float("nan")

        def close(self) -> None:
            stuck()

    with pytest.raises(ToolError, match="gave the reward nan from get_reward"):
        play(chat, Environment(Bad), ["0"], tool_name="guess", turns=1)


def test_a_copy_that_takes_too_long_loses_its_attempt_and_is_closed(chat, rooms):
    class Heavy(Room):
        def __deepcopy__(self, memo):
            time.sleep(0.4)
            return Heavy()

    tool = Gymnasium(make=Heavy, step_timeout_s=0.1)
    with pytest.raises(TrajectoryLost, match=r"environment .* in copy took longer than"):
        play(chat, tool, ["look"], turns=2, probes=1, max_restarts=0)
    until = time.monotonic() + 5
    while not all(room.closed for room in rooms) and time.monotonic() < until:
        time.sleep(0.01)
    assert [room.closed for room in rooms] == [1] * 3  # of specs, of the attempt, and the copy


def test_a_coroutine_that_is_cancelled_from_within_loses_its_attempt_and_no_other(chat):
    cancelled = []

    class Inner(Guess):
        async def look(self, n: int) -> str:
            """Look."""
            task = asyncio.create_task(asyncio.sleep(30))
            if not cancelled:
                cancelled.append(task)
                task.cancel()
                await task
            task.cancel()
            return "dark"

    tool = Environment(Inner)
    Inner.get_reward = lambda self: 1.0
    assert play(chat, tool, ["1"], size=3, tool_name="look", turns=1).restarted == 1
    cancelled.clear()
    with pytest.raises(TrajectoryLost, match="Inner in look was cancelled from within"):
        play(chat, tool, ["1"], tool_name="look", turns=1, max_restarts=0)


def test_get_reward_is_not_called_after_an_error(chat):
    asked = []

    class Breaks(Guess):
        def guess(self, number: int) -> str:
            """Guess."""
            raise OSError("broken")

        def get_reward(self) -> float:
            asked.append(self)
            return 1.0

    with pytest.raises(TrajectoryLost, match="environment Breaks in guess raised OSError: broken"):
        play(chat, Environment(Breaks), ["1"], tool_name="guess", turns=1, max_restarts=1)
    assert not asked


# ------------------------------------------------------------------------- one thread


@pytest.mark.parametrize("thread_safe", [True, False])
def test_queued_calls_run_one_at_a_time(chat, thread_safe):
    busy, met = threading.Semaphore(1), []

    def alone(room, action):
        met.append(not busy.acquire(blocking=False))
        time.sleep(0.01)
        if not met[-1]:
            busy.release()
        return "x", 0.0, False, False, {}

    tool = Gymnasium(make=Room, options={"step": alone}, thread_safe=thread_safe)
    play(chat, tool, ["on"], size=8, turns=2)
    assert len(met) == 16
    assert any(met) == thread_safe


class Ledger:
    """Holds what only the thread that made it may use, and notes in which thread it is called."""

    threads: set[str] = set()

    def __init__(self):
        self.note()
        self.held = sqlite3.connect(":memory:", isolation_level=None)
        self.held.execute("create table said (word)")

    def note(self):
        Ledger.threads.add(threading.current_thread().name)

    def reset(self, seed=None):
        return self.step(f"{seed}")[0], {}

    def step(self, action):
        self.note()
        self.held.execute("insert into said values (?)", [action])
        ((words,),) = self.held.execute("select group_concat(word) from said")
        return words, 0.0, False, False, {}

    def __deepcopy__(self, memo):
        other = Ledger()
        self.held.backup(other.held)
        return other

    def close(self):
        self.note()
        self.held.close()


def test_an_environment_that_is_not_thread_safe_is_called_in_one_thread(chat):
    tool = Gymnasium(make=Ledger, thread_safe=False)
    says = ["a", "b", "c"]
    attempts = play(chat, tool, says, size=8, turns=3, probes=1, max_restarts=0)
    assert len(attempts.probes[0]) == 8 * 3
    every = [*attempts.trajectories[0], *(probe.trajectory for probe in attempts.probes[0])]
    assert {trajectory.results[-1].unread for trajectory in every} == {"0,a,b,c"}
    # the environment that shows its actions is made where they are asked for
    assert Ledger.threads - {"MainThread"} == {"turnrl-environment"}


def step_as_told(room, action):
    """A step that hangs until `Queue.released` is set, ends at once, or takes some seconds."""
    Queue.ran.append(action)
    if action == "hang":
        Queue.released.wait(10)
    elif action != "go":
        time.sleep(float(action))
    return "x", 0.0, False, False, {}


class Queue:
    """The actions that the queued calls of `step_as_told` took, and what ends one that hangs."""

    ran: list[str] = []
    released = threading.Event()


@pytest.fixture
def queued():
    """Makes an environment of rooms whose calls wait in the queue, with this time limit."""
    Queue.ran.clear()
    Queue.released.clear()
    yield lambda limit_s: Gymnasium(
        make=Room, options={"step": step_as_told}, step_timeout_s=limit_s, thread_safe=False
    )
    Queue.released.set()


def test_waiting_for_others_does_not_count_against_the_time_limit(chat, queued):
    attempts = play(chat, queued(0.5), ["0.02"], size=40, turns=1, max_restarts=0)
    assert len(attempts.trajectories[0]) == 40


def test_a_call_that_hangs_in_the_one_thread_stops_the_run(chat, queued):
    tool = queued(0.2)
    says = lambda session, turn: "hang" if session == 0 and turn == 0 else "go"  # noqa: E731
    with pytest.raises(ToolError, match=r"environment Room in step took longer than .* = 0\.2"):
        play(chat, tool, says, size=3, turns=3, max_restarts=5)
    with pytest.raises(ToolError, match="environment Room in reset cannot begin: with thread_safe"):
        play(chat, tool, ["go"], turns=1)
