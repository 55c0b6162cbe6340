"""Whole runs on a second device (`foreign.py`): nothing of them may lie on the CPU by mistake."""

import contextlib
import csv
import gc
import json
from dataclasses import replace
from pathlib import Path

import bitsandbytes  # noqa: F401 - its operators are to be there
import lightning as L
import pytest
import torch
from lightning.fabric.accelerators import cuda
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import foreign
import turnrl
import turnrl.training.module
from commands import RECIPE, fails, save
from foreign import LEDGER, Far, counting
from runs import TIMINGS, data, make_module
from turnrl import Question
from turnrl.cli import main
from turnrl_slots import Slots

foreign.take_kernels("bitsandbytes")

FAR = ["--trainer.accelerator", "far", "--trainer.strategy", "far"]
SMALL = {
    "--model.group_size": 2,
    "--model.steps_per_pass": 1,
    "--model.passes_per_iteration": 2,
    "--model.policy.minibatch_tokens": 512,
    "--data.questions_per_iteration": 2,
    "--data.val_limit": 4,
    "--trainer.max_epochs": 2,
    "--trainer.check_val_every_n_epoch": 2,
    "--trainer.enable_model_summary": "false",
}
NF4 = ["--model.policy.quantization", "nf4", "--model.policy.lora.r", "4"]
NF4 += ["--model.policy.gradient_checkpointing", "1"]
# with room to spare: a device that is no GPU and no CPU has to be told
PAGES = ["--model.engine", "Slots", "--model.engine.kv_memory", "20MB"]
PAGES += ["--model.engine.prefill_tokens", "512"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for runs, which share their index."""
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    yield
    LEDGER.limit = None


@pytest.fixture(scope="module")
def tiny(tiny_model, folder):
    """A recipe of the small world."""
    contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model)))
    save(contents, folder / "tiny.yaml")
    return folder / "tiny.yaml"


def fit(name, recipe, *options):
    """Train a small version of a recipe; the rows of its metrics, without what the clock says."""
    small = [word for option, value in SMALL.items() for word in (option, str(value))]
    logger = ["--trainer.logger.class_path", "CSVLogger"]
    logger += ["--trainer.logger.init_args.save_dir", "runs"]
    logger += ["--trainer.logger.init_args.name", name, "--trainer.logger.init_args.version", "0"]
    code = main(["fit", str(recipe), *small, *PAGES, *logger, *options])
    assert code == 0
    with Path("runs", name, "version_0", "metrics.csv").open() as file:
        rows = csv.DictReader(file)
        return [{k: v for k, v in row.items() if v and k not in TIMINGS} for row in rows]


def fit_there(name, recipe, *options):
    """The same on the other device, on which it has to be computed."""
    with counting():
        rows = fit(name, recipe, *options, *FAR)
    assert LEDGER.peak > 1e6, "nothing was computed there"
    return rows


@pytest.fixture(scope="module")
def whole(tiny, folder):
    """A run there that is not interrupted."""
    with contextlib.chdir(folder):
        return fit_there("whole", tiny, *NF4)


def test_a_run_on_another_device_has_the_digits_of_the_cpu(tiny, whole):
    alike(fit("near", tiny, *NF4), whole)


def alike(near, far):
    assert len(near) == len(far) >= 3  # of the untrained policy, and of each iteration
    for here, there in zip(near, far, strict=True):
        assert here.keys() == there.keys()
        for key, value in here.items():
            assert float(there[key]) == pytest.approx(float(value), rel=1e-4, abs=2e-6), key


@pytest.mark.slow
def test_a_run_goes_on_there_and_leaves_weights_that_others_load(tiny, whole):
    fit("first", tiny, *FAR, *NF4, "--trainer.max_epochs", "1")
    checkpoint = "runs/first/version_0/checkpoints/last.ckpt"
    rest = fit("rest", tiny, *FAR, *NF4, "--ckpt_path", checkpoint)
    assert rest[-1] == whole[-1]
    trained = load_file("runs/rest/version_0/adapter/adapter_model.safetensors")
    again = load_file("runs/whole/version_0/adapter/adapter_model.safetensors")
    assert trained.keys() == again.keys()
    assert all(torch.equal(trained[name], again[name]) for name in again)
    assert any(value.abs().sum() > 0 for name, value in trained.items() if "lora_B" in name)
    # and a policy on the CPU goes on from it
    agent = turnrl.load("runs/rest/version_0")
    assert len(agent.ask(["1"])) == 1
    fit("plain", tiny, *FAR, "--trainer.max_epochs", "1")
    made = AutoModelForCausalLM.from_pretrained("runs/plain/version_0/model")
    assert all(p.isfinite().all() for p in made.parameters())


def test_lightning_gives_no_advice_on_float32_on_a_gpu(tiny, monkeypatch, caplog):
    turnrl.build([str(tiny)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(cuda, "_is_ampere_or_later", lambda _: True)
    with caplog.at_level("INFO"):
        # Lightning calls it only where there is a GPU
        cuda._check_cuda_matmul_precision(torch.device("cuda", 0))
    assert "Tensor Cores" not in caplog.text


@pytest.mark.slow
def test_a_policy_that_a_trainer_has_trained_is_asked_on_its_device(tiny_model):
    strategy = SingleDeviceStrategy("far", Far())  # leaves the weights on the CPU, as on a GPU
    run = L.Trainer(
        strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    agent = make_module(tiny_model, engine=Slots(kv_memory="20MB", prefill_tokens=512))
    run.fit(agent, data())
    assert agent.device.type == "cpu"
    with counting():
        (attempt,) = agent.ask(["Number 7?"])
    assert LEDGER.peak > 1e6, "it acted on the CPU"
    assert agent.device.type == "far"
    agent.cpu()
    agent.scores([replace(attempt, question=Question("7", "Number 7?", ("7",)))])
    assert agent.device.type == "far"  # a reward may read the policy


@pytest.mark.parametrize(
    ("room", "phase", "step"),
    [
        (100_000, "loading", "the size of model.policy.model (nf4 in model.policy"),
        (3_000_000, "learning", "Lower model.policy.minibatch_tokens"),
    ],
)
def test_memory_that_is_too_small_is_reported_at_the_start_with_its_phase(
    capsys, monkeypatch, tiny, room, phase, step
):
    grows = phase == "learning"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True" if grows else "")
    gc.collect()  # what earlier tests left must not be freed in the middle and make room
    LEDGER.limit = LEDGER.now + room
    small = [word for option, value in SMALL.items() for word in (option, str(value))]
    began = []
    monkeypatch.setattr(turnrl.training.module.MTGRPO, "collect", lambda *_: began.append(1))
    message = fails(capsys, ["fit", str(tiny), *small, *PAGES, *FAR], code=1)
    assert f"memory ran out while {phase}" in message
    assert step in message
    assert (
        "Start Python with PYTORCH_ALLOC_CONF=expandable_segments:True." in message
    ) is not grows
    assert not began
