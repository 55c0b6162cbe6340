"""The memory and the time of an iteration, computed from a model's dimensions, and the settings
that are fastest of those that fit.

    Shape      a model's dimensions, from its configuration
    Work       the recipe's part: what is trained, and how much is sampled
    Choice     the settings that decide how much memory is needed
    Card       a GPU: its memory and its ceilings

`memory` gives the bytes of every part in every phase, `seconds` the time of an iteration, and
`choose` the best choice. All are functions of numbers alone: no weights, no GPU.

Activations are counted tensor by tensor, as the policy's forward pass makes and keeps them: e bytes
an element, h wide, f inside the MLP. tests/test_plan.py compares them with the bytes that the real
code asks for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from turnrl import RecipeError

CONTEXT = 500_000_000
"""Bytes of a CUDA context with its libraries' workspaces."""
LOGITS = 2**26
"""Logits that the policy computes at once when it takes log-probabilities."""
_PAGE = 32
_HEADROOM = 0.1
"""Share of a card that is left alone: the allocator's blocks do not fit each other exactly."""
_GATHERED = 4
"""Keys and values that a layer gathers while learning, for each token of a minibatch, at most."""
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantisation: half a byte, and the scales of its block."""

PHASES = ("loading", "sampling", "learning", "step", "checkpoint")


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder with gated MLPs.

    Args:
        hidden: Width of the residual stream.
        inner: Width inside the MLP.
        layers: How many.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        head_size: Width of a head.
        vocab: Rows of the head.
        tied: Whether embedding and head are one matrix.
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
    def embedded(self) -> int:
        """Weights of embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def rest(self) -> int:
        """Weights of norms and biases, about."""
        kv = self.kv_heads * self.head_size
        return self.layers * (2 * self.hidden + self.heads * self.head_size + 2 * kv) + self.hidden


def shape_of(config: Any) -> Shape:
    """The dimensions of a transformers configuration.

    Raises:
        LookupError: If it is of a kind that the plan does not know, in words that go on from "the
            memory is not planned: ".
    """
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts")):
        raise LookupError(f"{text.model_type} routes tokens among experts")
    try:
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        return Shape(
            hidden,
            int(text.intermediate_size),
            int(text.num_hidden_layers),
            heads,
            int(getattr(text, "num_key_value_heads", None) or heads),
            int(getattr(text, "head_dim", None) or hidden // heads),
            int(text.vocab_size),
            bool(getattr(config, "tie_word_embeddings", False)),
        )
    except (AttributeError, TypeError) as error:
        raise LookupError(f"the configuration of {text.model_type} says no sizes") from error


@dataclass(frozen=True)
class Work:
    """A recipe's part of the plan.

    Args:
        shape: The model's.
        four_bit: Whether the layers' matrices are in NF4.
        size: Bytes of an element of activations and of weights that are not in NF4.
        rank: Rank of the adapter; 0 if all weights are trained.
        targets: Matrices that have an adapter; None for all.
        trajectories: Trajectories of an iteration, on one GPU, probes included.
        max_tokens: The most tokens of a trajectory.
        turn_tokens: The most tokens of a turn.
        turns: The most turns.
        result_tokens: The most tokens between two turns.
        updates: How often an iteration is learned from.
        old: Whether log-probabilities from before the updates are computed.
        cut: Whether tokens are drawn from a part of the distribution.
        moments: Numbers in float32 that the optimiser keeps for each weight.
        processes: How many learn together.
        sampled: Whether the engine is one whose memory is known.
        mixed: Whether float32 weights are rounded for each product.
    """

    shape: Shape
    four_bit: bool = False
    size: int = 2
    rank: int = 16
    targets: tuple[str, ...] | None = None
    trajectories: int = 256
    max_tokens: int = 2048
    turn_tokens: int = 512
    turns: int = 2
    result_tokens: int = 512
    updates: int = 1
    old: bool = False
    cut: bool = False
    moments: float = 2
    processes: int = 1
    sampled: bool = True
    mixed: bool = False

    @property
    def trained(self) -> int:
        """Weights that are trained, in float32."""
        shape = self.shape
        if not self.rank:
            return shape.dense + shape.embedded + shape.rest
        return shape.layers * self.rank * sum(a + b for a, b in self._wanted)

    @property
    def adapted(self) -> int:
        """Weights of the matrices that have an adapter."""
        return self.shape.layers * sum(a * b for a, b in self._wanted) if self.rank else 0

    @property
    def dense_copy(self) -> int:
        """Bytes of these matrices as dense weights with the adapter beside them."""
        weights = sum((a + self._beside) * b for a, b in self._wanted)
        return self.size * self.shape.layers * weights

    @property
    def _beside(self) -> int:
        """Columns that an adapter takes beside a matrix."""
        return self.rank + -self.rank % 8

    def joined(self, rows: int, dense: bool = False) -> int:
        """Bytes that a forward pass moves beside its factors, so that bases and adapters are added
        up in float32: see `joint_product` and `DenseLayer` of `turnrl.policy.compute`."""
        if not self.rank or self.size != 2:
            return 0
        copies = (4 * a * rows if dense else self._joined(rows, a, b) for a, b in self._wanted)
        return self.shape.layers * sum(copies)

    @staticmethod
    def _joined(rows: int, a: int, b: int) -> int:
        return min(4 * a * (rows + b), 16 * rows * b)

    @property
    def _wanted(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices that have an adapter."""
        linears = self.shape.linears
        return [linears[name] for name in self.targets or linears if name in linears]

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_size * self.size

    @property
    def asked(self) -> float:
        """The share of a trajectory's tokens that is sampled, at most."""
        return min(1.0, self.turns * self.turn_tokens / self.max_tokens)

    # an iteration as it may be expected to be, for the computed times alone
    @property
    def sampled_tokens(self) -> float:
        """Tokens sampled in a trajectory: a quarter of what its turns allow."""
        return max(1.0, min(self.turns * self.turn_tokens, self.max_tokens) / 4)

    @property
    def mean_tokens(self) -> float:
        """Tokens of a trajectory: half of what it may have."""
        return self.max_tokens / 2


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
        keep_memory: Whether pages, graphs and dense weights stay while learning.
    """

    slots: int = 256
    kv_memory: int = 0
    prefill_tokens: int = 16_384
    minibatch_tokens: int = 16_384
    gradient_checkpointing: int = 0
    decode_weights: str = "adapter"
    keep_memory: bool = False


NAMES = tuple(f.name for f in fields(Choice))


@dataclass(frozen=True)
class Card:
    """A GPU.

    Args:
        name: As it calls itself, or the size that was asked for.
        bytes: Its memory, as far as it is free.
        bandwidth: Bytes a second that kernels reach.
        flops: Operations a second that it reaches in bfloat16 products of matrices.
        like: The card whose ceilings these are, where its own are not known.
    """

    name: str
    bytes: int
    bandwidth: float
    flops: float
    like: str = ""

    @property
    def usable(self) -> int:
        """Bytes that are planned with."""
        return int(self.bytes * (1 - _HEADROOM))


_CEILINGS = {
    # bytes a second, FLOPs a second: what programs reach, some 0.8 and 0.55 of the data sheets
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
"""The card that is meant by a size alone."""


def card_of(name: str, size: int) -> Card:
    """A card by its name, with its ceilings; one that is not known has those of its size."""
    bare = name.upper().replace("-", " ")
    words = {word for part in bare.split() for word in (part, part.rstrip("S"))}
    known = next((n for n in _CEILINGS if n in words), None)
    like = next(card for least, card in _SIZED if size > least)
    return Card(name, size, *_CEILINGS[known or like], "" if known else like)


# ------------------------------------------------------------------------- memory

Parts = dict[str, int]
"""Bytes by part."""


def resident(work: Work) -> Parts:
    """Bytes that are there all the time, from loading on."""
    shape = work.shape
    dense = shape.dense * (FOUR_BIT if work.four_bit else work.size)
    masters = 4 * work.trained if work.rank else 0  # else the weights themselves
    return {
        "weights": int(dense + shape.rest * work.size),
        "embedding and head": shape.embedded * work.size,
        "adapter": masters,
    }


def forward(work: Work, tokens: int) -> int:
    """The peak of a forward pass that keeps nothing for a backward pass, of so many tokens.

    In the MLP: the activated gate, up, and their product (3ef); beside them the residual stream,
    the norm's float32 and its result. Or, while up is computed, the first two of these, the matrix
    in full precision, and what adds its adapter up in float32 (`Work.joined`).
    """
    shape, e = work.shape, work.size
    each = (8 if e == 2 else 12) * shape.hidden + 2 * e * shape.inner
    each += 2 * e * shape.head_size + 8
    wide = e * shape.hidden * shape.inner if work.four_bit else 0
    if work.rank and e == 2:
        copies, sums = shape.hidden * (tokens + shape.inner), tokens * shape.inner
        wide += e * copies if copies < 4 * sums else 4 * sums
    return tokens * each + max(tokens * e * shape.inner, wide)


def kept_by_layer(work: Work, tokens: int, keys: int) -> int:
    """Activations of one layer that wait for the backward pass.

    Two norms in float32 (8h) and their results (2eh); gate, activation, up, product (4ef); queries
    and what was read (2e a head's element) with the softmax's sums; keys and values as gathered;
    what goes into the adapters' second matrices. Without the kernel for sequences of any length
    (float32), queries and results are there once more, as gathered.
    """
    shape, e = work.shape, work.size
    wide = shape.heads * shape.head_size
    norms = (8 + 2 * e) * shape.hidden + (0 if work.rank else 8 * shape.hidden)
    attention = (2 if e == 2 else 4) * e * wide + 4 * shape.heads
    ranks = 7 * work.rank * e + 8
    each = norms + 4 * e * shape.inner + attention + ranks
    return tokens * each + keys * 2 * e * shape.kv_heads * shape.head_size


def learning(
    work: Work, choice: Choice, keys: int | None = None, asked: int | None = None
) -> Parts:
    """Bytes of one minibatch, at the peak of its forward and backward pass.

    Args:
        work: The recipe's part.
        choice: The settings; `minibatch_tokens` and `gradient_checkpointing` count.
        keys: Keys that segments see, in all; by default the most that there can be.
        asked: Tokens whose log-probabilities are asked for; by default the most.
    """
    tokens = max(choice.minibatch_tokens, work.max_tokens)
    keys = _GATHERED * tokens if keys is None else keys
    asked = int(tokens * work.asked) if asked is None else asked
    return dict(_minibatch(work, tokens, choice.gradient_checkpointing, keys, asked))


@functools.lru_cache(4096)
def _minibatch(work: Work, tokens: int, again: int, keys: int, asked: int) -> Parts:
    shape, e = work.shape, work.size
    layer = kept_by_layer(work, tokens, keys)
    inputs = again * tokens * e * shape.hidden
    full = (shape.layers - again) * layer
    # the last norm, angles of the positions, the slopes of the log-probabilities
    ends = tokens * (4 * shape.hidden + 2 * e * shape.head_size + 8) + asked * e * shape.hidden
    rows = min(max(1, LOGITS // shape.vocab), max(asked, 1))
    logits = 3 * rows * shape.vocab * 4 + asked * e * shape.hidden
    if not work.rank:  # a gradient of the head, and the sum that it is added to
        logits += 4 * shape.vocab * shape.hidden
    # of gate and up and their product, while what was kept for them is dropped
    slopes = max(0, tokens * (2 * e * shape.inner - 5 * e * shape.hidden // 4))
    # the first layers are those computed again: by then all others have been dropped
    last = {"kept activations": inputs + full + ends}
    moments: list[Parts] = [last | {"logits": logits}]
    if full:
        moments.append(last | {"gradients of activations": slopes})
    if again:
        first = {"kept activations": inputs + ends, "a layer computed again": layer}
        moments.append(first | {"gradients of activations": slopes})
    return max(moments, key=lambda parts: sum(parts.values()))


def reading(work: Work, tokens: int, rows: int) -> int:
    """The peak of a pass that reads so many tokens of prompts and results beside so many rows."""
    shape = work.shape
    # stock torch is given the pages of the texts that are read gathered, a layer at a time
    texts = -(-tokens // max(1, min(work.result_tokens, tokens)))
    width = -(-work.max_tokens // _PAGE) * _PAGE
    gathered = 2 * work.size * shape.kv_heads * shape.head_size * width
    attention = (tokens + rows) * 8 * shape.hidden + texts * gathered
    return max(forward(work, tokens + rows), attention)


def stepping(work: Work, rows: int) -> int:
    """The peak of sampling a token of each of so many rows: a forward pass, then the draws."""
    shape = work.shape
    drawn = 2 * min(rows, _DRAWN) + (7 * min(rows, _CUT) if work.cut else 0)
    return max(forward(work, rows), drawn * shape.vocab * 4 + rows * shape.hidden * work.size)


def sampling(work: Work, choice: Choice) -> Parts:
    """Bytes of sampling: pages, and the larger of a prefill and a step that samples."""
    prefill = reading(work, choice.prefill_tokens, choice.slots)
    step = stepping(work, choice.slots)
    return {
        "keys and values": choice.kv_memory,
        "dense weights": work.dense_copy if choice.decode_weights == "dense" else 0,
        "prefill": prefill if prefill >= step else 0,
        "step and logits": 0 if prefill >= step else step,
    }


_DRAWN, _CUT = 256, 64
"""Rows whose logits, and whose cut distributions, the engine has at once."""


def graphs(work: Work, choice: Choice) -> int:
    """Bytes that recorded steps hold: what one step needs, as they share their memory."""
    return forward(work, choice.slots)


def memory(work: Work, choice: Choice) -> dict[str, Parts]:
    """Bytes of each part in each phase."""
    trained, shape = 4 * work.trained, work.shape
    always = {"CUDA context": CONTEXT, **resident(work)}
    later = {
        "gradients": trained * (2 if work.processes > 1 else 1),
        "optimiser": int(trained * work.moments),
    }
    # files are read by some threads, a matrix each, and quantised on the GPU
    widest = shape.hidden * shape.inner
    load = {"matrices on their way": 4 * widest * work.size if work.rank else 0}
    # autocast keeps a rounded copy of each weight for as long as a forward pass takes
    rounded = {"rounded weights": 2 * (shape.dense + shape.vocab * shape.hidden) * work.mixed}
    sample = sampling(work, choice) if work.sampled else {}
    stay = {}
    if work.sampled and choice.keep_memory:
        stay = {
            "keys and values": choice.kv_memory,
            "dense weights": sample["dense weights"],
            "graphs": graphs(work, choice),
        }
    return {
        "loading": {**always, **load},
        "sampling": {**always, **later, **rounded, **sample},
        "learning": {**always, **later, **stay, **rounded, **learning(work, choice)},
        "step": {**always, **later, **stay, "updates": trained},
        "checkpoint": {**always, **later, **stay},
    }


# --------------------------------------------------------------------------- time


def seconds(work: Work, choice: Choice, card: Card) -> dict[str, float]:
    """Seconds of an iteration, computed from bytes and FLOPs: `rollouts` and `learning`.

    A model of the larger parts, to compare choices by. It expects trajectories of half of
    `max_tokens`, a quarter of what turns may have sampled.
    """
    return {"rollouts": _rollouts(work, choice, card), "learning": _learns(work, choice, card)}


def _weights_s(work: Work, rows: float, dense: bool, card: Card) -> float:
    """Reading all matrices once, and their products with so many rows on average. From 4 bits they
    are first written in bfloat16."""
    weights = work.shape.dense
    product = 2 * weights * rows / card.flops
    spent = max(weights * work.size / card.bandwidth, product)
    if work.four_bit and not dense:
        spent += weights * 2.5 / (0.85 * card.bandwidth)
    return spent + work.joined(int(rows), dense) / card.bandwidth


def _elementwise(work: Work) -> int:
    """Bytes that a token's elementwise operations read and write, in one layer and direction."""
    return (50 * work.shape.hidden + 30 * work.shape.inner) * work.size


def _rollouts(work: Work, choice: Choice, card: Card) -> float:
    if not work.sampled:
        return 0.0
    shape, total = work.shape, work.trajectories
    dense = choice.decode_weights == "dense"
    holds = max(1, int(0.9 * choice.kv_memory / (work.kv_bytes * work.mean_tokens)))
    waves = -(-total // holds)
    at_once = min(total / waves, choice.slots)
    turns = min(work.turns, max(1.0, work.sampled_tokens / max(1, work.turn_tokens / 4)))
    # a turn lasts as long as its longest; a slot that is free is filled, four times over on average
    steps = waves * turns * work.turn_tokens * (0.75 + 0.25 * total / waves / at_once)
    rows = min(at_once, total * work.sampled_tokens / steps)
    step = _weights_s(work, rows, dense, card)
    step += rows * work.mean_tokens * work.kv_bytes / card.bandwidth
    step += shape.vocab * shape.hidden * work.size / card.bandwidth
    step += (8 + 20 * work.cut) * rows * shape.vocab * 4 / card.bandwidth
    # kernels of a graph, some 1.3 us each: two more for each dense product with an adapter, three
    # for each other one, and three to dequantise its base
    beside = 0 if not work.rank else 2 if dense else 6 if work.four_bit else 3
    step += shape.layers * (35 + 7 * beside) * 1.3e-6 + 0.4e-3
    read = total * max(work.mean_tokens - work.sampled_tokens, 1.0)
    passes = max(math.ceil(read / choice.prefill_tokens), waves * turns)
    read_s = 2 * shape.dense * read / card.flops
    read_s += passes * _weights_s(work, 0, dense, card)
    read_s += passes * work.joined(int(read / passes), dense) / card.bandwidth
    read_s += shape.layers * read * _elementwise(work) / card.bandwidth
    again = 0.0 if choice.keep_memory else GRAPHS_S + choice.kv_memory / card.bandwidth
    filled = 4.5 * work.adapted / card.bandwidth if dense and not choice.keep_memory else 0.0
    return steps * step + read_s + again + filled


GRAPHS_S = 1.4
"""Recording 14 sizes of a step anew, each a plain step and a recording of 50 ms."""


def _learns(work: Work, choice: Choice, card: Card) -> float:
    shape = work.shape
    size = max(choice.minibatch_tokens, work.max_tokens)
    # a prompt, a third of a trajectory, is read once in each minibatch that has any of its group
    prompt = work.mean_tokens / 3
    passes = math.ceil(work.trajectories * 2 * prompt / (size - prompt))
    tokens = work.trajectories * 2 * prompt + passes * prompt
    again = choice.gradient_checkpointing / shape.layers
    backward = 1 if work.rank else 2
    forwards = 1 + again
    # tokens that each pass is computed for, forward and backward
    ways = work.updates * (forwards + backward) + work.old
    flops = 2 * shape.dense * tokens * ways
    head = 6 * shape.vocab * shape.hidden * work.trajectories * work.sampled_tokens
    moved = shape.layers * tokens * _elementwise(work)
    moved *= work.updates * (forwards + 2) + work.old
    moved += passes * work.joined(size) * (work.updates * forwards + work.old)
    unpacked = passes * ways * _weights_s(work, 0, False, card)
    rate = card.flops if work.size == 2 else card.flops / 8
    return (flops + head * work.updates) / rate + moved / card.bandwidth + unpacked


# -------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class Plan:
    """A choice, and what it comes to.

    Args:
        work: What it was made for.
        card: The same.
        choice: The settings.
        given: Those of them that the recipe gives, which are not changed.
    """

    work: Work
    card: Card
    choice: Choice
    given: Mapping[str, Any]

    @cached_property
    def memory(self) -> Mapping[str, Parts]:
        """Bytes of each part in each phase."""
        return memory(self.work, self.choice)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Of the parts of an iteration, computed."""
        return seconds(self.work, self.choice, self.card)

    @property
    def spent(self) -> float:
        """Seconds of an iteration."""
        return sum(self.seconds.values())

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(PHASES, key=self.total)

    @property
    def most(self) -> int:
        """Bytes of that phase."""
        return self.total(self.worst)

    def total(self, phase: str) -> int:
        """Bytes of a phase."""
        return sum(self.memory[phase].values())

    def setting(self, phase: str) -> str:
        """The setting to lower first if a phase runs out of memory: that of its largest transient,
        or of the pages, which take what the others leave."""
        if phase == "learning":
            return "model.minibatch_tokens"
        sizes = {name: self.memory[phase].get(name, 0) for name in ("prefill", "step and logits")}
        largest = max(sizes, key=sizes.__getitem__)
        return _SETTING_OF["keys and values" if sizes[largest] < 10**9 else largest]


_SETTING_OF = {
    "keys and values": "model.engine.kv_memory",
    "dense weights": "model.engine.decode_weights",
    "prefill": "model.engine.prefill_tokens",
    "step and logits": "model.engine.slots",
    "graphs": "model.engine.keep_memory",
    "kept activations": "model.minibatch_tokens",
    "a layer computed again": "model.minibatch_tokens",
    "gradients of activations": "model.minibatch_tokens",
    "logits": "model.minibatch_tokens",
}


def choose(work: Work, card: Card, given: Mapping[str, Any]) -> Plan:
    """The fastest settings that fit a card.

    Args:
        work: The recipe's part.
        card: The GPU.
        given: Settings that the recipe gives, which are not changed.
    Raises:
        RecipeError: If nothing fits, with the numbers and the first setting to change.
    """
    tried = (Plan(work, card, choice, given) for choice in _candidates(work, card, given))
    fitting = (fitted for plan in tried if (fitted := _with_pages(plan)) is not None)
    best = min(fitting, key=lambda plan: (plan.spent, plan.most), default=None)
    if best is None:
        raise RecipeError(_does_not_fit(work, card, given))
    return best


def _options(work: Work, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting that are tried."""
    most, layers = work.trajectories, work.shape.layers
    sizes = (65_536, 32_768, 16_384, 12_288, 8192, 6144, 4096, 3072, 2048, 1024, 512)
    options: dict[str, list[Any]] = {
        "slots": sorted({most, *(n for n in (8, 16, 32, 64, 96, 128, 192, 256, 384) if n < most)}),
        "prefill_tokens": [n for n in sizes if 2048 <= n <= 16_384],
        "minibatch_tokens": [n for n in sizes if n >= work.max_tokens] or [work.max_tokens],
        "gradient_checkpointing": sorted({layers * n // 8 for n in range(9)}),
        "decode_weights": ["adapter", "dense"] if work.rank and work.size == 2 else ["adapter"],
        "keep_memory": [False, True],
    }
    return options | {name: [value] for name, value in given.items() if name in options}


def _candidates(work: Work, card: Card, given: Mapping[str, Any]) -> Iterator[Choice]:
    """The combinations worth trying, without pages.

    Learning does not depend on the settings of sampling, but for what these keep meanwhile. So of
    its settings only those are combined that no others beat in both time and memory.
    """
    options = _options(work, given)
    learned = [options.pop(name) for name in ("minibatch_tokens", "gradient_checkpointing")]
    ways = []
    for tokens, again in itertools.product(*learned):
        way = Choice(minibatch_tokens=tokens, gradient_checkpointing=again)
        ways.append((_learns(work, way, card), sum(learning(work, way).values()), way))
    front: list[tuple[float, int, Choice]] = []
    for spent, size, way in sorted(ways, key=lambda found: found[:2]):
        if not front or size < front[-1][1]:
            front.append((spent, size, way))
    rest = options if work.sampled else {}
    for values in itertools.product(*rest.values()):
        chosen = dict(zip(rest, values, strict=True))
        for *_, way in front:
            yield replace(way, **chosen)


def _with_pages(plan: Plan) -> Plan | None:
    """A plan with the pages that there is room for; None if it does not fit."""
    work, given = plan.work, plan.given
    size = given.get("kv_memory", 0)
    if work.sampled and "kv_memory" not in given:
        phases = ("sampling", *(("learning", "step") if plan.choice.keep_memory else ()))
        room = plan.card.usable - max(map(plan.total, phases))
        least = (work.max_tokens + 2 * _PAGE) * work.kv_bytes
        size = min(room, max(work.trajectories * work.max_tokens * work.kv_bytes, least))
        if size < least:
            return None
        unit = 10**8 if size >= 10**9 else 10**6  # a number to read, and not one that is 0
        size = max(size // unit * unit, least)
    fitted = replace(plan, choice=replace(plan.choice, kv_memory=size))
    return fitted if fitted.most <= plan.card.usable else None


def _does_not_fit(work: Work, card: Card, given: Mapping[str, Any]) -> str:
    """The message of a recipe that fits in no way: the smallest choice, and what it lacks."""
    pages = given.get("kv_memory", (work.max_tokens + 2 * _PAGE) * work.kv_bytes)
    plan = min(
        (
            Plan(work, card, replace(choice, kv_memory=pages), given)
            for choice in _candidates(work, card, given)
        ),
        key=lambda plan: plan.most,
    )
    phase, needed = plan.worst, plan.most
    parts = plan.memory[phase]
    largest = max(parts, key=lambda name: parts[name])
    needs = (
        f"{phase} needs at least {gigabytes(needed)} GB, and {gigabytes(card.usable)} of the "
        f"{gigabytes(card.bytes)} GB of {card.name} are planned with; the largest part is "
        f"{largest} ({gigabytes(parts[largest])} GB)"
    )
    return f"the run does not fit: {needs}. {_remedy(work, largest, given)}"


def _remedy(work: Work, largest: str, given: Mapping[str, Any]) -> str:
    """The first setting to change, as a sentence."""
    setting = _SETTING_OF.get(largest, "")
    if setting.rpartition(".")[2] in given:
        return f"Lower {setting}, or leave it out."
    if largest in ("weights", "embedding and head", "matrices on their way"):
        if work.rank and not work.four_bit:
            return "Set model.policy.quantization to nf4, or take a smaller model."
        return "Take a smaller model, or a larger card."
    if not work.rank and largest in ("gradients", "optimiser", "updates"):
        return "Add model.policy.lora, or take a smaller model."
    if largest in ("gradients", "optimiser", "adapter"):
        return "Lower model.policy.lora.r."
    if given.get("gradient_checkpointing") == 0:
        return "Set model.policy.gradient_checkpointing to true, or leave it out."
    return "Lower model.rollout.max_tokens."


def given_up(plan: Plan) -> Iterator[tuple[str, float, int]]:
    """Settings that alone would be faster, and do not fit: the name, seconds saved, bytes more in
    some phase."""
    work, choice = plan.work, plan.choice
    wanted: dict[str, tuple[str, Any]] = {
        "keep_memory": ("kept pages and graphs", True),
        "gradient_checkpointing": ("keeping all activations", 0),
        "slots": (f"{work.trajectories} slots", work.trajectories),
    }
    if work.rank and work.size == 2:
        wanted["decode_weights"] = ("dense weights", "dense")
    if work.sampled:
        most = work.trajectories * work.max_tokens * work.kv_bytes
        wanted["kv_memory"] = ("pages for all trajectories", most)
    for name, (what, value) in wanted.items():
        if name in plan.given or getattr(choice, name) == value:
            continue
        other = replace(plan, choice=replace(choice, **{name: value}))
        saved = plan.spent - other.spent
        more = max(other.total(phase) - plan.total(phase) for phase in PHASES)
        if saved > 0.05 and more > 0:
            yield what, saved, more


# --------------------------------------------------------------------------- table


def gigabytes(size: float) -> str:
    """`5.63`, `47.1`: three digits, in units of 10^9 bytes."""
    return f"{size / 1e9:.2f}" if size < 9.995e9 else f"{size / 1e9:.1f}"


def _seconds(time: float) -> str:
    """One digit where there is but one: small models take less than a second."""
    return f"{time:.0f}" if time >= 9.5 else f"{time:.1g}"


def table(plan: Plan) -> str:
    """The plan as lines of at most 80 columns."""
    card, choice = plan.card, plan.choice
    lines = [
        f"memory plan for {card.name[:60]}",
        f"  {gigabytes(card.bytes)} GB, of which {gigabytes(card.usable)} are planned with; in GB",
        f" {'':24}" + "".join(f"{phase:>11}" for phase in PHASES),
    ]
    parts = dict.fromkeys(name for phase in PHASES for name in plan.memory[phase])
    for name in parts:
        sizes = [plan.memory[phase].get(name, 0) for phase in PHASES]
        if any(size >= 5e6 for size in sizes):
            shown = (gigabytes(size) if size >= 5e6 else "-" for size in sizes)
            lines.append(f" {name:24}" + "".join(f"{text:>11}" for text in shown))
    totals = "".join(f"{gigabytes(plan.total(phase)):>11}" for phase in PHASES)
    lines.append(f" {'sum':24}{totals}")
    lines.append("  settings")
    for name in NAMES:
        if not plan.work.sampled and name not in ("minibatch_tokens", "gradient_checkpointing"):
            continue
        value = getattr(choice, name)
        text = f"{gigabytes(value)}GB" if name == "kv_memory" else str(value)
        if name == "gradient_checkpointing":
            text = f"{value} of {plan.work.shape.layers} layers"
        lines.append(f"    {name:24}{text:24}{'given' if name in plan.given else 'by the plan'}")
    spent = plan.seconds
    whose = f", with the rates of {card.like}" if card.like else ""
    lines.append("  computed, not measured" + whose)
    lines.append(
        f"    an iteration takes {_seconds(plan.spent)} s: "
        f"rollouts {_seconds(spent['rollouts'])}, learning {_seconds(spent['learning'])}"
    )
    for what, saved, more in given_up(plan):
        lines.append(
            f"    {what} would save {saved:.1f} s and take {gigabytes(more)} GB: does not fit"
        )
    return "\n".join(lines)
