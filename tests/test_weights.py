"""Weights that somebody brings: base models with missing or misnamed tensors, adapters of other
kinds, quantised bases, tokenizers with more tokens than the embedding has rows."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import turnrl
from turnrl import Policy, RecipeError
from turnrl.policy.settings import Lora
from turnrl.watch.card import write_card

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft

ROW = ([5, 9, 33, 71, 120, 8], [False] + [True] * 5)


@pytest.fixture
def base(tiny_model, tmp_path):
    """A copy of the tiny model, to be changed."""
    return shutil.copytree(tiny_model, tmp_path / "base")


def change(folder, weights=None, **config):
    """Replace a model's weights by a function of them, and keys of its configuration."""
    if weights is not None:
        file = folder / "model.safetensors"
        save_file(weights(load_file(file)), file, {"format": "pt"})
    edit(folder / "config.json", config)


def edit(file, keys):
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def without(part):
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


def renamed(old, new):
    return lambda weights: {name.replace(old, new): w for name, w in weights.items()}


def cut(part):
    def shorter(weights):
        return {n: w[:-1].clone() if part in n else w for n, w in weights.items()}

    return shorter


@pytest.mark.parametrize(
    ("weights", "config", "message", "quantization"),
    [
        (without("layers.1."), {}, r"lacks \d+ tensors \(model\.layers\.1\.input_lay", "none"),
        (without("k_proj.bias"), {}, r"lacks 2 tensors \(model\.layers\.0\.self_attn\.k", "nf4"),
        (renamed("model.", "net."), {}, r"no place for \(net\.embed_tokens\.weight", "none"),
        (renamed("model.", "module.model."), {}, "no place for .module", "none"),
        (renamed("q_proj", "query"), {}, r"self_attn\.q_proj\.weight.*self_attn\.query", "none"),
        (None, {"tie_word_embeddings": False}, r"lacks 1 tensor \(lm_head\.weight\)", "none"),
        (cut("down_proj"), {}, r"other shapes .*down_proj\.weight \[63, 128\] inst", "none"),
        (cut("down_proj"), {}, r"other shapes .*down_proj\.weight \[63, 128\] inst", "nf4"),
        (None, {"vocab_size": 9999}, r"embed_tokens\.weight .* instead of \[9999, ", "none"),
    ],
)
def test_a_model_whose_tensors_are_not_all_there_is_refused_with_their_names(
    base, weights, config, message, quantization
):
    change(base, weights, **config)
    policy = Policy(str(base), quantization, Lora(r=4) if quantization == "nf4" else None).build()
    with pytest.raises(RecipeError, match=message):
        policy.load()


def as_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_old_bin(folder):
    as_bin(folder)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_shards(folder):
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="20KB")


def with_head(folder):
    change(folder, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})


@pytest.mark.parametrize("form", [as_bin, as_old_bin, as_shards, with_head])
def test_whole_models_load_in_every_form(base, tiny_model, form):
    form(base)
    policy = Policy(str(base)).build()
    policy.load()
    plain = Policy(str(tiny_model)).build()
    plain.load()
    torch.testing.assert_close(logprobs_of(policy), logprobs_of(plain))


def torn(folder):
    as_bin(folder)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])


def without_a_shard(folder):
    as_shards(folder)
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def of_no_layers(folder):
    change(folder, num_hidden_layers="many")


@pytest.mark.parametrize("fault", [torn, without_a_shard, of_no_layers])
def test_a_broken_model_folder_is_an_error_of_the_recipe(base, fault):
    fault(base)
    with pytest.raises(RecipeError, match=r"model\.policy\.model .* cannot be loaded"):
        Policy(str(base)).build().load()


# ---------------------------------------------------------------------------- adapters


def logprobs_of(policy):
    return policy.score_tokens([ROW])[0].logprobs


def by_peft(network):
    ids = torch.tensor([ROW[0]])
    with torch.no_grad():
        logprobs = network(ids).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


def adapter(base, folder, **settings):
    """An adapter as peft trains and saves it, and its log-probabilities."""
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **settings},
        task_type="CAUSAL_LM",
    )
    network = peft.get_peft_model(network, config).eval()
    for weight in network.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn(weight.shape, generator=torch.manual_seed(0))
    network.save_pretrained(folder)
    return by_peft(network)


@pytest.mark.parametrize(
    ("init", "layers"),
    [
        (True, ["q_proj", "v_proj"]),
        ("gaussian", ["q_proj", "lm_head"]),
        ("orthogonal", ["q_proj", "embed_tokens"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
def test_an_adapter_of_peft_computes_what_it_does_there(tiny_model, tmp_path, init, layers):
    wanted = adapter(tiny_model, tmp_path / "a", init_lora_weights=init, target_modules=layers)
    policy = Policy(str(tmp_path / "a"), lora=Lora(r=4, alpha=8, target_modules=layers)).build()
    policy.load()
    torch.testing.assert_close(logprobs_of(policy), wanted, atol=1e-5, rtol=0)
    again = Policy(str(policy.export(tmp_path / "b")), lora=policy.lora).build()
    again.load()
    torch.testing.assert_close(logprobs_of(again), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "setting",
    [
        {"init_lora_weights": "pissa"},
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 8}},
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"use_a_later_idea": True},
        {"task_type": "SEQ_CLS"},
    ],
)
def test_an_adapter_that_is_more_than_a_sum_is_refused(tiny_model, tmp_path, setting):
    adapter(tiny_model, tmp_path / "a")
    edit(tmp_path / "a" / "adapter_config.json", setting)
    with pytest.raises(RecipeError, match=f"has {next(iter(setting))}: .*Merge it into its base"):
        _ = Policy(str(tmp_path / "a"), lora=Lora(r=4, alpha=8)).build().folder


def test_an_adapter_with_changed_embeddings_is_refused(tiny_model, tmp_path):
    adapter(tiny_model, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    grown = torch.randn(600, 32)
    save_file(load_file(file) | {"base_model.model.model.embed_tokens.weight": grown}, file)
    policy = Policy(
        str(tmp_path / "a"), lora=Lora(4, 8, target_modules=["q_proj", "v_proj"])
    ).build()
    with pytest.raises(RecipeError, match=r"also holds base_model\.model\.model\.embed_tokens"):
        policy.load()


@pytest.mark.parametrize("fault", ["torn", "gone", "no rank", "no JSON"])
def test_a_broken_adapter_is_an_error_of_the_recipe(tiny_model, tmp_path, fault):
    adapter(tiny_model, tmp_path / "a")
    file, config = (
        tmp_path / "a" / n for n in ("adapter_model.safetensors", "adapter_config.json")
    )
    if fault == "torn":
        file.write_bytes(file.read_bytes()[:99])
    elif fault == "gone":
        file.unlink()
    else:
        config.write_text("{" if fault == "no JSON" else '{"peft_type": "LORA"}')
    with pytest.raises(RecipeError, match=r"Copy .*again, whole"):
        Policy(
            str(tmp_path / "a"), lora=Lora(4, 8, target_modules=["q_proj", "v_proj"])
        ).build().load()


@pytest.mark.parametrize("name", ["q_porj", "mlp.q_proj", "layers.7.self_attn.q_proj"])
def test_a_name_in_target_modules_that_matches_nothing_is_refused(tiny_model, name):
    policy = Policy(str(tiny_model), lora=Lora(target_modules=["v_proj", name])).build()
    with pytest.raises(RecipeError, match=rf"target_modules has '{name}'.*q_proj"):
        policy.load()


# ---------------------------------------------------------------------------- quantised bases


@pytest.fixture
def four_bits(tiny_model, tmp_path):
    """The tiny model, in 4 bits on disk."""
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    network = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=settings, device_map={"": "cpu"}
    )
    folder = shutil.copytree(tiny_model, tmp_path / "four")
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder)
    return folder


def test_a_base_that_is_quantised_on_disk_is_trained_only_with_an_adapter(four_bits, base):
    with pytest.raises(RecipeError, match=r"quantised on disk \(nf4\)"):
        Policy(str(four_bits)).build().files.check(100)
    for quantization in ("none", "nf4"):
        policy = Policy(str(four_bits), quantization, Lora(r=4)).build()
        policy.files.check(100)
        policy.load()
        (layout,) = (layout for _, layout in policy.forward_passes([ROW]))
        policy(layout).logprobs.sum().backward()
        moved = [p.grad for n, p in policy.trainable_parameters().items() if "lora_B" in n]
        assert all(gradient is not None and gradient.any() for gradient in moved)
        assert policy.files.base_quantization == "nf4"
    change(base, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(RecipeError, match=r"quantised on disk \(gptq\)"):
        Policy(str(base), "nf4", Lora(r=4)).build().files.check(100)


def test_the_card_of_an_adapter_says_that_its_base_was_quantised(tiny_model, tmp_path):
    policy = Policy(str(tiny_model), "nf4", Lora(r=4)).build()
    policy.load()
    card = (turnrl.export(policy, tmp_path / "a") / "README.md").read_text()
    assert "| base while training | quantised (nf4)" in card
    assert "quantization_config=nf4" in card
    (code,) = card.split("```python\n")[1:]
    space = {}
    exec(code.partition("```")[0].replace('Path(".")', f"Path({str(tmp_path / 'a')!r})"), space)
    for layer in space["model"].modules():  # or it computes in bfloat16 on some CPUs
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    torch.testing.assert_close(
        by_peft(space["model"].eval()), logprobs_of(policy), atol=1e-4, rtol=0
    )
    write_card(tmp_path / "a", "some/base", None, True, {})
    assert "quantised" not in (tmp_path / "a" / "README.md").read_text()
