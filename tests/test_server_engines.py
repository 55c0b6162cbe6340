"""Engines behind servers, against fake servers: what holds for vLLM and SGLang, and,
with vLLM as the example, how outages are survived."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from lightning import Callback

import turnrl.plugin.patience
from fake_server import FakeServer
from nodes import free_port
from serving import (
    IGNORE_PEFT_WARNING,
    PROMPT,
    SGLANG_KIND,
    VLLM_KIND,
    WINDOW,
    both_kinds,
    check_conversations,
    check_record,
    check_turn,
    converse_during,
    fake_servers,
    kind,
    perturb,
    refusal,
    start_engine,
    start_server,
    trained_policy,
    turn,
    turns,
    write_recipe,
)
from turnrl import Policy, RecipeError, build
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import EngineError, TrajectoryLost
from turnrl.policy.settings import Lora
from turnrl.testing import check_engine
from turnrl_vllm import VLLM

__all__ = ["kind", "start_engine", "start_server", "write_recipe"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """A server that is away is asked again sooner than a run would ask it."""
    monkeypatch.setattr(turnrl.plugin.patience, "_FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(turnrl.plugin.patience, "_PROBE_EVERY_S", 0.2)


# ------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        (SGLANG_KIND, False),
        pytest.param(SGLANG_KIND, True, marks=pytest.mark.slow),
        pytest.param(VLLM_KIND, False, marks=pytest.mark.slow),
        pytest.param(VLLM_KIND, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_engine_keeps_its_contract(kind, start_server, tiny_model, whole):
    policy = trained_policy(tiny_model, whole)
    engine = kind.engine(url=start_server().url).build()
    engine.check(policy, 64)
    check_engine(engine, policy)
    assert engine.active_choices["sampler"] == f"{kind.software} 0.0.0, 1 server"


@both_kinds
@pytest.mark.parametrize("whole", [False, True])
def test_each_version_samples_with_its_own_weights(start_server, start_engine, tiny_model, whole):
    policy, server = trained_policy(tiny_model, whole), start_server()
    engine = start_engine(policy, server)
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
    assert len(models_at(server)) == (1 if whole else 3)  # the base, and what is kept
    engine.close()
    assert len(models_at(server)) == 1


def models_at(server: FakeServer) -> list[str]:
    """The base and the adapters that a server lists."""
    listed = httpx2.get(f"{server.url}/v1/models").json()["data"]
    return [model["id"] for model in listed]


def test_a_session_continues_with_its_own_adapter_while_that_is_kept(start_server, tiny_model):
    policy = trained_policy(tiny_model)
    server = start_server()
    engine = VLLM(url=server.url, keeps=2).build()
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
    home = engine.weights.folder
    kept = {folder.name for folder in home.iterdir()}
    assert {name.split("-")[-2] for name in kept} == {"1", "2"}
    assert kept == set(server.model.adapters)
    engine.close()
    assert not home.exists()
    policy.network.load_state_dict(before, strict=False)
    assert done.version == 0
    check_turn(policy, done)


# ------------------------------------------------------------------------- servers that are refused


@both_kinds
def test_an_address_where_no_server_of_its_kind_answers_is_refused(kind, tiny_model):
    policy = Policy(str(tiny_model), lora=Lora()).build()
    away = f"http://127.0.0.1:{free_port()}"
    assert f"{kind.software} at {away} does not answer" in refusal(
        kind.engine(url=away).build(), policy
    )
    (other,) = {VLLM_KIND, SGLANG_KIND} - {kind}
    with fake_servers(tiny_model, *other.options) as start_other, web_server() as pages:
        for url in (start_other().url, pages):
            assert f"is no {kind.software}" in refusal(kind.engine(url=url).build(), policy)
    assert policy.network is None


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    """The address of a server that answers with a page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>It works!</html>")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (VLLM_KIND, "window of 48 tokens. Start it with --max-model-len 64"),
        (SGLANG_KIND, "window of 42 tokens. Start it with --context-length 70"),
    ],
    ids=str,
)
def test_a_server_with_a_short_window_is_refused_before_weights_load(
    kind, start_server, tiny_model, message
):
    policy = Policy(str(tiny_model), lora=Lora()).build()
    url = start_server("--max-model-len", "48").url
    assert message in refusal(kind.engine(url=url).build(), policy)
    assert policy.network is None


@both_kinds
@pytest.mark.parametrize("option", [("--no-adapters",), ("--max-lora-rank", "2")], ids=" ".join)
def test_a_server_that_does_not_take_adapters_is_refused_before_it_samples(
    start_server, start_engine, tiny_model, option
):
    engine = start_engine(trained_policy(tiny_model), start_server(*option))
    with pytest.raises(EngineError, match=r"does not take weights .*--enable-lora.*max-lora-rank"):
        engine.sync(0)


@both_kinds
def test_a_server_gets_the_key_of_the_environment_and_no_message_shows_it(
    kind, start_server, tiny_model, monkeypatch
):
    policy = Policy(str(tiny_model), lora=Lora(r=16)).build()  # as many as a stand-in takes
    engine = kind.engine(url=start_server("--api-key", "a-secret-of-mine").url).build()
    monkeypatch.delenv(kind.key_env, raising=False)
    assert "wants another key (status 401: Unauthorized)" in refusal(engine, policy)
    monkeypatch.setenv(kind.key_env, "a-wrong-key")
    message = refusal(engine, policy)
    assert f"api_key_env names ({kind.key_env})" in message
    assert "a-wrong-key" not in message
    monkeypatch.setenv(kind.key_env, "a-secret-of-mine")
    engine.check(policy, 64)
    assert policy.network is None


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (VLLM_KIND, "with --logprobs-mode processed_logprobs"),
        (SGLANG_KIND, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
    ids=str,
)
def test_a_server_that_returns_raw_log_probabilities_is_refused(
    start_server, start_engine, tiny_model, step
):
    engine = start_engine(trained_policy(tiny_model), start_server("--raw-logprobs"))
    with pytest.raises(EngineError, match=f"max_logprob_gap is 0.15.* {step}"):
        engine.sync(0)


@both_kinds
def test_another_base_is_refused_by_its_log_probabilities(
    kind, start_server, start_engine, tiny_model, tmp_path
):
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    base = Policy(str(tiny_model)).build()
    perturb(base, 1.0)
    base.network.save_pretrained(other)
    engine = start_engine(trained_policy(tiny_model), start_server(model=other))
    message = f"{kind.software} at http.* differ from the learner's by .*another base"
    with pytest.raises(EngineError, match=message):
        engine.sync(0)


# ------------------------------------------------------------------------------------------ outages


# with all weights, vLLM's answers do not show that it was started again
@pytest.mark.parametrize(
    ("kind", "whole"), [(VLLM_KIND, False), (SGLANG_KIND, False), (SGLANG_KIND, True)], ids=str
)
def test_attempts_of_a_server_that_dies_begin_again_when_it_is_back(
    start_server, start_engine, tiny_model, capfd, whole
):
    policy, server = trained_policy(tiny_model, whole), start_server()
    engine = start_engine(policy, server)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        server.kill()
        time.sleep(1)
        server.start()

    check_conversations(policy, converse_during(engine, disturb), 0)
    assert "answers again" in capfd.readouterr().err
    perturb(policy)
    engine.sync(1)
    check_conversations(policy, converse_during(engine, turns_each=1), 1)


def test_a_turn_that_the_server_loses_costs_its_attempt(start_server, start_engine, tiny_model):
    policy, server = trained_policy(tiny_model), start_server()
    engine = start_engine(policy, server)
    engine.sync(0)
    server.model.breaks_off = 1
    session = engine.open(PROMPT)
    with pytest.raises(TrajectoryLost, match=r"did not answer a turn .*'abort'"):
        on_loop(turn(session))
    with pytest.raises(RuntimeError, match="one turn at a time"):
        on_loop(turn(session))
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))


def test_a_server_that_was_restarted_between_turns_gets_its_adapters_again(
    start_server, start_engine, tiny_model
):
    policy, server = trained_policy(tiny_model), start_server()
    engine = start_engine(policy, server)
    engine.sync(0)
    older, before = engine.open(PROMPT), policy.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    perturb(policy)
    engine.sync(1)
    server.kill()
    server.start()  # before anybody asks it again
    with pytest.raises(TrajectoryLost, match="no adapters"):
        on_loop(turn(engine.open(PROMPT)))
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))
    policy.load_state_dict(before)
    check_turn(policy, on_loop(turn(older)))


@pytest.mark.parametrize("samples_ahead", [False, True])
def test_turns_of_a_server_that_was_restarted_unnoticed_are_not_learned_from(
    start_server, start_engine, tiny_model, samples_ahead
):
    policy, server = trained_policy(tiny_model, whole=True), start_server()
    perturb(policy, 0.5)
    engine = start_engine(policy, server)
    engine.sync(0)
    on_loop(turn(engine.open(PROMPT)))
    engine.release_memory()
    server.kill()
    server.start()
    on_loop(turn(engine.open(PROMPT)))  # with the weights of its start
    with pytest.raises(EngineError, match="was restarted between two turns"):
        engine.sync(1) if samples_ahead else engine.release_memory()


def test_attempts_of_a_server_that_dies_begin_again_on_another(
    start_server, start_engine, tiny_model, capfd
):
    policy, servers = trained_policy(tiny_model), [start_server(), start_server()]
    engine = start_engine(policy, *servers)
    engine.sync(0)

    def disturb():
        time.sleep(0.1)
        servers[0].kill()

    check_conversations(policy, converse_during(engine, disturb), 0)
    assert "its attempts begin again on another" in capfd.readouterr().err
    perturb(policy)
    engine.sync(1)
    servers[0].start()
    perturb(policy)
    engine.sync(2)  # the server that is back has this version too, and those that are kept
    assert len(models_at(servers[0])) == 3
    check_conversations(policy, converse_during(engine), 2)
    assert servers[0].model.prompts


def test_a_server_that_hangs_loses_its_turns_after_timeout_s(
    start_server, start_engine, tiny_model
):
    policy, servers = trained_policy(tiny_model), [start_server(), start_server()]
    engine = start_engine(policy, *servers, timeout_s=2)
    engine.sync(0)
    servers[1].hang()
    check_conversations(policy, converse_during(engine), 0)


def test_servers_that_stay_away_stop_the_run(start_server, start_engine, tiny_model):
    server = start_server()
    engine = start_engine(trained_policy(tiny_model), server, patience_s=1)
    engine.sync(0)
    with pytest.raises(EngineError, match=r"turnrl waited 1 s.*model\.engine\.patience_s"):
        converse_during(engine, server.kill)


def test_sessions_are_spread_over_servers_and_stay(start_server, start_engine, tiny_model):
    servers = [start_server(), start_server()]
    engine = start_engine(trained_policy(tiny_model), *servers)
    engine.sync(0)
    sessions = [engine.open([*PROMPT, n]) for n in range(6)]
    on_loop(turns(sessions))
    on_loop(turns([*sessions, *(session.fork() for session in sessions)]))
    asked = []
    for server in servers:
        prompts = [p for p in server.model.prompts if p[:4] == PROMPT]
        assert len(prompts) == 3 * 3  # two turns of each session, and one of its fork
        asked.append({prompt[4] for prompt in prompts})
    assert [*map(len, asked)] == [3, 3]
    assert asked[0].isdisjoint(asked[1])


# --------------------------------------------------------------------------------------------- runs


@both_kinds
def test_a_run_trains_with_it_and_its_record_has_every_version(kind, start_server, write_recipe):
    window = ("--max-model-len", str(2048 + kind.spare_tokens))
    write_recipe(url=[start_server(*window).url for _ in range(2)])
    built = build(["recipe.yaml"])
    assert built.module.objective.importance_cap == 2
    built.trainer.fit(built.module, datamodule=built.data)
    assert 0 < float(built.trainer.callback_metrics["train/logprob_gap"]) < 1e-4
    check_record(attempts=2 * 8)


def test_a_run_that_sampled_ahead_is_evaluated_without_its_server(start_server, write_recipe):
    server = start_server(*WINDOW)
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
    start_server, write_recipe, monkeypatch
):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise KeyboardInterrupt

    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("tmp").absolute()))
    server = start_server(*WINDOW)
    write_recipe(url=server.url)
    built = build(["recipe.yaml"])
    built.trainer.callbacks.append(Fails())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        built.trainer.fit(built.module, datamodule=built.data)
    assert not list(Path("tmp").glob("turnrl-weights-*"))
    assert models_at(server) == ["base"]
