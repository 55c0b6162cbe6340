"""A policy divided over processes learns as one that is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from commands import start
from division_script import CASES, Writes, train
from nursery import python
from runs import make_module as module
from turnrl import Policy, RecipeError
from turnrl.plugin.errors import CheckpointError
from turnrl.policy import trials
from turnrl.policy.compute import decoder_layers
from turnrl.policy.settings import Lora
from turnrl.policy.sharding import FSDP2
from turnrl.training.checks import check_division

SCRIPT = Path(__file__).parent / "division_script.py"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory, nursery):
    """Where two processes have trained each case, by both strategies and resumed."""
    folder = tmp_path_factory.mktemp("division")
    runs = [
        {"case": case, "strategy": strategy, "folder": f"{strategy}-{case}"}
        for case in CASES
        for strategy in ("ddp", "fsdp2")
    ]
    whole = {"case": "whole", "strategy": "fsdp2"}
    runs.append({**whole, "folder": "longer", "epochs": 3})
    last = "fsdp2-whole/version_0/checkpoints/last.ckpt"
    runs.append({**whole, "folder": "resumed", "epochs": 3, "resume": last})
    last = last.replace("fsdp2", "ddp")
    runs.append({**whole, "folder": "from-ddp", "epochs": 3, "resume": last})
    begin = Policy(str(tiny_model), lora=Lora(r=4)).build()
    begin.load()
    for name, weight in begin.trainable_parameters().items():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    begin.export(folder / "adapter")
    again = {"case": "reference", "model": str(folder / "adapter")}
    runs += [{**again, "strategy": s, "folder": f"{s}-adapter-again"} for s in ("ddp", "fsdp2")]
    half = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    half.save_pretrained(shutil.copytree(tiny_model, folder / "half"))
    both, mixed = {"model": str(tiny_model), "devices": 2}, {"model": str(folder / "half")}
    every = [both | (mixed if run["case"] == "mixed" else {}) | run for run in runs]
    (folder / "division.json").write_text(json.dumps(every))
    start(nursery, folder, SCRIPT)
    return folder


def kept(folder):
    return torch.load(folder / "kept.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "adapter-again"])
def test_a_divided_policy_learns_the_same_as_whole_ones(folder, case):
    whole, divided = (kept(folder / f"{strategy}-{case}") for strategy in ("ddp", "fsdp2"))
    gaps = []
    for first, second in zip(whole["gradients"], divided["gradients"], strict=True):
        assert first.abs().max() > 1e-4
        gaps.append(float((second - first).norm() / first.norm()))
    assert len(gaps) == {"passes": 12}.get(case, 2)
    # rounding, of which Adam makes more in each step
    assert gaps[0] < 1e-6
    assert max(gaps) < 5e-3
    assert whole["losses"] == pytest.approx(divided["losses"], abs=2e-3)
    assert whole["norms"] == pytest.approx(divided["norms"], rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes"), [("ddp", 1), ("fsdp2", 2)])
def test_a_process_holds_its_part_of_the_policy(folder, tiny_model, strategy, processes):
    weights, moments = kept(folder / f"{strategy}-whole")["held"]
    loaded = module(tiny_model).policy.load()
    whole = sum(p.numel() * p.element_size() for p in loaded.parameters())
    assert weights == pytest.approx(whole / processes, rel=0.01)
    assert moments == pytest.approx(2 * whole / processes, rel=0.01)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def saved(folder, config):
    """The folder of a small random model, without a tokenizer."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_a_trial_that_fails_in_mid_pass_leaves_nothing_undivided(mesh, tmp_path):
    """What was gathered when the attention raised would stay so, and not be trained."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.FalconConfig(num_hidden_layers=2, alibi=False, **sizes)
    folder = saved(tmp_path / "falcon", config)
    message = "has attention of its own.* Set model.policy.share_prefixes to false"
    with pytest.raises(RecipeError, match=message):
        Policy(folder).build().load("cpu", mesh)
    policy = Policy(folder, share_prefixes=False).build()
    policy.load("cpu", mesh)
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def test_a_divided_policy_keeps_no_copies_of_all_its_weights(mesh, tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.Qwen2Config(
        num_hidden_layers=2, num_key_value_heads=2, intermediate_size=32, **sizes
    )
    policy = Policy(
        saved(tmp_path / "qwen", config), dtype="bfloat16", gradient_checkpointing=True
    ).build()
    seen: list[bool] = []

    def watched(tried, value):  # the trial has a graph here, whose layers are computed again
        seen.extend(layer.training for layer in decoder_layers(tried.base))
        return norm(tried, value)

    norm = trials._gradient_norm
    monkeypatch.setattr(trials, "_gradient_norm", watched)
    policy.load("cpu", mesh)
    assert seen == [True, True]
    with policy.precision():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
    assert all(layer.training for layer in decoder_layers(policy.base))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is counted as Linux does")
def test_a_process_never_holds_a_whole_policy(tmp_path, nursery):
    """The files are read in place, and come apart layer by layer."""
    config = transformers.Qwen2Config(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        tie_word_embeddings=False,
    )
    network = transformers.Qwen2ForCausalLM(config).bfloat16()
    whole = 2 * sum(p.numel() for p in network.parameters())
    network.save_pretrained(tmp_path)
    del network
    script = Path(__file__).parent / "dividing_script.py"
    both = [
        subprocess.Popen(
            python(str(script), str(rank), str(tmp_path)),
            env={**os.environ, **nursery.environment},
        )
        for rank in range(2)
    ]
    assert [process.wait(200) for process in both] == [0, 0]
    for rank in range(2):
        held = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert held["dtypes"] == ["torch.bfloat16"]
        assert held["parts"] == pytest.approx(whole / 2, rel=0.01)
        # its part, a layer, and what the allocator keeps
        assert held["most"] < 0.8 * whole
        assert held["way"] == "prompts once, padded batches"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bfloat16", "reference", "critic", "whole", "mixed"])
def test_two_processes_learn_the_same_as_one(folder, tiny_model, tmp_path, case):
    model = folder / "half" if case == "mixed" else tiny_model
    train(case, str(model), "auto", 1, tmp_path)
    alone, divided = kept(tmp_path), kept(folder / f"fsdp2-{case}")
    assert alone["losses"][0] == pytest.approx(divided["losses"][0], abs=1e-5)
    assert alone["norms"][0] == pytest.approx(divided["norms"][0], rel=1e-5)
    gradient = alone["gradients"][0]
    assert (gradient - divided["gradients"][0]).norm() < 1e-5 * gradient.norm()


@pytest.mark.slow
def test_a_run_that_was_divided_resumes_exactly(folder):
    longer, resumed = kept(folder / "longer")["weights"], kept(folder / "resumed")["weights"]
    assert longer.keys() == resumed.keys()
    assert all(torch.equal(longer[name], resumed[name]) for name in longer)


@pytest.mark.slow
def test_it_resumes_with_another_strategy_or_number_of_processes(folder, tiny_model, tmp_path):
    wanted = kept(folder / "longer")["weights"]
    last = str(folder / "fsdp2-whole" / "version_0" / "checkpoints" / "last.ckpt")
    train("whole", str(tiny_model), "auto", 1, tmp_path, 3, last)
    for weights in (kept(tmp_path)["weights"], kept(folder / "from-ddp")["weights"]):
        gap = sum(float((weights[name] - wanted[name]).square().sum()) for name in wanted)
        size = sum(float(value.square().sum()) for value in wanted.values())
        assert gap / size < 1e-6


@pytest.mark.parametrize(
    ("policy", "engine", "message"),
    [
        ({"quantization": "nf4", "lora": Lora()}, Writes(), r"\(nf4\), which do not come apart"),
        ({}, None, "and Slots samples with the policy's own weights, of which each process"),
    ],
)
def test_policies_and_engines_that_cannot_be_divided_are_refused(
    tiny_model, policy, engine, message
):
    it = module(tiny_model, policy, engine=engine)
    with pytest.raises(RecipeError, match=message):
        check_division(it.policy, it.engine)


def resumed(optimizer):
    """What another optimiser of the same weights has after it took this one's state."""
    (weights,) = optimizer.param_groups[0]["params"]
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    other = type(optimizer)([weights])
    loads = SimpleNamespace(optimizers=[other])
    FSDP2.load_optimizer_state_dict(loads, {"optimizer_states": [optimizer.state_dict()]})
    return other.state[weights]


@pytest.mark.parametrize("shape", [(1,), (3, 4)])
def test_moments_are_resumed_by_the_weight_that_they_are_of(shape):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(shape))])
    moments = resumed(optimizer)
    (before,) = optimizer.state.values()
    assert moments.keys() == before.keys()
    assert all(torch.equal(moments[name], before[name]) for name in before)


def test_moments_that_do_not_come_apart_are_refused():
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(CheckpointError, match=r"shape \(3, 1\) for a weight of shape \(3, 4\)"):
        resumed(optimizer)


def test_the_layers_of_a_network_are_found_under_any_name():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.FalconConfig(num_hidden_layers=3, **sizes)
    network = transformers.FalconForCausalLM(config)
    assert decoder_layers(network) == [*network.transformer.h]
