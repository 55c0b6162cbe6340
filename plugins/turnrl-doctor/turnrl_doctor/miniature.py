"""A miniature of the recipe's own model and engine, which a machine of any size can run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from turnrl import Engine, Policy

_WIDTH = 128


def miniature(policy: Policy, folder: Path) -> Policy:
    """A policy as the recipe's, of a model with two of its layers, narrow, with random weights. Its
    heads, which the kernels of attention depend on, and its vocabulary are those of the recipe's.

    Args:
        policy: The recipe's; only its configuration is read.
        folder: Where the model is written.
    """
    config = copy.deepcopy(policy.config)
    text: Any = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    text.head_dim = size
    text.hidden_size = min(text.hidden_size, _WIDTH)
    text.intermediate_size = min(text.intermediate_size, 2 * _WIDTH)
    text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[: text.num_hidden_layers]
    network: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.generation_config = transformers.GenerationConfig()
    network.save_pretrained(folder)
    small = Policy(
        str(folder),
        policy.quantization,
        policy.lora,
        policy.dtype,
        policy.gradient_checkpointing and True,
        share_prefixes=policy.share_prefixes,
        fused_kernels=policy.fused_kernels,
    )
    small.tokenizer = policy.tokenizer
    return small


def small_engine(engine: Engine) -> Engine:
    """The recipe's engine with its options, but for memory and slots."""
    small: Any = copy.deepcopy(engine)
    for name, value in {"slots": 8, "prefill_tokens": 512, "kv_memory": "256MB"}.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return small  # type: ignore[no-any-return]
