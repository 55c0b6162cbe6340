"""Engines behind servers, against stand-ins for the servers: what holds for vLLM and SGLang, and,
with vLLM as the example, how outages are survived."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from lightning import Callback

import turnrl.servers
from nodes import free_port
from serving import (
    IGNORE_PEFT_WARNING,
    PROMPT,
    SGLANG_KIND,
    TURN,
    VLLM_KIND,
    WINDOW,
    StandIn,
    both_kinds,
    check_conversations,
    check_record,
    check_turn,
    converse_during,
    intercept,
    kind,
    perturb,
    refusal,
    stand_ins,
    start_engine,
    start_stand_in,
    trained_policy,
    turn,
    turns,
    write_recipe,
)
from turnrl import (
    EngineError,
    Lora,
    Policy,
    RecipeError,
    build,
    on_loop,
)
from turnrl.servers import Unavailable
from turnrl.testing import check_engine
from turnrl_servers import pool as pool_of_servers
from turnrl_vllm import VLLM

__all__ = ["kind", "start_engine", "start_stand_in", "write_recipe"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """A server that is away is asked again sooner than a run would ask it."""
    monkeypatch.setattr(turnrl.servers, "_FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(turnrl.servers, "_PROBE_EVERY_S", 0.2)


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
def test_the_engine_keeps_its_contract(kind, start_stand_in, tiny_model, whole):
    policy = trained_policy(tiny_model, whole)
    engine = kind.engine(url=start_stand_in().url).build()
    engine.check(policy, 64)
    check_engine(engine, policy)
    assert engine.in_force["sampler"] == f"{kind.software} 0.0.0, 1 server"


@both_kinds
@pytest.mark.parametrize("whole", [False, True])
def test_each_version_samples_with_its_own_weights(start_stand_in, start_engine, tiny_model, whole):
    policy, server = trained_policy(tiny_model, whole), start_stand_in()
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


def models_at(server: StandIn) -> list[str]:
    """The base and the adapters that a server lists."""
    listed = httpx2.get(f"{server.url}/v1/models").json()["data"]
    return [model["id"] for model in listed]


def test_a_session_continues_with_its_own_adapter_while_that_is_kept(start_stand_in, tiny_model):
    policy = trained_policy(tiny_model)
    engine = VLLM(url=start_stand_in().url, keeps=2).build()
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


@both_kinds
def test_a_server_that_took_weights_but_answered_too_late_is_asked_again(
    kind, start_stand_in, start_engine, tiny_model, monkeypatch
):
    policy = trained_policy(tiny_model)
    engine = start_engine(policy, start_stand_in())

    async def first_is_late(path, answer):
        if paths.count(kind.load_path) == 1:
            raise Unavailable("timed out")

    paths = intercept(monkeypatch, engine.pool.servers[0], first_is_late)
    engine.sync(0)
    assert paths.count(kind.load_path) == 2
    check_turn(policy, on_loop(turn(engine.open(PROMPT))))


@both_kinds
def test_a_turn_that_the_server_breaks_off_is_asked_for_again(
    kind, start_stand_in, start_engine, tiny_model, monkeypatch
):
    engine = start_engine(trained_policy(tiny_model), start_stand_in())
    engine.sync(0)

    async def abort_first(path, answer):
        if len(paths) == 1:
            kind.abort(answer)

    paths = intercept(monkeypatch, engine.pool.servers[0], abort_first)
    done = on_loop(turn(engine.open(PROMPT)))
    assert len(done.token_ids) == TURN.max_tokens
    assert paths.count(kind.turn_path) == 3  # the server is compared again in between


# ------------------------------------------------------------------------- servers that are refused


@both_kinds
def test_an_address_where_no_server_of_its_kind_answers_is_refused(kind, tiny_model):
    policy = Policy(str(tiny_model), lora=Lora())
    away = f"http://127.0.0.1:{free_port()}"
    assert f"{kind.software} at {away} does not answer" in refusal(
        kind.engine(url=away).build(), policy
    )
    (other,) = {VLLM_KIND, SGLANG_KIND} - {kind}
    with stand_ins(tiny_model, *other.stand_in) as start_other, web_server() as pages:
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
    ("kind", "options", "problem", "step"),
    [
        (
            VLLM_KIND,
            ("--max-model-len", "48"),
            "has a window of 48 tokens",
            "Start it with --max-model-len 64, or lower model.rollout.max_tokens.",
        ),
        (
            SGLANG_KIND,
            ("--max-model-len", "48"),
            "has a window of 42 tokens",
            "Start it with --context-length 70, or lower model.rollout.max_tokens.",
        ),
        (
            VLLM_KIND,
            ("--no-adapters",),
            "cannot take an adapter of rank 32 (status 404: Not Found)",
            "Start it with --enable-lora, --max-lora-rank, and in its environment "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; or, to train all weights, with "
            "VLLM_SERVER_DEV_MODE=1.",
        ),
        (
            SGLANG_KIND,
            ("--no-adapters",),
            "cannot take an adapter of rank 32 (status 400: LoRA is not enabled)",
            "Start it with --enable-lora, --max-lora-rank and --lora-target-modules.",
        ),
        (
            VLLM_KIND,
            (),
            "LoRA rank 32 is greater than max_lora_rank 16",
            "Start it with a larger --max-lora-rank, or lower model.policy.lora.r.",
        ),
        (
            SGLANG_KIND,
            (),
            "LoRA rank 32 is greater than --max-lora-rank 16",
            "Start it with a larger --max-lora-rank and with all --lora-target-modules, or lower "
            "model.policy.lora.r.",
        ),
    ],
    ids=str,
)
def test_a_server_that_cannot_serve_is_refused_before_weights_load(
    kind, start_stand_in, tiny_model, options, problem, step
):
    policy = Policy(str(tiny_model), lora=Lora(r=32))
    message = refusal(kind.engine(url=start_stand_in(*options).url).build(), policy)
    assert problem in message
    assert message.endswith(step)
    assert policy.network is None


@both_kinds
def test_a_server_gets_the_key_of_the_environment_and_no_message_shows_it(
    kind, start_stand_in, tiny_model, monkeypatch
):
    policy = Policy(str(tiny_model), lora=Lora(r=16))  # as many as a stand-in takes
    engine = kind.engine(url=start_stand_in("--api-key", "a-secret-of-mine").url).build()
    step = f"Put its key into the environment variable {kind.key_env}."
    monkeypatch.delenv(kind.key_env, raising=False)
    message = refusal(engine, policy)
    assert "wants a key (status 401: Unauthorized)" in message
    assert message.endswith(step)
    monkeypatch.setenv(kind.key_env, "a-wrong-key")
    message = refusal(engine, policy)
    assert "refuses the key" in message
    assert message.endswith(step)
    assert "a-wrong-key" not in message
    monkeypatch.setenv(kind.key_env, "a-secret-of-mine")
    engine.check(policy, 64)
    assert policy.network is None


@both_kinds
def test_another_tokenizer_is_refused(kind, start_stand_in, tiny_model, tmp_path):
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    engine = kind.engine(url=start_stand_in(model=other).url).build()
    message = refusal(engine, Policy(str(tiny_model), lora=Lora()))
    assert "whose tokenizer reads a text as other tokens" in message


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (VLLM_KIND, "with --logprobs-mode processed_logprobs"),
        (SGLANG_KIND, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
    ids=str,
)
def test_a_server_that_returns_raw_log_probabilities_is_refused(
    start_stand_in, start_engine, tiny_model, step
):
    engine = start_engine(trained_policy(tiny_model), start_stand_in("--raw-logprobs"))
    with pytest.raises(EngineError, match=f"before the temperature is applied. Start it {step}"):
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


@both_kinds
def test_another_base_is_refused_by_its_log_probabilities(
    kind, start_stand_in, start_engine, tiny_model, tmp_path
):
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    base = Policy(str(tiny_model))
    perturb(base, 1.0)
    base.network.save_pretrained(other)
    engine = start_engine(trained_policy(tiny_model), start_stand_in(model=other))
    message = f"{kind.software} at http.* differ from the learner's by .*It has other weights"
    with pytest.raises(EngineError, match=message):
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


# ------------------------------------------------------------------------------------------ outages


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


# not vLLM with all weights: its answers do not name their weights
@pytest.mark.parametrize(
    ("kind", "whole"), [(VLLM_KIND, False), (SGLANG_KIND, False), (SGLANG_KIND, True)], ids=str
)
def test_a_restarted_server_gets_its_weights_again_before_a_turn_counts(
    start_stand_in, start_engine, tiny_model, whole
):
    policy, server = trained_policy(tiny_model, whole), start_stand_in()
    engine = start_engine(policy, server)
    engine.sync(0)
    session = engine.open(PROMPT)
    first = on_loop(turn(session))
    server.kill()
    server.start()  # with the weights that training began from, before anybody asks again
    check_turn(policy, on_loop(turn(session, [7])), [*PROMPT, *first.token_ids, 7])


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
    monkeypatch.setattr(pool_of_servers, "_HEALTH_TIMEOUT_S", 0.3)
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


# --------------------------------------------------------------------------------------------- runs


@both_kinds
def test_a_run_trains_with_it_and_its_record_has_every_version(kind, start_stand_in, write_recipe):
    window = ("--max-model-len", str(2048 + kind.spare_tokens))
    write_recipe(url=[start_stand_in(*window).url for _ in range(2)])
    built = build(["recipe.yaml"])
    assert built.module.objective.importance_cap == 2
    built.trainer.fit(built.module, datamodule=built.data)
    assert 0 < float(built.trainer.callback_metrics["train/logprob_gap"]) < 1e-4
    check_record(attempts=2 * 8)


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
    assert models_at(server) == ["base"]
