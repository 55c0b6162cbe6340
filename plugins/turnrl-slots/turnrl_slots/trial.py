"""Trials at the start of a run: can the model be sampled, do pages agree with the model's own
attention, and is there memory for the largest passes?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from turnrl import RecipeError, Sampling
from turnrl.engines import SampledPolicy
from turnrl.plugin.errors import summarize_error
from turnrl.policy.device import is_device_error, is_out_of_memory
from turnrl_slots.attention import Feed
from turnrl_slots.limits import raise_unsupported
from turnrl_slots.pages import Pool, Shapes
from turnrl_slots.sampling import sample
from turnrl_slots.sizes import PAGE, ROWS, count_pages

Forward = Callable[[Sequence[Sequence[int]], np.ndarray, list[int], list[Feed]], Tensor]
"""One forward pass: takes the tables of its rows, their lengths and tokens, and its feeds. Returns
the hidden state after each row, and after each feed that ends, (n, H)."""


_MOST_ROWS = 512
"""The most turns in the trial step. Logits are computed for 256 rows at a time, so a larger step
takes little more."""


def make_text(policy: SampledPolicy, tokens: int) -> tuple[int, ...]:
    """A text of so many tokens, which repeats no token for a long time."""
    vocabulary = policy.config.get_text_config().vocab_size
    return tuple((7919 * i + 104_729) % vocabulary for i in range(tokens))


@torch.inference_mode()
def measure_shapes(policy: SampledPolicy, device: torch.device, tokens: int) -> Shapes:
    """The shapes of keys and values, found by reading two tokens.

    Raises:
        RecipeError: If the model has no attention, or a layer sees fewer than `tokens` tokens.
    """
    shapes = Shapes()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        policy.hidden(ids, None, torch.arange(2, device=device)[None], attend=shapes)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        if is_device_error(error):
            raise
        raise_unsupported(policy.config, f"({type(error).__name__}: {error})", error)
    if not shapes.layers:
        raise_unsupported(policy.config, "(it has no attention that asks for an implementation)")
    if shapes.windows and (window := min(shapes.windows)) < tokens:
        why = f"(a layer sees {window} tokens, and a trajectory has {tokens})"
        raise_unsupported(policy.config, why)
    return shapes


@torch.inference_mode()
def compare_paths(policy: SampledPolicy, pool: Pool, forward: Forward, tokens: int) -> None:
    """Read a text of the greatest possible length, once over pages and once as the model itself
    would. Over pages the text is read in two parts, and its last token as if it was sampled.
    Chunked attention, recurrent layers and anything else that pages do not hold show in the
    difference.

    Raises:
        RecipeError: If the two readings differ.
    """
    ids = make_text(policy, max(tokens, 2))
    half, last = len(ids) // 2, len(ids) - 1
    table = [pool.take() for _ in range(count_pages(len(ids)))]
    try:
        for begin, end in ((0, half), (half, last)):
            if begin < end:
                forward([], np.zeros(0, np.int64), [], [Feed(table, begin, ids[begin:end])])
        logits = policy.logits(forward([table], np.array([last]), [ids[last]], []))
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        if is_device_error(error):
            raise
        raise_unsupported(policy.config, f"({type(error).__name__}: {error})", error)
    text = torch.tensor([ids], device=pool.device)
    positions = torch.arange(len(ids), device=pool.device)[None]
    hidden = policy.hidden(text, None, positions)
    gap = logits.log_softmax(-1) - policy.logits(hidden[:, -1]).log_softmax(-1)
    pool.release(table)
    # rounding alone makes a difference of 1e-5 in float32, and of hundredths in bfloat16
    limit = 1e-2 if hidden.dtype == torch.float32 else 0.25
    if not (off := float(gap.abs().mean())) < limit:
        why = f"(log-probabilities {off:.2g} nats apart after {len(ids)} tokens)"
        raise_unsupported(policy.config, why)


@torch.inference_mode()
def fill_memory(
    policy: SampledPolicy,
    pool: Pool,
    forward: Forward,
    tokens: int,
    prefill_tokens: int,
    rows: int,
) -> None:
    """Compute the largest passes that may come, so that memory for them runs out now or never: a
    prefill of as many tokens as allowed, and a step that samples a token in as many turns as fit.

    Args:
        policy: The policy that is sampled.
        pool: Its pages; none is held yet.
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
        ids = make_text(policy, min(left, tokens, pool.available * PAGE))
        table = [pool.take() for _ in range(count_pages(len(ids)))]
        feeds.append(Feed(table, 0, ids))
        left -= len(ids)
    longest = count_pages(tokens)
    rows = min(rows, pool.count // longest, _MOST_ROWS)
    # nobody holds these pages, which does not matter here
    tables = np.arange(rows * longest).reshape(rows, longest).tolist()
    part = "a prefill of that many tokens"
    try:
        forward([], np.zeros(0, np.int64), [], feeds)
        part = f"a step of {rows} turns"
        hidden = forward(tables, np.full(rows, tokens - 1), [0] * rows, [])
        states = hidden[:ROWS]
        plain = [Sampling(1, 0.9)] * len(states)
        sample(policy.logits, states, plain, [0.5] * len(states), [None] * len(states))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        held = pool.bytes / 1e9
        raise RecipeError(
            f"{part} does not fit beside {held:.1f} GB of keys and values on {pool.device} "
            f"({summarize_error(error)[:200]}). It was tried at the start with "
            f"model.engine.prefill_tokens = {prefill_tokens}. Lower that "
            f"first (to {max(prefill_tokens // 2, 1)}, say), then model.engine.kv_memory."
        ) from error
    for feed in feeds:
        pool.release(feed.table)
