"""A vLLM server that the run starts, lets sleep and ends. Its interpreter starts a fake server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from lightning import Callback

from serving import (
    IGNORE_PEFT_WARNING,
    PROMPT,
    answer_of,
    check_conversations,
    converse_during,
    interpreter,
    is_asleep,
    kind,
    refusal,
    sleeps_and_samples,
    start_engine,
    start_server,
    trained_policy,
    turn,
    url_of,
    write_recipe,
)
from turnrl import Policy, RecipeError, build
from turnrl.agent.running import on_loop
from turnrl.cli import main
from turnrl.engines import RunContext
from turnrl.plugin.errors import EngineError
from turnrl.policy.model import LanguageModel
from turnrl.policy.settings import Lora
from turnrl_vllm import VLLM

__all__ = ["interpreter", "kind", "start_engine", "start_server", "write_recipe"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING


def listening(url: str) -> psutil.Process:
    """The process that listens at an address."""
    port = int(url.rpartition(":")[2])
    listen = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN")
    return psutil.Process(next(c.pid for c in listen if c.laddr[1] == port))


def keepers() -> list[psutil.Process]:
    """What keeps the servers of this process."""
    children = psutil.Process().children()
    return [child for child in children if any("keeper.py" in word for word in child.cmdline())]


def broken(interpreter: Path, message: str) -> None:
    """Let vLLM end with a message as soon as it starts."""
    program = interpreter.parent / "packages" / "vllm" / "entrypoints" / "cli" / "main.py"
    program.write_text(f"raise SystemExit({message!r})\n")


# ---------------------------------------------------------------------------- its start and its end


def test_an_interpreter_without_vllm_is_refused(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vllm").mkdir()  # an environment of that name, as in the how-to, is no package
    policy = Policy(str(tiny_model), lora=Lora()).build()
    for python, problem in (
        (sys.executable, "has no package vllm"),
        ("/nowhere/python", "does not run here"),
        (sys.prefix, "does not run here"),
    ):
        assert problem in refusal(VLLM(python=python).build(), policy)
    with pytest.raises(RecipeError, match="does not run here"):  # nothing is started
        VLLM(python="/nowhere/python").for_rehearsal()


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_with_the_end_of_its_log(
    interpreter, tiny_model, tmp_path
):
    policy = trained_policy(tiny_model)
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared")).build()
    engine.check(policy, 64)
    engine.start(policy, 64)
    engine.sync(0)
    check_conversations(policy, converse_during(engine), 0)
    server = listening(url_of(engine))
    with pytest.raises(EngineError, match=r"vLLM has ended. The end of its log"):
        converse_during(engine, server.kill)
    engine.close()
    (log,) = (tmp_path / "shared").iterdir()
    assert log.suffix == ".log"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_server(interpreter, tiny_model, tmp_path, number):
    (tmp_path / "run.py").write_text(
        "import sys, time\n"
        "from turnrl import Policy; from turnrl.policy.settings import Lora\n"
        "from turnrl_vllm.settings import VLLM\n"
        "policy = Policy(sys.argv[1], lora=Lora(r=4)).build()\n"
        "policy.load()\n"
        "engine = VLLM(python=sys.argv[2], folder=sys.argv[3]).build()\n"
        "engine.start(policy, 64)\n"
        "print(engine.supply.url.rpartition(':')[2], flush=True)\n"
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
    engine = VLLM(python=str(interpreter), folder=str(tmp_path / "shared")).build()
    with pytest.raises(EngineError, match=r"(?s)ended while it was starting.*no room on the GPU"):
        engine.start(trained_policy(tiny_model), 64)
    engine.close()
    (log,) = (tmp_path / "shared").iterdir()
    assert log.read_text().count("no room on the GPU") == 1  # it would end so every time


def test_the_end_of_a_log_has_nothing_of_an_earlier_server(interpreter, tiny_model, tmp_path):
    broken(interpreter, "error: an argument that there is not")
    engine = VLLM(python=str(interpreter)).build()
    policy, folder = trained_policy(tiny_model), tmp_path / "run"
    engine.check(policy, 64, RunContext(folder))
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


# ---------------------------------------------------------------------------------------- its sleep


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_server_sleeps_while_nothing_is_sampled(interpreter, tiny_model, tmp_path, whole):
    policy = trained_policy(tiny_model, whole)
    engine = VLLM(python=str(interpreter), sleeps=True).build()
    engine.check(policy, 64, RunContext(tmp_path / "run"))
    sleeps_and_samples(engine, policy)
    assert answer_of(engine, "wakes") == 2  # the first of three collections finds it awake
    assert len(answer_of(engine, "loads")) == 3
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
    sleeps = VLLM(python="python", arguments=arguments).build()
    assert sleeps.server_memory(10**11) == (
        None if share is None else (int(share * 1e11), 3 * 10**9)
    )
    awake = VLLM(python="python", arguments=arguments, sleeps=False).build()
    assert awake.server_memory(10**11) == (None if share is None else (int(share * 1e11),) * 2)
    assert VLLM(url="http://localhost:8000").build().server_memory(10**11) is None


def on_device(monkeypatch, kind: str) -> None:
    monkeypatch.setattr(LanguageModel, "device", property(lambda _: torch.device(kind)))


def test_a_policy_on_a_gpu_lets_its_server_sleep(interpreter, tiny_model, tmp_path, monkeypatch):
    policy = trained_policy(tiny_model)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    engine = VLLM(python=str(interpreter)).build()
    engine.check(policy, 64, RunContext(tmp_path / "run"))
    with monkeypatch.context() as there:
        on_device(there, "cuda")
        engine.start(policy, 64)
    (keeper,) = keepers()
    assert "--enable-sleep-mode" in keeper.cmdline()
    engine.sync(0)
    engine.release_memory()
    assert is_asleep(engine)
    before = len(emptied)
    engine.sync(1)
    assert len(emptied) - before == 1  # the learner's cache, which vLLM takes
    on_loop(turn(engine.open(PROMPT)))
    engine.close()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sleepless", r"does not give its memory back .*no such allocator.*engine\.sleeps"),
        ("--wakeless", r"does not get its memory back .*out of memory.*--gpu-memory-utilization"),
    ],
)
def test_a_server_that_does_not_sleep_or_wake_well_stops_the_run(
    start_server, start_engine, tiny_model, monkeypatch, option, message
):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    engine = start_engine(trained_policy(tiny_model), start_server(option))
    engine.sync(0)

    def sleep_and_wake() -> None:
        on_loop(engine.pool.sleep())
        engine.sync(1)

    with pytest.raises(EngineError, match=message):
        sleep_and_wake()


# --------------------------------------------------------------------------------------------- runs


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
    sampling = r"pass  sampling +\d+ turns by VLLM on cpu"
    assert re.search(sampling, printed.out)
    (log,) = re.findall(r"starting vLLM; its log is (\S+)", printed.err)
    assert not Path(log).exists()
    assert not Path("runs").exists()
    assert keepers() == []
