"""Sizes that decide how much memory a policy takes: its model's dimensions, the most that a forward
pass holds at once, and the rules of padding. Memory plans and the program import them without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOGITS = 2**26
"""Logits computed at once for log-probabilities: 0.25 GB in float32, of which about five copies are
held."""

GATHERED = 4
"""The most tokens whose keys and values a layer gathers while learning, per token of a minibatch.
"""

MINIBATCH_TOKENS = 16_384
"""Tokens of a minibatch if neither the recipe nor a plan sets them."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's allocator. torch 2.11 to 2.13 read either; 2.11
warns that the second is deprecated."""


def padded_columns(columns: int) -> int:
    """The next multiple of 8, which tensor cores need."""
    return columns + -columns % 8


def copies_factors(rows: int, inputs: int, outputs: int) -> bool:
    """True if `turnrl.policy.compute.joint_product` adds an adapter with one product of copied
    factors, which moves 4 K (M + N) bytes. Otherwise it adds two products in float32, which moves
    their sum, 16 M N bytes."""
    return inputs * (rows + outputs) < 4 * rows * outputs


@dataclass(frozen=True)
class ModelSizes:
    """A decoder as its transformers configuration describes it; None for what it leaves out.

    Args:
        hidden: Width of the residual stream.
        inner: Width inside the MLP.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        head_size: Width of a head.
        vocab: Rows of the head.
        tied: True if embedding and head are one matrix.
        positions: The most tokens of a text.
        kinds: The kind of each layer, such as `full_attention`.
        window: Number of tokens that a layer with a sliding window sees.
        slides: False if the window is switched off for the whole model.
        chunk: The most tokens that a layer with chunked attention sees.
        routed: True if the model routes tokens among experts.
        tuned: True if attention depends on a token's place in its row.
        shares_keys: True if layers share keys and values, or keep a compressed form of them.
    """

    hidden: int | None
    inner: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    vocab: int | None
    tied: bool
    positions: int | None
    kinds: tuple[str, ...] | None
    window: int | None
    slides: bool
    chunk: int | None
    routed: bool
    tuned: bool
    shares_keys: bool


def read_sizes(config: PretrainedConfig) -> ModelSizes:
    """Read a configuration by attribute names: transformers' configurations agree on these names
    but share no class that declares them. Nothing else in turnrl reads them this way."""
    text = config.get_text_config()

    def read(name: str, default: object = None, of: PretrainedConfig = text) -> Any:
        return getattr(of, name, default)  # each architecture has other attributes

    def number(name: str) -> int | None:
        value = read(name)
        return value if isinstance(value, int) and value > 0 else None

    def any_of(*names: str) -> bool:
        return any(map(read, names))

    hidden, heads, size = (
        number(name) for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if size is None and hidden is not None and heads is not None:
        size = hidden // heads
    kinds = read("layer_types")
    return ModelSizes(
        hidden=hidden,
        inner=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_size=size,
        vocab=number("vocab_size"),
        tied=bool(read("tie_word_embeddings", of=config)),
        positions=number("max_position_embeddings"),
        kinds=None if kinds is None else tuple(kinds),
        window=number("sliding_window"),
        slides=bool(read("use_sliding_window", True)),
        chunk=number("attention_chunk_size"),
        routed=any_of("num_experts", "num_local_experts"),
        tuned=any_of("attn_temperature_tuning"),
        shares_keys=any_of("kv_lora_rank", "num_kv_shared_layers"),
    )
