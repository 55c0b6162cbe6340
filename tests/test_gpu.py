"""Whole runs on a real GPU, by Lightning's own way: `pytest -m gpu`. Without one they are skipped.

What needs no GPU of these is in test_foreign.py, on a device of the tests' own.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import turnrl
from commands import RECIPE, fails, save
from turnrl.cli import main
from turnrl.plugin.hooks import load_classes
from turnrl.policy.settings import Lora

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = ["--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.max_epochs", "3"]
NF4 = ["--model.policy.quantization", "nf4", "--model.policy.lora.r", "4"]
LORA = ["--model.policy.lora.r", "4"]
WHOLE = ["--model.policy.dtype", "bfloat16"]


@pytest.fixture
def tiny(tiny_model, tmp_path, monkeypatch):
    """A recipe of the small world, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    save(json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model))), "tiny.yaml")
    return "tiny.yaml"


@pytest.mark.parametrize(
    "options", [[], WHOLE, LORA, NF4], ids=["float32", "bfloat16", "lora", "nf4"]
)
def test_a_run_trains_resumes_and_answers(tiny, options, capsys):
    assert main(["fit", tiny, *GPU, *options]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^iteration +\d/3", out, re.MULTILINE)) == 3
    assert (
        main(["fit", tiny, *GPU, *options, "--trainer.max_epochs", "4", "--ckpt_path", "last"]) == 0
    )
    assert "iteration   4/4" in capsys.readouterr().out
    agent = turnrl.load(max(Path("runs").glob("*/version_*")), device="cuda")
    (trajectory,) = agent.ask(["1"])
    assert trajectory.turns


def test_a_module_that_was_trained_in_python_is_asked_where_it_was_trained(tiny):
    built = turnrl.build([tiny, *GPU, *LORA])
    built.trainer.fit(built.module, datamodule=built.data)
    assert built.module.ask(["1"])[0].turns
    assert built.module.policy.device.type == "cuda"


@pytest.mark.parametrize("options", [LORA, NF4], ids=["lora", "nf4"])
def test_kernels_and_shared_prompts_are_in_force(tiny_model, options):
    policy = turnrl.Policy(str(tiny_model), "nf4" if options is NF4 else "none", Lora(r=4)).build()
    with torch.device("cuda"):  # as Lightning does
        policy.load("cuda")
    assert policy.way.share
    assert (
        policy.active_choices["attention while learning"] == "prompts once, torch's varlen kernel"
    )
    assert {p.device.type for p in policy.parameters()} == {"cuda"}
    assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
    engine = load_classes("turnrl_engines")["Slots"]()
    engine.start(policy, 64)
    in_force = dict(engine.active_choices)
    engine.close()
    assert in_force, "the engine says nothing of its choices"


def test_policies_on_the_cpu_and_the_gpu_work_in_one_process(tiny_model):
    from lightning.fabric.utilities import move_data_to_device

    rows = [([5, 6, 7, 8, *rest], [False] * 5 + [True] * 3) for rest in ([9, 10, 11, 12], [13] * 4)]
    outputs = []
    for device in ("cpu", "cuda", "cpu", "cuda"):
        policy = turnrl.Policy(str(tiny_model)).build()
        policy.load(device)
        (_, layout), *_ = policy.forward_passes(rows, 1000)
        with torch.no_grad():
            outputs.append(policy(move_data_to_device(layout, device))[0].cpu())
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert torch.allclose(*outputs[:2], atol=1e-3)


def test_memory_that_runs_out_names_the_phase_and_the_setting(tiny, capsys):
    options = ["--model.policy.minibatch_tokens", "4000000", "--model.rollout.max_tokens", "2000"]
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        message = fails(capsys, ["fit", tiny, *GPU, *options], code=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "memory ran out while" in message
    assert "Lower model." in message
