"""The arithmetic of a network on its device: wide products, adapters, fused kernels, recomputation.

Activations of a half-precision base stay in half precision here; weights that are trained stay in
float32, and so do sums that would lose them. On a GPU every product runs on its tensor cores.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from turnrl.device import of_the_device
from turnrl.errors import RecipeError, in_short


def wide_mm(one: Tensor, other: Tensor) -> Tensor:
    """The product of two matrices, (M, K) x (K, N), added up and returned in float32.

    Products of bfloat16 numbers are exact in float32, so nothing is lost beside a product of
    float32 copies, which a GPU would compute some ten times slower.
    """
    if one.is_cuda and one.dtype == other.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


class _Wide(torch.autograd.Function):
    """`wide_mm` of rows (M, K) in half precision and a weight (N, K) of any, and its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return wide_mm(rows, weight.to(rows.dtype).t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.to(rows.dtype)
        to_rows = wide_mm(gradient, weight.to(rows.dtype)).to(rows.dtype)
        to_weight = wide_mm(gradient.t(), rows) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight


def head_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Logits, (M, K) to (M, N), added up and returned in float32 whatever the precision of hidden
    states: rounded logits would be off by whole percents of a probability."""
    if hidden.dtype == torch.float32:
        return nn.functional.linear(hidden, head.weight.float(), head.bias)
    logits: Tensor = _Wide.apply(hidden, head.weight)  # type: ignore[no-untyped-call]
    return logits if head.bias is None else logits + head.bias.float()


class InOnePass(torch.autograd.Function):
    """Values of rows, a chunk at a time, with each one's gradient to its own row taken at once, so
    that nothing of a chunk is kept or computed again.

    `of_chunk` maps (M, H) and (M,) targets to (M,) values and (M,) figures without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        targets: Tensor,
        of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        size: int,
    ) -> tuple[Tensor, Tensor]:
        values, watched, slopes = [], [], []
        for some, wanted in zip(rows.split(size), targets.split(size), strict=True):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                value, beside = of_chunk(leaf, wanted)
                slopes += torch.autograd.grad(value.sum(), leaf)
            values.append(value.detach())
            watched.append(beside)
        ctx.save_for_backward(torch.cat(slopes))
        beside = torch.cat(watched)
        ctx.mark_non_differentiable(beside)
        return torch.cat(values), beside

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (gradient[:, None] * slopes).to(slopes.dtype), None, None, None


# ------------------------------------------------------------------------------------ adapters


class _Adapted(torch.autograd.Function):
    """y = base(x) + s (x A^T) B^T, with A and B in float32 and all products in x's precision.

    peft computes the same from float32 copies of the activations; here the second term is added in
    the product itself, forward and backward, so activations are read and written once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, base: nn.Module, scale: float
    ) -> Tensor:
        rows = x.flatten(0, -2)
        narrow = rows @ down.to(x.dtype).t()
        out: Tensor = torch.addmm(base(rows).to(x.dtype), narrow, up.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(rows, narrow, down, up)
        ctx.base, ctx.scale, ctx.shape = base, scale, x.shape
        # a model may add to what it is given, which autograd forbids for a view
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, narrow, down, up = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        back = (gradient @ up.to(rows.dtype)) * ctx.scale
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = gradient @ dense_weight(ctx.base).to(rows.dtype)
            to_x = to_x.addmm_(back, down.to(rows.dtype)).view(ctx.shape)
        to_up = wide_mm(gradient.t(), narrow) * ctx.scale
        return to_x, wide_mm(back.t(), rows), to_up, None, None


def dense_weight(layer: nn.Module) -> Tensor:
    """(out, in), the weight of a linear layer; one in 4 bits is dequantised."""
    weight = cast(Any, layer.weight)
    if (state := getattr(weight, "quant_state", None)) is None:
        return cast(Tensor, weight.detach())
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def adapt_in_place(network: nn.Module) -> None:
    """Have a network's adapted linear layers (peft's LoRA) computed by `_Adapted`.

    Left to peft are layers with several adapters, a dropout, or a variant such as DoRA.
    """
    from peft.tuners.lora import LoraLayer

    for layer in network.modules():
        if not isinstance(layer, LoraLayer) or len(layer.lora_A) != 1:
            continue
        (name,) = layer.lora_A
        one: Any = layer
        variant = one.lora_variant or one.lora_bias[name]
        drops = not isinstance(one.lora_dropout[name], nn.Identity)
        if isinstance(one.get_base_layer(), nn.Linear) and not variant and not drops:
            one.forward = _Forward(one, name)


class _Forward:
    """The forward pass of one adapted layer. An object's `forward` shadows its class's."""

    def __init__(self, layer: Any, name: str) -> None:
        self.layer, self.name = layer, name

    def __call__(self, x: Tensor) -> Tensor:
        layer, name = self.layer, self.name
        if layer.disable_adapters or layer.merged:
            return layer.base_layer(x)  # type: ignore[no-any-return]
        weights = layer.lora_A[name].weight, layer.lora_B[name].weight
        return _Adapted.apply(x, *weights, layer.base_layer, layer.scaling[name])  # type: ignore[no-any-return, no-untyped-call]


# ------------------------------------------------------------------------------------ layers


def fuse(network: Any, device: torch.device) -> str:
    """Swap in Liger's kernels for norms, rotations and activations, where they can be had. Liger
    swaps them for all models of this architecture in the process.

    Returns:
        The state of affairs, for people.
    Raises:
        RecipeError: If the network computes something else with them.
    """
    if device.type != "cuda":
        return "none on this device"
    if importlib.util.find_spec("liger_kernel") is None:
        return "none (pip install liger-kernel would bring them)"
    ids = torch.arange(1, 9, device=device)[None]
    options = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
        from transformers.integrations.liger import apply_liger_kernel

        if network.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            return f"none (Liger has none for {network.config.model_type})"
        with torch.no_grad():
            before = network(input_ids=ids, use_cache=False).logits.float()
            apply_liger_kernel(network, options)
            after = network(input_ids=ids, use_cache=False).logits.float()
    except Exception as error:
        if of_the_device(error):
            raise
        raise RecipeError(
            f"Liger's kernels do not work here ({in_short(error)}). Set policy.fused_kernels to "
            "false."
        ) from error
    if not (gap := (after - before).abs().mean()) < 0.25:
        raise RecipeError(
            f"Liger's kernels change the logits of {type(network).__name__} by {float(gap):.2g} on "
            "average. Set policy.fused_kernels to false."
        )
    return "Liger's"


def recompute(network: Any, layers: bool | int) -> None:
    """Recompute activations of the first so many decoder layers in the backward pass; True for
    all of them."""
    network.activation_checkpointing_enable({"use_reentrant": False})
    blocks = [part for part in network.modules() if isinstance(part, GradientCheckpointingLayer)]
    for block in blocks[len(blocks) if layers is True else layers :]:
        block.gradient_checkpointing = False
