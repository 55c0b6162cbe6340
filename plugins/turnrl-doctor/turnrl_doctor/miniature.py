"""A miniature of the recipe's own model, which a machine of any size can run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from turnrl import Policy, in_short

_WIDTH = 128


def miniature(policy: Policy, folder: Path) -> Policy:
    """A policy as the recipe's, of a model with two of its layers, narrow, with random weights. Its
    heads, which the kernels of attention depend on, and its vocabulary are those of the recipe's.

    Args:
        policy: The recipe's; only its configuration is read.
        folder: Where the model is written.
    Raises:
        ValueError: If no such model can be made.
    """
    network: Any = _network(policy.config)
    network.generation_config = transformers.GenerationConfig()
    network.save_pretrained(folder)
    small = Policy(
        str(folder),
        policy.quantization,
        policy.lora,
        policy.dtype,
        policy.gradient_checkpointing and True,  # a number is of the recipe's layers, not of two
        share_prefixes=policy.share_prefixes,
        fused_kernels=policy.fused_kernels,
    )
    small.tokenizer = policy.tokenizer
    return small


def _network(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The smallest of a few miniatures that this kind of model can be: some want a width that their
    heads divide, some know no size of heads but that, and some have other names for both."""
    faults = []
    for sizes in _sizes(config.get_text_config()):
        small = copy.deepcopy(config)
        text: Any = small.get_text_config()
        try:
            for name, size in sizes.items():
                setattr(text, name, size)
            if kinds := getattr(text, "layer_types", None):
                text.layer_types = kinds[: text.num_hidden_layers]
            network: Any = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            with torch.no_grad():
                network(input_ids=torch.arange(3)[None])
            return network  # type: ignore[no-any-return]
        except Exception as error:  # of any model's own code
            faults.append(in_short(error))
    raise ValueError(f"no miniature of {config.model_type} can be made ({faults[-1]})")


def _sizes(text: Any) -> Iterator[dict[str, int]]:
    heads, layers = text.num_attention_heads, {"num_hidden_layers": min(text.num_hidden_layers, 2)}
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    least = math.lcm(heads, 64)  # blocks of 4-bit weights have 64
    even = min(text.hidden_size, least * -(-_WIDTH // least))
    inner = getattr(text, "intermediate_size", None)
    narrow = {} if inner is None else {"intermediate_size": min(inner, 2 * _WIDTH)}
    yield {**layers, **narrow, "hidden_size": min(text.hidden_size, _WIDTH), "head_dim": head}
    yield {**layers, **narrow, "hidden_size": even, "head_dim": head}
    yield {**layers, **narrow, "hidden_size": even}
    yield layers
