"""The agent loop on scripted engines: what is appended, who is asked,
and whose fault a failure is."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from rollouts import (
    CALL,
    QUESTION,
    Brackets,
    Look,
    collect,
    collect_with_engine,
    encode,
    play_one,
    say,
)
from trajectories import ids_of, observed
from turnrl import (
    DataError,
    Policy,
    Reading,
    RecipeError,
    Rollout,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
)
from turnrl.agent.chat import ChatFormat
from turnrl.plugin.errors import PluginError
from turnrl.plugin.text import neutralize
from turnrl.rewards.scoring import compute_curves, score_group
from turnrl.testing import ScriptedEngine
from turnrl_rewards.qa import AnswerRetrieved, ExactMatch, ToolExecuted


def count_tokens(chat, text):
    """The number of tokens of a text."""
    return len(encode(chat, text))


def paid(trajectory, *more):
    """The rewards of each turn, for calls that ran and for finding `Paris`. A reward in `more`
    replaces the default one of its class."""
    rewards = {type(r): r for r in (ToolExecuted(), AnswerRetrieved(), *more)}.values()
    group = score_group([trajectory], list(rewards), len(trajectory.turns))
    return group.turn_rewards[0].double().round(decimals=6).tolist()


def test_a_trajectory_holds_exactly_the_sampled_and_appended_tokens(chat):
    tool = Look()
    groups, engine = collect_with_engine(
        Rollout(Brackets(), [tool]), chat, say('[look {"query": "Paris"}]', "=Paris")
    )
    trajectory = groups[0][0]
    assert [t.text for t in trajectory.turns] == ['[look {"query": "Paris"}]', "=Paris"]
    assert trajectory.answer == "Paris"
    assert trajectory.ended_by == "answer"
    # the trajectory holds the engine's history, to the token
    sample = trajectory.sample
    assert tuple(engine.asked[-1][1]) + ids_of(trajectory, 1) == sample.token_ids
    decoded = chat.tokenizer.decode(sample.token_ids)
    assert decoded == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        '[look {"query": "Paris"}]<|im_end|>\n<|im_start|>user\n'
        "<result>about Paris</result><|im_end|>\n"
        "<|im_start|>assistant\n=Paris"
    )
    # turn numbers stand on sampled tokens and nowhere else
    parts = [(-1, sample.prompt_ids), (0, encode(chat, '[look {"query": "Paris"}]'))]
    parts += [(-1, observed(trajectory, 0)), (1, encode(chat, "=Paris"))]
    assert sample.token_ids == tuple(token for _, ids in parts for token in ids)
    assert sample.turn_index == tuple(k for k, ids in parts for _ in ids)
    assert chat.tokenizer.decode(sample.prompt_ids).endswith("<|im_start|>assistant\n")
    assert chat.tokenizer.decode(observed(trajectory, 0)).startswith("<|im_end|>")


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("[look not json]", "bad JSON"),
        ('[peek {"query": "x"}]', "no tool 'peek'; there is look"),
        ('[look {"query": 3}]', "3 is not of type 'string'"),
        ('[look {"wrong": "x"}]', "'query' is a required property"),
    ],
)
def test_the_policy_reads_the_error_of_a_malformed_call(chat, text, reply):
    tool = Look()
    trajectory = play_one(Rollout(Brackets(), [tool]), chat, say(text, "=Paris"))
    (result,) = trajectory.turns[0].results
    assert not result.ok
    assert reply in result.content
    assert reply in chat.tokenizer.decode(observed(trajectory, 0))
    assert tool.batches == []


def test_calls_from_one_turn_and_from_other_trajectories_run_as_one_batch(chat):
    tool = Look()
    calls = '[look {"query": "a"}];[look {"query": "b"}]'
    groups = collect(Rollout(Brackets(), [tool]), chat, say(calls, "=x"), group_size=3)
    assert tool.batches == [["a", "b"] * 3]
    assert [r.content for r in groups[0][2].turns[0].results] == ["about a", "about b"]


def test_tools_run_while_other_trajectories_still_generate(chat):
    answered = threading.Event()

    def reply(query):
        answered.set()
        return "fact"

    async def slow():
        async with asyncio.timeout(10):
            while not answered.is_set():
                await asyncio.sleep(0.001)
        return "=late"

    def says(session, turn):
        return slow() if session == 0 else (CALL, "=early")[turn]

    for lockstep in (True, False):
        answered.clear()
        rollout = Rollout(Brackets(), [Look(reply)], lockstep=lockstep)
        (group,) = collect(rollout, chat, says, group_size=2)
        assert [trajectory.answer for trajectory in group] == ["late", "early"]


def test_in_lockstep_the_next_turn_waits_for_the_slowest_tool_and_keeps_the_order(chat):
    def reply(query):
        time.sleep(0.05 if query == "0" else 0)
        return query

    def says(session, turn):
        texts = (f'[look {{"query": "{session}"}}]', f"={session}")
        return texts[turn] if session < 3 else "=at once"

    groups, engine = collect_with_engine(
        Rollout(Brackets(), [Look(reply)]), chat, says, group_size=4
    )
    assert [number for number, *_ in engine.asked] == [0, 1, 2, 3, 0, 1, 2]
    assert [t.answer for t in groups[0]] == ["0", "1", "2", "at once"]


@pytest.mark.parametrize(
    ("capacity", "at_once", "waves"),
    [
        pytest.param(7, 6, "012345 678", id="two whole groups of 3"),
        pytest.param(5, 3, "012 345 678", id="one whole group"),
        pytest.param(2, 2, "01 23 45 67 8", id="two trajectories of a group"),
        pytest.param(1, 1, "0 1 2 3 4 5 6 7 8", id="one trajectory"),
    ],
)
@pytest.mark.parametrize("lockstep", [True, False])
def test_no_more_trajectories_run_at_once_than_the_engine_holds(
    chat, capacity, at_once, waves, lockstep
):
    under_way, counts = set(), []

    def says(session, turn):
        under_way.add(session)
        counts.append(len(under_way))
        if turn == 1:
            under_way.discard(session)
        return (CALL, f"={session}")[turn]

    engine = ScriptedEngine(chat.tokenizer, says)
    engine.capacity = capacity
    questions = [replace(QUESTION, id=f"q{i}") for i in range(3)]
    rollout = Rollout(Brackets(), [Look()], lockstep=lockstep)
    groups = rollout.play(engine, chat, questions, 3, (0,))
    assert [t.answer for group in groups for t in group] == [str(i) for i in range(9)]
    assert [[t.question.id for t in group] for group in groups] == [[q.id] * 3 for q in questions]
    asked = [number for number, *_ in engine.asked]
    if lockstep:
        assert asked == [int(i) for wave in waves.split() for i in wave * 2]
        assert max(counts) == at_once
    else:
        # the next begins when one ends, of whatever group
        assert max(counts) == min(capacity, 9)
    assert not engine.open_sessions


@pytest.mark.parametrize(
    ("capacity", "ends"),
    [
        pytest.param(8, [1, 8, 16, 20], id="room for two groups of 4"),
        pytest.param(4, [1, 4, 8, 12, 16, 20], id="room for one group"),
    ],
)
def test_groups_are_not_split_once_the_engine_has_room_for_them(chat, capacity, ends):
    engine = ScriptedEngine(chat.tokenizer, lambda session, k: (CALL, "=x")[k])
    engine.capacity = 1
    ask = engine.says

    def says(session, k):
        engine.capacity = capacity  # it turns out to hold more
        return ask(session, k)

    engine.says = says
    questions = [replace(QUESTION, id=f"q{i}") for i in range(5)]
    Rollout(Brackets(), [Look()]).play(engine, chat, questions, 4, (0,))
    asked = [number for number, *_ in engine.asked]
    waves = [range(begin, end) for begin, end in pairwise([0, *ends])]
    assert asked == [i for wave in waves for _ in range(2) for i in wave]


def test_the_maximum_number_of_probes_counts_toward_engine_capacity(chat):
    engine = ScriptedEngine(chat.tokenizer, lambda session, k: (CALL, "=x")[k])
    engine.capacity = 15  # of three turns with two branches each: two trajectories with theirs
    questions, open_at_once = [replace(QUESTION, id=f"q{i}") for i in range(2)], []
    ask = engine.says

    def says(session, k):
        open_at_once.append(len(engine.open_sessions))
        return ask(session, k)

    engine.says = says
    rollout = Rollout(Brackets(), [Look()])
    assert rollout.places.max_in_progress(engine, 2) == 2
    groups, probes_of_groups, _ = rollout.begin(engine, chat, questions, 2, (0,), 2).result()
    assert max(open_at_once) <= engine.capacity
    assert [len(group) for group in groups] == [2, 2]
    assert [len(probes) for probes in probes_of_groups] == [8, 8]
    # two trajectories begin, and then their branches; the other two begin when all these have ended
    assert [number for number, *_ in engine.asked[:6]] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_waves_do_not_change_the_samples(tiny_model):
    from turnrl_slots import Slots

    policy = Policy(str(tiny_model)).build()
    policy.load()
    chat = ChatFormat(policy.tokenizer)
    questions = [replace(QUESTION, id=f"q{i}", text=f"Number {i}?") for i in range(4)]
    collections = []
    for kv_memory, lockstep in (("auto", True), ("200KB", True), ("200KB", False), ("70KB", True)):
        rollout = Rollout(
            Brackets(), [Look()], max_tokens=120, max_turn_tokens=12, lockstep=lockstep
        )
        engine = Slots(kv_memory=kv_memory).build()
        engine.start(policy, rollout.max_tokens)
        engine.sync(1)
        groups, probes_of_groups, _ = rollout.begin(engine, chat, questions, 3, (5,), 1).result()
        collections.append(
            [
                [[t.sample.token_ids for t in group] for group in groups],
                [len(probes) for probes in probes_of_groups],
            ]
        )
        assert kv_memory == "auto" or engine.pool.bytes <= float(kv_memory[:-2]) * 1e3
    assert engine.capacity == 1
    assert collections[0] == collections[1] == collections[2] == collections[3]


def test_a_trajectory_stops_at_its_last_turn_without_running_its_calls(chat):
    tool = Look()
    calls = say(*['[look {"query": "Paris"}]'] * 3)
    trajectory = play_one(Rollout(Brackets(3), [tool]), chat, calls)
    assert (len(trajectory.turns), trajectory.ended_by, trajectory.answer) == (3, "turns", None)
    # the last call was attempted, and nobody would have read its result
    assert tool.batches == [["Paris"], ["Paris"]]
    assert trajectory.turns[2].reading.calls == (ToolCall("look", {"query": "Paris"}),)
    assert (trajectory.turns[2].results, observed(trajectory, 2)) == ((), ())
    assert paid(trajectory) == [0.2, 0.2, 0.0]  # the calls name the answer: nothing is found
    # two of three calls succeeded
    assert compute_curves(trajectory)["tool_execution"] == pytest.approx(2 / 3)


def test_a_turn_cut_short_gives_no_answer_and_runs_no_calls(chat):
    tool = Look()
    long = "=The capital of France is Paris"
    trajectory = play_one(Rollout(Brackets(), [tool], max_turn_tokens=3), chat, say(long))
    (turn,) = trajectory.turns
    assert turn.text == chat.truncate(long, 3) != long
    assert (turn.cut, turn.results, observed(trajectory, 0)) == (True, (), ())
    assert turn.reading == Reading(format_error="cut short")
    assert (trajectory.ended_by, trajectory.answer) == ("length", None)
    assert score_group([trajectory], [ExactMatch()], 3).outcome.tolist() == [0.0]
    # the calls that are whole in what was cut are no exception, for a scheme that reads them
    calls = ";".join(['[look {"query": "a"}]'] * 9)
    budget = count_tokens(chat, ";".join(['[look {"query": "a"}]'] * 2)) + 2
    trajectory = play_one(Rollout(Hasty(), [tool], max_turn_tokens=budget), chat, say(calls))
    (turn,) = trajectory.turns
    assert len(turn.reading.calls) >= 2
    assert (turn.cut, turn.results, trajectory.ended_by) == (True, (), "length")
    assert paid(trajectory) == [0.0]
    assert tool.batches == []


class Hasty(Brackets):
    """Reads calls even in a turn that was cut short."""

    def read(self, text, turn, cut):
        return super().read(text, turn, False)


def test_a_trajectory_stops_when_it_runs_out_of_tokens(chat):
    call = '[look {"query": "Paris"}]'
    prompt = len(Rollout(Brackets(), []).segmenter_loop.prompt_ids(QUESTION, chat))
    markup = count_tokens(chat, "<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    result = "<result>about Paris</result>"
    enough = prompt + count_tokens(chat, call) + markup + count_tokens(chat, result) + 1
    whole = play_one(Rollout(Brackets(), [Look()], max_tokens=enough), chat, say(call, "=Paris"))
    assert (len(whole.turns), whole.ended_by) == (2, "length")
    assert whole.tokens == enough
    assert paid(whole) == [0.2, 0.0]
    # with one token less there is no turn that could read the result: the call was in vain
    tool = Look()
    short = play_one(Rollout(Brackets(), [tool], max_tokens=enough - 1), chat, say(call, "=Paris"))
    assert tool.batches == [["Paris"]]
    (turn,) = short.turns
    assert (turn.results, observed(short, 0), turn.cut) == ((), (), False)
    assert turn.reading.calls == (ToolCall("look", {"query": "Paris"}),)
    assert short.ended_by == "length"
    assert short.tokens == prompt + count_tokens(chat, call)
    assert paid(short) == [0.0]
    assert compute_curves(short) | {"format": 0} == dict.fromkeys(compute_curves(short), 0.0)


def test_calls_beyond_max_calls_per_turn_get_an_error_and_do_not_run(chat):
    tool = Look()
    calls = ";".join(f'[look {{"query": "{i}"}}]' for i in range(40))
    room = {"max_turn_tokens": 2000, "max_tokens": 8000}
    rollout = Rollout(Brackets(), [tool], max_calls_per_turn=5, **room)
    trajectory = play_one(rollout, chat, say(calls, "=x"))
    results = trajectory.turns[0].results
    assert len(results) == len(trajectory.turns[0].reading.calls) == 40
    assert tool.batches == [["0", "1", "2", "3", "4"]]
    assert [r.content for r in results[:5]] == [f"about {i}" for i in range(5)]
    assert {(r.ok, r.content) for r in results[5:]} == {(False, "too many calls: at most 5 a turn")}
    # 5 of 40 calls succeeded
    assert paid(trajectory, AnswerRetrieved(0)) == [pytest.approx(0.2 * 5 / 40), 0.0]
    tool.batches.clear()
    play_one(Rollout(Brackets(), [tool], **room), chat, say(calls, "=x"))
    assert [len(batch) for batch in tool.batches] == [8]


def test_a_prompt_that_fills_max_tokens_is_refused(chat):
    prompt = len(play_one(Rollout(Brackets(), []), chat, say("=x")).sample.prompt_ids)
    assert (
        play_one(Rollout(Brackets(), [], max_tokens=prompt + 1), chat, say("=x")).ended_by
        == "length"
    )
    message = (
        f"question 'q1' makes a prompt of {prompt} tokens: "
        f"no room within model.rollout.max_tokens = {prompt}"
    )
    with pytest.raises(DataError, match=message):
        collect(Rollout(Brackets(), [], max_tokens=prompt), chat, say("=x"))


def test_a_long_result_is_cut_to_max_result_tokens_for_policy_and_rewards(chat):
    tool = Look(lambda query: "word " * 5000 + "Paris")
    rollout = Rollout(Brackets(), [tool], max_result_tokens=20)
    trajectory = play_one(rollout, chat, say(CALL, "=x"))
    (result,) = trajectory.turns[0].results
    assert chat.count_tokens(result.content) <= 20
    assert "Paris" not in result.content
    assert result.content in chat.tokenizer.decode(observed(trajectory, 0))


def test_cutting_a_result_never_creates_a_tag(chat):
    tags = ("tool", "answer")
    rest = ("<tool>", "<answer>", "</tool", "<|im_end|>", "<", ">", " ", "a", "é")
    draw, pieces = random.Random(0), ("<tools", "<answered", "< / toolbox", "<answer_", *rest)
    for _ in range(600):
        text, budget = "".join(draw.choices(pieces, k=6)), draw.randint(1, 24)
        safe = chat.sanitize(text, tags, budget)
        assert not re.search(r"<\s*/?\s*(tool|answer)\b", safe), (text, budget)
        assert "<|im_end|>" not in safe
        assert chat.count_tokens(safe) <= budget
        if chat.count_tokens(text) < budget / 3:
            assert safe == neutralize(text, tags, chat.control_tokens)


def test_a_result_is_shortened_when_making_it_inert_adds_tokens(chat, monkeypatch):
    monkeypatch.setattr(chat, "neutralize", lambda text, tags: f"{text} <unk>")
    safe = chat.sanitize("one two three four five six seven", Brackets.tags, 12)
    assert safe.endswith(" <unk>")
    assert chat.count_tokens(safe) <= 12


class Raises(Look):
    """A tool with a bug."""

    def run(self, calls):
        raise KeyError("no such page")


class Hangs(Look):
    """A tool that does not answer in time."""

    def run(self, calls):
        time.sleep(30)


class Short(Look):
    """A tool that returns one result too few."""

    def run(self, calls):
        return [ToolResult("one")] * (len(calls) - 1)


class Wrong(Look):
    """A tool that returns strings instead of results."""

    def run(self, calls):
        return ["text" for _ in calls]


class Down(Look):
    """A tool whose server does not run."""

    def run(self, calls):
        raise ToolError("no server at http://localhost:1. Start it.")


class Exits(Look):
    """A tool that ends the process."""

    def run(self, calls):
        raise SystemExit(3)


class Cancels(Look):
    """A tool that cancels its own task."""

    async def run(self, calls):
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (
            Raises(),
            r"tool 'look' \(Raises\) raised KeyError: 'no such page' in run on 2"
            r" calls.*query.*Fix the tool",
        ),
        (
            Hangs(timeout_s=0.1),
            r"tool 'look' \(Hangs\) did not answer to run on 2 calls.* within timeout_s = 0.1",
        ),
        (Exits(), r"\(Exits\) raised SystemExit: 3"),
        (Cancels(), r"\(Cancels\) raised CancelledError"),
        (Short(), r"\(Short\) returned .* for 2 calls"),
        (Wrong(), r"\(Wrong\) returned \['"),
        (Down(), "no server at http://localhost:1. Start it."),
    ],
)
def test_a_failing_tool_stops_the_collection_and_is_named(chat, tool, message):
    engine = ScriptedEngine(chat.tokenizer, say(CALL, "=x"))
    started = time.monotonic()
    with pytest.raises(ToolError, match=message):
        Rollout(Brackets(), [tool]).play(engine, chat, [QUESTION], 2, (0,))
    assert time.monotonic() - started < 20
    assert not engine.open_sessions
    assert engine.drained


def test_a_trajectory_closes_its_session_when_it_ends(chat):
    async def late(engine):
        async with asyncio.timeout(10):
            while len(engine.open_sessions) > 1:  # the other one is done
                await asyncio.sleep(0.001)
        return "=late"

    engine = ScriptedEngine(
        chat.tokenizer, lambda number, turn: late(engine) if number else "=early"
    )
    rollout = Rollout(Brackets(), [])
    ((early, last),) = rollout.play(engine, chat, [QUESTION], 2, (0,))
    assert (early.answer, last.answer) == ("early", "late")
    assert not engine.open_sessions


class Careless(Brackets):
    """Expects a bar in every text."""

    def read(self, text, turn, cut):
        return Reading(answer=text.split("|")[1])


def test_the_error_of_a_raising_segmenter_quotes_the_text(chat):
    with pytest.raises(PluginError, match=r"Careless\.read on '=no bar' raised IndexError"):
        collect(Rollout(Careless(), []), chat, say("=no bar"))


def test_added_white_space_tokens_are_not_control_tokens(tiny_model):
    tokenizer = Policy(str(tiny_model)).build().tokenizer
    tokenizer.add_tokens(["\n\n", "    "])
    assert not [t for t in ChatFormat(tokenizer).control_tokens if not t.strip()]


def test_collecting_works_inside_a_running_event_loop(chat):
    async def notebook():
        return collect(Rollout(Brackets(), []), chat, say("=x"))

    assert asyncio.run(notebook())[0][0].answer == "x"


def test_each_turn_of_each_trajectory_has_its_own_random_stream(chat):
    def seeds(stream):
        engine = ScriptedEngine(chat.tokenizer, say(CALL, CALL, "=x"))
        rollout.play(engine, chat, [QUESTION, QUESTION], 3, stream)
        return [sampling.seed for *_, sampling in engine.asked]

    rollout = Rollout(Brackets(), [Look()])
    first, again, other = seeds((0,)), seeds((0,)), seeds((1,))
    assert len(first) == len(set(first)) == 18
    assert again == first
    assert not set(first) & set(other)


class NoSchema(Look):
    """Has parameters of a type that does not exist."""

    parameters = {"type": "objekt"}


def bare(**attributes):
    """A tool with these attributes and no others."""
    return type("Bare", (Tool,), {"run": lambda self, calls: [], **attributes})()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, r"rollout\.temperature is 0"),
        ({"max_tokens": 0}, r"rollout\.max_tokens is 0"),
        ({"max_turn_tokens": 0}, r"rollout\.max_turn_tokens is 0"),
        ({"max_calls_per_turn": 0}, r"rollout\.max_calls_per_turn is 0"),
        ({"max_result_tokens": -1}, r"rollout\.max_result_tokens is -1"),
        ({"tools": [Look(), Look()]}, "two tools are called 'look'"),
        (
            {"tools": [NoSchema()]},
            r"tool 'look' \(NoSchema\) has parameters that are no JSON Schema",
        ),
        ({"tools": [bare(description="x", parameters={})]}, 'Bare has no name. .*name = "search"'),
        ({"tools": [bare(name="x", parameters={})]}, "Bare has no description"),
        ({"tools": [bare(name="x", description="x")]}, 'no parameters. Set .*= {"type": "object"'),
        ({"segmenter": Brackets(0)}, "Brackets.max_turns is 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message):
        Rollout(**{"segmenter": Brackets(), "tools": [], **arguments})


class Silent(Brackets):
    """Observes nothing."""

    def observe(self, reading, results):
        return []


class OldStyle(Brackets):
    """Observes a string."""

    def observe(self, reading, results):
        return "".join(result.content for result in results)


class Speaks(Brackets):
    """Observes a message of the assistant."""

    def observe(self, reading, results):
        return [{"role": "assistant", "content": "I know"}]


@pytest.mark.parametrize("segmenter", [Silent(), OldStyle(), Speaks()])
def test_check_refuses_a_segmenter_whose_observations_are_not_messages(chat, segmenter):
    name = type(segmenter).__name__
    with pytest.raises(PluginError, match=rf"{name}\.observe gave .*of role user or tool"):
        Rollout(segmenter, []).check(chat)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("read", "a turnrl.Reading"),
        ("prompt", "a list of messages"),
        ("observe", "a list of messages"),
    ],
)
def test_a_method_of_a_turn_scheme_that_returns_nothing_is_named(chat, method, says):
    forgets = type("Forgets", (Brackets,), {method: lambda *arguments: None})
    engine = ScriptedEngine(chat.tokenizer, say(CALL, "=x"))
    with pytest.raises(PluginError, match=rf"Forgets\.{method} gave None; it gives {says}"):
        Rollout(forgets(), [Look()]).play(engine, chat, [QUESTION], 1, (0,))


def test_check_runs_the_check_of_every_tool(chat):
    class Missing(Look):
        """A tool without its index."""

        def check(self):
            raise FileNotFoundError("no index at nowhere")

    Rollout(Brackets(), [Look()]).check(chat)
    with pytest.raises(
        ToolError, match=r"tool 'look' \(Missing\) in check raised FileNotFoundError: no index"
    ):
        Rollout(Brackets(), [Missing()]).check(chat)


def test_several_turns_without_any_tool_get_a_warning(chat, caplog):
    Rollout(Brackets(1), []).check(chat)
    Rollout(Brackets(3), [Look()]).check(chat)
    assert caplog.text == ""
    Rollout(Brackets(3), []).check(chat)
    assert "rollout.tools is empty, and Brackets takes up to 3 turns" in caplog.text
