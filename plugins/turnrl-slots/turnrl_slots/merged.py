"""An adapter and its base as dense weights, to sample with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turnrl import dense_weight


def adapted(network: nn.Module) -> list[Any]:
    """The linear layers of a network that have an adapter (LoRA), 4-bit ones included."""
    if not hasattr(network, "peft_config"):
        return []  # importing peft would bring in much, a second SGD included
    from peft.tuners.lora import LoraLayer

    return [
        layer
        for layer in network.modules()
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
    ]


def merged_dtype(device: torch.device) -> torch.dtype:
    """Type of merged weights: fast to multiply on a GPU, exact on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def merged_bytes(network: nn.Module, device: torch.device) -> int:
    """Memory that merged weights take."""
    size = merged_dtype(device).itemsize
    return sum(
        size * layer.get_base_layer().in_features * layer.get_base_layer().out_features
        for layer in adapted(network)
    )


class Merged:
    """Dense weights of the adapted linear layers as they are now: W + s B A each, with the base's W
    dequantised, summed in float32. Nothing of the network is changed or kept.

    Args:
        network: With an adapter.
        device: Where it is.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        dtype = merged_dtype(device)
        self._forwards = [(layer, _Dense(*_sum(layer, dtype))) for layer in adapted(network)]

    @torch.no_grad()
    def refill(self) -> None:
        """The sums of the weights as they are now, at the same addresses."""
        for layer, dense in self._forwards:
            weight, bias = _sum(layer, dense.weight.dtype)
            dense.weight.copy_(weight)
            if dense.bias is not None and bias is not None:
                dense.bias.copy_(bias)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the network computes with these weights. For the time of one pass, so that who
        else reads the network finds it as it is learned, however the pass ends."""
        # a `forward` of the object shadows its class's. Not set by way of nn.Module, which would
        # look among parameters and modules first: there are some hundred layers, in every pass
        own = [(vars(layer), vars(layer).get("forward")) for layer, _ in self._forwards]
        try:
            for layer, forward in self._forwards:
                vars(layer)["forward"] = forward
            yield
        finally:
            for attributes, before in own:
                if before is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = before


class _Dense:
    """A linear layer in its own precision, whatever the activations are in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@torch.no_grad()
def _sum(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer and its adapter."""
    base = layer.get_base_layer()
    whole = dense_weight(base).to(torch.float32, copy=True)
    for name in layer.active_adapters:
        if name in layer.lora_A and not layer.disable_adapters:
            up, down = (part[name].weight.float() for part in (layer.lora_B, layer.lora_A))
            whole.addmm_(up, down, alpha=layer.scaling[name])
    bias = None if base.bias is None else base.bias.detach().to(dtype)
    return whole.to(dtype), bias
