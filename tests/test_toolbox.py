"""Tools that keep something for each trajectory: whose it is, and that it is always given back."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import os
import random
import signal
import threading
import time

import pytest

from rollouts import (
    QUESTION,
    Brackets,
    Count,
    Counter,
    Look,
    PatientCount,
    PatientCounter,
    SlowlyMade,
    collect_with_engine,
)
from turnrl import Question, Rollout, Tool, ToolCall, ToolError, ToolResult, call_tools
from turnrl.agent.attempt import Attempt
from turnrl.agent.batches import MAX_RESULT_CHARACTERS
from turnrl.agent.running import on_loop, run_function, run_tool
from turnrl.agent.segmenter_loop import SegmenterLoop
from turnrl.agent.toolbox import Toolbox, ToolSessions
from turnrl.testing import ScriptedEngine, check_tool
from turnrl.types import ToolSession

COUNTERS = [Counter, PatientCounter, SlowlyMade]
QUESTIONS = [Question(f"q{i}", f"What is the capital of {i}?", ("x",)) for i in range(5)]


def add(*numbers):
    return ";".join(f'[add {{"n": {n}}}]' for n in numbers)


def counts(number, turn):
    """Trajectory `number` adds its number + 1 three times, twice in one turn."""
    step = number + 1
    return (add(step), add(step, step), "=done")[turn]


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("kind", COUNTERS)
def test_each_of_many_trajectories_sees_its_own_state_alone(chat, kind, lockstep):
    tool = kind()
    groups, engine = collect_with_engine(
        Rollout(Brackets(), [tool], lockstep=lockstep), chat, counts, QUESTIONS, 8
    )
    trajectories = [trajectory for group in groups for trajectory in group]
    numbers = []
    for trajectory in trajectories:
        counted = [[int(r.content) for r in turn.results] for turn in trajectory.turns]
        ((number,), *_) = counted
        assert counted == [[number], [2 * number, 3 * number], []]
        numbers.append(number)
    # without lockstep a trajectory begins when its session is open
    assert (numbers if lockstep else sorted(numbers)) == [*range(1, 41)]
    # the calls of many trajectories were answered together, each with the session of its own
    assert max(len(set(batch)) for batch in tool.batches) > 4
    tool.check_closed(40)
    assert not engine.open_sessions


def test_calls_of_a_session_run_in_order_and_never_in_two_batches_at_once():
    # trajectories that arrive at all moments, at a tool that takes its time
    class Uneven(PatientCounter):
        async def open(self, question):
            await asyncio.sleep(0.02 * draw.random())
            return Counter.open(self, question)

        async def run(self, calls):
            sessions = {call.session for call in calls}
            self.busy.update(sessions)
            await asyncio.sleep(0.005)
            assert all(self.busy[s] == 1 for s in sessions), "a session is in two batches at once"
            self.busy.subtract(sessions)
            return [self.add(call) for call in calls]

    async def scenario():
        box = Toolbox([tool], str, 8)
        for _ in range(10):
            several = [ToolSessions(box) for _ in range(100)]
            calls = [ToolCall("add", {"n": n}) for n in (1, 10, 100)]

            async def arrive(sessions):
                await sessions.open(QUESTION)
                return await sessions.answer_calls(calls)  # noqa: B023

            for replies in await asyncio.gather(*map(arrive, several)):
                assert [reply.content for reply in replies] == ["1", "11", "111"]
            for sessions in several:
                await sessions.close()

    draw, tool = random.Random(0), Uneven()
    tool.session = Count
    asyncio.run(scenario())
    tool.check_closed(1000)


# ------------------------------------------------------------------- however it ends


class Pages(Look):
    """Three pages of 40 characters, each under a title of 7."""

    def __init__(self, starts):
        super().__init__()
        self.starts = starts

    def run(self, calls):
        content = "\n\n".join(f"Page {i}\n{str(i) * 33}" for i in "abc")
        return [ToolResult(content, metadata={"passage_ids": [*"abc"], **self.starts})] * len(calls)


@pytest.mark.parametrize(
    ("starts", "kept", "shown"),
    [
        ([7, 49, 91], 200, "abc"),
        ([7, 49, 91], 92, "abc"),  # the first character of the last page's text
        ([7, 49, 91], 91, "ab"),  # its title alone
        ([7, 49, 91], 60, "ab"),
        ([7, 49, 91], 7, ""),
        (None, 200, "abc"),
        (None, 60, "a"),
    ],
)
def test_passages_that_were_cut_off_were_not_shown(starts, kept, shown):
    tool = Pages({} if starts is None else {"passage_starts": starts})

    async def scenario():
        sessions = ToolSessions(Toolbox([tool], lambda text: text[:kept], 8))
        return await sessions.answer_calls([ToolCall("look", {"query": "x"})])

    (result,) = asyncio.run(scenario())
    assert "".join(result.metadata["passage_ids"]) == shown


def test_an_async_tool_that_exits_stops_the_run_and_not_the_event_loop():
    class Exits(Tool):
        """Ends the program."""

        name, description, parameters = "exits", "Ends.", {"type": "object"}

        async def run(self, calls):
            raise SystemExit("no key")

    tool = Exits()
    with pytest.raises(ToolError, match="raised SystemExit: no key in run"):
        asyncio.run(run_tool(tool, "run", tool.run, [ToolCall("exits")]))


def breaks(chat, tool, message, says=counts, group_size=6, kind=ToolError):
    """A collection that stops with an error, with nothing left open."""
    engine = ScriptedEngine(chat.tokenizer, says)
    started = time.monotonic()
    with pytest.raises(kind, match=message):
        Rollout(Brackets(), [tool], lockstep=False).play(
            engine, chat, QUESTIONS[:2], group_size, (0,)
        )
    assert time.monotonic() - started < 10
    assert not engine.open_sessions
    assert engine.drained


@pytest.mark.parametrize("kind", COUNTERS)
def test_every_session_is_closed_when_the_tool_crashes_in_the_middle_of_one(chat, kind):
    class Crashes(kind):
        def add(self, call):
            if call.session.number == 14:  # of the seventh trajectory, in the middle of turn 2
                raise ZeroDivisionError("no more")
            return super().add(call)

    tool = Crashes()
    breaks(chat, tool, r"tool 'add' \(Crashes\) raised ZeroDivisionError: no more in run on")
    tool.check_closed(12)


@pytest.mark.parametrize("patient", [False, True])
def test_every_session_is_closed_when_opening_one_hangs(chat, patient):
    over = threading.Event()

    class Hangs(Counter):
        timeout_s = 0.3

        def open(self, question):
            if question.id == "q1":
                over.wait(20)
            return super().open(question)

    class HangsPatiently(PatientCounter):
        timeout_s = 0.3

        async def open(self, question):
            if question.id == "q1":
                await asyncio.sleep(20)
            return await super().open(question)

    tool = HangsPatiently() if patient else Hangs()
    breaks(
        chat,
        tool,
        r"did not answer to open for question .* within timeout_s = 0\.3. Raise its timeout_s",
        counts,
        1,
    )
    tool.check_closed(1)
    over.set()


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_session_that_is_being_opened_when_another_trajectory_fails_is_closed(chat, kind):
    opening = threading.Event()

    class Crashes(kind):
        def open(self, question):
            if question.id == "q1":
                assert opening.wait(20)
                raise OSError("no sandbox is left")
            return super().open(question)

    class Slow(kind):
        name = "slow"

        def open(self, question):
            opening.set()
            time.sleep(0.1)
            return super().open(question)

    slow, crashes = Slow(), Crashes()
    engine = ScriptedEngine(chat.tokenizer, lambda number, turn: add(1))
    with pytest.raises(ToolError, match="no sandbox is left"):
        Rollout(Brackets(), [crashes, slow]).play(engine, chat, QUESTIONS[:2], 1, (0,))
    slow.check_closed(1)
    crashes.check_closed(1)
    assert not engine.asked


@pytest.mark.parametrize("kind", COUNTERS)
def test_every_session_is_closed_after_ctrl_c(chat, kind, ctrl_c):
    class Interrupts(kind):
        def add(self, call):
            if len(self.batches) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().add(call)

        async def run(self, calls):
            replies = super().run(calls)
            replies = await replies if asyncio.iscoroutine(replies) else replies
            if len(self.batches) == 2:
                await asyncio.sleep(20)
            return replies

    tool = Interrupts()
    breaks(chat, tool, None, group_size=10, kind=KeyboardInterrupt)
    tool.check_closed(20)


@pytest.mark.parametrize("kind", [Count, PatientCount])
def test_a_session_that_cannot_be_closed_is_reported_and_the_others_are_closed(chat, kind):
    class Sticks(kind):
        def close(self):
            if self.number == 9:  # of the third trajectory
                self.tool.closed.append(self)
                raise OSError("the container is gone")
            return super().close()

    tool = PatientCounter()
    tool.session = Sticks
    breaks(
        chat, tool, r"tool 'add' \(PatientCounter\) raised OSError: the container is gone in close"
    )
    tool.check_closed(12)


# ------------------------------------------------------------------- branches


BRACKETS = SegmenterLoop(Brackets(), ())


async def begun(agent):
    """An attempt that has begun, after its first turn."""
    attempt = Attempt(agent, QUESTION, (0,))
    await attempt.sessions.open(QUESTION)
    BRACKETS.begin([attempt], agent.chat)
    await BRACKETS.advance(attempt)
    return attempt


async def branches(agent, seeds):
    """One turn, then a branch per seed that goes on for two more; and the trunk."""
    trunk = await begun(agent)
    forked = [await trunk.fork((seed,)) for seed in seeds]
    ended = []
    for attempt in [*forked, trunk]:
        while attempt.ended_by is None:
            await BRACKETS.advance(attempt)
        await attempt.close()
        await attempt.close()  # harmless
        ended.append(attempt.trajectory)
    return ended


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_branch_continues_with_a_copy_of_every_session(chat, kind):
    tool = kind()

    def says(number, turn):  # the trunk is session 0
        return (add(5), add(10**number), "=done")[turn]

    engine = ScriptedEngine(chat.tokenizer, says)
    agent = Rollout(Brackets(), [tool, Look()]).make_agent(engine, chat)
    ended = asyncio.run(branches(agent, [1, 2, 3]))
    shown = [[r.content for r in trajectory.results] for trajectory in ended]
    assert shown == [["5", "15"], ["5", "105"], ["5", "1005"], ["5", "6"]]
    tool.check_closed(4)
    assert not engine.open_sessions
    # each branch has random streams of its own
    assert len({sampling.seed for *_, sampling in engine.asked}) == len(engine.asked) == 9


def test_a_session_that_cannot_be_copied_refuses_to_branch_and_leaves_nothing_open(chat):
    class Unique(ToolSession):
        __init__, close = Count.__init__, Count.close

    class Box(Counter):
        name, session = "box", Unique

    tool, box = Counter(), Box()
    calls = '[add {"n": 1}];[box {"n": 1}]'
    engine = ScriptedEngine(chat.tokenizer, lambda number, turn: calls)
    agent = Rollout(Brackets(), [tool, box]).make_agent(engine, chat)

    async def scenario():
        attempt = await begun(agent)
        with pytest.raises(
            ToolError, match=r"tool 'box' \(Box\) keeps a Unique .* be copied\. Make"
        ):
            await attempt.fork((1,))
        assert len(engine.open_sessions) == 1
        # the trunk goes on as if nothing had been
        await BRACKETS.advance(attempt)
        await attempt.close()
        return [r.content for r in attempt.turns[-1].results]

    assert asyncio.run(scenario()) == ["2", "2"]
    tool.check_closed(2)
    box.check_closed(1)
    assert not engine.open_sessions


# ------------------------------------------------------------------- without a policy


@pytest.mark.parametrize("kind", COUNTERS)
def test_calls_are_answered_without_a_policy_each_trajectory_with_its_own_state(kind):
    tool, wrong = kind(), ToolCall("add", {"n": "1"})
    calls = [[ToolCall("add", {"n": n}), ToolCall("add", {"n": 1})] for n in (1, 10)]
    results = asyncio.run(call_tools([tool], QUESTIONS[0], [*calls, [wrong], []]))
    assert [[result.content for result in answers] for answers in results[:2]] == [
        ["1", "2"],
        ["10", "11"],
    ]
    ((refused,), none) = results[2:]
    assert not refused.ok
    assert "'1' is not of type 'integer'" in refused.content
    assert none == ()
    assert [len(batch) for batch in tool.batches] == [4]
    tool.check_closed(4)


def test_a_result_of_more_characters_than_are_accepted_is_cut_and_stops_no_run():
    most = MAX_RESULT_CHARACTERS

    def brings(count):
        tool, call = Look(lambda query: "x" * count), ToolCall("look", {"query": "x"})
        ((result,),) = asyncio.run(call_tools([tool], QUESTIONS[0], [[call]]))
        return len(result.content)

    assert [brings(most), brings(most + 1), brings(10 * most)] == [most] * 3


def test_call_tools_starts_the_toolsets_and_stops_them_whatever_happens():
    class Pool(Look):
        hands = 0

        async def start(self):
            self.hands += 1

        async def stop(self):
            self.hands -= 1

    tool = Pool(lambda query: "x" * tool.hands)
    call = ToolCall("look", {"query": "x"})
    ((result,),) = asyncio.run(call_tools([tool], QUESTIONS[0], [[call]]))
    assert (result.content, tool.hands) == ("x", 0)
    check_tool(tool, [{"query": "x"}])
    tool = Pool(lambda query: 1 // 0)
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        asyncio.run(call_tools([tool], QUESTIONS[0], [[call]]))
    assert tool.hands == 0


@pytest.mark.parametrize("flag", [{"ok": "False"}, {"done": "no"}, {"done": None}])
def test_a_flag_of_a_result_that_is_neither_true_nor_false_stops_the_run(flag):
    class Odd(Look):
        def run(self, calls):
            return [ToolResult("x", **flag) for _ in calls]

    ((name, value),) = flag.items()
    with pytest.raises(ToolError, match=f"{name}={value!r}.* True or False"):
        asyncio.run(call_tools([Odd()], QUESTIONS[0], [[ToolCall("look", {"query": "x"})]]))


# ------------------------------------------------------------------- the kit agrees


def test_the_check_catches_an_open_that_gives_no_session():
    class Wrong(Counter):
        def open(self, question):
            return {}

    with pytest.raises(AssertionError, match=r"gave \{\} from open; it gives a ToolSession, whose"):
        check_tool(Wrong(), [{"n": 1}])


def test_threads_are_reused_and_a_hung_one_blocks_no_other_call():
    held, before = threading.Event(), set(threading.enumerate())

    async def calls():
        hung = asyncio.create_task(run_function(held.wait))
        names, threads = set(), set()
        for _ in range(200):
            thread = await run_function(threading.current_thread)
            threads.add(thread)
            names.add(thread.daemon)
        assert not hung.done()
        held.set()
        await hung
        return threads, names

    threads, daemons = on_loop(calls())
    assert len(threads - before) < 20  # one or two; more if the machine is busy
    assert daemons == {True}  # none keeps a program that is interrupted


def test_context_set_by_one_call_does_not_leak_into_the_next():
    kept = contextvars.ContextVar("kept", default=0)

    def sets():
        decimal.getcontext().prec = 3
        kept.set(1)

    async def calls():
        for _ in range(5):
            await run_function(sets)
        return await run_function(lambda: (kept.get(), decimal.getcontext().prec))

    assert on_loop(calls()) == (0, decimal.DefaultContext.prec)
