"""The least time of some work: bytes and operations over the device's best rates.

A *floor* is the sum, over products of matrices, attention, head and elementwise work, of

    max(bytes / bytes a second of a large copy, operations / operations a second of a large product)

with both rates measured in the same run. It counts what the mathematics needs, in the precision
that is in use: weights read once a step (4 bits and their scales, or 2 bytes), keys and values of
each row's whole history, two operations per weight and token. It leaves out activations that are
computed again, launches, sampling, biases, weights of norms, and embeddings. A kernel that reads a
shared prompt once for all rows can beat the floor of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turnrl_doctor.counts import FOUR_BIT
from turnrl_doctor.work import Work


@dataclass(frozen=True)
class Cost:
    """Bytes moved and operations done, which overlap."""

    bytes: float
    flops: float = 0.0


def seconds(costs: Iterable[Cost], bytes_per_s: float, operations_per_s: float) -> float:
    """The floor of some costs.

    Args:
        costs: Of its parts.
        bytes_per_s: Read and written by a large copy on this device.
        operations_per_s: Those of a large product of matrices.
    """
    return sum(max(c.bytes / bytes_per_s, c.flops / operations_per_s) for c in costs)


def weights_bytes(net: Work, weights: str) -> float:
    """Bytes of the linear layers that a forward pass reads, without the head.

    Args:
        net: The network and its adapter, as the memory plan counts them.
        weights: The base in 4 bits (`nf4`) or not (`dense`), with the adapter.
    """
    return net.shape.dense * (FOUR_BIT if weights == "nf4" else net.size) + net.size * net.trained


def _used(net: Work) -> int:
    """Weights that a token is multiplied with, without the head."""
    return net.shape.dense + net.trained


def decode_step(net: Work, weights: str, rows: int, history: int) -> list[Cost]:
    """One token of each row.

    Args:
        net: The network.
        weights: See `weights_bytes`.
        rows: How many.
        history: Tokens that they attend to, all together.
    """
    return [
        Cost(weights_bytes(net, weights), 2.0 * _used(net) * rows),
        Cost(history * net.kv_bytes, 4.0 * net.shape.hidden * net.shape.layers * history),
        _head(net, rows, 1),
    ]


def reading(net: Work, weights: str, tokens: int, pairs: int, asked: int) -> list[Cost]:
    """A forward pass over tokens that come together: a prefill, or log-probabilities.

    Args:
        net: The network.
        weights: See `weights_bytes`.
        tokens: How many are computed.
        pairs: Pairs of a token and one that it attends to.
        asked: Tokens whose logits are taken.
    """
    return [
        Cost(weights_bytes(net, weights), 2.0 * _used(net) * tokens),
        Cost(tokens * net.kv_bytes, 4.0 * net.shape.hidden * net.shape.layers * pairs),
        Cost(tokens * _elementwise(net)),
        _head(net, asked, 1),
    ]


def learning(net: Work, weights: str, tokens: int, pairs: int, asked: int) -> list[Cost]:
    """Forward and backward of an adapter over a frozen base: four operations for a base's weight
    and token (its own gradient is not taken), six for the adapter's; attention's backward is twice
    its forward. See `reading` for the arguments."""
    base, own = 4.0 * net.shape.dense, 6.0 * net.trained
    return [
        Cost(2 * weights_bytes(net, weights), (base + own) * tokens),
        Cost(3 * tokens * net.kv_bytes, 12.0 * net.shape.hidden * net.shape.layers * pairs),
        Cost(3 * tokens * _elementwise(net)),
        _head(net, asked, 2),
    ]


def _head(net: Work, asked: int, times: int) -> Cost:
    weights = net.shape.hidden * net.shape.vocab
    return Cost(times * net.size * weights, 2.0 * times * weights * asked)


def _elementwise(net: Work) -> float:
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
