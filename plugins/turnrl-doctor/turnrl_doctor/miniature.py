"""A miniature of the recipe's own model, which a machine of any size can run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import transformers

from turnrl import Policy
from turnrl.plugin.errors import summarize_error
from turnrl.policy.model import LanguageModel
from turnrl.policy.sizes import ModelSizes, read_sizes

_WIDTH = 128


def make_miniature(policy: LanguageModel, folder: Path) -> Policy:
    """The recipe's settings for a narrow model of two layers with random weights. It keeps the
    heads, which attention kernels depend on, and the vocabulary.

    Args:
        policy: The recipe's policy; only its configuration is read.
        folder: The folder to write the model to.
    Raises:
        ValueError: If no such model can be made.
    """
    network = small_network(policy.config)
    network.generation_config = transformers.GenerationConfig()
    network.save_pretrained(folder)
    settings = policy.settings
    return replace(
        settings,
        model=str(folder),
        chat_template=None,
        revision=None,
        # a number counts the recipe's layers, not two
        gradient_checkpointing=settings.gradient_checkpointing and True,
    )


def small_network(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The smallest of a few miniatures that works for this kind of model. Some models want a width
    that their heads divide, some derive the size of a head from it, and some use other names for
    both.

    Args:
        config: The configuration of the full model.
    Raises:
        ValueError: If no miniature works.
    """
    faults, full = [], read_sizes(config)
    for sizes in _sizes(full):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        try:
            text.update(dict(sizes))
            if full.kinds:
                text.update({"layer_types": list(full.kinds[: sizes["num_hidden_layers"]])})
            network = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            with torch.no_grad():
                network(input_ids=torch.arange(3)[None])
            return cast(transformers.PreTrainedModel, network)
        except Exception as error:  # a model's own code may raise anything
            faults.append(summarize_error(error))
    raise ValueError(f"no miniature of {config.model_type} can be made ({faults[-1]})")


def _sizes(full: ModelSizes) -> Iterator[dict[str, int]]:
    layers = {"num_hidden_layers": min(full.layers or 2, 2)}
    hidden, heads, head, inner = full.hidden, full.heads, full.head_size, full.inner
    if hidden and heads and head:
        unit = math.lcm(heads, 64)  # a block of 4-bit weights has 64
        even = min(hidden, unit * -(-_WIDTH // unit))
        narrow = layers if inner is None else layers | {"intermediate_size": min(inner, 2 * _WIDTH)}
        yield {**narrow, "hidden_size": min(hidden, _WIDTH), "head_dim": head}
        yield {**narrow, "hidden_size": even, "head_dim": head}
        yield {**narrow, "hidden_size": even}
    yield layers
