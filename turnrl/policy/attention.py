"""Attention computed by the caller that lays out the tokens, in place of a model's own.

A model that asks transformers for its attention function gets this one. It is transformers' own
`sdpa` unless the caller of the forward pass passes an `Attend`. So tokens may be laid out in any
way, packed or paged, without copying any of a model's code. The `Attend` travels through the layers
as a keyword, so a layer that activation checkpointing recomputes gets the same one.
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
"""Additions of some models to attention that an `Attend` does not support."""


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


def override_attention(network: PreTrainedModel) -> bool:
    """Let the caller of a model's forward pass compute its attention. False if its code cannot do
    so."""
    network.set_attn_implementation(_NAME)
    return bool(network.config._attn_implementation == _NAME)


def no_mask(like: Tensor) -> Tensor:
    """A mask to pass along with an `Attend`: transformers takes any mask of four dimensions as it
    is, and would make one itself without it."""
    return like.new_ones(1, 1, 1, 1, dtype=torch.bool)
