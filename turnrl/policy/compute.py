"""The arithmetic of a network on its device: wide products, adapters, fused kernels, recomputation.

Activations of a half-precision base stay in half precision here; weights that are trained stay in
float32, and so do sums that would lose them. On a GPU every product runs on its tensor cores.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turnrl.plugin.errors import RecipeError, summarize_error
from turnrl.policy.device import is_device_error
from turnrl.policy.sizes import copies_factors, padded_columns


def wide_mm(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, (M, K) x (K, N), added up and returned in float32.

    Products of bfloat16 numbers are exact in float32, so nothing is lost compared with a product of
    float32 copies, which a GPU would compute some ten times slower.
    """
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Context(Protocol):
    """The context of an operation with its own gradient, with what operations here store on it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    base: nn.Linear
    scale: float

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _Wide(torch.autograd.Function):
    """`wide_mm` of rows (M, K) in half precision and a weight (N, K) of any, and its gradients."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return wide_mm(rows, weight.to(rows.dtype).t())

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
    """Values of rows, computed a chunk at a time. Each value's gradient with respect to its row is
    taken at once, so that nothing of a chunk is kept or recomputed.

    `of_chunk` maps (M, H) and (M,) targets to (M,) values and (M,) figures without a gradient.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        rows: Tensor,
        targets: Tensor,
        of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        size: int,
    ) -> tuple[Tensor, Tensor]:
        values, watched, slopes = [], [], []
        for chunk, wanted in zip(rows.split(size), targets.split(size), strict=True):
            with torch.enable_grad():
                leaf = chunk.detach().requires_grad_()
                value, beside = of_chunk(leaf, wanted)
                slopes += torch.autograd.grad(value.sum(), leaf)
            values.append(value.detach())
            watched.append(beside)
        ctx.save_for_backward(torch.cat(slopes))
        beside = torch.cat(watched)
        ctx.mark_non_differentiable(beside)
        return torch.cat(values), beside

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (gradient[:, None] * slopes).to(slopes.dtype), None, None, None


# ------------------------------------------------------------------------------------ adapters


def join_columns(wide: Tensor, narrow: Tensor) -> Tensor:
    """[wide, narrow, 0]: (M, K) and (M, r) beside each other in wide's precision, and zeros up to
    a multiple of 8 columns, which tensor cores need."""
    rows, columns = len(wide), wide.shape[1] + narrow.shape[1]
    zeros = wide.new_zeros(rows, padded_columns(columns) - columns)
    return torch.cat([wide, narrow.to(wide.dtype), zeros], dim=1)


def joint_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor, up: Tensor
) -> Tensor:
    """x W^T + n B^T + b in x's half precision, added up in float32 and rounded once.

    If x W^T were rounded first, it would lie on the grid of half-precision numbers. An adapter's
    contribution would then vanish wherever it is less than half a unit, which is nearly everywhere
    in the first tens of optimiser steps.

    Args:
        x: (M, K).
        weight: W, (N, K), in x's precision.
        bias: b, (N,).
        narrow: n, (M, r).
        up: B, (N, r).
    Returns:
        (M, N).
    """
    (m, k), n = x.shape, len(weight)
    if copies_factors(m, k, n):
        return nn.functional.linear(join_columns(x, narrow), join_columns(weight, up), bias)
    out = wide_mm(x, weight.t()).addmm_(narrow.float(), up.float().t())
    return (out if bias is None else out.add_(bias)).to(x.dtype)


class _Adapted(torch.autograd.Function):
    """y = base(x) + s (d A^T) B^T for rows x, (M, K), with A and B in float32 and all products in
    x's precision; d is x, or x after dropout.

    peft computes the same from float32 copies of the activations. Here the activations are read and
    written once, and in half precision base and adapter are one sum (`joint_product`).
    """

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        dropped: Tensor | None,
        down: Tensor,
        up: Tensor,
        base: nn.Linear,
        scale: float,
    ) -> Tensor:
        entered = x if dropped is None else dropped
        narrow = entered @ down.to(x.dtype).t()
        ctx.save_for_backward(entered, narrow, down, up)
        ctx.base, ctx.scale = base, scale
        if x.dtype == torch.float32:
            return torch.addmm(base(x), narrow, up.t(), alpha=scale)
        weight = dense_weight(base).to(x.dtype)
        return joint_product(x, weight, base.bias, narrow, (scale * up).to(x.dtype))

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        entered, narrow, down, up = ctx.saved_tensors
        back = (gradient @ up.to(entered.dtype)) * ctx.scale
        to_x = to_dropped = None
        if ctx.needs_input_grad[0]:
            to_x = gradient @ dense_weight(ctx.base).to(entered.dtype)
        if ctx.needs_input_grad[1]:
            to_dropped = back @ down.to(entered.dtype)
        elif to_x is not None:
            to_x.addmm_(back, down.to(entered.dtype))
        to_up = wide_mm(gradient.t(), narrow) * ctx.scale
        return to_x, to_dropped, wide_mm(back.t(), entered), to_up, None, None


def dense_weight(layer: nn.Module) -> Tensor:
    """(out, in), the weight of a linear layer, dequantised if it is in 4 bits."""
    weight = cast(Tensor, layer.weight)
    if (state := _quantization_state(layer)) is None:
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def _quantization_state(layer: nn.Module) -> Any:
    """bitsandbytes' state of a layer in 4 bits, else None. Looked up by name, because importing
    bitsandbytes takes seconds, and a policy that is not quantised need not wait for it."""
    return getattr(layer.weight, "quant_state", None)


def adapt_in_place(network: nn.Module) -> None:
    """Have `AdaptedLayer` compute a network's adapted linear layers (peft's LoRA)."""
    from peft.tuners.lora import LoraLayer

    for layer in network.modules():
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear):
            (name,) = layer.lora_A
            vars(layer)["forward"] = AdaptedLayer(layer, name)


def find_adapted_layers(network: nn.Module) -> "list[AdaptedLayer]":
    """The layers of a network that `AdaptedLayer` computes."""
    forwards = (vars(part).get("forward") for part in network.modules())
    return [forward for forward in forwards if isinstance(forward, AdaptedLayer)]


class AdaptedLayer:
    """The forward pass of one linear layer with an adapter. It replaces peft's, because an object's
    `forward` shadows its class's.

    Args:
        layer: peft's layer.
        name: Name of its adapter.
    """

    def __init__(self, layer: Any, name: str) -> None:
        self.layer, self._name = layer, name

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        layer, name = self.layer, self._name
        if layer.disable_adapters or layer.merged:
            return layer.base_layer(x)  # type: ignore[no-any-return]
        dropout, rows = layer.lora_dropout[name], x.flatten(0, -2)
        dropped = dropout(rows) if isinstance(dropout, nn.Dropout) and dropout.training else None
        # reshaped here, where autograd sees it, because a model may add to the output in place
        out: Tensor = _Adapted.apply(rows, dropped, *self.factors, self.base, layer.scaling[name])  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    @property
    def base(self) -> nn.Linear:
        """The layer that is adapted, in 4 bits or dense."""
        return cast(nn.Linear, self.layer.get_base_layer())

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A, (r, K), and B, (N, r), in float32."""
        return self.layer.lora_A[self._name].weight, self.layer.lora_B[self._name].weight

    @property
    def dense_bytes(self) -> int:
        """Memory of a `DenseLayer` of this layer."""
        columns = padded_columns(self.base.in_features + len(self.factors[0]))
        state = _quantization_state(self.base)
        dtype = self.base.weight.dtype if state is None else state.dtype
        return int(dtype.itemsize * self.base.out_features * columns)

    @torch.no_grad()
    def dense(self) -> "DenseLayer":
        """This layer with its base as a dense weight."""
        return DenseLayer(self)

    @property
    def scaled_up(self) -> Tensor:
        """s B, (N, r), in float32."""
        return self.factors[1].detach() * float(self.layer.scaling[self._name])


class DenseLayer:
    """An adapted layer to sample with: [W, s B] as one dense weight, (N, K + r), in the precision
    of the base's products. It takes one product, and one rounding, as in learning.

    Adding s B A to W instead, as merging does, would round the sum to W's precision: after five
    optimiser steps at 1e-5, a merged bfloat16 weight holds 3 % of the adapter.
    """

    def __init__(self, layer: AdaptedLayer) -> None:
        self._bias = layer.base.bias
        self.weight = join_columns(dense_weight(layer.base), layer.scaled_up)
        self._down = layer.factors[0].detach().to(self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self.weight.dtype).flatten(0, -2)
        joined = join_columns(rows, rows @ self._down.t())
        out = nn.functional.linear(joined, self.weight, self._bias)
        return out.view(*x.shape[:-1], -1).to(x.dtype)


# ------------------------------------------------------------------------------------ layers


def fuse(
    network: PreTrainedModel,
    device: torch.device,
    compute: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> str:
    """Swap in Liger's kernels for norms, rotations and activations, where they are available. The
    rotation is swapped for all networks of this architecture that run on a GPU in the process.

    Args:
        network: The network, without an adapter if possible.
        device: Where it computes.
        compute: A function from the ids of a text to a pair whose first item is the network's
            logits; by default the network is called directly.
    Returns:
        The kernels in use, for people to read.
    Raises:
        RecipeError: If the kernels fail, or change the network's logits.
    """
    if device.type != "cuda":
        return "none on this device"
    if importlib.util.find_spec("liger_kernel") is None:
        return "none (pip install '.[gpu]' in a clone of turnrl would bring them)"
    ids = make_trial_ids(network).to(device)

    def logits() -> Tensor:
        if compute is not None:
            return compute(ids)[0]
        return cast(Tensor, network(input_ids=ids, use_cache=False).logits.float())

    options = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
        from transformers.integrations.liger import apply_liger_kernel

        if network.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            return f"none (Liger has none for {network.config.model_type})"
        # it warns about each chip vendor whose kernels are not installed
        logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
        with torch.no_grad(), swap_on_gpus(sys.modules[type(network).__module__]):
            before = logits()
            apply_liger_kernel(network, options)
            after = logits()
            if not (change := relative_change(before, after)) < MOST_CHANGE:
                raise RecipeError(
                    f"Liger's kernels change the logits of {type(network).__name__} by "
                    f"{change:.0%} of their spread. Set model.policy.fused_kernels to false."
                )
    except Exception as error:
        if isinstance(error, RecipeError) or is_device_error(error):
            raise
        raise RecipeError(
            f"Liger's kernels do not work here ({summarize_error(error)}). Set "
            "model.policy.fused_kernels to false."
        ) from error
    return "Liger's"


MOST_CHANGE = 0.15
"""The most that kernels may change logits: rounding changes them less (0.05 in bfloat16), and a
wrong rotation more (0.35)."""


def relative_change(before: Tensor, after: Tensor) -> float:
    """The mean absolute change of logits, as a fraction of their standard deviation."""
    return float((after - before).abs().mean() / before.std())


def make_trial_ids(network: PreTrainedModel) -> Tensor:
    """Token ids to try a network with, (1, 32).

    They leave out the first sixteenth of the vocabulary. Control tokens are often there, and at
    those a trained network's activations can be so large that rounding alone changes its logits:
    the logits of SmolLM2-135M in bfloat16 by 0.4 of their spread.
    """
    vocabulary = cast(Tensor, network.get_input_embeddings().weight).shape[0]
    return torch.linspace(vocabulary // 16, vocabulary - 1, 32).long()[None]


class _ByDevice:
    """Calls one function for tensors on a GPU, and another for tensors elsewhere."""

    def __init__(self, on_gpu: Callable[..., Any], elsewhere: Callable[..., Any]) -> None:
        self.on_gpu, self.elsewhere = on_gpu, elsewhere

    def __call__(self, *args: object, **kwargs: object) -> object:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return (self.on_gpu if first.is_cuda else self.elsewhere)(*args, **kwargs)


@contextlib.contextmanager
def swap_on_gpus(architecture: ModuleType) -> Iterator[None]:
    """Keep swaps made in this block away from networks that are not on a GPU.

    Liger swaps names in an architecture's module as well as parts of one network, so the next
    network on a CPU would be built from kernels that only a GPU runs. After the block the module
    has its own classes again. Swapped functions, which the network looks up whenever it runs, are
    then chosen by the device of their first tensor. Inside the block the module has its own
    functions until they are swapped. An exception leaves it as it was before.
    """
    before = dict(vars(architecture))
    own = {n: x.elsewhere if isinstance(x, _ByDevice) else x for n, x in before.items()}
    vars(architecture).update(own)
    try:
        yield
        for name, value in own.items():
            if (swapped := getattr(architecture, name)) is not value:
                function = not isinstance(value, type)
                before[name] = _ByDevice(swapped, value) if function else value
    finally:
        vars(architecture).update(before)


def decoder_layers(network: nn.Module) -> list[Any]:
    """The layers of a network, in order, whatever its code calls them."""
    return [part for part in network.modules() if isinstance(part, GradientCheckpointingLayer)]


def checkpoint_activations(network: nn.Module, layers: bool | int) -> None:
    """Recompute the activations of the first `layers` decoder layers in the backward pass; True for
    all layers, False for none.

    This sets the layers itself, because the transformers method for it changed its name after 5.17.

    Raises:
        RecipeError: If none of the network's layers can be recomputed.
    """
    blocks = decoder_layers(network)
    if layers and not blocks:
        raise RecipeError(
            "model.policy.gradient_checkpointing is on, and this model has no layers that "
            "transformers can recompute. Set it to false."
        )
    for number, block in enumerate(blocks):
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        block.gradient_checkpointing = layers is True or number < layers
