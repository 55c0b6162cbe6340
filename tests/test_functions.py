"""Functions as tools, rewards and question sources."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest
import torch
from jsonschema import Draft202012Validator

from rollouts import Look
from turnrl import (
    DataError,
    FunctionReward,
    OutcomeReward,
    PolicyMistake,
    Question,
    QuestionData,
    Reading,
    RecipeError,
    Rollout,
    Stateful,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
    Turn,
    call_tools,
    load_questions,
    score_group,
)
from turnrl.agent.function_tools import FunctionTool
from turnrl.agent.functions import describe_function
from turnrl.agent.running import on_loop
from turnrl.data.fields import Fields
from turnrl.plugin.errors import PluginError, TrajectoryLost
from turnrl.rewards.scoring import Tally, convert_rewards, score_groups, tally_groups
from turnrl.testing import ScriptedEngine
from turnrl.types import ToolSession
from turnrl_segmenters import ReAct, SearchR1, TwoTurn


class Unit(enum.Enum):
    METRIC = "km"
    IMPERIAL = "miles"


@dataclasses.dataclass
class Place:
    name: str
    latitude: float = 0.0


class Trip(pydantic.BaseModel):
    title: str
    stops: list[Place] = []


class Tree(pydantic.BaseModel):
    branches: list[Tree] = []


def distance(
    start: Place,
    trip: Trip,
    day: datetime.date,
    unit: Unit = Unit.METRIC,
    mode: Literal["road", "air"] = "road",
    via: list[str] | None = None,
    most: Annotated[int, pydantic.Field(ge=1)] = 3,
) -> str:
    """Measure how far
    a trip is.

    It is slow.

    Args:
        start: Where the trip
            begins.
        most: The most stops.
    """
    return f"{start} {trip} {day} {unit} {mode} {via} {most}"


PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "latitude": {"type": "number", "default": 0.0}},
    "required": ["name"],
}


def test_a_functions_schema_is_whole_in_each_place_and_without_titles_but_the_users_own():
    spec = describe_function(distance).spec
    assert (spec.name, spec.description) == (
        "distance",
        "Measure how far a trip is.\n\nIt is slow.",
    )
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "start": {**PLACE, "description": "Where the trip begins."},
            "trip": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "stops": {"type": "array", "items": PLACE, "default": []},
                },
                "required": ["title"],
            },
            "day": {"type": "string", "format": "date"},
            "unit": {"type": "string", "enum": ["km", "miles"], "default": "km"},
            "mode": {"type": "string", "enum": ["road", "air"], "default": "road"},
            "via": {
                "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                "default": None,
            },
            "most": {
                "type": "integer",
                "description": "The most stops.",
                "default": 3,
                "minimum": 1,
            },
        },
        "required": ["start", "trip", "day"],
        "additionalProperties": False,
    }
    Draft202012Validator.check_schema(spec.parameters)

    def prune(tree: Tree) -> str:
        """Cut a tree."""
        return str(tree)

    description = describe_function(prune)  # a type that contains itself stays a definition
    assert description.spec.parameters["properties"] == {"tree": {"$ref": "#/$defs/Tree"}}
    assert description.bind({"tree": {"branches": [{}]}}) == {"tree": Tree(branches=[Tree()])}


def test_arguments_arrive_as_objects_with_the_defaults_of_the_function():
    bound = describe_function(distance).bind(
        {
            "start": {"name": "Utrecht"},
            "trip": {"title": "North", "stops": [{"name": "Assen", "latitude": 53}]},
            "day": "2026-02-28",
            "most": 2.0,  # which JSON Schema takes for a whole number
        }
    )
    assert bound == {
        "start": Place("Utrecht"),
        "trip": Trip(title="North", stops=[Place("Assen", 53.0)]),
        "day": datetime.date(2026, 2, 28),
        "unit": Unit.METRIC,
        "mode": "road",
        "via": None,
        "most": 2,
    }
    assert isinstance(bound["most"], int)


def test_an_argument_that_only_the_type_refuses_is_the_policys_mistake():
    with pytest.raises(PolicyMistake, match=r"^bad arguments: day: .*valid date"):
        describe_function(distance).bind(
            {"start": {"name": "A"}, "trip": {"title": "B"}, "day": "2026-02-31"}
        )


def google(query: str, top_k: int = 3) -> str:
    """Search pages.

    Args:
        query: Words of
            the question.
        top_k (int): How many.

    Returns:
        The pages.
    """
    return query * top_k


class Shelf:
    def find(self, title: str) -> str:
        """Find a book."""
        return title


@pytest.mark.parametrize(
    "description",
    [
        describe_function(Shelf().find),
        describe_function(Shelf.find, skip=("self",)),
        describe_function(functools.partial(google, top_k=1), name="find", skip=()),
        describe_function(functools.partial(google, "words"), name="find"),
    ],
)
def test_methods_and_partial_functions_leave_out_bound_arguments(description):
    assert description.spec.name == "find"
    assert len(description.spec.parameters["properties"]) == 1


def defined(source: str) -> Any:
    """The `f` of source code."""
    space: dict[str, Any] = {"Callable": Callable, "threading": threading, "math": math}
    exec(compile(source, "f.py", "exec", dont_inherit=True), space)
    return space["f"]


# as tools


QUESTION = Question("q1", "Where is Utrecht?", ("NL", "the Netherlands"), {"level": 3})
NL: tuple[str, ...] = ("NL",)


def called(*tools: Any, **arguments: Any) -> ToolResult:
    """The result of a call of the first tool."""
    (tool, *_) = Rollout(TwoTurn(), [*tools]).specs
    ((result,),) = on_loop(call_tools(tools, QUESTION, [[ToolCall(tool.name, arguments)]]))
    return result


def find(place: str, question: Question, unit: Unit = Unit.METRIC) -> str:
    """Find a place."""
    if place == "nowhere":
        raise PolicyMistake("no place 'nowhere'")
    if place == "server":
        raise OSError("connection refused")
    if place == "sandbox":
        raise TrajectoryLost("the sandbox crashed")
    return f"{place} {unit.name} {question.id} {question.metadata['level']}"


async def find_async(place: str, question: Question, unit: Unit = Unit.METRIC) -> str:
    """Find a place."""
    return find(place, question, unit)


@pytest.mark.parametrize("function", [find, find_async])
def test_a_function_is_a_tool_and_gets_the_question(function):
    (spec,) = Rollout(TwoTurn(), [function]).specs
    assert list(spec.parameters["properties"]) == ["place", "unit"]
    assert called(function, place="Utrecht").content == "Utrecht METRIC q1 3"
    assert called(function, place="Utrecht", unit="miles").content == "Utrecht IMPERIAL q1 3"
    mistake = called(function, place="nowhere")
    assert (mistake.content, mistake.ok) == ("no place 'nowhere'", False)
    untyped = called(function, place=3)
    assert (untyped.content, untyped.ok) == ("bad arguments: 3 is not of type 'string'", False)
    with pytest.raises(TrajectoryLost, match="the sandbox crashed"):
        called(function, place="sandbox")
    with pytest.raises(ToolError) as error:
        called(function, place="server")
    assert re.fullmatch(
        rf"the function test_functions.{function.__name__} raised OSError: connection refused "
        r'on the arguments {"place": "server"} \(test_functions.py:\d+\). Fix it; for a mistake of '
        "the policy, it raises turnrl.PolicyMistake with a text for the policy to read.",
        str(error.value),
    )


class NotAllowed(Exception):
    pass


def refuse(move: str) -> str:
    """Make a move."""
    broken = {
        "value": lambda: int(move),
        "key": lambda: {}[move],
        "divide": lambda: 1 // 0,
        "attribute": lambda: move.nothing,
        "json": lambda: json.loads("<html>"),
        "thread": lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL),
    }
    raised = {"own": NotAllowed, "plain": Exception, "os": OSError, "type": TypeError}
    if move in raised:
        raise raised[move]("no such move")
    return str(broken[move]())


async def refuse_async(move: str) -> str:
    """Make a move."""
    return refuse(move)


@functools.wraps(refuse_async)
def refuse_later(**arguments):
    return refuse_async(**arguments)


@pytest.mark.parametrize("function", [refuse, refuse_async, refuse_later])
def test_an_error_that_a_policy_can_provoke_is_a_result_and_any_other_stops_the_run(
    function, caplog
):
    provoked = {
        "value": "ValueError: invalid literal for int() with base 10: 'value'",
        "key": "KeyError: 'key'",
        "divide": "ZeroDivisionError: integer division or modulo by zero",
        "own": "NotAllowed: no such move",
        "plain": "Exception: no such move",
    }
    for move, text in provoked.items():
        result = called(function, move=move)
        assert (result.content, result.ok) == (text, False)
        assert text in caplog.text.replace("raised ", "")  # for the author, who may think otherwise
    broken = ["os", "type", "attribute", "json"]
    for move in [*broken, "thread"] if function is refuse else broken:
        with pytest.raises(ToolError, match=r"raised \w+: .*\(test_functions.py:\d+\)"):
            called(function, move=move)


def test_each_call_of_a_function_has_its_time():
    def wait(seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "done"

    tool = FunctionTool(wait, timeout_s=0.5)
    calls = [[ToolCall("wait", {"seconds": 0.2})] for _ in range(4 * 32)]  # 32 threads: 0.8 s
    assert len(on_loop(call_tools([tool], QUESTION, calls))) == len(calls)
    with pytest.raises(ToolError, match=r'wait with arguments {"seconds": 2.0} .*timeout_s = 0.5'):
        on_loop(call_tools([tool], QUESTION, [*calls[:3], [ToolCall("wait", {"seconds": 2.0})]]))


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is", "as it is"),
        (ToolResult("failed", ok=False, reward=0.5), "failed"),
        ([Place("Ütrecht", 52.1)], '[{"name": "Ütrecht", "latitude": 52.1}]'),
        ({"day": datetime.date(2026, 2, 1), "u": Unit.METRIC}, '{"day": "2026-02-01", "u": "km"}'),
        (None, "None"),
        (math.nan, "nan"),
        (
            {"mean": np.float64(0.1), "of": torch.tensor([[1], [2]])},
            '{"mean": 0.1, "of": [[1], [2]]}',
        ),
        (Decimal("1.50"), "1.50"),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (ValueError("no such row"), "no such row"),
    ],
)
def test_any_value_with_a_text_becomes_the_text_of_a_result(value, content):
    def give() -> Any:
        """Give it."""
        return value

    result = called(give)
    assert (result.content, result.ok) == (content, content != "failed")


def test_a_value_that_cannot_be_written_is_the_policys_mistake_and_one_without_a_text_is_not():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    def give(what: str) -> Any:
        """Give it."""
        return {"long": 10**5000, "deep": deep}.get(what, object())

    for what in ("long", "deep"):
        result = called(give, what=what)
        assert not result.ok
        assert "cannot be written" in result.content
    with pytest.raises(ToolError, match=r"give returned an object.*neither text nor"):
        called(give, what="object")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(x, y=3): 'Doc.'", "'x' of the function f has no type.*def search"),
        ("def f(x: str): pass", 'f has no docstring.*"""What it does'),
        ("def f(*x: str): 'Doc.'", r"'\*x: str' of the function f has no name"),
        ("def f(x: str, /): 'Doc.'", "'x: str' of the function f has no name"),
        ("def f(x: threading.Event): 'Doc.'", "function f have no JSON Schema: .*Event"),
        ("def f(x: 'Nowhere'): 'Doc.'", "'Nowhere', cannot be read: .* TYPE_CHECKING"),
        ("f = lambda x: x", "lambda.* is not a function with a name"),
        ("f = max", "max does not say what it takes"),
        ("def f(question: str): 'Doc.'", r"write 'question: turnrl\.Question'"),
        ("def f(question): 'Doc.'", r"write 'question: turnrl\.Question'"),
    ],
)
def test_a_function_that_a_policy_could_not_call_is_refused(source, says):
    with pytest.raises(RecipeError, match=rf"(?s)tools\[0\]: .*{says}"):
        Rollout(TwoTurn(), [defined(source)])


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([find, find], "two tools are called 'find', in the function test_functions.find"),
        ([Place], r"tools\[0\] is the class Place. Pass an instance of .*, or a function"),
        (["places.search"], r"tools\[0\] is the string 'places.search'"),
        (3, r"tools is an int. Pass a list"),
    ],
)
def test_invalid_tools_are_refused(tools, says):
    with pytest.raises(RecipeError, match=says):
        Rollout(TwoTurn(), tools)


# as rewards


def short(trajectory: Trajectory) -> float:
    """Pay for an answer of few letters."""
    return 1.0 / len(trajectory.answer) if trajectory.answer else 0.0


def early(trajectory: Trajectory, turn: int, level: int = 1) -> float:
    return float(level * (turn == 0))


def exact(completions: Any, answer: Any, level: Any, **columns: Any) -> Any:
    texts = [messages[-1]["content"] for messages in completions]
    return [float(a in g) * n for g, a, n in zip(texts, answer, level, strict=True)]


def attempt_of(*texts: str, answer: str | None = None) -> Trajectory:
    call = ToolCall("find", {"place": "Utrecht"})
    turns = [Turn(text, Reading((call,)), (ToolResult("a city"),)) for text in texts[:-1]]
    return Trajectory(QUESTION, (*turns, Turn(texts[-1], Reading(answer=answer))), "answer")


GROUP = [attempt_of("find it", "it is NL", answer="NL"), attempt_of("no idea", answer="X")]


def test_a_function_scores_attempts_turns_or_batches_by_its_parameters():
    group = score_group(GROUP, [short, early, exact])
    assert group.components["outcome/short"].values.tolist() == [0.5, 1.0]
    assert group.components["turn/early"].values.tolist() == [[3.0, 0.0], [3.0, 0.0]]
    assert group.components["outcome/exact"].values.tolist() == [3.0, 0.0]
    halved = score_group(GROUP, [FunctionReward(early, weight=-0.5)])
    assert halved.turn_rewards.tolist() == [[-1.5, 0.0], [-1.5, 0.0]]


def level_of(trajectory: Trajectory, level: int) -> float:
    return level


def test_a_column_does_not_override_a_rewards_other_arguments():
    asked = Question("q", "?", ("x",), metadata={"turn": 7, "trajectory": "t", "level": 3})
    trajectory = dataclasses.replace(attempt_of("a", "b"), question=asked)
    rewards = [
        FunctionReward(early),
        FunctionReward(functools.partial(level_of, level=1), name="one"),
        FunctionReward(functools.partial(level_of, level=2), name="two"),
        level_of,
    ]
    group = score_group([trajectory], rewards)
    paid = {name: part.sum().item() for name, part in group.component_totals.items()}
    assert [paid[f"outcome/{name}"] for name in ("one", "two", "level_of")] == [1, 2, 3]


def test_a_batch_leaves_out_results_that_were_never_read():
    last = Turn("c", Reading((ToolCall("x"),)), (ToolResult("", unread="the end"),))
    trajectory = attempt_of("a")
    trajectory = dataclasses.replace(trajectory, turns=(*trajectory.turns, last))
    seen = []

    def paid(completions):
        seen.extend(completions)
        return [0.0] * len(completions)

    score_group([trajectory], [paid])
    assert [message["role"] for message in seen[0]] == ["assistant", "assistant"]


def test_none_and_nan_of_a_batch_reward_pay_nothing_as_in_trl():
    def applies_nowhere(completions: Any) -> Any:
        return [None, np.float32("nan")]

    assert score_group(GROUP, [applies_nowhere]).outcome.tolist() == [0.0, 0.0]


def test_a_batch_reward_gets_the_arguments_that_trl_passes():
    seen: dict[str, Any] = {}

    async def watch(prompts: Any, completions: Any, **columns: Any) -> Any:
        seen.update(columns, prompts=prompts, completions=completions)
        return [None, 2]

    asked = Question("q", "Who?", NL, {"level": 1}, system="Be brief.")
    (first, _), tool = GROUP, {"role": "tool", "name": "find", "content": "a city"}
    both = [dataclasses.replace(first, question=asked)] * 2
    both = [both[0], dataclasses.replace(both[1])]
    assert score_group(both, [watch]).outcome.tolist() == [0.0, 2.0]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    replies = [{"role": "assistant", "content": text} for text in ("find it", "it is NL")]
    function = {"name": "find", "arguments": {"place": "Utrecht"}}
    replies[0]["tool_calls"] = [{"type": "function", "function": function}]
    assert seen["prompts"] == [chat, chat]
    assert seen["completions"] == [[replies[0], tool, replies[1]]] * 2
    assert (seen["level"], seen["answers"], seen["solution"]) == ([1, 1], [["NL"]] * 2, ["NL"] * 2)


CHAT = [{"role": "user", "content": "Who?"}]


@pytest.mark.parametrize(
    ("prompt", "tools", "as_chat"),
    [("Who?", [], False), (CHAT, [], True), ("Who?", [find], True)],
)
def test_a_batch_reward_gets_texts_where_trl_gives_texts(chat, prompt, tools, as_chat):
    rows = [{"prompt": prompt, "solution": "NL"}]
    questions = load_questions(rows, fields=Fields(None, "prompt", "solution"))
    engine = ScriptedEngine(chat.tokenizer, lambda member, turn: "<answer>NL</answer>")
    (group,) = Rollout(TwoTurn(), tools).play(engine, chat, questions, 1, (0,))
    seen = {}

    def watch(prompts, completions, **columns):
        seen.update(prompt=prompts[0], completion=completions[0])
        return [0.0]

    score_group(group, [watch])
    text = "<answer>NL</answer>"
    assert seen == {
        "prompt": CHAT if as_chat else "Who?",
        "completion": [{"role": "assistant", "content": text}] if as_chat else text,
    }


def test_what_a_tool_or_a_reward_changes_in_a_question_belongs_to_its_attempt(chat):
    def note(text: str, question: Question) -> str:
        """Note a text."""
        question.metadata["notes"].append(text)
        question.metadata["seen"] = question.metadata.get("seen", 0) + 1
        return f"{question.metadata['notes']}"

    class Opens(Stateful, Look):
        def open(self, question):
            question.metadata["notes"].append("opened")
            return ToolSession()

    def count(trajectory: Trajectory, notes: list[str]) -> float:
        notes.append("counted")
        return float(len(trajectory.question.metadata["notes"]) + len(trajectory.question.row["x"]))

    lock = threading.Lock()  # which cannot be copied, and stays as it is
    asked = Question("q", "?", NL, {"notes": [], "lock": lock}, row={"x": []})
    call = '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>'
    engine = ScriptedEngine(chat.tokenizer, lambda member, turn: [call, "<answer>x</answer>"][turn])
    rollout = Rollout(ReAct(2), [note, Opens(str)], max_tokens=4000)
    (group,) = rollout.play(engine, chat, [asked], 3, (0,))
    assert score_group(group, [count]).outcome.tolist() == [3.0] * 3  # opened, a, counted
    assert asked.metadata == {"notes": [], "lock": lock}
    on_loop(call_tools([note], asked, [[ToolCall("note", {"text": "b"})]]))
    assert asked.metadata["notes"] == []
    assert [t.question.metadata["seen"] for t in group] == [1, 1, 1]


def test_a_call_that_cannot_be_read_is_no_tool_call_of_a_completion():
    call = ToolCall("", error="bad JSON")
    turn = Turn("x", Reading((call,), None, "bad JSON"), (ToolResult("bad JSON", ok=False),))
    seen = []

    def watch(completions):
        seen.extend(completions)
        return [0.0]

    score_group([dataclasses.replace(attempt_of("a"), turns=(turn,))], [watch])
    assert ["tool_calls" in message for message in seen[0]] == [False, False]


def test_columns_come_by_their_own_names_and_to_a_batch_as_they_are_in_the_data():
    rows = [{"prompt": "A?", "answer": 4, "gold": 5.5, "note": None, "few": [1]} for _ in range(2)]
    (asked, *_) = load_questions(rows, fields=Fields(None, "prompt", ["answer", "gold"]))
    assert (asked.answers, asked.metadata) == (("4", "5.5"), {"few": [1]})
    trajectory = dataclasses.replace(attempt_of("a"), question=asked)
    seen: dict[str, Any] = {}

    def batch(completions, answer, gold, solution, note, **rest):
        seen.update(rest, answer=answer, gold=gold, solution=solution, note=note)
        return [0.0]

    def attempt(trajectory, answer, gold, answers, note="default"):
        seen.update(attempt=(answer, gold, answers, note))
        return 0.0

    score_group([trajectory], [batch, attempt])
    assert seen.pop("attempt") == ("4", 5.5, ["4", "5.5"], "default")
    del seen["prompts"]
    assert seen.pop("completion_ids") == [[]]
    assert callable(seen.pop("log_metric"))
    assert seen == {
        "answer": [4],
        "gold": [5.5],
        "solution": ["4"],
        "ground_truth": ["4"],
        "target": ["4"],
        "answers": [["4", "5.5"]],
        "note": [None],
        "few": [[1]],
    }


def test_questions_without_a_column_that_a_reward_takes_are_refused_before_a_run():
    rows = [{"question": f"{n}?", "answers": "x", "level": n} for n in range(3)]
    questions = load_questions([*rows, {"question": "Bare?", "answers": "x"}])

    def by_attempt(trajectory, level):
        return float(level)

    def by_turn(trajectory, turn, answer, level=0):
        return 0.0

    def by_batch(completions, prompts, level, solution, **rest):
        assert level == [None]
        return [1.0]

    def no_column(completions, difficulty):
        return [0.0]

    message = "'level', which is not a column of the question '3'. It has question, answers"
    with pytest.raises(DataError, match=re.escape(message)):
        FunctionReward(by_attempt).check_questions(questions)
    FunctionReward(by_attempt).check_questions(questions[:3])
    FunctionReward(by_turn).check_questions(questions)
    with pytest.raises(DataError, match="takes 'difficulty', which is not a column"):
        FunctionReward(no_column).check_questions(questions)
    # as in TRL, a batch gets None for what only other rows have
    reward = FunctionReward(by_batch)
    reward.check_questions(questions)
    trajectory = dataclasses.replace(attempt_of("a"), question=questions[3])
    score_group([trajectory], [reward])


def noting(completions, log_metric, **columns):
    log_metric("length", len(completions))
    log_metric("length", 0)
    return [1.0] * len(completions)


class Longest(OutcomeReward):
    def prepare(self, trajectories, policy):
        return {"longest": max(len(trajectory.turns) for trajectory in trajectories)}

    def score(self, trajectory):
        return 0.0


def test_numbers_that_a_reward_logs_become_metrics():
    other = [dataclasses.replace(attempt, question=Question("q2", "Who?", NL)) for attempt in GROUP]
    rewards = [Longest(), *convert_rewards([noting])]
    groups = score_groups([GROUP, other[:1]], rewards)
    # (3 + 0) / 2
    assert [group.logged for group in groups] == [{"longest": 2, "length": 1.5}] * 2
    assert tally_groups(groups, rewards)["log/length"] == Tally(4.5, 3)


@pytest.mark.parametrize("figures", [{"a": math.nan}, [("a", 1.0)]])
def test_what_is_not_numbers_by_name_is_refused(figures):
    class Odd(Longest):
        def prepare(self, trajectories, policy):
            return figures

    with pytest.raises(PluginError, match=r"gave .* from prepare.* numbers by name"):
        score_group(GROUP, [Odd()])


def test_an_attempt_that_no_batch_had_is_scored_on_its_own():
    many = FunctionReward(sized)
    score_group(GROUP, [many])
    assert [many.score(attempt_of("a", "b", "c")), *map(many.score, GROUP)] == [3.0, 2.0, 2.0]


def sized(completions: Any) -> list[float]:
    return [float(len(completions)) if len(completions) > 1 else 3.0] * len(completions)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(completions, log_extra): pass", "takes 'log_extra', which is not a column"),
        (
            "def f(completions, log_metric): log_metric('a', 'b')",
            r"the function f .*raised ValueError",
        ),
        (
            "def f(trajectory): return 'good'",
            r"the function f .*gave 'good' from score, which is not a finite",
        ),
        ("def f(trajectory): pass", r"the function f .*gave None from score, which is not"),
        ("def f(trajectory): return 1 / 0", r"the function f on question 'q1' raised ZeroDivision"),
        ("def f(trajectory, nowhere): pass", "takes 'nowhere', which is not a column of .*level"),
        ("def f(completions): return [1.0]", r"returned \[1.0\] for 2 completions"),
        ("def f(completions): return 1.0", "returned 1.0 for 2 completions"),
        (
            "def f(completions): return ['a', 'b']",
            "gave 'a' from score, which is not a",
        ),
        ("def f(x): pass", r"f takes \(x\), and a reward takes an attempt: write 'def f\(trajec"),
        ("async def f(trajectory): pass", "f is async, which only a reward of a batch may be"),
        ("f = lambda trajectory: 1.0", r"rewards\[0\]: .*lambda.* is not a function with a name"),
        ("class f: pass", r"rewards\[0\] is the class f\. Pass an instance of .* or a function"),
    ],
)
def test_a_function_that_is_not_a_reward_is_refused(source, says):
    with pytest.raises((PluginError, RecipeError, DataError), match=says):
        score_group(GROUP, [defined(source)])


# as questions


def asked() -> Any:
    yield {"prompt": [{"role": "user", "content": "Who?"}], "solution": "Ada", "info": {"a": [1]}}


def of_split(split: str) -> list[Question]:
    return [Question(split, f"{split}?", ("x",))]


def with_default(seed: int = 0, *, split: str = "train") -> list[Question]:
    return of_split(split)


def test_a_function_gives_questions_as_rows_or_questions():
    fields = Fields(None, "prompt", "solution")
    (question,) = load_questions(asked, fields=fields)
    assert (question.text, question.answers) == ("Who?", ("Ada",))
    assert question.metadata == {"info": {"a": [1]}}
    assert load_questions("test_functions.asked", fields=fields) == [question]
    assert load_questions("test_functions.of_split", role="train")[0].id == "train"
    assert load_questions(of_split, "held_out")[0].id == "held_out"
    assert load_questions(with_default, role="val")[0].id == "val"


def test_fields_of_a_function_that_gives_questions_are_refused_and_not_ignored():
    fields = Fields(None, "prompt", "solution")
    with pytest.raises(DataError, match=r"of_split \(val\) takes no fields here: .*Leave them out"):
        load_questions("test_functions.of_split", fields=fields)
    alone = QuestionData(train=of_split, val=with_default, fields=fields)
    with pytest.raises(RecipeError, match=r"data\.fields is set, but no source uses it\. Leave it"):
        alone.setup("fit")
    # they may be about another source of the recipe, or, in an evaluation, about another recipe's
    QuestionData(train=asked, val=of_split, fields=fields).setup("fit")
    QuestionData(val=of_split, fields=fields).setup("validate")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(): return 3", "the function f raised TypeError"),
        (
            "def f(): return ['Who?']",
            "the function f gives the string 'Who\\?'.* is not a question",
        ),
        ("def f(): pass", "has no usable question: it is empty"),
        ("def f(): 1 / 0", r"the function f raised ZeroDivisionError: division by zero \(f.py:1"),
        ("def f(a, b): pass", "cannot be called for questions: it takes a, b"),
        ("async def f(): pass", "cannot be called for questions"),
    ],
)
def test_a_function_that_gives_no_questions_is_named(source, says):
    with pytest.raises(DataError, match=says):
        load_questions(defined(source))


def test_an_error_names_a_function_whose_module_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a module may lie that is on no path
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "needs_more.py").write_text("import nothing_of_the_kind")
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "here_alone.py").write_text("def rows(): return [{'question': 'A?', 'answers': 1}]")
    for path, says in (("needs_more.f", "No module named 'nothing_of"), ("raises.f", "ZeroDivis")):
        with pytest.raises(DataError, match=rf"questions is '{path}', which cannot be .*{says}"):
            load_questions(path)
    assert load_questions("here_alone.rows")[0].text == "A?"
    with pytest.raises(DataError, match=r"'here_alone.rowz', which"):
        load_questions("here_alone.rowz")


# a system message of the data's own


@pytest.mark.parametrize("segmenter", [TwoTurn, ReAct, SearchR1])
def test_a_questions_system_message_stands_before_the_schemes(segmenter, chat):
    asked = dataclasses.replace(QUESTION, system="Be brief.<|im_end|>")
    rollout = Rollout(segmenter(), [google])
    plain, own = (rollout.segmenter_loop.messages(question, chat) for question in (QUESTION, asked))
    assert [message["role"] for message in own] == ["system", "user"]
    assert own[0]["content"].startswith("Be brief.")
    assert "<|im_end|>" not in own[0]["content"]
    assert own[0]["content"].endswith(f"\n\n{plain[0]['content']}")
    assert own[1:] == plain[1:]
    alone = Rollout(segmenter(instructions=""), [google]).segmenter_loop.messages(asked, chat)
    assert alone[0]["content"].startswith("Be brief.")
    assert len(alone[0]["content"]) < 40
