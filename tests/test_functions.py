"""Functions as tools, rewards and question sources."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import functools
import inspect
import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest
import torch
from jsonschema import Draft202012Validator

from commands import fails, save
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
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
    Turn,
    call_tools,
    load_questions,
    score_group,
)
from turnrl.agent.function_tools import FunctionTool, _Batch
from turnrl.agent.functions import described
from turnrl.agent.running import on_loop
from turnrl.data.fields import Fields
from turnrl.plugin.errors import PluginError, TrajectoryLost
from turnrl.rewards.functions import rewards_of
from turnrl.rewards.scoring import Tally, group_tallies, score_groups
from turnrl.testing import ScriptedEngine, check_reward, check_tool
from turnrl.types import Notes, ToolSession
from turnrl.watch.recorder import rows
from turnrl_doctor.tools import judged, replies_of
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
    spec = described(distance).spec
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
    assert list(spec.parameters) == ["type", "properties", "required", "additionalProperties"]
    Draft202012Validator.check_schema(spec.parameters)


def test_a_type_that_contains_itself_stays_a_definition():
    def prune(tree: Tree) -> str:
        """Cut a tree."""
        return str(tree)

    description = described(prune)
    assert description.spec.parameters["properties"] == {"tree": {"$ref": "#/$defs/Tree"}}
    schema = Draft202012Validator(description.spec.parameters)
    assert schema.is_valid({"tree": {"branches": [{"branches": []}]}})
    assert not schema.is_valid({"tree": {"branches": [3]}})
    assert description.bind({"tree": {"branches": [{}]}}) == {"tree": Tree(branches=[Tree()])}


def test_arguments_arrive_as_objects_with_the_defaults_of_the_function():
    bound = described(distance).bind(
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


def shouting(function: Any) -> Any:
    @functools.wraps(function)
    def inner(**arguments: Any) -> str:
        return function(**{**arguments, "times": arguments["times"] + 1})

    return inner


@shouting
def shouted(query: str, times: int = 2) -> str:
    """Shout."""
    return query * times


def test_plain_arguments_arrive_as_they_are_and_others_through_pydantic():
    def plain(query: str, top: float = 0.5) -> str:
        """Search."""
        return query

    def with_field(query: str, top: int = pydantic.Field(3, ge=1)) -> str:
        """Search."""
        return query

    assert described(plain).bind({"query": "x"}) == {"query": "x", "top": 0.5}
    bound = described(plain).bind({"query": "x", "top": 1})
    assert bound == {"query": "x", "top": 1.0}
    assert isinstance(bound["top"], float)
    with pytest.raises(PolicyMistake, match="bad arguments: query: Missing"):
        described(plain).bind({"top": 0.1})
    assert described(with_field).bind({"query": "x"}) == {"query": "x", "top": 3}
    assert described(shouted).bind({"query": "x"}) == {"query": "x", "times": 2}


def test_an_argument_that_only_the_type_refuses_is_the_policys_mistake():
    with pytest.raises(PolicyMistake, match=r"^bad arguments: day: .*valid date"):
        described(distance).bind(
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


def numpy_style(query: str, top_k: int = 3) -> str:
    """Search pages.

    Parameters
    ----------
    query : str
        Words of
        the question.
    top_k : int, optional
        How many.

    Returns
    -------
    str
        The pages.
    """
    return query * top_k


def sphinx(query: str, top_k: int = 3) -> str:
    """Search pages.

    :param query: Words of
        the question.
    :param int top_k: How many.
    :return: The pages.
    """
    return query * top_k


@pytest.mark.parametrize("function", [google, numpy_style, sphinx])
def test_docstrings_of_three_styles_say_the_same(function):
    spec = described(function, name="search").spec
    assert (spec.name, spec.description) == ("search", "Search pages.")
    assert spec.parameters["properties"] == {
        "query": {"type": "string", "description": "Words of the question."},
        "top_k": {"type": "integer", "description": "How many.", "default": 3},
    }


class Shelf:
    def find(self, title: str) -> str:
        """Find a book."""
        return title


@pytest.mark.parametrize(
    "description",
    [
        described(Shelf().find),
        described(Shelf.find, skip=("self",)),
        described(functools.partial(google, top_k=1), name="find", skip=()),
        described(functools.partial(sphinx, "words"), name="find"),
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


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(x, y=3): 'Doc.'", r"Write 'def f\(x: str, y: int = 3\)'"),
        ("def f(x: str): pass", 'f has no docstring that says what it does.*"""What it does'),
        ("def f(*x: str): 'Doc.'", r"f takes '\*x'.*Name each parameter"),
        ("def f(**x: str): 'Doc.'", r"f takes '\*\*x'.*Name each parameter"),
        ("def f(x: str, /): 'Doc.'", "'x' of the function f .* Take the '/' out"),
        ("def f(x: threading.Event): 'Doc.'", "'x' of the function f is of the type Event, .*enum"),
        ("def f(x: Callable[[], str]): 'Doc.'", "type Callable, which has no JSON Schema"),
        ("def f(x: 'Nowhere'): 'Doc.'", "'Nowhere', cannot be read: .* TYPE_CHECKING"),
        ("f = lambda x: x", "a lambda has no name and no types. Write it as a function"),
        ("class f: pass", "f is not a function. Give a function"),
        ("f = 3", "3 is not a function"),
        ("class A:\n def go(self, x: str): 'Go.'\nf = A.go", "A.go is a method without its object"),
        ("f = math.sqrt", "math.sqrt can only be given by its place"),
        ("f = max", "max does not say what it takes"),
        (
            "def f(query: str):\n  '''Doc.\n\n  Args:\n    querry: It.\n  '''",
            "describes 'querry', which is no parameter. Did you mean query?",
        ),
    ],
)
def test_a_function_that_a_policy_could_not_call_is_refused_with_the_line_to_write(source, says):
    with pytest.raises(RecipeError) as error:
        described(defined(source))
    assert re.search(says, re.sub(r"<class '|'>", "", str(error.value)))


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


def test_a_text_is_not_a_number_where_the_schema_wants_one():
    def double(n: float) -> float:
        """Double a number."""
        return 2 * n

    assert called(double, n=1.5).content == "3.0"
    assert not called(double, n="1.5").ok


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is", "as it is"),
        (ToolResult("failed", ok=False, reward=0.5), "failed"),
        ([Place("Ütrecht", 52.1)], '[{"name": "Ütrecht", "latitude": 52.1}]'),
        (
            {"day": datetime.date(2026, 2, 1), "unit": Unit.METRIC},
            '{"day": "2026-02-01", "unit": "km"}',
        ),
        (True, "true"),
    ],
)
def test_a_functions_return_value_becomes_the_text_of_the_result(value, content):
    def give() -> Any:
        """Give it."""
        return value

    result = called(give)
    assert result.content == content
    assert result.ok == (content != "failed")


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, "None"),
        (math.nan, "nan"),
        (np.int64(5), "5"),
        (
            {"mean": np.float32(0.1), "counts": np.array([[1], [2]])},
            '{"mean": 0.1, "counts": [[1], [2]]}',
        ),
        (np.array(["2026-02-01"], "datetime64[ns]"), '["2026-02-01T00:00:00.000000000"]'),
        (np.ma.array([1.5, 2.5], mask=[False, True]), "[1.5, null]"),
        (torch.tensor([1, 2]), "[1, 2]"),
        (Decimal("1.50"), "1.50"),
        (Path("a/b"), "a/b"),
        (Unit.METRIC, "km"),
        (b"caf\xc3\xa9", "café"),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        ((n for n in (1, 2)), "[1, 2]"),
        (ValueError("no such row"), "no such row"),
        (nested(300), "[" * 301 + "]" * 301),
    ],
)
def test_any_value_with_a_text_becomes_the_text_of_a_result(value, content):
    def give() -> Any:
        """Give it."""
        return value

    result = called(give)
    assert (result.content, result.ok) == (content, True)


@pytest.mark.parametrize("value", [10**5000, nested(900)], ids=["long", "deep"])
def test_a_result_that_is_too_long_or_too_deep_to_be_written_is_said_to_the_policy(value):
    for _ in range(200):  # deeper than Python can write
        value = [value] if isinstance(value, list) else value

    def give() -> Any:
        """Give it."""
        return value

    result = called(give)
    assert not result.ok
    assert "too long or too deeply nested to be written" in result.content


def test_a_result_without_a_text_stops_the_run():
    def give() -> Any:
        """Give it."""
        return object()

    says = "the function test_functions.give returned an object, <object .* neither text nor JSON"
    with pytest.raises(ToolError, match=says):
        called(give)


BASE = sqlite3.connect(":memory:")
MINE = threading.local()
MINE.seen = "mine"


def from_table(place: str) -> str:
    """Look a place up in a table of this module's connection."""
    return str(BASE.execute("select ?", (place,)).fetchone()[0])


def in_time(place: str) -> str:
    """Look a place up in at most two seconds."""
    before = signal.signal(signal.SIGALRM, lambda *frame: None)
    signal.alarm(2)
    try:
        return place
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def of_thread(place: str) -> str:
    """Look a place up in what this thread keeps."""
    return f"{place} {MINE.seen}"


def with_a_loop(place: str) -> str:
    """Look a place up on the thread's event loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.get_event_loop()
    return place


@pytest.mark.parametrize("function", [from_table, in_time, of_thread, with_a_loop])
@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_function_that_needs_the_main_thread_is_called_there(function, thread_safe, caplog):
    tool = FunctionTool(function, thread_safe=thread_safe)
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    calls = [[ToolCall(tool.name, {"place": f"{n}"})] for n in range(5)]
    try:
        results = on_loop(call_tools([tool], QUESTION, calls))
        check_tool(tool, [{"place": "x"}])
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert [result.content[:1] for (result,) in results] == ["0", "1", "2", "3", "4"]
    told = "called in the thread that waits for the attempts" in caplog.text
    assert told == thread_safe  # once, with the setting to write
    assert len(caplog.records) == told


def test_a_thread_of_a_forum_is_no_thread_of_the_machine(caplog):
    calls = []

    def open_thread(name: str) -> str:
        """Open a thread of the forum."""
        calls.append(name)
        raise PolicyMistake(f"no thread {name!r}")

    tool = FunctionTool(open_thread)
    ((result,),) = on_loop(call_tools([tool], QUESTION, [[ToolCall("open_thread", {"name": "x"})]]))
    assert result.content == "no thread 'x'"
    assert calls == ["x"]  # once
    assert tool.thread_safe
    assert not caplog.records


def test_ctrl_c_reaches_a_function_in_the_main_thread():
    def interrupted() -> str:
        """Take long."""
        signal.raise_signal(signal.SIGINT)
        return "went on"

    with pytest.raises(KeyboardInterrupt):
        called(FunctionTool(interrupted, thread_safe=False))


def test_thread_safe_false_is_refused_for_an_async_function():
    with pytest.raises(RecipeError, match="find_async is async, and with thread_safe: false"):
        FunctionTool(find_async, thread_safe=False)


class NotAllowed(Exception):
    pass


def refuse(move: str) -> str:
    """Make a move."""
    faults = {
        "value": lambda: int(move),
        "key": lambda: {}[move],
        "divide": lambda: 1 // 0,
        "pattern": lambda: re.compile("("),
        "attribute": lambda: move.nothing,
        "json": lambda: json.loads("<html>"),
    }
    raised = {"own": NotAllowed, "plain": Exception, "runtime": RuntimeError, "os": OSError}
    raised |= {"time": TimeoutError, "name": NameError}
    if move in raised:
        raise raised[move]("no such move")
    return str(faults[move]())


@pytest.mark.parametrize("as_async", [False, True])
@pytest.mark.parametrize(
    ("move", "text"),
    [
        ("value", "ValueError: invalid literal for int() with base 10: 'value'"),
        ("key", "KeyError: 'key'"),
        ("divide", "ZeroDivisionError: integer division or modulo by zero"),
        ("own", "NotAllowed: no such move"),
        ("plain", "Exception: no such move"),
        ("runtime", "RuntimeError: no such move"),
        ("time", "TimeoutError: no such move"),
        ("os", None),
        ("name", None),
        ("attribute", None),
        ("json", None),
    ],
)
def test_an_error_that_a_policy_can_provoke_is_a_result_and_any_other_stops_the_run(
    move, text, as_async, caplog
):
    async def refuse_async(move: str) -> str:
        """Make a move."""
        return refuse(move)

    function = refuse_async if as_async else refuse
    if text is None:
        with pytest.raises(ToolError, match=r"raised \w+: .*\(test_functions.py:\d+\). Fix it"):
            called(function, move=move)
        return
    result = called(function, move=move)
    assert (result.content, result.ok) == (text, False)
    assert "The policy reads this as its own mistake. If it is not, fix" in caplog.text


def read_file(path: str) -> str:
    """Read a file beside this one."""
    return (Path(__file__).parent / path).read_text()


def read_page(title: str) -> str:
    """Read a page."""
    return read_file(f"{title}.txt")


def read_own(title: str) -> str:
    """Read a page of a file that has to be there."""
    return read_file("no-corpus.json")


def query(sql: str) -> str:
    """Ask a database."""
    base = sqlite3.connect(":memory:")
    base.execute("create table towns (name not null)")
    return str(base.execute(sql).fetchall())


def compute(expression: str) -> str:
    """Compute an expression."""
    return str(eval(expression, {"__builtins__": {}}))


def run_program(program: str) -> str:
    """Run a program."""
    exec(program, {})
    return "ran"


def run_in_shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(["sh", "-c", command], timeout=0.2, check=True).args[2]


def parse_own(text: str) -> str:
    """Parse a text."""
    return str(json.loads(text))


def add(text: str) -> str:
    """Add 1."""
    return text + 1


def stated(kind: str) -> str:
    """Make a move."""
    raise {"type": TypeError, "none": NotImplementedError, "path": PermissionError}[kind]("no")


@pytest.mark.parametrize(
    ("function", "argument", "text"),
    [
        (read_file, "nowhere.txt", "FileNotFoundError: "),
        (read_page, "Nowhere", "FileNotFoundError: "),
        (read_own, "Nowhere", None),
        (query, "selec name", 'OperationalError: near "selec": syntax error'),
        (compute, "town + 1", "NameError: name 'town' is not defined"),
        (run_program, "import nothing_of_that_name", "ModuleNotFoundError: "),
        (run_program, "raise SystemExit(3)", "SystemExit: 3"),
        (run_in_shell, "sleep 5", "TimeoutExpired: "),
        (parse_own, "{x}", "JSONDecodeError: "),
        (add, "1", None),
        (stated, "type", "TypeError: no"),
    ],
)
def test_the_policy_reads_how_what_it_wrote_failed(function, argument, text):
    (name,) = inspect.signature(function).parameters
    if text is None:
        with pytest.raises(ToolError, match=r"Fix it"):
            called(function, **{name: argument})
        return
    result = called(function, **{name: argument})
    assert (text in result.content, result.ok) == (True, False)


def test_a_plain_function_around_an_async_one_is_awaited():
    async def find(place: str) -> str:
        """Find a place."""
        await asyncio.sleep(0)
        return {"Utrecht": "found"}[place]

    @functools.wraps(find)
    def logged(**arguments):
        return find(**arguments)

    assert called(logged, place="Utrecht").content == "found"
    assert called(logged, place="Oslo").content == "KeyError: 'Oslo'"


def test_the_doctor_warns_of_a_function_that_only_raises_or_says_none():
    tool, name = FunctionTool(refuse), "tool refuse"
    replies = replies_of(tool, QUESTION, [ToolCall("refuse", {"move": "key"})])
    finding = judged(name, tool, replies)
    assert (finding.status, "KeyError: 'key'" in finding.text) == ("warn", True)

    def forget(x: str) -> None:
        """Look it up."""

    tool = FunctionTool(forget)
    finding = judged(name, tool, replies_of(tool, QUESTION, [ToolCall("forget", {"x": "a"})]))
    assert (finding.status, "every result is empty" in finding.text) == ("warn", True)


def test_a_functions_time_limit_leaves_out_the_wait_for_a_free_thread():
    def wait(seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "done"

    tool = FunctionTool(wait, timeout_s=0.5)
    calls = [[ToolCall("wait", {"seconds": 0.2})] for _ in range(4 * 32)]  # 32 threads: 0.8 s
    assert len(on_loop(call_tools([tool], QUESTION, calls))) == len(calls)
    late = r'did not answer to run on wait with arguments {"seconds": 2.0} within timeout_s = 0.5'
    for more in ([], calls[:3]):
        with pytest.raises(ToolError, match=late):
            on_loop(call_tools([tool], QUESTION, [*more, [ToolCall("wait", {"seconds": 2.0})]]))


class Hand(Tool):
    name, description = "double", "Double a number."

    def __init__(self) -> None:
        self.parameters = described(double).spec.parameters

    def run(self, calls):
        return [ToolResult(double(**call.arguments)) for call in calls]


class AsyncHand(Hand):
    async def run(self, calls):
        return [ToolResult(await double_async(**call.arguments)) for call in calls]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("function", "hand", "more"), [("double", Hand, 40), ("double_async", AsyncHand, 60)]
)
def test_a_function_tool_makes_few_more_calls_than_a_handwritten_tool(function, hand, more, size):
    """Counted in functions called for each call, as the time depends on what else runs."""

    def called(tool: Any) -> float:
        count = 0

        def counted(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        async def batch() -> None:
            calls = [ToolCall("double", {"n": 1})] * size
            sys.setprofile(counted)
            try:
                in_thread = isinstance(tool, FunctionTool) and tool.timed  # as Hand.run is
                results = _Batch(tool, calls).work_through() if in_thread else tool.run(calls)
                _ = await results if inspect.isawaitable(results) else results
            finally:
                sys.setprofile(None)

        on_loop(batch())
        return count / size

    apart = called(FunctionTool(globals()[function], "double")) - called(hand())
    assert 0 < apart < more


async def double_async(n: int) -> str:
    """Double a number."""
    return double(n)


def double(n: int) -> str:
    """Double a number."""
    return str(2 * n)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([double, double], "two tools are called 'double', in the function test_functions.double"),
        ([lambda x: x], r"tools\[0\]: a lambda has no name and no types"),
        ([Place], r"tools\[0\] is the class Place. Pass an instance of .*, or a function"),
        ([3], r"tools\[0\] is an int. Pass an instance of a class that extends .*, or a function"),
        ([{"a": 1}], r"tools\[0\] is a dict. Pass an instance of"),
        ([None], r"tools\[0\] is None. Pass an instance of"),
        (["places.search"], r"'places.search'. In Python, pass the function itself: search\."),
        (["WikiSearch"], r"'WikiSearch'. In Python, pass an instance: WikiSearch\(\)"),
        (3, r"tools is an int, not a list. Pass a list: tools=\[...\]"),
        ([max], r"tools\[0\]: the function max does not say what it takes"),
    ],
)
def test_invalid_tools_are_refused(tools, says):
    with pytest.raises(RecipeError, match=says):
        Rollout(TwoTurn(), tools)


@pytest.mark.parametrize("kind", ["question: str", "question"])
def test_a_parameter_question_of_another_type_is_refused(kind):
    message = r"write 'question: turnrl\.Question'. If the policy should"
    with pytest.raises(RecipeError, match=message):
        FunctionTool(defined(f"def f({kind}): 'Doc.'"))


def test_functions_and_classes_take_the_same_check():
    check_tool(double, good_calls=[{"n": 2}], bad_calls=[{"n": "2"}])
    check_reward(short)


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
    [("Who?", [], False), (CHAT, [], True), (json.dumps(CHAT), [], True), ("Who?", [find], True)],
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
    assert callable(seen.pop("log_extra"))
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


def test_fit_refuses_a_row_without_a_column_before_it_begins(recipe, capsys):
    rows = [{"question": f"{n}?", "answers": "x", "level": n} for n in range(3)]
    rows += [{"question": "Bare?", "answers": "x"}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("levels.py").write_text("def paid(trajectory, level):\n    return float(level)\n")
    recipe["model"]["rewards"] = ["levels.paid"]
    recipe["data"] = {"train": "rows.jsonl", "questions_per_iteration": 1}
    save(recipe)
    message = fails(capsys, ["fit", "recipe.yaml"])
    assert "takes 'level', which is not a column of the question '3'" in message
    assert not [*Path("runs").rglob("metrics.csv")]


def noting(completions, log_metric, log_extra, **columns):
    log_metric("length", len(completions))
    log_metric("length", 0)
    log_extra("last", [messages[-1]["content"] for messages in completions])
    return [1.0] * len(completions)


def test_values_that_a_function_logs_become_metrics_and_record_columns():
    other = [dataclasses.replace(attempt, question=Question("q2", "Who?", NL)) for attempt in GROUP]
    groups = score_groups([GROUP, other[:1]], rewards_of([noting]))
    assert [group.extra for group in groups] == [
        ({"last": "it is NL"}, {"last": "no idea"}),
        ({"last": "it is NL"},),
    ]
    assert [group.logged for group in groups] == [{"length": 1.5}] * 2  # (3 + 0) / 2
    assert group_tallies(groups, rewards_of([noting]))["log/length"] == Tally(4.5, 3)
    row, _ = rows([groups[0]], [None], "val", 0, 0)
    assert json.loads(row["extra"]) == {"last": "it is NL"}


class Length(OutcomeReward):
    def prepare(self, trajectories, policy):
        lengths = [len(trajectory.turns) for trajectory in trajectories]
        return Notes({"longest": max(lengths)}, {"turns": lengths})

    def score(self, trajectory):
        return 0.0


def test_any_reward_may_log_metrics_and_extra_columns():
    (group,) = score_groups([GROUP], [Length(), *rewards_of([noting])])
    assert group.logged == {"longest": 2, "length": 1.0}
    assert group.extra == ({"turns": 2, "last": "it is NL"}, {"turns": 1, "last": "no idea"})
    with pytest.raises(PluginError, match=r"column 'turns' .* so does a reward before"):
        score_group(GROUP, [Length(), Length()])


@pytest.mark.parametrize(
    "notes",
    [
        Notes({"a": math.nan}),
        Notes({}, {"a": [1]}),
        Notes({}, {"a": "ab"}),
        Notes([("a", 1.0)]),
        {"a": 1.0},
    ],
)
def test_notes_that_are_not_well_formed_are_named(notes):
    class Odd(Length):
        def prepare(self, trajectories, policy):
            return notes

    with pytest.raises(PluginError, match=r"gave .* from prepare.*Notes"):
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
        ("def f(completions, log_extra): log_extra('a', [1])", "a value for each of the 2 complet"),
        ("def f(completions, log_metric): log_metric('a', 'b')", "Give a name and a finite number"),
        (
            "def f(trajectory): return 'good'",
            "the function f returned 'good', which is not a finite",
        ),
        ("def f(trajectory): pass", "the function f returned None, which is not a finite number"),
        ("def f(trajectory): return 1 / 0", r"the function f on question 'q1' raised ZeroDivision"),
        ("def f(trajectory, nowhere): pass", "takes 'nowhere', which is not a column of .*level"),
        ("def f(completions): return [1.0]", "returned 1 numbers for 2 completions"),
        ("def f(completions): return 1.0", "returned a float for 2 completions"),
        ("def f(completions): return ['a', 'b']", "returned 'a', which is not a finite number"),
        ("def f(x): pass", r"f takes \(x\), and a reward takes an attempt: write 'def f\(trajec"),
        ("def f(completions, trainer_state): pass", "f takes 'trainer_state', which only TRL's"),
        ("def f(completions, environments): pass", "Write 'environments=None' if the function can"),
        ("def f(environments, **rest): pass", "as its get_reward, and add EnvironmentOutcome"),
        ("async def f(trajectory): pass", "f is async, which only a reward of a batch may be"),
        ("f = lambda trajectory: 1.0", r"rewards\[0\]: a lambda has no name"),
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
    plain, own = (rollout.scheme.messages(question, chat) for question in (QUESTION, asked))
    assert [message["role"] for message in own] == ["system", "user"]
    assert own[0]["content"].startswith("Be brief.")
    assert "<|im_end|>" not in own[0]["content"]
    assert own[0]["content"].endswith(f"\n\n{plain[0]['content']}")
    assert own[1:] == plain[1:]
    alone = Rollout(segmenter(instructions=""), [google]).scheme.messages(asked, chat)
    assert alone[0]["content"].startswith("Be brief.")
    assert len(alone[0]["content"]) < 40
