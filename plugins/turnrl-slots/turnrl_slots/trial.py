"""Trials at the start of a run: the model can be sampled, pages agree with its own attention, and
there is memory for the largest passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from turnrl import RecipeError, SampledPolicy, Sampling, in_short, of_the_device, out_of_memory
from turnrl_slots.attention import Feed
from turnrl_slots.limits import refuse
from turnrl_slots.pages import Pool, Shapes
from turnrl_slots.sampling import sample
from turnrl_slots.sizes import PAGE, ROWS, pages_of

Forward = Callable[[Sequence[Sequence[int]], np.ndarray, list[int], list[Feed]], Tensor]
"""One forward pass: the tables of its rows, their lengths and tokens, and its feeds. Gives the
hidden state after each row, and after each feed that ends, (n, H)."""


_MOST_ROWS = 512
"""Turns of the step that is tried. Logits are made for 256 rows at a time, so a larger step takes
little more."""


def text_of(policy: SampledPolicy, tokens: int) -> tuple[int, ...]:
    """A text of so many tokens, each another for long."""
    vocabulary = policy.config.get_text_config().vocab_size
    return tuple((7919 * i + 104_729) % vocabulary for i in range(tokens))


@torch.inference_mode()
def measure(policy: SampledPolicy, device: torch.device, tokens: int) -> Shapes:
    """The shapes of keys and values, found by reading two tokens.

    Raises:
        RecipeError: If the model does not attend, or a layer sees less than so many tokens.
    """
    shapes = Shapes()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        policy.hidden(ids, None, torch.arange(2, device=device)[None], attend=shapes)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        if of_the_device(error):
            raise
        refuse(policy.config, f"({type(error).__name__}: {error})", error)
    if not shapes.layers:
        refuse(policy.config, "(it has no attention that asks for an implementation)")
    if shapes.windows and (window := min(shapes.windows)) < tokens:
        why = f"(a layer sees {window} tokens, and a trajectory has {tokens})"
        refuse(policy.config, why)
    return shapes


@torch.inference_mode()
def compare(policy: SampledPolicy, pool: Pool, forward: Forward, tokens: int) -> None:
    """Read a text as long as any that will come, once over pages and once as the model itself
    would. Over pages it is read in two parts, and its last token as one that was sampled. Chunked
    attention, recurrent layers and whatever else pages do not hold show in the difference.

    Raises:
        RecipeError: If there is one.
    """
    ids = text_of(policy, max(tokens, 2))
    half, last = len(ids) // 2, len(ids) - 1
    table = [pool.take() for _ in range(pages_of(len(ids)))]
    try:
        for begin, end in ((0, half), (half, last)):
            if begin < end:
                forward([], np.zeros(0, np.int64), [], [Feed(table, begin, ids[begin:end])])
        logits = policy.logits(forward([table], np.array([last]), [ids[last]], []))
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        if of_the_device(error):
            raise
        refuse(policy.config, f"({type(error).__name__}: {error})", error)
    whole = torch.tensor([ids], device=pool.device)
    positions = torch.arange(len(ids), device=pool.device)[None]
    hidden = policy.hidden(whole, None, positions)
    gap = logits.log_softmax(-1) - policy.logits(hidden[:, -1]).log_softmax(-1)
    pool.release(table)
    # rounding alone makes 1e-5 in float32, and some hundredths in bfloat16
    limit = 1e-2 if hidden.dtype == torch.float32 else 0.25
    if not (off := float(gap.abs().mean())) < limit:
        why = f"(log-probabilities {off:.2g} nats apart after {len(ids)} tokens)"
        refuse(policy.config, why)


@torch.inference_mode()
def fill(
    policy: SampledPolicy,
    pool: Pool,
    forward: Forward,
    tokens: int,
    prefill_tokens: int,
    rows: int,
) -> None:
    """Compute the largest passes that may come, so that memory for them is missing now or never: as
    many tokens read at once as ever will be, and a token sampled in each of as many turns as fit.

    Args:
        policy: That is sampled.
        pool: Pages; none is held.
        forward: Computes a pass.
        tokens: Length of the longest trajectory.
        prefill_tokens: The most tokens read at once.
        rows: The most turns sampled at once.
    Raises:
        RecipeError: If memory runs out, with the settings to lower.
    """
    feeds: list[Feed] = []
    left = min(prefill_tokens, pool.count * PAGE)
    while left and pool.available:
        ids = text_of(policy, min(left, tokens, pool.available * PAGE))
        table = [pool.take() for _ in range(pages_of(len(ids)))]
        feeds.append(Feed(table, 0, ids))
        left -= len(ids)
    whole = pages_of(tokens)
    rows = min(rows, pool.count // whole, _MOST_ROWS)
    tables = (
        np.arange(rows * whole).reshape(rows, whole).tolist()
    )  # no matter that nobody holds them
    part = "a prefill of that many tokens"
    try:
        forward([], np.zeros(0, np.int64), [], feeds)
        part = f"a step of {rows} turns"
        hidden = forward(tables, np.full(rows, tokens - 1), [0] * rows, [])
        some = hidden[:ROWS]
        plain = [Sampling(1, 0.9)] * len(some)
        sample(policy.logits, some, plain, [0.5] * len(some), [None] * len(some))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        held = pool.bytes / 1e9
        raise RecipeError(
            f"{part} does not fit beside {held:.1f} GB of keys and values on {pool.device} "
            f"({in_short(error)[:200]}). It was tried at the start with model.engine.prefill_tokens"
            f" = {prefill_tokens}. Lower that first (to {max(prefill_tokens // 2, 1)}, say), then "
            "model.engine.kv_memory."
        ) from error
    for feed in feeds:
        pool.release(feed.table)
