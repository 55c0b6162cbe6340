"""OpenEnv's servers: sessions in turn, what breaks in them, and how long a run waits."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pydantic
import pytest
from jsonschema import Draft202012Validator

from turnrl import DataError, Question, RecipeError, Rollout, ToolCall, ToolError, call_tools
from turnrl.agent.running import on_loop
from turnrl.cli import main
from turnrl.plugin.errors import TrajectoryLost
from turnrl.runs import record
from turnrl.testing import ScriptedEngine, check_tool
from turnrl_environments import OpenEnv
from turnrl_environments.client import Connection
from turnrl_segmenters import Action

HERE = Path(__file__).parent
QUESTION = Question("q", "Go.", metadata={"seed": 7})


class Served:
    """A server in a process of its own."""

    def __init__(self, sessions, port=None):
        self.sessions = sessions
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.start()

    def start(self):
        command = [sys.executable, str(HERE / "lift_server.py"), str(self.port), str(self.sessions)]
        self.process = subprocess.Popen(command)
        until = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server did not begin"
                time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve():
    begun = []

    def begin(sessions=1):
        begun.append(Served(sessions))
        return begun[-1]

    yield begin
    for server in begun:
        server.kill()


def play(chat, tool, says, count=1, size=1, turns=6, **limits):
    """The attempts of a scripted policy, each at a question of its own seed."""
    policy = says if callable(says) else lambda session, turn: says[turn % len(says)]
    rollout = Rollout(
        Action(turns, "text"), [tool], **{"max_turn_tokens": 40, "max_tokens": 4000, **limits}
    )
    rollout.check(chat)
    questions = [Question(f"seed {n}", "Go.", metadata={"seed": n}) for n in range(count)]
    with rollout.running_tools():
        engine = ScriptedEngine(chat.tokenizer, policy)
        return rollout.begin(engine, chat, questions, size, (0,), 0).result()


def play_one(chat, tool, says, **options):
    """The attempt of one."""
    ((trajectory,),) = play(chat, tool, says, **options).trajectories
    return trajectory


def test_an_attempt_has_a_session_that_pays_by_the_step_and_ends_the_attempt(chat, serve):
    tool = OpenEnv(serve().url, {"top": 2, "name": "Paternoster"})
    trajectory = play_one(chat, tool, ["up", "down", "up", "up", "up"])
    assert trajectory.ended_by == "tool"
    assert "Go.\n\nPaternoster 0 at 0 of 2." in chat.tokenizer.decode(trajectory.sample.prompt_ids)
    # a reward of null pays nothing
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 0.0, -0.1, 1.0]
    assert [turn.results[0].content for turn in trajectory.turns] == ["At 1.", "At 0.", "At 1.", ""]
    assert trajectory.figures == {
        "steps": 4,
        "earned": pytest.approx(0.8),
        "ended": 1,
        "truncated": 0,
    }
    good = [{"go": "up", "floors": 3}]
    check_tool(tool, good, [{"go": "left"}, {"floors": 1}, {"go": "up", "x": 1}], QUESTION)


def test_the_tools_spec_follows_the_servers_action_schema(serve):
    url = serve().url
    spec = on_loop(OpenEnv(url)._describe_tool())
    assert (spec.name, spec.description) == ("step", "Move the lift.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "go": {
                "description": "Where to go.",
                "enum": ["up", "down", "crash", "hang", "blur"],
                "type": "string",
            },
            "floors": {"default": 1, "maximum": 3, "minimum": 1, "type": "integer"},
        },
        "required": ["go"],
        "additionalProperties": False,
    }
    ride = OpenEnv(url + "/", description="Ride.")
    assert on_loop(ride._describe_tool()).description == "Ride."


class Page(BaseHTTPRequestHandler):
    """The page of a server whose action has a default with a title, and a type of its own twice."""

    class Move(pydantic.BaseModel):
        class Place(pydantic.BaseModel):
            title: str = ""
            inside: list[Page.Move.Place] = []

        start: Place
        note: dict[str, object] = {"title": "x", "a": 1}

    def do_GET(self):
        Page.Move.model_rebuild()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"action": Page.Move.model_json_schema()}).encode())

    def log_message(self, *about):
        """Say nothing."""


def test_an_action_schema_keeps_its_defaults_and_recursive_types():
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        tool = OpenEnv(f"http://127.0.0.1:{server.server_port}")
        spec = on_loop(tool._describe_tool())
    assert spec.parameters["properties"]["note"]["default"] == {"title": "x", "a": 1}
    schema = Draft202012Validator(spec.parameters)
    assert schema.is_valid({"start": {"title": "a", "inside": [{"title": "b"}]}})
    assert not schema.is_valid({"start": {"inside": [{"title": 3}]}})


@pytest.mark.parametrize("lockstep", [True, False])
def test_any_number_of_attempts_are_played_in_turn(chat, serve, lockstep):
    tool = OpenEnv(serve(4).url, {"top": 2}, capacity=4)
    attempts = play(chat, tool, ["up"], count=4, size=3, lockstep=lockstep)
    assert attempts.restarted == 0
    every = [trajectory for group in attempts.trajectories for trajectory in group]
    assert {trajectory.ended_by for trajectory in every} == {"tool"}


def test_a_full_server_is_waited_for_and_then_named(chat, serve):
    tool = OpenEnv(serve().url, wait_s=1.0)
    on_loop(tool.start())

    async def visit():
        other = await Connection.open(tool.url, 9)
        try:
            with pytest.raises(ToolError, match=r"does not answer \(Server at capacity.*capacity"):
                await tool.open(QUESTION)
            opening = asyncio.create_task(tool.open(QUESTION))
            await asyncio.sleep(0.3)
        finally:
            await other.close()
        await (await opening).close()

    on_loop(visit())


def test_refused_actions_are_the_policys_mistake_and_server_failures_are_not(chat, serve):
    tool = OpenEnv(serve().url)

    def calls(*arguments):
        steps = [ToolCall("step", each) for each in arguments]
        return on_loop(call_tools([tool], QUESTION, [steps]))[0]

    # the schema of the action refuses it before, so it has to be asked behind its back
    on_loop(tool.start())
    tool.specs[0].parameters["properties"]["go"].pop("enum")
    wrong, right = calls({"go": "left"}, {"go": "up"})
    assert (wrong.ok, right.ok) == (False, True)
    assert wrong.content.startswith("go: Input should be 'up', 'down', 'crash'")
    with pytest.raises(TrajectoryLost, match=r"answered to step: EXECUTION_ERROR: the rope. See"):
        calls({"go": "crash"})
    # an observation that is not valid has the code of an action that is not
    with pytest.raises(TrajectoryLost, match="answered to step: VALIDATION_ERROR: text: Input"):
        calls({"go": "blur"})
    message = "SESSION_ERROR: .*ValueError.* into the types of the action"
    with pytest.raises(TrajectoryLost, match=message):
        calls({"go": "up", "floors": 2})
    with pytest.raises(TrajectoryLost, match="answered to reset: EXECUTION_ERROR: a lift without"):
        play_one(chat, OpenEnv(tool.url, {"top": -1}), ["up"])


def test_a_session_is_dropped_after_a_time_out_and_its_answer_is_never_read(chat, serve):
    tool = OpenEnv(serve().url, step_timeout_s=0.5)
    words = iter(["up", "hang", "up", "down", "down", "up", "down", "down"])
    trajectory = play_one(chat, tool, lambda session, turn: next(words), turns=3)
    # its server is full until the step is done
    assert [turn.results[0].content for turn in trajectory.turns[:2]] == ["At 1.", "At 0."]
    assert trajectory.figures["steps"] == 3


def test_attempts_of_a_server_that_is_killed_begin_again(chat, serve, capfd):
    server, begun = serve(4), []

    def says(session, turn):
        if turn == 1 and not begun:
            begun.append(1)
            server.kill()
            threading.Timer(1.0, server.start).start()
        return "up"

    tool = OpenEnv(server.url, capacity=4)
    attempts = play(chat, tool, says, count=3, size=4)
    every = [trajectory for group in attempts.trajectories for trajectory in group]
    assert [trajectory.figures["steps"] for trajectory in every] == [3] * 12
    assert attempts.restarted == 4
    err = capfd.readouterr().err
    assert f"turnrl: environment {server.url} does not answer (" in err
    assert "the run waits for it, 300 s at most (wait_s)" in err
    assert "answers again after" in err


def test_a_server_that_stays_away_ends_the_run_with_the_next_step(chat, serve):
    server = serve()

    def says(session, turn):
        if turn == 1:
            server.kill()
        return "up"

    message = r"does not answer \(.*\). turnrl waited 1 s for it. Start the server, or correct"
    with pytest.raises(ToolError, match=message):
        play_one(chat, OpenEnv(server.url, wait_s=1), says)
    with pytest.raises(ToolError, match=r"does not answer .* Start the server, or correct OpenEnv"):
        Rollout(Action(), [OpenEnv(server.url)]).check(chat)


def test_a_cancelled_run_does_not_wait_for_its_server(chat, serve):
    server = serve()
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "up")
    rollout = Rollout(Action(3, "text"), [OpenEnv(server.url)], max_tokens=4000)
    rollout.check(chat)
    server.kill()
    work = rollout.begin(engine, chat, [QUESTION], 1, (0,), 0)
    time.sleep(0.5)
    began = time.monotonic()
    work.cancel()
    assert time.monotonic() - began < 5


def test_reset_gets_the_seed_the_options_and_the_columns(chat, serve):
    tool = OpenEnv(serve().url, {"top": 9}, columns=["name"], observe=lambda seen: seen["text"][:8])
    question = Question("q", "Go.", metadata={"seed": 5, "name": "Fox", "floor": 2})
    rollout = Rollout(Action(1, "text"), [tool], max_tokens=4000)
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "up")
    ((trajectory,),) = rollout.play(engine, chat, [question], 1, (0,))
    assert "Go.\n\nFox 5 at<" in chat.tokenizer.decode(trajectory.sample.prompt_ids)
    with pytest.raises(DataError, match="needs name to begin, and question 'q' does not say it"):
        rollout.play(engine, chat, [QUESTION], 1, (0,))


@pytest.mark.slow
def test_the_recipe_of_the_page_runs(serve, tmp_path, monkeypatch):
    page = (HERE.parent / "docs" / "howto" / "environments.md").read_text()
    (recipe,) = re.findall("<!-- server.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall("^turnrl (fit quickstart server.yaml .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    server = serve(sessions=3)
    Path("server.yaml").write_text(recipe.replace("http://localhost:8000", server.url))
    words = [*shlex.split(command), "--model.rollout.max_turn_tokens", "16"]
    assert main(words) == 0
    (row, *_) = record.read("runs/server/version_0/record")
    assert {figure["name"] for figure in row["figures"]} == {
        "steps",
        "earned",
        "ended",
        "truncated",
    }
    server.kill()
    assert main(words) == 1


def test_a_server_of_another_kind_is_named(chat, serve):
    url = serve().url
    with pytest.raises(ToolError, match=r"has no page /schema with the properties of an action"):
        Rollout(Action(), [OpenEnv(f"{url}/elsewhere")]).check(chat)
    tool = OpenEnv(url)
    on_loop(tool.start())
    tool.url = f"{url}/elsewhere"
    with pytest.raises(ToolError, match=r"elsewhere/ws is no WebSocket of OpenEnv \(status 404\)"):
        on_loop(tool.start())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "OpenEnv.url is 'localhost:8000'; it must look like"),
        ({"url": "https://there/?token=hunter2"}, "OpenEnv.url holds a user, a password"),
        ({"capacity": 0}, "OpenEnv.capacity is 0; it must be at least 1"),
        ({"observe": "no_such.text"}, "observe is 'no_such.text', which cannot be imported"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message) as refused:
        OpenEnv(**{"url": "http://localhost:1", **settings})
    assert "hunter2" not in str(refused.value)


def test_without_websockets_the_line_that_installs_them_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    with pytest.raises(RecipeError, match=r"Run \"pip install '\.\[openenv\]'\""):
        OpenEnv("http://localhost:1")


def test_a_function_that_cannot_read_an_observation_loses_an_attempt_and_not_the_run(chat, serve):
    threads, url = [], serve(sessions=2).url

    def read(seen):
        threads.append(threading.current_thread().name)
        if len(threads) == 2:
            raise KeyError("words")
        return seen["text"]

    attempts = play(chat, OpenEnv(url, observe=read, capacity=2), ["up"], size=2, turns=2)
    assert attempts.restarted == 1
    assert "turnrl-rollout" not in threads  # the event loop of all collections

    def never(seen):
        raise KeyError("words")

    message = r"in observe, after reset raised KeyError: 'words' \(test_openenv.py:\d+\)\. An att"
    with pytest.raises(TrajectoryLost, match=message):
        play_one(chat, OpenEnv(url, observe=never), ["up"], max_restarts=1)
