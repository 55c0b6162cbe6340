"""The policy: loading, log-probabilities, adapters on a 4-bit base, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import turnrl.policy.head
from nursery import python
from runs import adamw, column, data, last, make_module, trainer
from turnrl import MTGRPO, Policy, RecipeError
from turnrl.agent.chat import ChatFormat
from turnrl.plugin.errors import CheckpointError
from turnrl.policy.layout import lay_out
from turnrl.policy.settings import Lora

ROWS = [
    ([5, 9, 33, 71, 120, 8, 17, 41], [False, False, True, True, False, False, True, True]),
    ([44, 2, 301, 7, 7], [False, False, True, False, True]),
    ([5, 9, 33, 71, 8, 120], [False, False, False, True, True, True]),
]


def naive_logprobs(network, temperature):
    """One row at a time, unpadded, all logits, no chunks."""
    logprobs, entropies = [], []
    for ids, asked in ROWS:
        logits = network(input_ids=torch.tensor([ids])).logits[0] / temperature
        for t in (t for t, wanted in enumerate(asked) if wanted):
            log_p = logits[t - 1].log_softmax(-1)
            logprobs.append(log_p[ids[t]])
            entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("per_chunk", [2**27, 1024])
@pytest.mark.parametrize("share", [True, False])
def test_log_probabilities_and_their_gradient_equal_the_naive_ones(
    tiny_model, temperature, per_chunk, share, monkeypatch
):
    monkeypatch.setattr(turnrl.policy.head, "LOGITS", per_chunk)  # 1024: two tokens a chunk
    policy = Policy(str(tiny_model)).build()
    network = policy.load()
    expected, entropies = naive_logprobs(network, temperature)
    (gradient,) = torch.autograd.grad(expected.sum(), network.get_input_embeddings().weight)
    logprobs, entropy, _ = policy(lay_out(ROWS, share), temperature)
    (other,) = torch.autograd.grad(logprobs.sum(), network.get_input_embeddings().weight)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(entropy, entropies, atol=1e-4)
    assert torch.allclose(other, gradient, atol=1e-4)
    assert not entropy.requires_grad


def test_read_and_score_give_each_sequences_scores_and_score_their_gradient(tiny_policy):
    expected, entropies = naive_logprobs(tiny_policy.load(), 0.6)
    weight = tiny_policy.base.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(expected.sum(), weight)
    for score in (tiny_policy.score_tokens, tiny_policy.score_with_grad):
        scores = score(ROWS, 8, temperature=0.6)  # 8 tokens at once: several forward passes
        assert [len(of_row.logprobs) for of_row in scores] == [4, 2, 3]
        logprobs = torch.cat([s.logprobs for s in scores])
        assert torch.allclose(logprobs, expected, atol=1e-5)
        assert torch.allclose(torch.cat([s.entropy for s in scores]), entropies, atol=1e-4)
        assert not torch.cat([s.values for s in scores]).any()
        assert logprobs.requires_grad == (score == tiny_policy.score_with_grad)
    assert torch.allclose(torch.autograd.grad(logprobs.sum(), weight)[0], gradient, atol=1e-4)


def test_bitsandbytes_is_imported_without_its_remark_on_a_kernel_and_says_the_rest(
    tmp_path, nursery
):
    """A module of its name stands in for it: the remark depends on the machine's processor."""
    (tmp_path / "bitsandbytes.py").write_text(
        "import logging\n"
        "log = logging.getLogger('bitsandbytes.backends.cpu.ops')\n"
        "log.warning('Failed to load CPU gemm_4bit_forward from kernels-community: %s.', 'none')\n"
        "log.warning('another remark')\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import turnrl.policy.adapter\nimport bitsandbytes\n")
    done = subprocess.run(
        python(str(script)),
        env=os.environ | nursery.environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "another remark\n"


def test_an_adapter_on_a_base_that_is_not_quantised_brings_no_remark_on_kernels(
    tiny_model, tmp_path, nursery
):
    script = tmp_path / "script.py"
    script.write_text(
        "from turnrl import Policy; from turnrl.policy.settings import Lora\n"
        f"Policy({str(tiny_model)!r}, lora=Lora()).build().load()\n"
    )
    done = subprocess.run(
        python(str(script)),
        env=os.environ | nursery.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gemm_4bit" not in done.stderr  # peft imports bitsandbytes whatever the base


def test_nf4_with_lora_trains_and_the_adapter_loads_in_peft(tiny_model, tmp_path):
    from peft import PeftModel

    module = make_module(
        tiny_model,
        policy={"quantization": "nf4", "lora": Lora(r=4)},
        steps_per_pass=1,
        optimizer=adamw(1e-2),
    )
    trainer(tmp_path, 3, limit_val_batches=0).fit(module, data())
    network = module.policy.network
    kinds = {type(m).__name__ for m in network.modules()}
    assert "Linear4bit" in kinds
    assert all(p.dtype == torch.float32 for p in module.policy.trainable_state().values())
    assert column(tmp_path, "train/ratio") == [1.0, 1.0, 1.0]
    assert max(column(tmp_path, "train/logprob_gap")) < 1e-3
    moved = [v for n, v in module.policy.trainable_state().items() if "lora_B" in n]
    assert any(v.abs().max() > 0 for v in moved)
    # the exported adapter, on the same 4-bit base, is the policy that was trained
    base = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=network.config.quantization_config, device_map={"": "cpu"}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        loaded = PeftModel.from_pretrained(base, tmp_path / "version_0" / "adapter")
    for layer in loaded.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    network.eval()
    loaded.eval()
    with torch.no_grad():
        ids = torch.tensor([ROWS[0][0]])
        assert torch.allclose(loaded(ids).logits, network(ids).logits, atol=1e-5)


def test_an_adapter_leaves_out_layers_that_return_more_than_a_product(random_model):
    # the routers of Llama 4 are linear layers, and give a pair
    folder = random_model("Llama4Text", intermediate_size_mlp=64, num_local_experts=2)
    policy = Policy(str(folder), lora=Lora(r=4)).build()
    network = policy.load()
    assert {n.split(".")[-4] for n in policy.trainable_state() if "lora_A" in n} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    with policy.eval_mode():
        expected, _ = naive_logprobs(network, 1.0)
        logprobs, *_ = policy(lay_out(ROWS, share=False))
    assert torch.allclose(logprobs, expected, atol=1e-5)
    logprobs.sum().backward()
    up = [v.grad for n, v in policy.named_parameters() if "lora_B" in n]
    assert all(gradient.abs().max() > 0 for gradient in up)


def test_a_whole_model_is_exported_for_transformers(tiny_model, tmp_path):
    module = make_module(tiny_model)
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "version_0" / "model")
    for name, value in module.policy.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_checkpoint_restores_the_trained_weights(tiny_model, tmp_path):
    module = make_module(tiny_model, policy={"lora": Lora(r=4)}, optimizer=adamw(1e-2))
    trainer(tmp_path, 2, limit_val_batches=0).fit(module, data())
    again = make_module(tiny_model, policy={"lora": Lora(r=4)})
    trainer(tmp_path / "eval").validate(again, data(), ckpt_path=last(tmp_path), verbose=False)
    for name, value in module.policy.trainable_state().items():
        assert torch.equal(again.policy.trainable_state()[name], value)


def test_without_its_adapter_the_policy_is_the_base(tiny_model, tiny_policy):
    policy = Policy(str(tiny_model), lora=Lora(r=4)).build()
    policy.load()
    torch.nn.init.normal_(next(v for n, v in policy.named_parameters() if "lora_B" in n))
    with torch.no_grad():
        base, *_ = tiny_policy(lay_out(ROWS))
        adapted, *_ = policy(lay_out(ROWS))
        with policy.reference():
            reference, *_ = policy(lay_out(ROWS))
    assert torch.equal(reference, base)
    assert (adapted - base).abs().max() > 1e-3


def test_the_head_of_a_bfloat16_base_computes_in_float32(tiny_model):
    policy = Policy(str(tiny_model), lora=Lora(r=4), dtype="bfloat16").build()
    base = policy.load().get_base_model()
    assert base.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        ids = torch.tensor([ROWS[0][0]])
        hidden = policy.hidden(ids, None, torch.arange(ids.shape[1])[None])[0]
        scores = policy.logits(hidden)
        wanted = hidden.double() @ base.lm_head.weight.double().T
        rounded = base.lm_head(hidden)
    assert (hidden.dtype, scores.dtype) == (torch.bfloat16, torch.float32)
    assert torch.allclose(scores.double(), wanted, rtol=1e-5, atol=1e-4)
    # what it is for: the base's own head is off by percents of a probability
    assert (rounded.double() - wanted).abs().max() > 1e-2
    log_p = wanted.log_softmax(-1)
    naive = [log_p[t - 1, ids[0, t]] for t, asked in enumerate(ROWS[0][1]) if asked]
    with torch.no_grad():
        scores = policy(lay_out(ROWS[:1], share=False))[0]
    assert torch.allclose(scores.double(), torch.stack(naive), atol=1e-3)


def saved(folder, copy, shard, noise=0.0):
    """A copy of a model in which one linear layer of the last block may have other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    weight = model.model.layers[-1].mlp.down_proj.weight
    weight.data += noise * weight.std() * torch.randn_like(weight)
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size=shard)
    return copy


@pytest.mark.parametrize(
    ("shard", "files"), [("1GB", 1), pytest.param("100KB", 5, marks=pytest.mark.slow)]
)
def test_a_checkpoint_knows_the_fine_tune_that_it_was_trained_from(
    tiny_model, tmp_path, shard, files
):
    base = saved(tiny_model, tmp_path / "base", shard)
    other = saved(tiny_model, tmp_path / "other", shard, noise=0.05)
    assert len(list(other.glob("*.safetensors"))) == files
    lora = {"lora": Lora(r=4)}
    first = trainer(tmp_path / "first", 1, limit_val_batches=0)
    first.fit(make_module(base, policy=lora), data())
    options = {"ckpt_path": last(tmp_path / "first"), "verbose": False}
    # it is the same base elsewhere, and in another precision
    moved = shutil.copytree(base, tmp_path / "moved")
    same = make_module(moved, policy={**lora, "dtype": "bfloat16"})
    trainer(tmp_path / "a").validate(same, data(), **options)
    with pytest.raises(CheckpointError, match=r"another policy: its weights is"):
        trainer(tmp_path / "b").validate(make_module(other, policy=lora), data(), **options)


def test_a_folder_inside_an_installed_package_is_a_model(monkeypatch, tiny_model, tmp_path):
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    shutil.copytree(tiny_model, tmp_path / "some_package" / "starter")
    monkeypatch.syspath_prepend(tmp_path)
    policy = Policy("package://some_package/starter").build()
    assert Path(policy.folder) == tmp_path / "some_package" / "starter"
    assert policy.tokenizer.chat_template


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "./modle"}, r"no model folder at './modle'"),
        ({"model": "/no/such/folder"}, "no model folder at '/no/such/folder'"),
        ({"model": "package://no_such_package/x"}, "no package 'no_such_package'"),
        ({"model": "package://turnrl/x"}, "no folder 'x' in package 'turnrl'"),
        (
            {"model": ".", "chat_template": "none.jinja"},
            "no file at model.policy.chat_template 'none.jinja'",
        ),
    ],
)
def test_a_model_that_is_not_there_is_named(tiny_model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tiny_model if arguments["model"] == "." else tiny_model.parent)
    with pytest.raises(RecipeError, match=message):
        _ = Policy(**arguments).build().tokenizer


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(RecipeError, match="cannot be loaded"):
        _ = Policy(str(tmp_path)).build().tokenizer


def test_a_tokenizer_without_a_chat_template_is_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        RecipeError, match=r"chat_template is not set .*in model\.policy\.chat_template"
    ):
        ChatFormat(Policy(str(folder)).build().tokenizer)


def test_impossible_settings_are_refused(tiny_model):
    with pytest.raises(RecipeError, match=r"quantization is 'nf4'.*Add model\.policy\.lora"):
        Policy(str(tiny_model), quantization="nf4").build()
    with pytest.raises(RecipeError, match=r"target_modules has .no_such_layer"):
        Policy(str(tiny_model), lora=Lora(target_modules=["no_such_layer"])).build().load()
    with pytest.raises(
        RecipeError, match=r"policy\.dtype is 'float16'; choose one of auto, float32"
    ):
        Policy(str(tiny_model), dtype="float16").build()
    with pytest.raises(RecipeError, match=r"policy\.quantization is 'int8'; choose one of nf4"):
        Policy(str(tiny_model), quantization="int8").build()


def test_a_model_that_changes_logits_after_its_head_is_refused(tiny_model, tmp_path):
    import json

    folder = shutil.copytree(tiny_model, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "logits_scaling": 8.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    policy = Policy(str(folder)).build()
    for _ in range(2):  # the second time there is no network of the first
        with pytest.raises(RecipeError, match=r"GraniteForCausalLM.*changes logits after its head"):
            policy.load()


def test_the_tokenizer_is_checked_before_the_weights_are_loaded(tiny_model, tmp_path):
    # no weights at all: whatever comes first is what is reported
    folder = shutil.copytree(tiny_model, tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").unlink()
    module = make_module(folder)
    assert isinstance(module, MTGRPO)
    with pytest.raises(RecipeError, match="chat_template is not set"):
        trainer(tmp_path, 1).fit(module, data())
