"""Attention computed by the caller that lays out the tokens, in place of a model's own.

A model that asks transformers for its attention function is given this one, which is transformers'
own `sdpa` unless the caller of the forward pass sends an `Attend` along. So tokens may be laid out
in any way, packed or paged, and no line of a model is repeated. What is sent travels as a keyword
through the layers, so that a layer that activation checkpointing recomputes is given the same.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnrl.types import Attend

_NAME = "turnrl"
_FOREIGN = ("softcap", "s_aux", "position_bias")
"""Additions of some models to attention, of which an `Attend` knows nothing."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if attend is None:
        options["sliding_window"] = sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    if foreign := [name for name in _FOREIGN if options.get(name) is not None]:
        raise NotImplementedError(f"{type(module).__name__} wants {foreign[0]} in its attention")
    layer = cast(int, module.layer_idx)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast rotates in float32
    return attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def take_over(network: PreTrainedModel) -> bool:
    """Let the caller of a model's forward pass compute its attention. False if its code cannot."""
    network.set_attn_implementation(_NAME)
    return bool(network.config._attn_implementation == _NAME)


def no_mask(like: Tensor) -> Tensor:
    """Mask to give beside an `Attend`: transformers takes any mask of four dimensions as it is, and
    would make one itself if there were none."""
    return like.new_ones(1, 1, 1, 1, dtype=torch.bool)
