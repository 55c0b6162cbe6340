"""The least that an iteration costs: bytes and operations over what the device does at best.

A *floor* is the sum, over products of matrices, attention, head and elementwise work, of

    max(bytes / bytes a second of a large copy, operations / operations a second of a large product)

with both rates measured in the same run. It counts what the mathematics needs, in the precision
that is in use: weights read once a step (as they lie: 4 bits and their scales, or 2 bytes), keys
and values of each row's whole history, two operations for each weight and token. Not counted are
activations that are computed again, launches, sampling, biases and norms' weights, and tables of
embeddings, of which a step reads a few rows. A kernel that reads a shared prompt once for all rows
can go below the floor of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turnrl_doctor import plan
from turnrl_doctor.plan import FOUR_BIT

Network = plan.Work
"""A Qwen2 and its adapter, as the memory plan counts them."""


@dataclass(frozen=True)
class Work:
    """Bytes moved and operations done, which overlap."""

    bytes: float
    flops: float = 0.0


def seconds(works: Iterable[Work], bytes_per_s: float, operations_per_s: float) -> float:
    """The floor of some work.

    Args:
        works: Its parts.
        bytes_per_s: Read and written by a large copy on this device.
        operations_per_s: Those of a large product of matrices.
    """
    return sum(max(w.bytes / bytes_per_s, w.flops / operations_per_s) for w in works)


def model_bytes(net: Network) -> int:
    """Bytes of the model on disk."""
    return net.size * (net.shape.dense + net.shape.embedded)


def weights_bytes(net: Network, weights: str) -> float:
    """Bytes of the linear layers that a forward pass reads, without the head.

    Args:
        net: The network.
        weights: The base in 4 bits (`nf4`) or not (`dense`), with the adapter.
    """
    return net.shape.dense * (FOUR_BIT if weights == "nf4" else net.size) + net.size * net.trained


def _used(net: Network) -> int:
    """Weights that a token is multiplied with, without the head."""
    return net.shape.dense + net.trained


def decode_step(net: Network, weights: str, rows: int, history: int) -> list[Work]:
    """One token of each row.

    Args:
        net: The network.
        weights: See `weights_bytes`.
        rows: How many.
        history: Tokens that they attend to, all together.
    """
    return [
        Work(weights_bytes(net, weights), 2.0 * _used(net) * rows),
        Work(history * net.kv_bytes, 4.0 * net.shape.hidden * net.shape.layers * history),
        _head(net, rows, 1),
    ]


def reading(net: Network, weights: str, tokens: int, pairs: int, asked: int) -> list[Work]:
    """A forward pass over tokens that come together: a prefill, or log-probabilities.

    Args:
        net: The network.
        weights: See `weights_bytes`.
        tokens: How many are computed.
        pairs: Pairs of a token and one that it attends to.
        asked: Tokens whose logits are taken.
    """
    return [
        Work(weights_bytes(net, weights), 2.0 * _used(net) * tokens),
        Work(tokens * net.kv_bytes, 4.0 * net.shape.hidden * net.shape.layers * pairs),
        Work(tokens * _elementwise(net)),
        _head(net, asked, 1),
    ]


def learning(net: Network, weights: str, tokens: int, pairs: int, asked: int) -> list[Work]:
    """Forward and backward of an adapter over a frozen base: four operations for a base's weight
    and token (its own gradient is not taken), six for the adapter's; attention's backward is twice
    its forward. See `reading` for the arguments."""
    base, own = 4.0 * net.shape.dense, 6.0 * net.trained
    return [
        Work(2 * weights_bytes(net, weights), (base + own) * tokens),
        Work(3 * tokens * net.kv_bytes, 12.0 * net.shape.hidden * net.shape.layers * pairs),
        Work(3 * tokens * _elementwise(net)),
        _head(net, asked, 2),
    ]


def flops(works: Iterable[Work]) -> float:
    """All operations."""
    return sum(work.flops for work in works)


def _head(net: Network, asked: int, times: int) -> Work:
    weights = net.shape.hidden * net.shape.vocab
    return Work(times * net.size * weights, 2.0 * times * weights * asked)


def _elementwise(net: Network) -> float:
    """Bytes of a token, by fused kernels: two norms with their additions, two rotations, and the
    gated activation; each reads its inputs and writes its outputs once."""
    shape = net.shape
    values = 10 * shape.hidden + 2 * shape.kv_heads * shape.head_size + 3 * shape.inner
    return float(shape.layers * values * net.size)


def pairs_of(seen: int, own: int) -> int:
    """Pairs of a stretch of `own` tokens that come after `seen` others."""
    return own * seen + own * (own + 1) // 2


def turn_steps(histories: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The decode steps of a turn whose rows all begin together: (rows, tokens attended to) each.

    Args:
        histories: Tokens before each row's turn.
        lengths: Tokens that each samples; the first comes from what was read before, so a turn of
            n tokens has n - 1 steps.
    """
    steps = []
    for t in range(1, max(lengths)):
        alive = [h + t for h, n in zip(histories, lengths, strict=True) if n > t]
        steps.append((len(alive), sum(alive)))
    return steps
