"""The seconds of an iteration on a card, computed from bytes and operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnrl_doctor.work import Choice, Work

_HEADROOM = 0.1
"""Share of a card that stays unused, because the allocator's blocks do not fit exactly."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Args:
        name: The card's own name, or the size that was asked for.
        bytes: Its free memory.
        bandwidth: Bytes per second that kernels reach.
        flops: Operations per second that bfloat16 products of matrices reach.
        like: The card whose ceilings are used, if this card's own are not known.
    """

    name: str
    bytes: int
    bandwidth: float
    flops: float
    like: str = ""

    @property
    def usable(self) -> int:
        """Bytes that a plan may use."""
        return int(self.bytes * (1 - _HEADROOM))


_CEILINGS = {
    # bytes and FLOPs per second that programs reach: about 0.8 and 0.55 of the data sheets
    "H200": (3.9e12, 580e12),
    "GH200": (3.2e12, 560e12),
    "H100": (2.7e12, 550e12),
    "A100": (1.6e12, 230e12),
    "L40": (0.7e12, 150e12),
    "A6000": (0.62e12, 110e12),
    "5090": (1.4e12, 170e12),
    "4090": (0.9e12, 140e12),
    "3090": (0.8e12, 60e12),
    "A10": (0.5e12, 60e12),
    "A10G": (0.5e12, 60e12),
    "L4": (0.25e12, 55e12),
}
_SIZED = ((120e9, "H200"), (60e9, "H100"), (30e9, "A100"), (0.0, "4090"))
"""The card that a size alone stands for."""


def card_of(name: str, size: int) -> Card:
    """A card by its name, with its ceilings; an unknown card gets the ceilings of its size."""
    bare = name.upper().replace("-", " ")
    words = {word for part in bare.split() for word in (part, part.rstrip("S"))}
    model = next((n for n in _CEILINGS if n in words), None)
    like = next(card for least, card in _SIZED if size > least)
    return Card(name, size, *_CEILINGS[model or like], "" if model else like)


def seconds(work: Work, choice: Choice, card: Card) -> dict[str, float]:
    """Seconds of an iteration, computed from bytes and FLOPs: `rollouts` and `learning`.

    This models only the larger parts, to compare choices. It expects trajectories of half of
    `max_tokens`, and turns that sample a quarter of the tokens that they may.
    """
    return {"rollouts": _rollouts_s(work, choice, card), "learning": learning_s(work, choice, card)}


def _weights_s(work: Work, rows: float, dense: bool, card: Card) -> float:
    """Seconds to read all matrices once and multiply them with so many rows on average. 4-bit
    matrices are first written in bfloat16."""
    weights = work.shape.dense
    product = 2 * weights * rows / card.flops
    spent = max(weights * work.size / card.bandwidth, product)
    if work.four_bit and not dense:
        spent += weights * 2.5 / (0.85 * card.bandwidth)
    return spent + work.joined(int(rows), dense) / card.bandwidth


def _elementwise(work: Work) -> int:
    """Bytes that a token's elementwise operations read and write, in one layer and direction."""
    return (50 * work.shape.hidden + 30 * work.shape.inner) * work.size


def _rollouts_s(work: Work, choice: Choice, card: Card) -> float:
    if not work.sampled:
        return 0.0
    shape, total = work.shape, work.trajectories
    dense = choice.decode_weights == "dense"
    holds = max(1, int(0.9 * choice.kv_memory / (work.kv_bytes * work.mean_tokens)))
    waves = -(-total // holds)
    at_once = min(total / waves, choice.slots)
    turns = min(work.turns, max(1.0, work.sampled_tokens / max(1, work.turn_tokens / 4)))
    # a turn lasts as long as the longest; a free slot is filled again, four times on average
    steps = waves * turns * work.turn_tokens * (0.75 + 0.25 * total / waves / at_once)
    rows = min(at_once, total * work.sampled_tokens / steps)
    step = _weights_s(work, rows, dense, card)
    step += rows * work.mean_tokens * work.kv_bytes / card.bandwidth
    step += shape.vocab * shape.hidden * work.size / card.bandwidth
    step += (8 + 20 * work.cut) * rows * shape.vocab * 4 / card.bandwidth
    # kernels of a graph take about 1.3 us each: two more for each dense product with an adapter,
    # three for each other product, and three to dequantise its base
    kernels = 0 if not work.rank else 2 if dense else 6 if work.four_bit else 3
    step += shape.layers * (35 + 7 * kernels) * 1.3e-6 + 0.4e-3
    read = total * max(work.mean_tokens - work.sampled_tokens, 1.0)
    reads = max(math.ceil(read / choice.prefill_tokens), waves * turns)
    read_s = 2 * shape.dense * read / card.flops
    read_s += reads * _weights_s(work, 0, dense, card)
    read_s += reads * work.joined(int(read / reads), dense) / card.bandwidth
    read_s += shape.layers * read * _elementwise(work) / card.bandwidth
    begun_s = 0.0 if choice.keep_memory else GRAPHS_S + choice.kv_memory / card.bandwidth
    filled = 4.5 * work.adapted / card.bandwidth if dense and not choice.keep_memory else 0.0
    return steps * step + read_s + begun_s + filled


GRAPHS_S = 1.4
"""Seconds to record 14 sizes of a step anew, each with a plain step and a recording of 50 ms."""


def learning_s(work: Work, choice: Choice, card: Card) -> float:
    shape = work.shape
    size = max(choice.minibatch_tokens, work.max_tokens)
    # a prompt, a third of a trajectory, is read once in each minibatch that has any of its group
    prompt = work.mean_tokens / 3
    minibatches = math.ceil(work.trajectories * 2 * prompt / (size - prompt))
    tokens = work.trajectories * 2 * prompt + minibatches * prompt
    recomputed = choice.gradient_checkpointing / shape.layers
    backward = 1 if work.rank else 2
    forwards = 1 + recomputed
    # the number of passes over each token, forward and backward
    ways = work.passes * (forwards + backward) + work.old
    flops = 2 * shape.dense * tokens * ways
    head = 6 * shape.vocab * shape.hidden * work.trajectories * work.sampled_tokens
    moved = shape.layers * tokens * _elementwise(work)
    moved *= work.passes * (forwards + 2) + work.old
    moved += minibatches * work.joined(size) * (work.passes * forwards + work.old)
    unpacked = minibatches * ways * _weights_s(work, 0, False, card)
    if work.shares > 1:  # the rate between cards is about a tenth of the memory's, as with NVLink
        unpacked += minibatches * ways * shape.dense * work.size / (card.bandwidth / 10)
    rate = card.flops if work.size == 2 else card.flops / 8
    return (flops + head * work.passes) / rate + moved / card.bandwidth + unpacked
