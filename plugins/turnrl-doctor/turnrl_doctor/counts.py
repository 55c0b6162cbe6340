"""The bytes of an iteration, part by part.

Activations are counted tensor by tensor, as the policy's forward pass makes and keeps them, with e
bytes per element, width h, and width f inside the MLP. tests/test_plan.py compares the counts with
the bytes that the real code requests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from turnrl.policy.sizes import GATHERED, LOGITS, copies_factors
from turnrl_doctor.work import Choice, Work
from turnrl_slots.sizes import PAGE, ROWS, count_pages

CONTEXT = 500_000_000
"""Bytes of a CUDA context with its libraries' workspaces."""
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantisation: half a byte, and the scales of its block."""

ENGINE = "the engine's process"
"""An engine's memory on the GPU outside the run's own process; see `Engine.server_memory`."""

PHASES = ("loading", "sampling", "learning", "step", "checkpoint")

Parts = Mapping[str, int]
"""Bytes by part."""


def resident_bytes(work: Work) -> Parts:
    """Bytes that are in use all the time, from loading on."""
    shape = work.shape
    dense = shape.dense * (FOUR_BIT if work.four_bit else work.size)
    masters = 4 * work.trained_weights if work.rank else 0  # else the weights themselves
    return {
        "weights": int(dense + shape.rest * work.size),
        "embedding and head": shape.embedding_weights * work.size,
        "adapter": masters,
    }


def forward_bytes(work: Work, tokens: int) -> int:
    """The peak of a forward pass over so many tokens that keeps nothing for a backward pass.

    It is in the MLP: the activated gate, up, and their product (3ef); beside them the residual
    stream, the norm's float32 and its result. Or, while up is computed: the first two of these, the
    matrix in full precision, and the buffers that add its adapter in float32 (`Work.dense_copy`).
    """
    shape, e = work.shape, work.size
    per_token = (8 if e == 2 else 12) * shape.hidden + 2 * e * shape.inner
    per_token += 2 * e * shape.head_size + 8
    wide = e * shape.hidden * shape.inner if work.four_bit else 0
    if work.rank and e == 2:
        copied = copies_factors(tokens, shape.hidden, shape.inner)
        copies = e * shape.hidden * (tokens + shape.inner)
        wide += copies if copied else 4 * tokens * shape.inner
    return tokens * per_token + max(tokens * e * shape.inner, wide)


def activation_bytes(work: Work, tokens: int, keys: int) -> int:
    """Activations of one layer that wait for the backward pass.

    Two norms in float32 (8h) and their results (2eh); gate, activation, up, product (4ef); queries
    and the results of attention (2e per element of a head) with the softmax's sums; keys and values
    as gathered; the inputs of the adapters' second matrices. Without the kernel for sequences of
    any length (float32), queries and results are held twice, the second time as gathered.
    """
    shape, e = work.shape, work.size
    wide = shape.heads * shape.head_size
    norms = (8 + 2 * e) * shape.hidden + (0 if work.rank else 8 * shape.hidden)
    attention = (2 if e == 2 else 4) * e * wide + 4 * shape.heads
    ranks = 7 * work.rank * e + 8
    per_token = norms + 4 * e * shape.inner + attention + ranks
    return tokens * per_token + keys * 2 * e * shape.kv_heads * shape.head_size


@functools.lru_cache(4096)
def learning_bytes(
    work: Work, tokens: int, again: int = 0, keys: int | None = None, asked: int | None = None
) -> Parts:
    """Bytes of one minibatch, at the peak of its forward and backward pass.

    Args:
        work: The recipe's part.
        tokens: Tokens of the minibatch; at least a trajectory.
        again: Layers whose activations are computed again.
        keys: Total keys that segments see; by default the most possible.
        asked: Tokens whose log-probabilities are requested; by default the most.
    """
    shape, e, tokens = work.shape, work.size, max(tokens, work.max_tokens)
    asked = int(tokens * work.asked) if asked is None else asked
    layer = activation_bytes(work, tokens, GATHERED * tokens if keys is None else keys)
    inputs = again * tokens * e * shape.hidden
    full = (shape.layers - again) * layer
    # the last norm, angles of the positions, gradients of the log-probabilities
    ends = tokens * (4 * shape.hidden + 2 * e * shape.head_size + 8) + asked * e * shape.hidden
    rows = min(max(1, LOGITS // shape.vocab), max(asked, 1))
    logits = 3 * rows * shape.vocab * 4 + asked * e * shape.hidden
    if not work.rank:  # a gradient of the head, and the sum that it is added to
        logits += 4 * shape.vocab * shape.hidden
    # of gate, up and their product, while the activations kept for them are dropped
    slopes = max(0, tokens * (2 * e * shape.inner - 5 * e * shape.hidden // 4))
    # the first layers are recomputed; by then the activations of all others have been dropped
    last = {"kept activations": inputs + full + ends}
    moments = [last | {"logits": logits}]
    if full:
        moments.append(last | {"gradients of activations": slopes})
    if again:
        first = {"kept activations": inputs + ends, "a layer computed again": layer}
        moments.append(first | {"gradients of activations": slopes})
    return max(moments, key=lambda parts: sum(parts.values()))


def prefill_bytes(work: Work, tokens: int, rows: int) -> int:
    """The peak of a pass that reads so many tokens of prompts and results, and samples in so many
    rows."""
    shape = work.shape
    # stock torch reads a gathered copy of these texts' pages, one layer at a time
    texts = -(-tokens // max(1, min(work.result_tokens, tokens)))
    width = count_pages(work.max_tokens) * PAGE
    gathered = 2 * work.size * shape.kv_heads * shape.head_size * width
    attention = (tokens + rows) * 8 * shape.hidden + texts * gathered
    return max(forward_bytes(work, tokens + rows), attention)


def decode_bytes(work: Work, rows: int) -> int:
    """The peak of sampling one token in each of so many rows: a forward pass, then the draws."""
    shape = work.shape
    logits = 2 * min(rows, ROWS) * shape.vocab * 4
    return max(forward_bytes(work, rows), logits + rows * shape.hidden * work.size)


def sampling_bytes(work: Work, choice: Choice) -> Parts:
    """Bytes of sampling: pages, and the larger of a prefill and a step that samples."""
    prefill = prefill_bytes(work, choice.prefill_tokens, choice.slots)
    step = decode_bytes(work, choice.slots)
    return {
        "keys and values": choice.kv_memory,
        "dense weights": work.dense_copy if choice.decode_weights == "dense" else 0,
        "prefill": prefill if prefill >= step else 0,
        "step and logits": 0 if prefill >= step else step,
    }


def memory_by_phase(work: Work, choice: Choice) -> dict[str, Parts]:
    """Bytes of each part in each phase."""
    trained, shape = 4 * work.trained_weights, work.shape
    always = {"CUDA context": CONTEXT, **resident_bytes(work)}
    later = {
        # DDP has buckets of them
        "gradients": trained * (2 if work.processes > 1 else 1),
        "optimiser": int(trained * work.moments),
    }
    # several threads read files, each one matrix at a time, which the GPU quantises
    widest = shape.hidden * shape.inner
    load = {"matrices on their way": 4 * widest * work.size if work.rank else 0}
    # autocast keeps a copy of each weight that it rounds
    copies = 2 * (shape.dense + shape.vocab * shape.hidden) if work.mixed else 0
    passing = {"rounded weights": copies}
    sample = sampling_bytes(work, choice) if work.sampled else {}
    beside = {} if work.beside is None else {ENGINE: work.beside.sampling}
    learn = learning_bytes(work, choice.minibatch_tokens, choice.gradient_checkpointing)
    stay = {} if work.beside is None else {ENGINE: work.beside.learning}
    return {
        "loading": {**always, **load},
        "sampling": {**always, **later, **passing, **sample, **beside},
        "learning": {**always, **later, **stay, **passing, **learn},
        "step": {**always, **later, **stay, "updates": trained},
        "checkpoint": {**always, **later, **stay},
    }
