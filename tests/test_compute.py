"""Adapters, heads and layers as they are computed, each beside a plain reading of its equation."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

import turnrl_atlas
from turnrl import Policy, RecipeError
from turnrl.policy.compute import (
    MOST_CHANGE,
    checkpoint_activations,
    dense_weight,
    find_adapted_layers,
    fuse,
    head_logits,
    make_trial_ids,
    relative_change,
    swap_on_gpus,
    wide_mm,
)
from turnrl.policy.device import is_device_error, is_out_of_memory
from turnrl.policy.layout import lay_out
from turnrl.policy.settings import Lora

STARTER = Path(turnrl_atlas.__file__).with_name("starter")
ROWS = [([5, 6, 7, 8, *rest], [False] * 5 + [True] * 3) for rest in ([9, 10, 11, 12], [13] * 4)]


def adapted(folder, **options):
    """A policy whose adapter is not zero."""
    policy = Policy(str(folder), lora=Lora(r=4, **options.pop("lora", {})), **options).build()
    torch.manual_seed(0)
    policy.load()
    for name, value in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05)
    return policy


def value_and_gradients(policy):
    policy.zero_grad()
    logprobs, *_ = policy(lay_out(ROWS))
    (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in policy.trainable_parameters().items()}


def left_to_peft(policy):
    """Take back the forward passes that loading put in place of peft's own."""
    for layer in policy.modules():
        vars(layer).pop("forward", None)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("checkpointing", [None, True])
def test_adapter_values_and_gradients_match_peft(tiny_model, quantization, checkpointing):
    options = {"quantization": quantization, "gradient_checkpointing": checkpointing}
    policy = adapted(tiny_model, **options)
    logprobs, gradients = value_and_gradients(policy)
    left_to_peft(policy)
    wanted, others = value_and_gradients(policy)
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    assert len(gradients) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() < 1e-4 * others[name].norm(), name


def test_an_adapter_of_a_bfloat16_base_has_weights_and_gradients_in_float32(tiny_model):
    policy = adapted(tiny_model, dtype="bfloat16")
    with torch.no_grad():  # with a large adapter these few tokens are at the mercy of rounding
        for name, value in policy.trainable_parameters().items():
            value.mul_(0.2 if "lora_B" in name else 1)
    exact = adapted(tiny_model)
    exact.load_state_dict({name: value.float() for name, value in policy.state_dict().items()})
    seen = []
    layer = policy.network.base_model.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(
        lambda _, inputs, result: seen.append((inputs[0].dtype, result.dtype))
    )
    logprobs, gradients = value_and_gradients(policy)
    wanted, others = value_and_gradients(exact)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert (logprobs - wanted).abs().mean() < 0.03 * wanted.abs().mean()
    all_found, all_wanted = (
        torch.cat([g[name].flatten() for name in sorted(g)]) for g in (gradients, others)
    )
    assert torch.cosine_similarity(all_found, all_wanted, 0) > 0.98


def test_an_adapter_that_is_off_is_left_alone(tiny_model):
    policy = adapted(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), policy.reference():
        assert torch.equal(policy.network(input_ids=ids).logits, base(input_ids=ids).logits)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_applies_only_to_the_adapters_input_as_in_peft(tiny_model, training):
    policy = adapted(tiny_model, lora={"dropout": 0.5})
    policy.network.train(training)

    def seeded():
        torch.manual_seed(3)
        return value_and_gradients(policy)

    logprobs, gradients = seeded()
    assert torch.equal(logprobs, value_and_gradients(policy)[0]) is not training
    left_to_peft(policy)
    wanted, others = seeded()
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() < 1e-4 * others[name].norm(), name


def test_a_model_may_add_in_place_to_an_adapted_layers_output(tiny_model):
    layer = find_adapted_layers(adapted(tiny_model).network)[0]
    x = torch.randn(2, 3, layer.base.in_features, requires_grad=True)
    (wanted,) = torch.autograd.grad((layer(x) + 1).square().sum(), x)
    (gradient,) = torch.autograd.grad(layer(x).add_(1).square().sum(), x)
    assert torch.allclose(gradient, wanted, atol=1e-5)


def test_a_dense_weight_reproduces_the_quantized_layers_output(tiny_model):
    policy = adapted(tiny_model, quantization="nf4")
    layer = policy.network.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.uint8
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.allclose(layer(x), x @ dense_weight(layer).t(), atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_half_precision_are_added_up_in_float32(bias):
    torch.manual_seed(0)
    head = torch.nn.Linear(256, 50, bias=bias).bfloat16()
    hidden = torch.randn(3, 256).bfloat16().requires_grad_()
    logits = head_logits(head, hidden)
    wanted = hidden.double() @ head.weight.double().t() + (head.bias.double() if bias else 0)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), wanted, atol=1e-5)
    assert (head(hidden).double() - wanted).abs().max() > 1e-3  # what it is for
    slopes = torch.randn(3, 50)
    (gradient,) = torch.autograd.grad(logits, hidden, slopes)
    exact = slopes.double() @ head.weight.double()
    assert gradient.dtype == torch.bfloat16
    assert (gradient - exact).norm() < 0.01 * exact.norm()


def test_a_trained_head_learns_in_float32():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 8, bias=False)
    hidden = torch.randn(3, 16).bfloat16()
    head_logits(head, hidden).square().sum().backward()
    wanted = 2 * (hidden.float() @ head.weight.detach().bfloat16().float().t()).t() @ hidden.float()
    assert head.weight.grad.dtype == torch.float32
    assert (head.weight.grad - wanted).norm() < 0.01 * wanted.norm()


def test_wide_products_lose_nothing():
    row = torch.full((1, 3), 256.0).bfloat16()
    other = torch.tensor([[256.0], [1.0], [1 / 256]]).bfloat16()
    # 65536 + 256 + 1; bfloat16 would make it 66048
    assert wide_mm(row, other).tolist() == [[65793.0]]


@pytest.mark.parametrize(("setting", "again"), [(None, 0), (True, 2), (1, 1), (0, 0), (2, 2)])
def test_as_many_layers_as_asked_are_recomputed(tiny_model, setting, again):
    assert recomputed(adapted(tiny_model, gradient_checkpointing=setting)) == again


def recomputed(policy):
    """How many layers are computed again in a backward pass, of two."""
    passes = []
    for layer in policy.base.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    value_and_gradients(policy)
    return len(passes) - 2


def test_layers_are_recomputed_without_the_transformers_checkpointing_methods(
    tiny_model, monkeypatch
):
    # the first is of later versions than 5.17, the other ends with 6
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        monkeypatch.delattr(PreTrainedModel, name, raising=False)
    policy = adapted(tiny_model, gradient_checkpointing=True)
    assert recomputed(policy) == 2
    for again, wanted in ((False, [False] * 2), (True, [True] * 2), (1, [True, False])):
        checkpoint_activations(policy.base, again)
        layers = policy.base.model.layers
        assert [layer.gradient_checkpointing for layer in layers] == wanted


def test_a_model_without_layers_to_recompute_is_refused():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    checkpoint_activations(plain, False)
    with pytest.raises(RecipeError, match=r"gradient_checkpointing is on.* Set it to false"):
        checkpoint_activations(plain, 1)


def test_mixed_precision_trains_float32_weights_through_bfloat16_products(tiny_model):
    policy, exact = (
        Policy(str(tiny_model), dtype="bfloat16").build(),
        Policy(str(tiny_model)).build(),
    )
    for each in (policy, exact):
        each.load()
    seen = []
    layer = policy.network.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda _, inputs, result: seen.append(result.dtype))
    logprobs, gradients = value_and_gradients(policy)
    wanted, others = value_and_gradients(exact)
    assert set(seen) == {torch.bfloat16}
    assert logprobs.dtype == torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert 1e-4 < (logprobs - wanted).abs().mean() < 0.1
    all_found, all_wanted = (
        torch.cat([g[name].flatten() for name in sorted(g)]) for g in (gradients, others)
    )
    assert torch.cosine_similarity(all_found, all_wanted, 0) > 0.98
    # an update that bfloat16 would round away
    before = policy.trainable_state()["network.model.norm.weight"].clone()
    torch.optim.SGD(policy.parameters(), lr=1e-9).step()
    torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0).step()
    change = (policy.trainable_state()["network.model.norm.weight"] - before).abs()
    assert 5e-6 < change.max() < 2e-5


def test_fused_kernels_are_for_gpus(tiny_model):
    policy = Policy(str(tiny_model)).build()
    policy.load()
    assert policy.active_choices["fused kernels"] == "none on this device"
    assert fuse(policy.network, torch.device("cpu")) == "none on this device"


def test_a_wrong_rotation_is_distinguished_from_rounding(monkeypatch):
    rotate = modeling_qwen2.apply_rotary_pos_emb
    network = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    ids = make_trial_ids(network)

    @torch.no_grad()
    def logits():
        return network(input_ids=ids, use_cache=False).logits.float()

    right = logits()
    monkeypatch.setattr(
        modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, cos, -sin)
    )
    assert relative_change(right, logits()) > 2 * MOST_CHANGE
    monkeypatch.undo()
    network.to(torch.bfloat16)
    assert relative_change(right, logits()) < MOST_CHANGE / 2


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_kernels_that_are_swapped_in_for_a_gpu_leave_the_next_network_on_a_cpu_alone():
    class Norm:
        """As transformers has it."""

    def rotate(x, cos):
        return x * cos

    architecture = ModuleType("architecture")
    architecture.Norm, architecture.rotate, architecture.kept = Norm, rotate, 1
    for factor in (10, 100):  # by two networks, one after another
        with swap_on_gpus(architecture):
            assert architecture.rotate is rotate  # to compare with
            architecture.Norm = type("Fused", (), {})
            architecture.rotate = lambda x, cos, factor=factor: factor
        assert architecture.Norm is Norm
        assert architecture.rotate(torch.tensor(3.0), cos=2) == 6
        assert architecture.rotate(x=OnGpu(3), cos=2) == factor
    with pytest.raises(ZeroDivisionError), swap_on_gpus(architecture):
        architecture.rotate = 1 / 0
    assert architecture.rotate(x=OnGpu(3), cos=2) == 100
    assert architecture.kept == 1


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (TypeError("forward() got an unexpected keyword argument 'attend'"), False),
    ],
)
def test_faults_of_a_device_say_nothing_of_a_model(error, wanted):
    assert is_device_error(error) is wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("the search server is out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_distinguished_from_other_errors(error, wanted):
    assert is_out_of_memory(error) is wanted


def test_device_errors_are_distinguished_from_kernel_refusals():
    with pytest.raises(RuntimeError) as mixed:
        torch.ones(2) + torch.ones(2, device="meta")
    assert is_device_error(mixed.value)
    with pytest.raises(RuntimeError) as memory:
        torch.empty(10**15)
    assert is_device_error(memory.value)
    for code, expected in ((209, False), (900, False), (700, True), (719, True)):
        error = torch.AcceleratorError("CUDA error")
        error.error_code = code
        assert is_device_error(error) is expected
    assert not is_device_error(RuntimeError("paged attention takes FlashAttention 3"))
    assert is_device_error(ValueError("Pointer argument (at 0) cannot be accessed (cpu tensor?)"))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="Liger is there")
def test_the_extra_that_is_named_where_liger_is_missing_brings_it():
    message = fuse(None, torch.device("cuda"))
    (extra,) = re.findall(r"pip install '\.\[(\w+)\]'", message)
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"][extra]
    assert wanted.startswith("liger-kernel>=")
