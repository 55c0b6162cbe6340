"""The input of a memory plan: a model's dimensions, the recipe's part, and the settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from turnrl.engines import ServerMemory
from turnrl.policy.sizes import MINIBATCH_TOKENS, padded_columns, read_sizes
from turnrl_slots.sizes import PREFILL_TOKENS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Decoder:
    """The dimensions of a decoder with gated MLPs.

    Args:
        hidden: Width of the residual stream.
        inner: Width inside the MLP.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        head_size: Width of a head.
        vocab: Rows of the head.
        tied: True if embedding and head are one matrix.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's matrices, by name."""
        h, q, kv = self.hidden, self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (h, q),
            "k_proj": (h, kv),
            "v_proj": (h, kv),
            "o_proj": (q, h),
            "gate_proj": (h, self.inner),
            "up_proj": (h, self.inner),
            "down_proj": (self.inner, h),
        }

    @property
    def dense(self) -> int:
        """Weights of all layers' matrices."""
        return self.layers * sum(a * b for a, b in self.linears.values())

    @property
    def embedding_weights(self) -> int:
        """Weights of embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def rest(self) -> int:
        """Weights of norms and biases, approximately."""
        kv = self.kv_heads * self.head_size
        return self.layers * (2 * self.hidden + self.heads * self.head_size + 2 * kv) + self.hidden


def read_decoder(config: PretrainedConfig) -> Decoder:
    """The dimensions of a transformers configuration.

    Raises:
        LookupError: If the plan does not know this kind of model; the text completes "the memory is
            not planned: ".
    """
    sizes, kind = read_sizes(config), config.get_text_config().model_type
    if sizes.routed:
        raise LookupError(f"{kind} routes tokens among experts")
    dimensions = {field.name: getattr(sizes, field.name) for field in fields(Decoder)}
    if None in dimensions.values():
        raise LookupError(f"the configuration of {kind} lacks sizes")
    return Decoder(**dimensions)


@dataclass(frozen=True)
class Work:
    """A recipe's part of the plan.

    Args:
        shape: The model's dimensions.
        four_bit: True if the layers' matrices are in NF4.
        size: Bytes of an element of activations and of weights that are not in NF4.
        rank: Rank of the adapter; 0 if all weights are trained.
        targets: Matrices that have an adapter; None for all.
        trajectories: Trajectories of an iteration, on one GPU, probes included.
        max_tokens: The most tokens of a trajectory.
        turn_tokens: The most tokens of a turn.
        turns: The most turns.
        result_tokens: The most tokens between two turns.
        moments: Numbers in float32 that the optimiser keeps for each weight.
        processes: Number of processes that learn together.
        sampled: True if the plan knows the engine's memory.
        mixed: True if float32 weights are rounded for each product.
        beside: GPU memory of the engine's own processes; None if it has none, or it is not known.
    """

    shape: Decoder
    four_bit: bool = False
    size: int = 2
    rank: int = 16
    targets: tuple[str, ...] | None = None
    trajectories: int = 256
    max_tokens: int = 2048
    turn_tokens: int = 512
    turns: int = 2
    result_tokens: int = 512
    moments: float = 2
    processes: int = 1
    sampled: bool = True
    mixed: bool = False
    beside: ServerMemory | None = None

    @property
    def trained_weights(self) -> int:
        """Weights that are trained, in float32."""
        shape = self.shape
        if not self.rank:
            return shape.dense + shape.embedding_weights + shape.rest
        return shape.layers * self.rank * sum(a + b for a, b in self._adapted)

    @property
    def dense_copy(self) -> int:
        """Bytes of the adapted matrices as dense weights with the adapter beside them."""
        weights = sum(padded_columns(a + self.rank) * b for a, b in self._adapted)
        return self.size * self.shape.layers * weights

    @property
    def _adapted(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices that have an adapter."""
        linears = self.shape.linears
        return [linears[name] for name in self.targets or linears if name in linears]

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_size * self.size

    @property
    def asked(self) -> float:
        """The largest share of a trajectory's tokens that may be sampled."""
        return min(1.0, self.turns * self.turn_tokens / self.max_tokens)


@dataclass(frozen=True)
class Choice:
    """The settings that decide how much memory is needed.

    Args:
        slots: The most turns sampled at once.
        kv_memory: Bytes for keys and values.
        prefill_tokens: The most tokens read in one pass of sampling.
        minibatch_tokens: The most tokens of a pass of learning.
        gradient_checkpointing: Layers whose activations are computed again.
        decode_weights: `adapter` or `dense`.
    """

    slots: int = 256
    kv_memory: int = 0
    prefill_tokens: int = PREFILL_TOKENS
    minibatch_tokens: int = MINIBATCH_TOKENS
    gradient_checkpointing: int = 0
    decode_weights: Literal["adapter", "dense"] = "adapter"


NAMES = tuple(f.name for f in fields(Choice))
