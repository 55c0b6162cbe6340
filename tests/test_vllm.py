"""`VLLM` against a stand-in for vLLM, and, where there is one, against vLLM itself.

The slow tests need an interpreter with vLLM: `TURNRL_TEST_VLLM_PYTHON=.../bin/python`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import psutil
import pytest
import torch
import yaml
from lightning import Callback
from safetensors.torch import load_file

import server_stand_in
from commands import RECIPE
from nursery import command, python
from turnrl import (
    EngineError,
    Lora,
    Policy,
    RecipeError,
    Sampling,
    Surroundings,
    build,
    on_loop,
    record,
)
from turnrl.cli import main
from turnrl.servers import Unavailable
from turnrl.testing import check_engine
from turnrl_servers import pool as pool_of_servers
from turnrl_servers.connection import Connection
from turnrl_servers.folders import Together
from turnrl_vllm.engine import VLLM

REAL = os.environ.get("TURNRL_TEST_VLLM_PYTHON")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Stand:
    """A stand-in for a vLLM server, in a process of its own."""

    def __init__(self, nursery, model, *options: str) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._nursery = nursery
        self._options = ["--model", str(model), *options, "--port", str(self._port)]
        self.start()

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen(
            python(server_stand_in.__file__, *self._options, *options),
            env={**os.environ, **self._nursery.environment},
            stdout=subprocess.PIPE,
        )
        self.pid = int(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def stand(nursery, tiny_model):
    """Makes stand-ins, which end with the test."""
    made: list[Stand] = []

    def make(*options: str, model=tiny_model) -> Stand:
        made.append(Stand(nursery, model, *options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def adapted(model, rank: int = 4) -> Policy:
    """A policy with an adapter that changes what the base says."""
    policy = Policy(str(model), lora=Lora(r=rank))
    change(policy)
    return policy


def change(policy: Policy, size: float = 0.1) -> None:
    """Other weights, as a step of training would leave them."""
    policy.load()
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if policy.lora is None or "lora_B" in name:
                weight.add_(torch.randn_like(weight) * size * (1 if policy.lora else 0.1))


def own(policy: Policy, prompt, tokens) -> list[float]:
    """The learner's log-probabilities of sampled tokens."""
    rows = [([*prompt, *tokens], [False] * len(prompt) + [True] * len(tokens))]
    return policy.read(rows, temperature=1.0)[0].logprobs.tolist()


PROMPT = [5, 9, 33, 71]
TURN = Sampling(6, 1.0)


async def turn(session, new=(), sampling: Sampling = TURN):
    return await session.generate(list(new), sampling)


# ------------------------------------------------------------------------ the contract


@pytest.mark.slow  # the one of SGLang is not
@pytest.mark.parametrize("whole", [False, True])
def test_the_engine_keeps_its_contract(stand, tiny_model, whole):
    policy = Policy(str(tiny_model)) if whole else adapted(tiny_model)
    policy.load()
    engine = VLLM(url=stand().url)
    engine.check(policy, 64)
    check_engine(engine, policy)
    assert engine.in_force["sampler"] == "vLLM 0.0.0, 1 server"


@pytest.mark.parametrize("whole", [False, True])
def test_each_version_samples_with_its_own_weights(stand, tiny_model, whole):
    policy = Policy(str(tiny_model)) if whole else adapted(tiny_model)
    policy.load()
    engine = VLLM(url=stand().url)
    engine.start(policy, 64)
    for version in range(4):
        engine.sync(version)
        done = on_loop(turn(engine.open(PROMPT)))
        assert done.version == version
        assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)
        change(policy)
    engine.close()


def test_a_session_goes_on_with_the_adapter_that_it_began_with_while_it_is_kept(stand, tiny_model):
    policy = adapted(tiny_model)
    server = stand()
    engine = VLLM(url=server.url, keeps=2)
    engine.start(policy, 64)
    engine.sync(0)
    session = engine.open(PROMPT)
    before = {name: one.clone() for name, one in policy.network.named_parameters()}
    change(policy)
    engine.sync(1)
    done = on_loop(turn(session))
    change(policy)
    engine.sync(2)
    with pytest.raises(RuntimeError, match="weights are gone"):
        on_loop(turn(session))
    served = engine.pool.servers[0]
    home = engine.weights.folder
    assert {name.split("-")[-2] for name in served.has} == {"1", "2"}
    assert {folder.name for folder in home.iterdir()} == served.has
    engine.close()
    assert not home.exists()
    policy.network.load_state_dict(before, strict=False)
    assert done.version == 0
    assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_other_weights_of_the_same_version_are_in_force(stand, tiny_model, whole):
    policy = Policy(str(tiny_model)) if whole else adapted(tiny_model)
    policy.load()
    engine = VLLM(url=stand().url)
    engine.start(policy, 64)
    for version in (0, 2, 2):  # the last one, say, because another checkpoint was loaded
        session = engine.open(PROMPT) if version else None
        change(policy, 0.5)
        engine.sync(version)
        done = on_loop(turn(engine.open(PROMPT)))
        assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)
        if session is not None:  # two are kept, whatever their numbers
            assert on_loop(turn(session)).version in (0, 2)
    engine.close()


def test_a_server_that_took_weights_and_was_late_to_say_so_is_asked_again(
    stand, tiny_model, monkeypatch
):
    policy = adapted(tiny_model)
    engine = VLLM(url=stand().url)
    engine.start(policy, 64)
    server, late = engine.pool.servers[0], []
    send = server.connection.ask_async

    async def asks(path, body, within_s=None):
        answer = await send(path, body, within_s)
        if path == "/v1/load_lora_adapter" and not late:
            late.append(path)
            raise Unavailable("timed out")
        return answer

    monkeypatch.setattr(server.connection, "ask_async", asks)
    engine.sync(0)
    assert late
    done = on_loop(turn(engine.open(PROMPT)))
    assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)
    engine.close()


def test_a_turn_that_the_server_breaks_off_is_asked_for_again(stand, tiny_model, monkeypatch):
    policy = adapted(tiny_model)
    engine = VLLM(url=stand().url)
    engine.start(policy, 64)
    engine.sync(0)
    asked, server = [], engine.pool.servers[0]
    send = server.connection.ask_async

    async def aborts(path, body, within_s=None):
        answer = await send(path, body, within_s)
        asked.append(path)
        if len(asked) == 1:
            answer["choices"][0] |= {"finish_reason": "abort", "token_ids": [1, 2]}
        return answer

    monkeypatch.setattr(server.connection, "ask_async", aborts)
    done = on_loop(turn(engine.open(PROMPT)))
    assert len(done.token_ids) == 6
    assert asked.count("/v1/completions") == 3  # the server is compared again in between
    engine.close()


# ------------------------------------------------------------------- servers that are refused


class Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    def log_message(self, *_):
        pass


def told(engine: VLLM, policy: Policy, tokens: int = 64) -> str:
    with pytest.raises(RecipeError) as error:
        engine.check(policy, tokens)
    return str(error.value)


def test_a_server_that_cannot_serve_is_told_before_weights_load(
    stand, tiny_model, random_model, monkeypatch
):
    policy = Policy(str(tiny_model), lora=Lora(r=32))
    away = f"http://127.0.0.1:{free_port()}"
    assert f"vLLM at {away} does not answer" in told(VLLM(url=away), policy)
    short = stand("--max-model-len", "48")
    assert "has a window of 48 tokens" in told(VLLM(url=short.url), policy)
    assert "serves base." in told(VLLM(url=short.url, base="other"), policy)
    bare = stand("--no-adapters")
    message = told(VLLM(url=bare.url), policy)
    assert "cannot take an adapter of rank 32 (status 404: Not Found)" in message
    assert "--enable-lora, --max-lora-rank, and in its environment VLLM_ALLOW" in message
    message = told(VLLM(url=stand().url), policy)
    assert "cannot take an adapter of rank 32" in message
    assert "LoRA rank 32 is greater than max_lora_rank 16" in message
    assert message.endswith("Start it with a larger --max-lora-rank, or lower model.policy.lora.r.")
    locked = stand("--api-key", "a-secret-of-mine", "--max-lora-rank", "32")
    monkeypatch.setenv("VLLM_API_KEY", "a-wrong-key")
    message = told(VLLM(url=locked.url), policy)
    assert "refuses the key" in message
    assert "a-wrong-key" not in message
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-of-mine")
    VLLM(url=locked.url).check(policy, 64)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        assert "is no vLLM" in told(VLLM(url=place), policy)
    finally:
        server.shutdown()
        server.server_close()
    assert policy.network is None


def test_another_tokenizer_is_told(stand, tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    server = stand(model=other)
    message = told(VLLM(url=server.url), Policy(str(tiny_model), lora=Lora()))
    assert "whose tokenizer reads a text as other tokens" in message


def test_what_shows_with_the_weights_stops_the_run_at_its_first_sync(stand, tiny_model):
    engine = VLLM(url=stand("--raw-logprobs").url)
    engine.start(adapted(tiny_model), 64)
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        engine.sync(0)
    engine.close()


def test_a_server_that_came_back_with_a_lower_rank_is_told(stand, tiny_model):
    server = stand()
    engine = VLLM(url=server.url)
    engine.start(adapted(tiny_model), 64)
    server.kill()
    server.start("--max-lora-rank", "2")
    with pytest.raises(EngineError, match="larger --max-lora-rank"):
        engine.sync(0)
    engine.close()


def test_another_base_is_told_by_its_log_probabilities(stand, tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    model = Policy(str(tiny_model))
    change(model, 1.0)
    model.network.save_pretrained(other)
    engine = VLLM(url=stand(model=other).url)
    engine.start(adapted(tiny_model), 64)
    with pytest.raises(EngineError, match="It has other weights"):
        engine.sync(0)
    engine.close()


def test_a_base_that_is_quantised_for_learning_alone_is_told(stand, tiny_model):
    policy = Policy(str(tiny_model), quantization="nf4", lora=Lora(r=4))
    change(policy)
    engine = VLLM(url=stand().url, max_logprob_gap=1e-6)
    engine.start(policy, 64)
    with pytest.raises(
        EngineError, match=r"learns on a base in 4 bits .*raise model\.engine\.max_logprob"
    ):
        engine.sync(0)
    engine.close()


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
def test_settings_that_make_no_sense_are_told(settings, message):
    with pytest.raises(RecipeError, match=message):
        VLLM(**settings)


def test_an_interpreter_without_vllm_is_told(tiny_model):
    policy = Policy(str(tiny_model), lora=Lora())
    assert "has no package vllm" in told(VLLM(python=sys.executable), policy)
    assert "no Python that runs here" in told(VLLM(python="/nowhere/python"), policy)
    message = told(VLLM(python=sys.prefix), policy)
    assert f"is a folder. Give the path of the interpreter in it: {sys.prefix}/bin/pyt" in message
    with pytest.raises(RecipeError, match="no Python that runs here"):  # nothing is started
        VLLM(python="/nowhere/python").rehearsal()


# ------------------------------------------------------------------------------- outages


def crowd(engine: VLLM, disturb, turns: int = 3, many: int = 6):
    """Sessions of several turns, and something that is done to the servers meanwhile."""

    async def one(n: int):
        session = engine.open([*PROMPT, n])
        said = [await turn(session)]
        for k in range(1, turns):
            await asyncio.sleep(0.05)
            said.append(await turn(session, [k]))
        return n, said

    async def every():
        later = asyncio.get_running_loop().run_in_executor(None, disturb)
        done = await asyncio.gather(*(one(n) for n in range(many)))
        await later
        await engine.drain()
        return done

    return on_loop(every())


def check_crowd(policy: Policy, done, version: int) -> None:
    """Every token of every turn has the learner's log-probability, after exactly its history."""
    for n, said in done:
        history = [*PROMPT, n]
        for k, part in enumerate(said):
            history += [k] if k else []
            assert part.version == version
            assert len(part.token_ids) == 6
            wanted = own(policy, history, part.token_ids)
            assert part.logprobs == pytest.approx(wanted, abs=1e-4)
            history += part.token_ids


def test_a_server_that_dies_and_comes_back_is_waited_for(stand, tiny_model, capfd):
    policy, server = adapted(tiny_model), stand()
    engine = VLLM(url=server.url, patience_s=60)
    engine.start(policy, 64)
    engine.sync(0)

    def disturb():
        time.sleep(0.2)
        server.kill()
        time.sleep(0.5)
        server.start()

    check_crowd(policy, crowd(engine, disturb), 0)
    server.kill()  # nobody asks it meanwhile
    server.start()
    check_crowd(policy, crowd(engine, lambda: None, 1), 0)
    server.kill()
    server.start("--raw-logprobs")
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        crowd(engine, lambda: None, 1)
    server.kill()
    server.start()
    change(policy)
    engine.sync(1)
    check_crowd(policy, crowd(engine, lambda: None, 1), 1)
    engine.close()
    assert "answers again" in capfd.readouterr().err


def test_sessions_of_a_server_that_dies_go_on_at_another(stand, tiny_model, capfd):
    policy, servers = adapted(tiny_model), [stand(), stand()]
    engine = VLLM(url=[one.url for one in servers], patience_s=20)
    engine.start(policy, 64)
    engine.sync(0)

    def disturb():
        time.sleep(0.2)
        servers[0].kill()

    done = crowd(engine, disturb)
    check_crowd(policy, done, 0)
    change(policy)
    engine.sync(1)
    check_crowd(policy, crowd(engine, lambda: None, 1), 1)
    engine.close()
    assert "its sessions move to another server" in capfd.readouterr().err


def test_a_server_that_hangs_is_left(stand, tiny_model, monkeypatch):
    monkeypatch.setattr(pool_of_servers, "_CHECK_EVERY_S", 0.3)
    monkeypatch.setattr(pool_of_servers, "_HEALTH_TIMEOUT_S", 0.5)
    policy, servers = adapted(tiny_model), [stand(), stand()]
    engine = VLLM(url=[one.url for one in servers], patience_s=20)
    engine.start(policy, 64)
    engine.sync(0)

    def disturb():
        time.sleep(0.2)
        servers[1].signal(signal.SIGSTOP)

    check_crowd(policy, crowd(engine, disturb), 0)

    asked, ask, is_well = [], Connection.ask_async, Connection.is_well

    async def asks(self, path, *more):
        asked.append((self.url, path))
        return await ask(self, path, *more)

    async def asks_whether_well(self, within_s):
        asked.append((self.url, "/health"))
        return await is_well(self, within_s)

    monkeypatch.setattr(Connection, "ask_async", asks)
    monkeypatch.setattr(Connection, "is_well", asks_whether_well)
    change(policy)
    engine.sync(1)  # and does not wait until the other one has not taken an adapter
    assert {path for url, path in asked if url == servers[1].url} == {"/health"}
    servers[1].signal(signal.SIGCONT)
    change(policy)
    engine.sync(2)
    assert (servers[1].url, "/v1/load_lora_adapter") in asked
    check_crowd(policy, crowd(engine, lambda: None), 2)
    engine.close()


def test_turns_do_not_wait_in_turn_for_a_server_that_was_lost(stand, tiny_model, monkeypatch):
    """All would give it the adapter again, one after another, each with a wait of its own."""
    policy = adapted(tiny_model)
    engine = VLLM(url=stand().url)
    engine.start(policy, 64)
    engine.sync(0)
    (server,) = engine.pool.servers
    asked, send, is_well = [], server.connection.ask_async, server.connection.is_well

    async def asks(path, body, within_s=None):
        asked.append(path)
        if path == "/v1/load_lora_adapter" and asked.count(path) == 1:
            await asyncio.sleep(0.2)  # the others wait by now
            raise Unavailable("timed out")
        return await send(path, body, within_s)

    async def asks_whether_well(within_s):
        asked.append("/health")
        return await is_well(within_s)

    monkeypatch.setattr(server.connection, "ask_async", asks)
    monkeypatch.setattr(server.connection, "is_well", asks_whether_well)
    server.forget()
    sessions = [engine.open(PROMPT) for _ in range(5)]
    done = on_loop(asyncio_gather([turn(session) for session in sessions]))
    assert {one.version for one in done} == {0}
    assert asked[:2] == ["/v1/load_lora_adapter", "/health"]
    assert asked.count("/v1/load_lora_adapter") == 2
    engine.close()


def test_servers_that_stay_away_stop_the_run(stand, tiny_model):
    policy, server = adapted(tiny_model), stand()
    engine = VLLM(url=server.url, patience_s=1)
    engine.start(policy, 64)
    engine.sync(0)
    with pytest.raises(EngineError, match=r"turnrl waited 1 s.*model\.engine\.patience_s"):
        crowd(engine, server.kill)
    engine.close()


def test_sessions_are_spread_over_servers_and_stay(stand, tiny_model):
    policy, servers = adapted(tiny_model), [stand(), stand()]
    engine = VLLM(url=[one.url for one in servers])
    engine.start(policy, 64)
    engine.sync(0)
    sessions = [engine.open([*PROMPT, n]) for n in range(6)]
    first = [str(session._server) for session in sessions]
    assert sorted(first) == sorted([one.url for one in servers] * 3)
    on_loop(asyncio_gather([turn(session) for session in sessions]))
    assert [str(session._server) for session in sessions] == first
    assert [str(s.fork()._server) for s in sessions] == first
    engine.close()


async def asyncio_gather(work):
    return await asyncio.gather(*work)


# ------------------------------------------------------------------- a run, and its own server


@pytest.fixture
def interpreter(tmp_path, nursery, monkeypatch) -> Path:
    """An interpreter in whose environment `vllm` is the stand-in."""
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


def listening(url: str) -> psutil.Process:
    """The process that listens at an address."""
    port = int(url.rpartition(":")[2])
    every = psutil.net_connections("tcp")
    return psutil.Process(next(c.pid for c in every if c.status == "LISTEN" and c.laddr[1] == port))


def keepers() -> list[psutil.Process]:
    """What keeps the servers of this process."""
    every = psutil.Process().children()
    return [one for one in every if any("keeper.py" in word for word in one.cmdline())]


@pytest.mark.slow
def test_a_run_starts_its_server_which_is_started_again_and_ends_with_it(
    interpreter, tiny_model, tmp_path
):
    policy = adapted(tiny_model)
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"), patience_s=60)
    engine.check(policy, 64)
    engine.start(policy, 64)
    engine.sync(0)
    url = engine.supply.started.url

    def disturb():
        time.sleep(0.2)
        listening(url).kill()

    check_crowd(policy, crowd(engine, disturb), 0)
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


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(
    interpreter, tiny_model, tmp_path
):
    broken = Path(tmp_path / "packages" / "vllm" / "entrypoints" / "cli" / "main.py")
    broken.write_text("raise SystemExit('no room on the GPU')\n")
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"))
    with pytest.raises(EngineError, match=r"(?s)ended while it was starting.*no room on the GPU"):
        engine.start(adapted(tiny_model), 64)
    engine.close()
    (log,) = (tmp_path / "shared").iterdir()
    assert log.read_text().count("no room on the GPU") == 1  # it would end so every time


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch):
    """A recipe with VLLM for its engine, in the working directory."""

    def write(**engine) -> str:
        contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model)))
        contents["model"]["policy"]["lora"] = {"r": 4}
        contents["model"]["engine"] = {"class_path": "VLLM", "init_args": engine}
        contents["record"] = {"tokens": True}
        Path("recipe.yaml").write_text(yaml.safe_dump(contents))
        return "recipe.yaml"

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return write


def told_by(engine: VLLM, name: str):
    """What the server of an engine answers."""
    headers = {"Authorization": f"Bearer {engine.supply.started.key}"}
    return httpx2.get(f"{engine.supply.started.url}/{name}", headers=headers).json()


def asleep(engine: VLLM) -> bool:
    """Whether the server that an engine has started sleeps."""
    return told_by(engine, "is_sleeping")["is_sleeping"]


def sleeps_and_samples(engine: VLLM, policy: Policy) -> None:
    """It sleeps after each collection, and acts with the right weights after each wake."""
    engine.start(policy, 64)
    (server,) = engine.pool.servers
    for version in range(3):
        engine.sync(version)
        for collection in range(2):  # the second one on the same weights, without a sync
            assert asleep(engine) == bool(collection)
            sessions = [engine.open(PROMPT) for _ in range(4)]
            for done in on_loop(asyncio_gather([turn(session) for session in sessions])):
                assert done.version == version
                wanted = own(policy, PROMPT, done.token_ids)
                assert done.logprobs == pytest.approx(wanted, abs=2e-3)
            assert not asleep(engine)
            engine.rest()
            assert asleep(engine)
            assert not server.connection._clients
        change(policy)
    assert engine.in_force["memory between collections"] == "given back"


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_server_sleeps_while_nothing_is_sampled(interpreter, tiny_model, tmp_path, whole):
    policy = Policy(str(tiny_model)) if whole else adapted(tiny_model)
    policy.load()
    engine = VLLM(python=str(interpreter), sleeps=True)
    engine.check(policy, 64, Surroundings(tmp_path / "run"))
    sleeps_and_samples(engine, policy)
    assert told_by(engine, "wakes") == 5  # of six collections the first finds it awake
    # all weights are read again, as nobody knows what a sleep has left of them
    assert len(told_by(engine, "loads")) == (6 if whole else 3)
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
def test_the_memory_plan_hears_what_a_server_takes(arguments, share):
    own = VLLM(python="python", arguments=arguments)
    assert own.beside(10**11) == (None if share is None else (int(share * 1e11), 3 * 10**9))
    awake = VLLM(python="python", arguments=arguments, sleeps=False)
    assert awake.beside(10**11) == (None if share is None else (int(share * 1e11),) * 2)
    assert VLLM(url="http://localhost:8000").beside(10**11) is None


def test_a_policy_on_a_gpu_lets_its_server_sleep(interpreter, tiny_model, tmp_path, monkeypatch):
    policy = adapted(tiny_model)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for kind, sleeps, wanted in (
        ("cuda", None, True),
        ("cuda", False, False),
        ("cpu", None, False),
    ):
        engine = VLLM(python=str(interpreter), sleeps=sleeps)
        engine.check(policy, 64, Surroundings(tmp_path / "run"))
        with monkeypatch.context() as there:
            there.setattr(Policy, "device", property(lambda _, kind=kind: torch.device(kind)))
            engine.start(policy, 64)
        assert ("--enable-sleep-mode" in engine.supply.started._keeper.args) == wanted
        engine.sync(0)
        engine.rest()
        assert asleep(engine) == wanted
        before = len(emptied)
        on_loop(turn(engine.open(PROMPT)))
        on_loop(turn(engine.open(PROMPT)))
        assert len(emptied) - before == wanted  # the learner's cache, which vLLM takes
        engine.close()


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
    policy = adapted(tiny_model)
    engine = sleeper(policy, patience_s=60)
    listening(engine.supply.started.url).kill()
    engine.rest()
    done = on_loop(turn(engine.open(PROMPT)))
    assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)
    engine.close()


@pytest.mark.slow
def test_a_sleep_that_is_interrupted_ends_with_the_next_turn(sleeper, tiny_model):
    policy = adapted(tiny_model)
    engine = sleeper(policy)

    async def interrupted() -> None:
        falls = asyncio.ensure_future(engine.pool.sleep())
        while not engine.pool.asleep:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the request is under way
        falls.cancel()
        await asyncio.gather(falls, return_exceptions=True)

    on_loop(interrupted())
    on_loop(turn(engine.open(PROMPT)))
    engine.close()


@pytest.mark.slow
def test_a_server_that_dies_in_its_sleep_is_started_again(sleeper, tiny_model):
    policy = adapted(tiny_model)
    engine = sleeper(policy, patience_s=60)
    engine.rest()
    listening(engine.supply.started.url).kill()
    time.sleep(1)
    with pytest.raises(StopIteration):  # it would take the memory that the learner has now
        listening(engine.supply.started.url)
    check_crowd(policy, crowd(engine, lambda: None), 0)
    engine.close()


def rested_and_asked(engine: VLLM) -> None:
    engine.rest()
    on_loop(turn(engine.open(PROMPT)))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--sleepless", r"does not give its memory back .*no such allocator.*engine\.sleeps"),
        ("--wakeless", r"does not get its memory back .*out of memory.*--gpu-memory-utilization"),
        ("--forgetful", r"differ from the learner's by .* or an older adapter"),
    ],
)
def test_a_server_that_does_not_sleep_or_wake_well_is_told(sleeper, tiny_model, option, told):
    policy = adapted(tiny_model)
    engine = sleeper(policy, arguments=[option])
    try:
        with pytest.raises(EngineError, match=told):
            rested_and_asked(engine)
    finally:
        engine.close()


class Asleep(Callback):
    """Notes whether the server sleeps while the policy learns."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(asleep(pl_module.engine))


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_lets_its_server_sleep_unless_it_samples_ahead(recipe, interpreter, staleness):
    written = recipe(python=str(interpreter), sleeps=True)
    ahead = [] if not staleness else ["--model.max_staleness", "1"]
    run = build([written, "--trainer.max_epochs", "2", *ahead])
    run.trainer.callbacks.append(seen := Asleep())
    run.trainer.fit(run.module, run.data)
    assert len(seen.seen) > 1
    assert set(seen.seen) == {not staleness}


def test_a_run_keeps_the_log_of_its_server(recipe, interpreter, capfd):
    assert main(["fit", recipe(python=str(interpreter)), "--trainer.max_epochs", "1"]) == 0
    assert "its log is runs/recipe/version_0/vllm.log" in capfd.readouterr().err
    assert Path("runs/recipe/version_0/vllm.log").is_file()
    assert keepers() == []


def test_the_doctor_starts_a_server_with_a_small_model(recipe, interpreter, capfd):
    assert main(["doctor", recipe(python=str(interpreter))]) == 0
    told = capfd.readouterr()
    assert re.search(r"pass  sampling +\d+ turns by VLLM on cpu; sampler: vLLM 0\.0\.0", told.out)
    (log,) = re.findall(r"starting vLLM; its log is (\S+)", told.err)
    assert not Path(log).exists()
    assert not Path("runs").exists()
    assert keepers() == []


@pytest.mark.slow
def test_a_server_that_is_not_started_again_stops_the_run_at_once(
    interpreter, tiny_model, tmp_path
):
    policy = adapted(tiny_model)
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared"))
    engine.start(policy, 64)
    engine.sync(0)
    file = tmp_path / "packages" / "vllm" / "entrypoints" / "cli" / "main.py"
    file.write_text("raise SystemExit('the GPU is gone')\n")
    server = listening(engine.supply.started.url)

    async def sampled():
        server.kill()
        return await turn(engine.open(PROMPT))

    with pytest.raises(EngineError, match=r"(?s)started again in vain.*the GPU is gone"):
        on_loop(sampled())
    engine.close()


def test_a_run_trains_with_it_and_its_record_has_every_version(stand, recipe):
    recipe(url=stand("--max-model-len", "2048").url)
    built = build(["recipe.yaml"])
    assert built.module.objective.importance_cap == 2
    built.trainer.fit(built.module, datamodule=built.data)
    assert 0 < float(built.trainer.callback_metrics["train/logprob_gap"]) < 1e-4
    rows = [row for file in Path("runs").rglob("record") for row in record.read(file.parent)]
    trained = [row for row in rows if row["split"] == "train"]
    assert {row["policy_version"] for row in trained} == {0, 2}
    for row in trained:
        tokens = [
            *zip(row["versions"], row["sampler_logprobs"], row["learner_logprobs"], strict=True)
        ]
        sampled = [token for token in tokens if token[0] is not None]
        assert len(sampled) == sum(turn >= 0 for turn in row["turn_index"]) > 0
        assert {version for version, _, _ in sampled} == {row["policy_version"]}
        assert max(abs(one - other) for _, one, other in sampled) < 1e-4


def test_a_run_that_sampled_ahead_is_evaluated_without_its_server(stand, recipe):
    server = stand("--max-model-len", "2048")
    words = [recipe(url=server.url), "--model.max_staleness=1"]
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


def test_a_run_that_fails_leaves_no_weights_and_no_adapters(stand, recipe, monkeypatch):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise KeyboardInterrupt

    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("tmp").absolute()))
    server = stand("--max-model-len", "2048")
    built = build([recipe(url=server.url)])
    built.trainer.callbacks.append(Fails())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        built.trainer.fit(built.module, datamodule=built.data)
    assert not list(Path("tmp").glob("turnrl-weights-*"))
    models = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert [one["id"] for one in models] == ["base"]


def fit_in_two(nursery, strategy="ddp", *options: str) -> subprocess.CompletedProcess[str]:
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
    stand, recipe, tmp_path, nursery, strategy
):
    two = [stand("--max-model-len", "2048") for _ in range(2)]
    recipe(url=[one.url for one in two])
    ran = fit_in_two(nursery, strategy)
    assert ran.returncode == 0, ran.stderr
    rows = list(record.read("runs/recipe/version_0"))
    trained = [row for row in rows if row["split"] == "train"]
    assert len(trained) == 2 * 4 * 4
    assert {row["policy_version"] for row in trained} == {0, 2}
    for row in trained:
        known = zip(row["versions"], row["sampler_logprobs"], row["learner_logprobs"], strict=True)
        for version, one, other in (token for token in known if token[0] is not None):
            assert version == row["policy_version"]
            assert one == pytest.approx(other, abs=1e-4)
    saved = torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/adapter/adapter_model.safetensors")
    assert len(exported) == len(saved["state_dict"])
    for name, value in exported.items():
        inner = name.replace(".weight", ".default.weight")
        assert torch.equal(value, saved["state_dict"][f"policy.network.{inner}"])
    for one in two:
        names = Connection(one.url, "", 5).ask("GET", "/loads")
        assert [name.split("-")[4:] for name in names] == [["0", "0"], ["2", "0"], ["4", "0"]]
    assert not [file for file in Path("runs").rglob("*") if file.name.startswith("turnrl-weights-")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_that_learn_together_sample_ahead(stand, recipe, nursery, strategy):
    two = [stand("--max-model-len", "2048", "--max-loras", "4") for _ in range(2)]
    recipe(url=[one.url for one in two], keeps=2)
    ran = fit_in_two(nursery, strategy, "--model.max_staleness=1", "--trainer.max_epochs=4")
    assert ran.returncode == 0, ran.stderr
    trained = [row for row in record.read("runs/recipe/version_0") if row["split"] == "train"]
    assert len(trained) == 4 * 4 * 4
    behind = set()
    for row in trained:
        known = zip(row["versions"], row["sampler_logprobs"], row["learner_logprobs"], strict=True)
        for version, one, other in (token for token in known if token[0] is not None):
            behind.add(row["policy_version"] - version)
            assert version < row["policy_version"] or one == pytest.approx(other, abs=1e-4)
    assert behind == {0, 2}  # an iteration has two steps


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_if_the_first_process_fails_the_others_end(stand, recipe, tmp_path, nursery, strategy):
    # the first one finds it, while the others wait for the versions that it gives to the servers
    recipe(url=stand("--max-model-len", "2048").url, max_logprob_gap=0)

    def here() -> set[int]:
        return {p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)}

    before = here()
    ran = fit_in_two(nursery, strategy)
    assert ran.returncode == 1
    assert "and model.engine.max_logprob_gap is 0." in ran.stderr
    assert "stopped by" not in ran.stderr
    assert here() == before


def test_processes_that_share_one_policy_train_all_of_its_weights(stand, recipe, nursery):
    two = [stand("--max-model-len", "2048") for _ in range(2)]
    name = recipe(url=[one.url for one in two])
    contents = yaml.safe_load(Path(name).read_text())
    contents["model"]["policy"]["lora"] = None
    Path(name).write_text(yaml.safe_dump(contents))
    ran = fit_in_two(nursery, "fsdp2")
    assert ran.returncode == 0, ran.stderr
    trained = [row for row in record.read("runs/recipe/version_0") if row["split"] == "train"]
    assert {row["policy_version"] for row in trained} == {0, 2}
    for row in trained:
        known = zip(row["versions"], row["sampler_logprobs"], row["learner_logprobs"], strict=True)
        for version, one, other in (token for token in known if token[0] is not None):
            assert version == row["policy_version"]
            assert one == pytest.approx(other, abs=1e-4)
    saved = torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)
    exported = load_file("runs/recipe/version_0/model/model.safetensors")
    assert exported.keys() <= {k.removeprefix("policy.network.") for k in saved["state_dict"]}
    for name, value in exported.items():
        assert torch.equal(value, saved["state_dict"][f"policy.network.{name}"])


def test_processes_meet_in_a_folder_of_this_run_and_this_start_alone(tmp_path):
    processes = torch.distributed
    processes.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        one, other = Together(tmp_path / "run"), Together(tmp_path / "run")
        folders = [one.make(), one.make(), other.make()]
        assert len({folder.name for folder in folders}) == 3  # adapters have their names
        for folder in folders:
            folder.rmdir()
        one.leave()
        other.leave()
        assert not [*(tmp_path / "run").iterdir()]
        (tmp_path / "file").touch()
        with pytest.raises(RecipeError, match=r"cannot be made .* Set model\.engine\.folder"):
            Together(tmp_path / "file")
    finally:
        processes.destroy_process_group()


def together_of(rank: int, store: str, url: str, model: str, told: list) -> None:
    """A process of two: it starts an engine, and publishes a version twice."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    processes = torch.distributed
    processes.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(len(store))
    policy = adapted(model)
    engine = VLLM(url=url)
    engine.check(policy, 64, Surroundings(Path(store).parent / "runs", 2))
    engine.start(policy, 64)
    if rank == 0:
        time.sleep(1)  # the other one waits, however long it takes
    engine.sync(0)
    done = on_loop(turn(engine.open(PROMPT)))
    assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=1e-4)
    told.append(engine.weights.newest.name)
    processes.barrier()
    engine.close()
    processes.destroy_process_group()


@pytest.mark.slow
def test_runs_of_the_same_folder_and_port_share_no_name(stand, tiny_model, tmp_path):
    """The second one would sample with the adapter of the first, which has its name already."""
    url, names = stand().url, []
    for run in range(2):
        script = (
            "import sys, test_vllm; told = []; rank, *rest = sys.argv[1:]\n"
            "test_vllm.together_of(int(rank), *rest, told); print(*told)"
        )
        given = [str(tmp_path / ("store" + "x" * run)), url, str(tiny_model)]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        both = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), *given],
                stdout=subprocess.PIPE,
                env=path,
                text=True,
            )
            for rank in range(2)
        ]
        told = [process.communicate(timeout=120)[0].split()[-1] for process in both]
        assert told[0] == told[1]
        names.append(told[0])
    assert names[0] != names[1]
    assert not [*(tmp_path / "runs").iterdir()]


@pytest.mark.slow
def test_a_forked_child_of_a_killed_run_keeps_no_server(interpreter, tiny_model, tmp_path):
    """It has the other end of the keeper's input too."""
    (tmp_path / "run.py").write_text(
        "import os, sys, time\n"
        "from test_vllm import VLLM, adapted\n"
        "policy = adapted(sys.argv[1])\n"
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


def test_an_environment_that_is_called_vllm_is_no_package(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    Path("vllm").mkdir()  # as in the how-to, before anything is installed there
    with pytest.raises(RecipeError, match="has no package vllm"):
        VLLM(python=sys.executable).check(Policy(str(tiny_model)), 64)


def test_the_end_of_a_log_has_nothing_of_an_earlier_server(
    interpreter, tiny_model, tmp_path, monkeypatch
):
    file = tmp_path / "packages" / "vllm" / "entrypoints" / "cli" / "main.py"
    file.write_text("raise SystemExit('error: an argument that there is not')\n")
    engine = VLLM(python=str(interpreter))
    policy, folder = adapted(tiny_model), tmp_path / "run"
    engine.check(policy, 64, Surroundings(folder))
    folder.mkdir()
    earlier = "torch.OutOfMemoryError: CUDA out of memory\n"
    (folder / "vllm.log").write_text(earlier + "more\n" * 20)
    with pytest.raises(EngineError, match="an argument that there is not") as told:
        engine.start(policy, 64)
    assert "CUDA" not in str(told.value)
    assert "--gpu-memory" not in str(told.value)
    file.write_text("raise SystemExit('ValueError: Free memory on device is less than desired')\n")
    with pytest.raises(EngineError, match=r"starting\. Lower --gpu-memory-utilization in model\."):
        engine.start(policy, 64)


def test_the_doctor_tells_what_processes_cannot_share(recipe, interpreter, capsys):
    written = recipe(python=str(interpreter))
    words = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    assert main(["doctor", written, *words]) == 1
    assert "python would start a server for each of 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize(("strategy", "whole"), [("ddp", False), ("fsdp2", True)])
def test_the_doctor_passes_what_processes_can_share(stand, recipe, capsys, strategy, whole):
    written = recipe(url=stand("--max-model-len", "2048").url)
    without = ["--model.policy.lora=null"] if whole else []
    main(["doctor", written, "--trainer.devices=2", f"--trainer.strategy={strategy}", *without])
    shown = capsys.readouterr().out
    assert re.search(
        r"^pass  sampler +VLLM can sample this model \(vLLM 0\.0\.0, 1 server\)$",
        shown,
        re.MULTILINE,
    ), shown


def test_the_doctor_tells_what_cannot_be_divided(recipe, capsys):
    written = recipe(url="http://127.0.0.1:9")
    words = ["doctor", written, "--trainer.devices=2", "--trainer.strategy=fsdp2"]
    assert main([*words, "--model.policy.quantization=nf4"]) == 2
    assert "is 'nf4', whose weights do not come apart" in capsys.readouterr().out
    assert main([*words, "--model.engine=Slots"]) == 2
    assert "Slots samples with the policy's own weights" in capsys.readouterr().out


@pytest.mark.slow
def test_what_processes_cannot_share_is_told(recipe, interpreter, nursery):
    for engine, lora, told in (
        ({"python": str(interpreter)}, {"r": 4}, "model.engine.python would start a server for ea"),
        ({"url": "http://127.0.0.1:9"}, None, "2 processes train all weights, and a server would"),
    ):
        contents = yaml.safe_load(Path(recipe(**engine)).read_text())
        contents["model"]["policy"]["lora"] = lora
        Path("recipe.yaml").write_text(yaml.safe_dump(contents))
        ran = fit_in_two(nursery)
        assert ran.returncode == 2
        assert told in ran.stderr
        assert "Traceback" not in ran.stderr


# -------------------------------------------------------------------------- vLLM itself


real = [
    pytest.mark.slow,
    pytest.mark.skipif(REAL is None, reason="TURNRL_TEST_VLLM_PYTHON names no interpreter"),
]


def served(policy: Policy, folder: Path, **settings) -> VLLM:
    """An engine that has started vLLM."""
    engine = VLLM(
        python=str(REAL),
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


STARTER = "package://turnrl_atlas/starter"


class TestReal:
    pytestmark = real

    @pytest.mark.parametrize("whole", [False, True])
    def test_it_keeps_the_contract(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        change(policy)
        check_engine(served(policy, tmp_path), policy)

    @pytest.mark.parametrize("whole", [False, True])
    def test_it_sleeps_while_nothing_is_sampled(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        change(policy)
        engine = served(policy, tmp_path, sleeps=True)
        sleeps_and_samples(engine, policy)
        engine.close()

    @pytest.mark.parametrize("whole", [False, True])
    def test_each_of_many_versions_is_in_force(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16))
        change(policy)
        engine = served(policy, tmp_path)
        engine.start(policy, 256)
        (keeper,) = psutil.Process().children()
        held = []
        for version in range(300):
            change(policy, 0.02)
            engine.sync(version)
            done = on_loop(turn(engine.open(PROMPT)))
            assert done.version == version
            assert done.logprobs == pytest.approx(own(policy, PROMPT, done.token_ids), abs=2e-3)
            held.append(sum(p.memory_info().rss for p in keeper.children(recursive=True)))
        engine.close()
        print(f"{held[20] / 1e6:.0f} MB after 20 versions, {held[-1] / 1e6:.0f} MB after 300")
        assert held[-1] < 1.1 * held[20]
        assert not [*tmp_path.iterdir()]

    def test_it_samples_nearly_as_fast_as_a_bare_client(self, small_cache, tmp_path):
        """128 turns of 60 tokens after 195, all at once, in turns with the engine."""
        policy = Policy(STARTER, lora=Lora(r=16))
        change(policy)
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
            assert sum(len(one.token_ids) for one in done) == 128 * 60
            for session in sessions:
                session.close()

        async def bare() -> None:
            more = {"model": name, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
            more |= {"logprobs": 0, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {started.key}"}
            async with httpx2.AsyncClient(headers=headers, timeout=600) as client:
                address = f"{started.url}/v1/completions"
                done = await asyncio.gather(
                    *(client.post(address, json=more | {"prompt": prompt}) for prompt in prompts)
                )
            told = [one.json()["choices"][0]["token_ids"] for one in done]
            assert sum(map(len, told)) == 128 * 60

        def seconds(work) -> float:
            began = time.perf_counter()
            on_loop(work())
            return time.perf_counter() - began

        seconds(ours), seconds(bare)  # what is compiled or cached is so for both
        pairs = [(seconds(bare), seconds(ours)) for _ in range(5)]
        engine.close()
        shares = sorted(one / other for one, other in pairs)
        print(f"of a bare client's tokens/s: {', '.join(f'{share:.3f}' for share in shares)}")
        assert shares[2] > 0.9
