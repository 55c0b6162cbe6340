"""The least time of some work: bytes and operations over the device's best rates.

A *floor* is the sum, over products of matrices, attention, head and elementwise work, of

    max(bytes / bytes per second of a large copy,
        operations / operations per second of a large product)

with both rates measured in the same run. It counts the work that the mathematics needs, in the
precision in use: weights read once per step (4 bits and their scales, or 2 bytes), keys and values
of each row's whole history, two operations per weight and token. It leaves out activations that are
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
    """The floor of these costs.

    Args:
        costs: The costs of all parts.
        bytes_per_s: Bytes per second that a large copy reads and writes on this device.
        operations_per_s: Operations per second of a large product of matrices.
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
    """The number of weights that a token is multiplied with, without the head."""
    return net.shape.dense + net.trained


def decode_step(net: Work, weights: str, rows: int, history: int) -> list[Cost]:
    """The costs of sampling one token in each row.

    Args:
        net: The network.
        weights: See `weights_bytes`.
        rows: Number of rows.
        history: Total number of tokens that the rows attend to.
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
        tokens: Number of tokens computed.
        pairs: Number of pairs of a token and a token that it attends to.
        asked: Number of tokens whose logits are computed.
    """
    return [
        Cost(weights_bytes(net, weights), 2.0 * _used(net) * tokens),
        Cost(tokens * net.kv_bytes, 4.0 * net.shape.hidden * net.shape.layers * pairs),
        Cost(tokens * _elementwise(net)),
        _head(net, asked, 1),
    ]


def learning(net: Work, weights: str, tokens: int, pairs: int, asked: int) -> list[Cost]:
    """Forward and backward pass of an adapter over a frozen base: four operations per token and
    weight of the base, whose own gradient is not computed, and six per weight of the adapter. The
    backward pass of attention costs twice its forward pass. See `reading` for the arguments."""
    base, adapter = 4.0 * net.shape.dense, 6.0 * net.trained
    return [
        Cost(2 * weights_bytes(net, weights), (base + adapter) * tokens),
        Cost(3 * tokens * net.kv_bytes, 12.0 * net.shape.hidden * net.shape.layers * pairs),
        Cost(3 * tokens * _elementwise(net)),
        _head(net, asked, 2),
    ]


def _head(net: Work, asked: int, times: int) -> Cost:
    weights = net.shape.hidden * net.shape.vocab
    return Cost(times * net.size * weights, 2.0 * times * weights * asked)


def _elementwise(net: Work) -> float:
    """Bytes per token with fused kernels: two norms with their additions, two rotations, and the
    gated activation; each reads its inputs and writes its outputs once."""
    shape = net.shape
    values = 10 * shape.hidden + 2 * shape.kv_heads * shape.head_size + 3 * shape.inner
    return float(shape.layers * values * net.size)


def pairs_of(seen: int, new: int) -> int:
    """The number of pairs when `new` tokens follow `seen` tokens; each attends to all up to it."""
    return new * seen + new * (new + 1) // 2


def turn_steps(histories: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The decode steps of a turn whose rows all begin together: (rows, tokens attended to) each.

    Args:
        histories: Tokens before each row's turn.
        lengths: Tokens that each row samples. The first comes from the pass that read the history,
            so a turn of n tokens has n - 1 steps.
    """
    steps = []
    for t in range(1, max(lengths)):
        alive = [h + t for h, n in zip(histories, lengths, strict=True) if n > t]
        steps.append((len(alive), sum(alive)))
    return steps
