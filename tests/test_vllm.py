"""`VLLM` against a stand-in for vLLM, and, where there is one, against vLLM itself.

The slow tests need an interpreter with vLLM: `TURNRL_TEST_VLLM_PYTHON=.../bin/python`.
"""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from lightning import Callback
from safetensors.torch import load_file

import turnrl_vllm.started
from nodes import free_port
from nursery import command, python
from serving import (
    IGNORE_PEFT_WARNING,
    PROMPT,
    STARTER,
    TURN,
    VLLM_PYTHON,
    StandIn,
    check_record,
    check_turn,
    intercept,
    needs_vllm,
    perturb,
    refusal,
    sampled_tokens,
    save_recipe,
    stand_ins,
    trained_policy,
    trained_rows,
    turn,
    turns,
)
from turnrl import (
    Completion,
    EngineError,
    Lora,
    Policy,
    RecipeError,
    Sampling,
    Surroundings,
    build,
    on_loop,
)
from turnrl.cli import main
from turnrl.servers import Unavailable
from turnrl.testing import check_engine
from turnrl_servers import pool as pool_of_servers
from turnrl_servers.folders import Together
from turnrl_vllm.engine import VLLM

pytestmark = IGNORE_PEFT_WARNING
WINDOW = ("--max-model-len", "2048")
"""A stand-in's option for the turns of a run."""


@pytest.fixture
def start_stand_in(tiny_model):
    """Starts stand-ins, which end with the test."""
    with stand_ins(tiny_model) as start:
        yield start


@pytest.fixture
def start_engine():
    """Starts engines that sample a policy with some stand-ins, and closes them after the test."""
    engines: list[VLLM] = []

    def start(policy: Policy, *servers: StandIn, **settings: Any) -> VLLM:
        urls = [server.url for server in servers]
        engine = VLLM(url=urls, **{"patience_s": 20, **settings})
        engines.append(engine)
        engine.start(policy, 64)
        return engine

    yield start
    for engine in engines:
        engine.close()


# ------------------------------------------------------------------------ the contract


@pytest.mark.slow  # SGLang's is not
@pytest.mark.parametrize("whole", [False, True])
def test_the_engine_keeps_its_contract(start_stand_in, tiny_model, whole):
    policy = trained_policy(tiny_model, whole)
    engine = VLLM(url=start_stand_in().url)
    engine.check(policy, 64)
    check_engine(engine, policy)
    assert engine.in_force["sampler"] == "vLLM 0.0.0, 1 server"


@pytest.mark.parametrize("whole", [False, True])
def test_each_version_samples_with_its_own_weights(start_stand_in, start_engine, tiny_model, whole):
    policy = trained_policy(tiny_model, whole)
    engine = start_engine(policy, start_stand_in())
    session = None
    for version in (0, 1, 3, 3):  # the last one, say, because another checkpoint was loaded
        engine.sync(version)
        done = on_loop(turn(engine.open(PROMPT)))
        assert done.version == version
        check_turn(policy, done)
        if session is not None:  # two versions are kept, whatever their numbers
            assert on_loop(turn(session)).version <= version
        session = engine.open(PROMPT)
        perturb(policy, 0.5)


def test_a_session_continues_with_its_own_adapter_while_that_is_kept(start_stand_in, tiny_model):
    policy = trained_policy(tiny_model)
    engine = VLLM(url=start_stand_in().url, keeps=2)
    engine.start(policy, 64)
    engine.sync(0)
    session = engine.open(PROMPT)
    before = {name: weight.clone() for name, weight in policy.network.named_parameters()}
    perturb(policy)
    engine.sync(1)
    done = on_loop(turn(session))
    perturb(policy)
    engine.sync(2)
    with pytest.raises(RuntimeError, match="weights are gone"):
        on_loop(turn(session))
    (server,) = engine.pool.servers
    home = engine.weights.folder
    assert {name.split("-")[-2] for name in server.has} == {"1", "2"}
    assert {folder.name for folder in home.iterdir()} == server.has
    engine.close()
    assert not home.exists()
    policy.network.load_state_dict(before, strict=False)
    assert done.version == 0
    check_turn(policy, done)


def test_a_server_that_took_weights_but_answered_too_late_is_asked_again(
    start_stand_in, start_engine, tiny_model, monkeypatch
):
    policy = trained_policy(tiny_model)
    engine = start_engine(policy, start_stand_in())

    async def first_is_late(path, answer):
        if paths.count("/v1/load_lora_adapter") == 1:
            raise Unavailable("timed out")

    paths = intercept(monkeypatch, engine.pool.servers[0], first_is_late)
    engine.sync(0)
    assert paths.count("/v1/load_lora_adapter") == 2
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))


def test_a_turn_that_the_server_breaks_off_is_asked_for_again(
    start_stand_in, start_engine, tiny_model, monkeypatch
):
    engine = start_engine(trained_policy(tiny_model), start_stand_in())
    engine.sync(0)

    async def abort_first(path, answer):
        if len(paths) == 1:
            answer["choices"][0] |= {"finish_reason": "abort", "token_ids": [1, 2]}

    paths = intercept(monkeypatch, engine.pool.servers[0], abort_first)
    done = on_loop(turn(engine.open(PROMPT)))
    assert len(done.token_ids) == TURN.max_tokens
    assert paths.count("/v1/completions") == 3  # the server is compared again in between


# ------------------------------------------------------------------- servers that are refused


class Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    def log_message(self, *_):
        pass


def test_a_server_that_cannot_serve_is_reported_before_weights_load(
    start_stand_in, tiny_model, monkeypatch
):
    policy = Policy(str(tiny_model), lora=Lora(r=32))
    away = f"http://127.0.0.1:{free_port()}"
    assert f"vLLM at {away} does not answer" in refusal(VLLM(url=away), policy)
    short = start_stand_in("--max-model-len", "48")
    assert "has a window of 48 tokens" in refusal(VLLM(url=short.url), policy)
    assert "serves base." in refusal(VLLM(url=short.url, base="other"), policy)
    message = refusal(VLLM(url=start_stand_in("--no-adapters").url), policy)
    assert "cannot take an adapter of rank 32 (status 404: Not Found)" in message
    assert "--enable-lora, --max-lora-rank, and in its environment VLLM_ALLOW" in message
    message = refusal(VLLM(url=start_stand_in().url), policy)
    assert "cannot take an adapter of rank 32" in message
    assert "LoRA rank 32 is greater than max_lora_rank 16" in message
    assert message.endswith("Start it with a larger --max-lora-rank, or lower model.policy.lora.r.")
    locked = start_stand_in("--api-key", "a-secret-of-mine", "--max-lora-rank", "32")
    monkeypatch.setenv("VLLM_API_KEY", "a-wrong-key")
    message = refusal(VLLM(url=locked.url), policy)
    assert "refuses the key" in message
    assert "a-wrong-key" not in message
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-of-mine")
    VLLM(url=locked.url).check(policy, 64)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        assert "is no vLLM" in refusal(VLLM(url=place), policy)
    finally:
        server.shutdown()
        server.server_close()
    assert policy.network is None


def test_another_tokenizer_is_refused(start_stand_in, tiny_model, tmp_path):
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    message = refusal(
        VLLM(url=start_stand_in(model=other).url), Policy(str(tiny_model), lora=Lora())
    )
    assert "whose tokenizer reads a text as other tokens" in message


def test_a_server_that_returns_raw_log_probabilities_is_refused(
    start_stand_in, start_engine, tiny_model
):
    engine = start_engine(trained_policy(tiny_model), start_stand_in("--raw-logprobs"))
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        engine.sync(0)


def test_a_server_that_came_back_with_a_lower_rank_is_refused(
    start_stand_in, start_engine, tiny_model
):
    server = start_stand_in()
    engine = start_engine(trained_policy(tiny_model), server)
    server.kill()
    server.start("--max-lora-rank", "2")
    with pytest.raises(EngineError, match="larger --max-lora-rank"):
        engine.sync(0)


def test_another_base_is_refused_by_its_log_probabilities(
    start_stand_in, start_engine, tiny_model, tmp_path
):
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    base = Policy(str(tiny_model))
    perturb(base, 1.0)
    base.network.save_pretrained(other)
    engine = start_engine(trained_policy(tiny_model), start_stand_in(model=other))
    with pytest.raises(EngineError, match="It has other weights"):
        engine.sync(0)


def test_a_base_that_only_the_learner_quantises_is_refused(
    start_stand_in, start_engine, tiny_model
):
    policy = Policy(str(tiny_model), quantization="nf4", lora=Lora(r=4))
    perturb(policy)
    engine = start_engine(policy, start_stand_in(), max_logprob_gap=1e-6)
    message = r"learns on a base in 4 bits .*raise model\.engine\.max_logprob"
    with pytest.raises(EngineError, match=message):
        engine.sync(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither url nor python"),
        ({"url": "http://a:1", "python": "python"}, "both url and python"),
        ({"url": "http://a:1/v1"}, "without /v1"),
        ({"url": []}, "give an address"),
        ({"python": "python", "base": "mine"}, "what a given server serves"),
        ({"url": ["http://a:1", "http://a:1"]}, "several different ones"),
        ({"url": "a:1"}, "must look like"),
        ({"url": "http://me:pass@a:1"}, "without /v1, a password"),
        ({"url": "http://a:1", "arguments": ["--x"]}, "for a server that the run starts"),
        ({"python": "p", "arguments": ["--x 1"]}, "as two items: '--x', '1'"),
        ({"url": "http://a:1", "keeps": 0}, "keeps"),
        ({"url": "http://a:1", "timeout_s": -1}, "timeout_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        VLLM(**settings)


def test_an_interpreter_without_vllm_is_refused(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vllm").mkdir()  # an environment of that name, as in the how-to, is no package
    policy = Policy(str(tiny_model), lora=Lora())
    assert "has no package vllm" in refusal(VLLM(python=sys.executable), policy)
    assert "no Python that runs here" in refusal(VLLM(python="/nowhere/python"), policy)
    message = refusal(VLLM(python=sys.prefix), policy)
    assert f"is a folder. Give the path of the interpreter in it: {sys.prefix}/bin/pyt" in message
    with pytest.raises(RecipeError, match="no Python that runs here"):  # nothing is started
        VLLM(python="/nowhere/python").rehearsal()


# ------------------------------------------------------------------------------- outages


def converse_during(
    engine: VLLM, disturb: Callable[[], None] = lambda: None, turns_each: int = 3
) -> list[tuple[int, list[Completion]]]:
    """Six sessions of several turns, while something is done to the servers. When exactly it
    happens is left to chance: no turn may suffer from it at any moment.

    Args:
        engine: A started engine.
        disturb: What is done, in a thread.
        turns_each: Turns of each session.
    Returns:
        Each session's number, and its turns.
    """

    async def converse(n: int):
        session = engine.open([*PROMPT, n])
        done = [await turn(session)]
        for k in range(1, turns_each):
            await asyncio.sleep(0.05)
            done.append(await turn(session, [k]))
        return n, done

    async def scenario():
        disturbed = asyncio.get_running_loop().run_in_executor(None, disturb)
        conversations = await asyncio.gather(*(converse(n) for n in range(6)))
        await disturbed
        await engine.drain()
        return conversations

    return on_loop(scenario())


def check_conversations(
    policy: Policy, conversations: Sequence[tuple[int, Sequence[Completion]]], version: int
) -> None:
    """Every token of every turn has the learner's log-probability, after exactly its history."""
    for n, done in conversations:
        history = [*PROMPT, n]
        for k, completion in enumerate(done):
            history += [k] if k else []
            assert completion.version == version
            assert len(completion.token_ids) == TURN.max_tokens
            check_turn(policy, completion, history)
            history += completion.token_ids


def test_a_server_that_dies_and_comes_back_is_waited_for(
    start_stand_in, start_engine, tiny_model, capfd
):
    policy, server = trained_policy(tiny_model), start_stand_in()
    engine = start_engine(policy, server)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        server.kill()
        time.sleep(0.3)
        server.start()

    check_conversations(policy, converse_during(engine, disturb), 0)
    server.kill()  # nobody asks it meanwhile
    server.start()
    check_conversations(policy, converse_during(engine, turns_each=1), 0)
    server.kill()
    server.start("--raw-logprobs")
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        converse_during(engine, turns_each=1)
    server.kill()
    server.start()
    perturb(policy)
    engine.sync(1)
    check_conversations(policy, converse_during(engine, turns_each=1), 1)
    assert "answers again" in capfd.readouterr().err


def test_a_server_that_was_restarted_gets_all_weights_again(
    start_stand_in, start_engine, tiny_model
):
    policy, server = trained_policy(tiny_model, whole=True), start_stand_in()
    perturb(policy, 0.5)
    engine = start_engine(policy, server)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        server.kill()
        server.start()

    check_conversations(policy, converse_during(engine, disturb), 0)


@pytest.mark.parametrize("samples_ahead", [False, True])
def test_turns_of_a_server_that_was_restarted_unnoticed_are_not_learned_from(
    start_stand_in, start_engine, tiny_model, samples_ahead
):
    policy, server = trained_policy(tiny_model, whole=True), start_stand_in()
    perturb(policy, 0.5)
    engine = start_engine(policy, server)
    engine.sync(0)
    on_loop(turn(engine.open(PROMPT)))
    engine.rest()
    server.kill()
    server.start()
    on_loop(turn(engine.open(PROMPT)))  # with the weights of its start
    with pytest.raises(EngineError, match="was restarted between two turns"):
        engine.sync(1) if samples_ahead else engine.rest()


def test_sessions_of_a_server_that_dies_continue_at_another(
    start_stand_in, start_engine, tiny_model, capfd
):
    policy, servers = trained_policy(tiny_model), [start_stand_in(), start_stand_in()]
    engine = start_engine(policy, *servers)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        servers[0].kill()

    check_conversations(policy, converse_during(engine, disturb), 0)
    perturb(policy)
    engine.sync(1)
    check_conversations(policy, converse_during(engine, turns_each=1), 1)
    assert "its sessions move to another server" in capfd.readouterr().err


def test_a_server_that_hangs_is_left_until_it_answers_again(
    start_stand_in, start_engine, tiny_model, monkeypatch
):
    # constants, because no run has a reason to set them
    monkeypatch.setattr(pool_of_servers, "_CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(pool_of_servers, "_HEALTH_TIMEOUT_S", 0.5)
    policy, servers = trained_policy(tiny_model), [start_stand_in(), start_stand_in()]
    engine = start_engine(policy, *servers)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        servers[1].hang()

    check_conversations(policy, converse_during(engine, disturb), 0)
    paths = intercept(monkeypatch, engine.pool.servers[1])
    perturb(policy)
    engine.sync(1)  # and does not wait until the other one has not taken an adapter
    assert set(paths) == {"/health"}
    servers[1].go_on()
    perturb(policy)
    engine.sync(2)
    assert "/v1/load_lora_adapter" in paths
    check_conversations(policy, converse_during(engine), 2)


def test_turns_do_not_wait_in_sequence_for_a_lost_server(
    start_stand_in, start_engine, tiny_model, monkeypatch
):
    """Each would give it the adapter again, and wait for as long as that may take."""
    restarted = start_stand_in()
    engine = start_engine(trained_policy(tiny_model), restarted)
    engine.sync(0)
    restarted.kill()
    restarted.start()
    (server,) = engine.pool.servers

    async def first_is_lost(path, answer):
        if path == "/v1/load_lora_adapter" and paths.count(path) == 1:
            await asyncio.sleep(0.2)  # the others wait by now
            raise Unavailable("timed out")

    paths = intercept(monkeypatch, server, first_is_lost)
    server.forget()
    done = on_loop(turns([engine.open(PROMPT) for _ in range(5)]))
    assert {completion.version for completion in done} == {0}
    assert paths[:2] == ["/v1/load_lora_adapter", "/health"]
    assert paths.count("/v1/load_lora_adapter") == 2


def test_servers_that_stay_away_stop_the_run(start_stand_in, start_engine, tiny_model):
    server = start_stand_in()
    engine = start_engine(trained_policy(tiny_model), server, patience_s=1)
    engine.sync(0)
    with pytest.raises(EngineError, match=r"turnrl waited 1 s.*model\.engine\.patience_s"):
        converse_during(engine, server.kill)


def test_sessions_are_spread_over_servers_and_stay(start_stand_in, start_engine, tiny_model):
    servers = [start_stand_in(), start_stand_in()]
    engine = start_engine(trained_policy(tiny_model), *servers)
    engine.sync(0)
    sessions = [engine.open([*PROMPT, n]) for n in range(6)]
    on_loop(turns(sessions))
    on_loop(turns([*sessions, *(session.fork() for session in sessions)]))
    asked = []
    for server in servers:
        prompts = [p for p in server.listener.model.prompts if p[:4] == PROMPT]
        assert len(prompts) == 3 * 3  # two turns of each session, and one of its fork
        asked.append({prompt[4] for prompt in prompts})
    assert [*map(len, asked)] == [3, 3]
    assert asked[0].isdisjoint(asked[1])


# ------------------------------------------------------------------- a run, and its own server


@pytest.fixture
def interpreter(tmp_path, nursery, monkeypatch) -> Path:
    """An interpreter in whose environment `vllm` is the stand-in, which starts fast."""
    monkeypatch.setattr(turnrl_vllm.started, "_LOOK_EVERY_S", 0.05)
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import server_stand_in\n"
        "_, model, *rest = sys.argv[1:]\n"
        "server_stand_in.main(['--model', model, '--api-key', os.environ['VLLM_API_KEY'], *rest])\n"
    )
    for name, value in nursery.environment.items():
        monkeypatch.setenv(name, value)
    forked = " ".join(python(str(package / "main.py")))
    file = tmp_path / "python"
    file.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then shift 2; exec {forked} "$@"; fi\n'
        f'PYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n'
    )
    file.chmod(0o755)
    return file


def url_of(engine: VLLM) -> str:
    """The address of the server that an engine has started."""
    return engine.supply.started.url


def listening(url: str) -> psutil.Process:
    """The process that listens at an address."""
    port = int(url.rpartition(":")[2])
    listen = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN")
    return psutil.Process(next(c.pid for c in listen if c.laddr[1] == port))


def keepers() -> list[psutil.Process]:
    """What keeps the servers of this process."""
    children = psutil.Process().children()
    return [child for child in children if any("keeper.py" in word for word in child.cmdline())]


@pytest.mark.slow
def test_a_run_starts_its_server_restarts_it_and_ends_it(interpreter, tiny_model, tmp_path):
    policy = trained_policy(tiny_model)
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"), patience_s=60)
    engine.check(policy, 64)
    engine.start(policy, 64)
    engine.sync(0)
    url = url_of(engine)

    def disturb():
        time.sleep(0.2)
        listening(url).kill()

    check_conversations(policy, converse_during(engine, disturb), 0)
    last = listening(url)
    (log,) = (tmp_path / "shared").glob("*.log")
    assert "vLLM ended with exit code -9" in log.read_text()
    assert "it is started again" in log.read_text()
    engine.close()
    assert not last.is_running()
    assert not [*(tmp_path / "shared").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_server(interpreter, tiny_model, tmp_path, number):
    (tmp_path / "run.py").write_text(
        "import sys, time\n"
        "from turnrl import Lora, Policy\n"
        "from turnrl_vllm.engine import VLLM\n"
        "policy = Policy(sys.argv[1], lora=Lora(r=4))\n"
        "policy.load()\n"
        "engine = VLLM(python=sys.argv[2], folder=sys.argv[3])\n"
        "engine.start(policy, 64)\n"
        "print(engine.supply.started.url.rpartition(':')[2], flush=True)\n"
        "time.sleep(600)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "run.py", str(tiny_model), str(interpreter), str(tmp_path / "s")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    port = run.stdout.readline().decode().strip()
    left = [p for p in psutil.process_iter(["cmdline"]) if port in (p.info["cmdline"] or ())]
    assert len(left) == 2  # the server, and its keeper
    run.send_signal(number)
    run.wait()
    run.stdout.close()
    assert psutil.wait_procs(left, timeout=30)[1] == []


def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(
    interpreter, tiny_model, tmp_path
):
    broken(interpreter, "no room on the GPU")
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"))
    with pytest.raises(EngineError, match=r"(?s)ended while it was starting.*no room on the GPU"):
        engine.start(trained_policy(tiny_model), 64)
    engine.close()
    (log,) = (tmp_path / "shared").iterdir()
    assert log.read_text().count("no room on the GPU") == 1  # it would end so every time


def broken(interpreter: Path, message: str) -> None:
    """Let vLLM end with a message as soon as it starts."""
    program = interpreter.parent / "packages" / "vllm" / "entrypoints" / "cli" / "main.py"
    program.write_text(f"raise SystemExit({message!r})\n")


@pytest.fixture
def write_recipe(tiny_model, tmp_path, monkeypatch):
    """Writes `recipe.yaml`, with VLLM for its engine, into a folder that is now the working
    directory."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(save_recipe, tiny_model, "VLLM")


def answer_of(engine: VLLM, path: str):
    """What the server that an engine has started answers."""
    headers = {"Authorization": f"Bearer {engine.supply.started.key}"}
    return httpx2.get(f"{url_of(engine)}/{path}", headers=headers).json()


def is_asleep(engine: VLLM) -> bool:
    """Whether the server that an engine has started sleeps."""
    return answer_of(engine, "is_sleeping")["is_sleeping"]


def sleeps_and_samples(engine: VLLM, policy: Policy) -> None:
    """It sleeps after each collection, and acts with the right weights after each wake."""
    engine.start(policy, 64)
    (server,) = engine.pool.servers
    for version in range(3):
        engine.sync(version)
        for collection in range(2):  # the second one on the same weights, without a sync
            assert is_asleep(engine) == bool(collection)
            for done in on_loop(turns([engine.open(PROMPT) for _ in range(4)])):
                assert done.version == version
                check_turn(policy, done, within=2e-3)
            assert not is_asleep(engine)
            engine.rest()
            assert is_asleep(engine)
            # a server that sleeps for long closes its connections
            assert not server.connection._clients
        perturb(policy)
    assert engine.in_force["memory between collections"] == "given back"


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_server_sleeps_while_nothing_is_sampled(interpreter, tiny_model, tmp_path, whole):
    policy = trained_policy(tiny_model, whole)
    engine = VLLM(python=str(interpreter), sleeps=True)
    engine.check(policy, 64, Surroundings(tmp_path / "run"))
    sleeps_and_samples(engine, policy)
    assert answer_of(engine, "wakes") == 5  # of six collections the first finds it awake
    # all weights are read again, as nobody knows what a sleep has left of them
    assert len(answer_of(engine, "loads")) == (6 if whole else 3)
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ([], 0.92),
        (["--gpu-memory-utilization", "0.4"], 0.4),
        (["--max-num-seqs", "64", "--gpu-memory-utilization=0.25"], 0.25),
        (["--gpu-memory-utilization"], None),
        (["--gpu-memory-utilization", "half"], None),
        (["--kv-cache-memory-bytes", "8G"], None),
    ],
)
def test_the_memory_plan_accounts_for_what_a_server_uses(arguments, share):
    sleeps = VLLM(python="python", arguments=arguments)
    assert sleeps.beside(10**11) == (None if share is None else (int(share * 1e11), 3 * 10**9))
    awake = VLLM(python="python", arguments=arguments, sleeps=False)
    assert awake.beside(10**11) == (None if share is None else (int(share * 1e11),) * 2)
    assert VLLM(url="http://localhost:8000").beside(10**11) is None


def on_device(monkeypatch, kind: str) -> None:
    monkeypatch.setattr(Policy, "device", property(lambda _: torch.device(kind)))


def test_a_policy_on_a_gpu_lets_its_server_sleep(interpreter, tiny_model, tmp_path, monkeypatch):
    policy = trained_policy(tiny_model)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    engine = VLLM(python=str(interpreter))
    engine.check(policy, 64, Surroundings(tmp_path / "run"))
    with monkeypatch.context() as there:
        on_device(there, "cuda")
        engine.start(policy, 64)
    (keeper,) = keepers()
    assert "--enable-sleep-mode" in keeper.cmdline()
    engine.sync(0)
    engine.rest()
    assert is_asleep(engine)
    before = len(emptied)
    on_loop(turn(engine.open(PROMPT)))
    on_loop(turn(engine.open(PROMPT)))
    assert len(emptied) - before == 1  # the learner's cache, which vLLM takes
    engine.close()


@pytest.mark.parametrize(
    ("device", "sleeps", "wanted"),
    [("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True)],
)
def test_a_server_sleeps_if_the_policy_is_on_a_gpu_or_if_it_is_set(
    tiny_model, monkeypatch, device, sleeps, wanted
):
    class NotStarted(Exception):
        pass

    def start(*_, sleeps, **__):
        assert sleeps == wanted
        raise NotStarted

    # in place of a process
    monkeypatch.setattr("turnrl_vllm.supply.Started", start)
    on_device(monkeypatch, device)
    engine = VLLM(python=sys.executable, sleeps=sleeps)
    with pytest.raises(NotStarted):
        engine.start(Policy(str(tiny_model), lora=Lora()), 64)


@pytest.fixture
def sleeper(interpreter, tmp_path):
    """Makes an engine that has started a server and given it a version."""

    def make(policy: Policy, **settings) -> VLLM:
        engine = VLLM(python=str(interpreter), sleeps=True, **settings)
        engine.check(policy, 64, Surroundings(tmp_path / "run"))
        engine.start(policy, 64)
        engine.sync(0)
        return engine

    return make


@pytest.mark.slow
def test_a_server_that_is_gone_when_it_is_to_sleep_is_no_fault(sleeper, tiny_model):
    policy = trained_policy(tiny_model)
    engine = sleeper(policy, patience_s=60)
    listening(url_of(engine)).kill()
    engine.rest()
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))
    engine.close()


def test_a_sleep_that_is_interrupted_ends_with_the_next_turn(
    start_stand_in, start_engine, tiny_model, monkeypatch
):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # else vLLM refuses to sleep
    server = start_stand_in()
    engine = start_engine(trained_policy(tiny_model), server)
    engine.sync(0)

    async def interrupted() -> None:
        falls = asyncio.ensure_future(engine.pool.sleep())
        while not engine.pool.asleep:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the request is under way
        falls.cancel()
        await asyncio.gather(falls, return_exceptions=True)

    on_loop(interrupted())
    assert server.listener.model.asleep
    on_loop(turn(engine.open(PROMPT)))
    assert not server.listener.model.asleep


@pytest.mark.slow
def test_a_server_that_dies_in_its_sleep_is_started_again(sleeper, tiny_model):
    policy = trained_policy(tiny_model)
    engine = sleeper(policy, patience_s=60)
    engine.rest()
    listening(url_of(engine)).kill()
    time.sleep(1)
    with pytest.raises(StopIteration):  # it would take the memory that the learner has now
        listening(url_of(engine))
    check_conversations(policy, converse_during(engine), 0)
    engine.close()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sleepless", r"does not give its memory back .*no such allocator.*engine\.sleeps"),
        ("--wakeless", r"does not get its memory back .*out of memory.*--gpu-memory-utilization"),
        ("--forgetful", r"differ from the learner's by .* or an older adapter"),
    ],
)
def test_a_server_that_does_not_sleep_or_wake_well_stops_the_run(
    start_stand_in, start_engine, tiny_model, monkeypatch, option, message
):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    engine = start_engine(trained_policy(tiny_model), start_stand_in(option))
    engine.sync(0)

    async def sleep_and_sample() -> None:
        await engine.pool.sleep()
        await turn(engine.open(PROMPT))

    with pytest.raises(EngineError, match=message):
        on_loop(sleep_and_sample())


def learned_asleep(*words: str) -> set[bool]:
    """Train a recipe; whether its server slept during each step."""

    class Asleep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            steps.append(is_asleep(pl_module.engine))

    steps: list[bool] = []
    run = build([*words])
    run.trainer.callbacks.append(Asleep())
    run.trainer.fit(run.module, run.data)
    assert len(steps) > 1
    return set(steps)


@pytest.mark.slow
def test_a_run_that_samples_ahead_lets_its_server_stay_awake(write_recipe, interpreter):
    write_recipe(python=str(interpreter), sleeps=True)
    ahead = ("--trainer.max_epochs=2", "--model.max_staleness=1")
    assert learned_asleep("recipe.yaml", *ahead) == {False}


def test_a_run_keeps_the_log_of_its_server(write_recipe, interpreter, capfd):
    write_recipe(python=str(interpreter), sleeps=True)
    assert learned_asleep("recipe.yaml", "--trainer.max_epochs=1") == {True}
    assert "its log is runs/recipe/version_0/vllm.log" in capfd.readouterr().err
    assert Path("runs/recipe/version_0/vllm.log").is_file()
    assert keepers() == []


def test_the_doctor_starts_a_server_with_a_small_model(write_recipe, interpreter, capfd):
    write_recipe(python=str(interpreter))
    assert main(["doctor", "recipe.yaml"]) == 0
    printed = capfd.readouterr()
    sampling = r"pass  sampling +\d+ turns by VLLM on cpu; sampler: vLLM 0\.0\.0"
    assert re.search(sampling, printed.out)
    (log,) = re.findall(r"starting vLLM; its log is (\S+)", printed.err)
    assert not Path(log).exists()
    assert not Path("runs").exists()
    assert keepers() == []


@pytest.mark.slow
def test_a_server_that_is_not_started_again_stops_the_run_at_once(
    interpreter, tiny_model, tmp_path
):
    policy = trained_policy(tiny_model)
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"))
    engine.start(policy, 64)
    engine.sync(0)
    broken(interpreter, "the GPU is gone")
    server = listening(url_of(engine))

    async def sampled():
        server.kill()
        return await turn(engine.open(PROMPT))

    with pytest.raises(EngineError, match=r"(?s)started again in vain.*the GPU is gone"):
        on_loop(sampled())
    engine.close()


def test_a_run_trains_with_it_and_its_record_has_every_version(start_stand_in, write_recipe):
    write_recipe(url=start_stand_in(*WINDOW).url)
    built = build(["recipe.yaml"])
    assert built.module.objective.importance_cap == 2
    built.trainer.fit(built.module, datamodule=built.data)
    assert 0 < float(built.trainer.callback_metrics["train/logprob_gap"]) < 1e-4
    check_record(attempts=2 * 16)


def test_a_run_that_sampled_ahead_is_evaluated_without_its_server(start_stand_in, write_recipe):
    server = start_stand_in(*WINDOW)
    write_recipe(url=server.url)
    words = ["recipe.yaml", "--model.max_staleness=1"]
    built = build(words)
    built.trainer.fit(built.module, datamodule=built.data)
    server.kill()
    gone = build(words)
    with pytest.raises(
        RecipeError, match=r"score a run without it: turnrl eval RUN --model\.engine Slots"
    ):
        gone.trainer.validate(gone.module, datamodule=gone.data, verbose=False)
    other = build([*words, "--model.engine=Slots"])
    assert other.trainer.validate(other.module, datamodule=other.data, verbose=False)


def test_a_run_that_fails_leaves_no_weights_and_no_adapters(
    start_stand_in, write_recipe, monkeypatch
):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise KeyboardInterrupt

    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("tmp").absolute()))
    server = start_stand_in(*WINDOW)
    write_recipe(url=server.url)
    built = build(["recipe.yaml"])
    built.trainer.callbacks.append(Fails())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        built.trainer.fit(built.module, datamodule=built.data)
    assert not list(Path("tmp").glob("turnrl-weights-*"))
    models = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["base"]


def fit_in_two(nursery, strategy: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Train `recipe.yaml` in two processes."""
    two = ("--trainer.devices=2", f"--trainer.strategy={strategy}")
    return subprocess.run(
        command("fit", "recipe.yaml", *two, *options),
        env={**os.environ, **nursery.environment, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_processes_that_learn_together_share_the_versions_of_the_first(
    start_stand_in, write_recipe, nursery, strategy
):
    servers = [start_stand_in(*WINDOW) for _ in range(2)]
    write_recipe(url=[server.url for server in servers])
    ran = fit_in_two(nursery, strategy)
    assert ran.returncode == 0, ran.stderr
    check_record(attempts=2 * 16)
    saved = torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/adapter/adapter_model.safetensors")
    assert len(exported) == len(saved["state_dict"])
    for name, value in exported.items():
        inner = name.replace(".weight", ".default.weight")
        assert torch.equal(value, saved["state_dict"][f"policy.network.{inner}"])
    for server in servers:
        names = server.listener.model.loads
        assert [name.split("-")[4:] for name in names] == [["0", "0"], ["2", "0"], ["4", "0"]]
    assert not list(Path("runs").rglob("turnrl-weights-*"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_that_learn_together_sample_ahead(
    start_stand_in, write_recipe, nursery, strategy
):
    servers = [start_stand_in(*WINDOW, "--max-loras", "4") for _ in range(2)]
    write_recipe(url=[server.url for server in servers], keeps=2)
    ran = fit_in_two(nursery, strategy, "--model.max_staleness=1", "--trainer.max_epochs=4")
    assert ran.returncode == 0, ran.stderr
    trained = trained_rows()
    assert len(trained) == 4 * 16
    behind = set()
    for row in trained:
        for version, sampler, learner in sampled_tokens(row):
            behind.add(row["policy_version"] - version)
            assert version < row["policy_version"] or sampler == pytest.approx(learner, abs=1e-4)
    assert behind == {0, 2}  # an iteration has two steps


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_if_the_first_process_fails_the_others_end(
    start_stand_in, write_recipe, tmp_path, nursery, strategy
):
    # the first one fails while the others wait for the versions that it gives to the servers
    write_recipe(url=start_stand_in(*WINDOW).url, max_logprob_gap=0)

    def here() -> set[int]:
        return {p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)}

    before = here()
    ran = fit_in_two(nursery, strategy)
    assert ran.returncode == 1
    assert "and model.engine.max_logprob_gap is 0." in ran.stderr
    assert "stopped by" not in ran.stderr
    assert here() == before


def test_processes_that_share_one_policy_train_all_of_its_weights(
    start_stand_in, write_recipe, nursery
):
    write_recipe(whole=True, url=[start_stand_in(*WINDOW).url for _ in range(2)])
    ran = fit_in_two(nursery, "fsdp2")
    assert ran.returncode == 0, ran.stderr
    check_record(attempts=2 * 16)
    saved = torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/model/model.safetensors")
    assert exported.keys() <= {k.removeprefix("policy.network.") for k in saved["state_dict"]}
    for name, value in exported.items():
        assert torch.equal(value, saved["state_dict"][f"policy.network.{name}"])


def test_processes_meet_in_a_folder_of_this_run_and_this_start_alone(tmp_path):
    processes = torch.distributed
    processes.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        first, second = Together(tmp_path / "run"), Together(tmp_path / "run")
        folders = [first.make(), first.make(), second.make()]
        assert len({folder.name for folder in folders}) == 3  # adapters have their names
        for folder in folders:
            folder.rmdir()
        first.leave()
        second.leave()
        assert not [*(tmp_path / "run").iterdir()]
        (tmp_path / "file").touch()
        with pytest.raises(RecipeError, match=r"cannot be made .* Set model\.engine\.folder"):
            Together(tmp_path / "file")
    finally:
        processes.destroy_process_group()


def publish_together(rank: int, store: str, url: str, model: str) -> str:
    """Publish a version, as one of two processes. Returns the name of its weights."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    processes = torch.distributed
    processes.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(len(store))
    policy = trained_policy(model)
    engine = VLLM(url=url)
    engine.check(policy, 64, Surroundings(Path(store).parent / "runs", 2))
    engine.start(policy, 64)
    if rank == 0:
        time.sleep(1)  # the other one waits, however long it takes
    engine.sync(0)
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))
    name = engine.weights.newest.name
    processes.barrier()
    engine.close()
    processes.destroy_process_group()
    return name


@pytest.mark.slow
def test_runs_of_the_same_folder_and_port_share_no_name(start_stand_in, tiny_model, tmp_path):
    """The second one would sample with the adapter of the first, which has its name already."""
    url, names = start_stand_in().url, []
    script = (
        "import sys, test_vllm; rank, *rest = sys.argv[1:]\n"
        "print(test_vllm.publish_together(int(rank), *rest))"
    )
    for run in range(2):
        arguments = [str(tmp_path / ("store" + "x" * run)), url, str(tiny_model)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
                text=True,
            )
            for rank in range(2)
        ]
        both = [process.communicate(timeout=120)[0].split()[-1] for process in processes]
        assert both[0] == both[1]
        names.append(both[0])
    assert names[0] != names[1]
    assert not [*(tmp_path / "runs").iterdir()]


@pytest.mark.slow
def test_a_forked_child_of_a_killed_run_keeps_no_server(interpreter, tiny_model, tmp_path):
    """It has the other end of the keeper's input too."""
    (tmp_path / "run.py").write_text(
        "import os, sys, time\n"
        "from serving import trained_policy\n"
        "from turnrl_vllm.engine import VLLM\n"
        "policy = trained_policy(sys.argv[1])\n"
        "engine = VLLM(python=sys.argv[2])\n"
        "engine.start(policy, 64)\n"
        "if child := os.fork():\n"
        "    print(engine.supply.started.url, child, flush=True)\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "run.py", str(tiny_model), str(interpreter)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    url, child = run.stdout.readline().split()
    server = listening(url)
    run.kill()
    run.wait()
    run.stdout.close()
    try:
        assert psutil.wait_procs([server], timeout=30)[1] == []
        assert psutil.pid_exists(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_the_end_of_a_log_has_nothing_of_an_earlier_server(interpreter, tiny_model, tmp_path):
    broken(interpreter, "error: an argument that there is not")
    engine = VLLM(python=str(interpreter))
    policy, folder = trained_policy(tiny_model), tmp_path / "run"
    engine.check(policy, 64, Surroundings(folder))
    folder.mkdir()
    earlier = "torch.OutOfMemoryError: CUDA out of memory\n"
    (folder / "vllm.log").write_text(earlier + "more\n" * 20)
    with pytest.raises(EngineError, match="an argument that there is not") as error:
        engine.start(policy, 64)
    assert "CUDA" not in str(error.value)
    assert "--gpu-memory" not in str(error.value)
    broken(interpreter, "ValueError: Free memory on device is less than desired")
    with pytest.raises(EngineError, match=r"starting\. Lower --gpu-memory-utilization in model\."):
        engine.start(policy, 64)


def test_the_doctor_refuses_an_engine_that_processes_cannot_share(
    write_recipe, interpreter, capsys
):
    write_recipe(python=str(interpreter))
    words = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    assert main(["doctor", "recipe.yaml", *words]) == 1
    assert "python would start a server for each of 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize(("strategy", "whole"), [("ddp", False), ("fsdp2", True)])
def test_the_doctor_passes_a_server_that_processes_can_share(
    start_stand_in, write_recipe, capsys, strategy, whole
):
    write_recipe(whole, url=start_stand_in(*WINDOW).url)
    main(["doctor", "recipe.yaml", "--trainer.devices=2", f"--trainer.strategy={strategy}"])
    shown = capsys.readouterr().out
    assert re.search(
        r"^pass  sampler +VLLM can sample this model \(vLLM 0\.0\.0, 1 server\)$",
        shown,
        re.MULTILINE,
    ), shown


def test_the_doctor_refuses_settings_that_fsdp_cannot_shard(write_recipe, capsys):
    write_recipe(url="http://127.0.0.1:9")
    words = ["doctor", "recipe.yaml", "--trainer.devices=2", "--trainer.strategy=fsdp2"]
    assert main([*words, "--model.policy.quantization=nf4"]) == 2
    assert "is 'nf4', whose weights do not come apart" in capsys.readouterr().out
    assert main([*words, "--model.engine=Slots"]) == 2
    assert "Slots samples with the policy's own weights" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_refuses_an_engine_that_processes_cannot_share(write_recipe, interpreter, nursery):
    for engine, whole, message in (
        ({"python": str(interpreter)}, False, "model.engine.python would start a server for ea"),
        ({"url": "http://127.0.0.1:9"}, True, "2 processes train all weights, and a server would"),
    ):
        write_recipe(whole, **engine)
        ran = fit_in_two(nursery, "ddp")
        assert ran.returncode == 2
        assert message in ran.stderr
        assert "Traceback" not in ran.stderr


# -------------------------------------------------------------------------- vLLM itself


def served(policy: Policy, folder: Path, **settings) -> VLLM:
    """An engine that has started vLLM."""
    engine = VLLM(
        python=str(VLLM_PYTHON),
        arguments=["--enforce-eager", "--max-num-seqs", "64"],
        folder=str(folder),
        **settings,
    )
    engine.check(policy, 256)
    return engine


@pytest.fixture
def small_cache(monkeypatch):
    """On a CPU vLLM takes a share of the machine's memory for keys and values, unless it is told
    how many GB."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.slow
@needs_vllm
class TestReal:
    @pytest.mark.parametrize("whole", [False, True])
    def test_it_keeps_the_contract(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        perturb(policy)
        check_engine(served(policy, tmp_path), policy)

    @pytest.mark.parametrize("whole", [False, True])
    def test_it_sleeps_while_nothing_is_sampled(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        perturb(policy)
        engine = served(policy, tmp_path, sleeps=True)
        sleeps_and_samples(engine, policy)
        engine.close()

    @pytest.mark.parametrize("whole", [False, True])
    def test_each_of_many_versions_is_in_force(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        perturb(policy)
        engine = served(policy, tmp_path)
        engine.start(policy, 256)
        (keeper,) = psutil.Process().children()
        held = []
        for version in range(300):
            perturb(policy, 0.02)
            engine.sync(version)
            done = on_loop(turn(engine.open(PROMPT)))
            assert done.version == version
            check_turn(policy, done, within=2e-3)
            held.append(sum(p.memory_info().rss for p in keeper.children(recursive=True)))
        engine.close()
        print(f"{held[20] / 1e6:.0f} MB after 20 versions, {held[-1] / 1e6:.0f} MB after 300")
        assert held[-1] < 1.1 * held[20]
        assert not [*tmp_path.iterdir()]

    def test_it_samples_nearly_as_fast_as_a_bare_client(self, small_cache, tmp_path):
        """128 turns of 60 tokens after 195, all at once, in turns with the engine."""
        policy = Policy(STARTER, lora=Lora(r=16))
        perturb(policy)
        engine = served(policy, tmp_path)
        engine.start(policy, 256)
        engine.sync(0)
        started, name = engine.supply.started, engine.weights.newest.name
        draw = random.Random(0)
        prompts = [[draw.randrange(10, 300) for _ in range(195)] for _ in range(128)]
        sampling = Sampling(60)

        async def ours() -> None:
            sessions = [engine.open(prompt) for prompt in prompts]
            done = await asyncio.gather(*(session.generate([], sampling) for session in sessions))
            assert sum(len(completion.token_ids) for completion in done) == 128 * 60
            for session in sessions:
                session.close()

        async def bare() -> None:
            more = {"model": name, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
            more |= {"logprobs": 0, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {started.key}"}
            async with httpx2.AsyncClient(headers=headers, timeout=600) as client:
                address = f"{started.url}/v1/completions"
                answers = await asyncio.gather(
                    *(client.post(address, json=more | {"prompt": prompt}) for prompt in prompts)
                )
            tokens = [answer.json()["choices"][0]["token_ids"] for answer in answers]
            assert sum(map(len, tokens)) == 128 * 60

        def seconds(work) -> float:
            began = time.perf_counter()
            on_loop(work())
            return time.perf_counter() - began

        seconds(ours), seconds(bare)  # what is compiled or cached is so for both
        pairs = [(seconds(bare), seconds(ours)) for _ in range(5)]
        engine.close()
        shares = sorted(bare_s / ours_s for bare_s, ours_s in pairs)
        print(f"of a bare client's tokens/s: {', '.join(f'{share:.3f}' for share in shares)}")
        assert shares[2] > 0.9
