"""Attention over pages by a GPU's own kernel: torch's `varlen_attn`, for half precision.

A forward pass is then one call a layer, of sequences of one token (those being sampled) or several
(those being read), each over all pages of its own. FlashAttention 3 or 4, where it is installed and
was chosen (`torch.nn.attention.activate_flash_attention_impl`), takes pages as they lie. The kernel
that comes with torch 2.13 takes none, so those in use are gathered for it, in each layer. Which way
works here is found by trying both on a few pages, beside plain attention.

On a CPU it is tested with a function that does what torch documents of the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from turnrl_slots.attention import Feed
from turnrl_slots.pages import PAGE, Pool, Shapes, Way, pages_of, rectangle

try:  # where this torch was built with it
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

_logger = logging.getLogger(__name__)


def takes_ragged(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel for sequences of any length is made for this device and type."""
    half = dtype in (torch.bfloat16, torch.float16)
    return varlen_attn is not None and device.type == "cuda" and half


@torch.inference_mode()
def find_way(shapes: Shapes, device: torch.device) -> Way | None:
    """How the kernel of this device can be given pages: the first way that computes attention, of
    one token to a sequence and of several; None if it has no kernel, or none that does."""
    if not takes_ragged(device, shapes.dtype):
        return None
    ways: tuple[Way, ...] = ("pages", "gathered")
    for way in ways:
        try:
            gap = max(_gap(way, counts, shapes, device) for counts in ((1, 1), (1, 3)))
        except (RuntimeError, TypeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            _logger.info("no attention over pages (%s): %s: %s", way, type(error).__name__, first)
            continue
        if gap < 0.05:  # of numbers near 1; bfloat16 rounds by 0.004
            return way
        _logger.info("no attention over pages (%s): it is off by %.2g", way, gap)
    return None


def _gap(way: Way, counts: tuple[int, int], shapes: Shapes, device: torch.device) -> float:
    """How far the kernel is from plain attention, at most, for two sequences of three pages and
    one, which have so many tokens more than was read of them."""
    rng = torch.Generator().manual_seed(0)  # of its own: a run's numbers shall not depend on this

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, shapes.dtype)

    keys, values = (noise(5, PAGE, shapes.heads, shapes.size) for _ in range(2))
    query = noise(sum(counts), shapes.asking, shapes.size)
    tables, used = [[4, 1, 3], [2]], [2 * PAGE + 7, 9]
    table = torch.tensor([tables[0], [2, 0, 0]], dtype=torch.int32, device=device)
    begins = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    scale = shapes.size**-0.5
    found = attend(way, query, keys, values, table, begins, lengths, max(counts), scale)
    wanted, at = [], 0
    for pages, length, count in zip(tables, used, counts, strict=True):
        # (heads, tokens, D), each key-value head as often as it is asked
        known = [
            side[pages].flatten(0, 1)[:length].transpose(0, 1).float() for side in (keys, values)
        ]
        k, v = (side.repeat_interleave(shapes.asking // shapes.heads, 0) for side in known)
        for n in range(count):
            seen = length - count + n + 1
            weights = (query[at].float()[:, None] @ k[:, :seen].mT * scale).softmax(-1)
            wanted.append((weights @ v[:, :seen])[:, 0])
            at += 1
    return float((found.float() - torch.stack(wanted)).abs().max())


def attend(
    way: Way,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    begins: Tensor,
    used: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Attention of S sequences, each to all tokens of its own up to the one that asks.

    Args:
        way: How the kernel is given the pages.
        query: (N, heads, D), the last tokens of each sequence, one sequence after the other.
        keys: (pages, page, key-value heads, D).
        values: The same.
        table: (S, W), int32, the pages of each sequence in order; any page after its last.
        begins: (S + 1,), int32, where each one's queries begin, and the end.
        used: (S,), int32, tokens of each in its pages, those that ask included.
        longest: The most queries of a sequence.
        scale: Of the scores.
    Returns:
        (N, heads, D).
    """
    count, width = table.shape
    reach = pages = None
    if way == "pages":
        pages = table
    else:
        gathered = table.flatten()
        keys, values = (side.index_select(0, gathered).flatten(0, 1) for side in (keys, values))
        reach = torch.arange(count + 1, dtype=torch.int32, device=table.device) * (width * PAGE)
    found = varlen_attn(
        query,
        keys,
        values,
        begins,
        reach,
        longest,
        width * PAGE,
        scale=scale,
        # a token alone sees all that is there; said so, the queries that share a head are packed
        window_size=(-1, 0 if longest > 1 else -1),
        enable_gqa=True,
        seqused_k=used,
        block_table=pages,
    )
    return cast(Tensor, found)


class KernelPass:
    """The attention of one forward pass: an `Attend`.

    Args:
        pool: Where keys and values are.
        positions: (N,), of the tokens that are read, in their sequences.
        slots: (N,), where their keys and values are put.
        table: See `attend`.
        begins: The same.
        used: The same.
        longest: The same.
    """

    def __init__(
        self,
        pool: Pool,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        begins: Tensor,
        used: Tensor,
        longest: int,
    ) -> None:
        assert pool.kernel is not None
        self.pool, self.way, self.positions, self.slots = pool, pool.kernel, positions, slots
        self.table, self.begins, self.used, self.longest = table, begins, used, longest

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """See `Attend`. A window is of no matter: the engine refuses one that could be felt."""
        self.pool.write(layer, self.slots, key[0], value[0])
        keys, values = self.pool.store[layer]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        asked = query[0].transpose(0, 1)
        where = (self.table, self.begins, self.used, self.longest)
        return attend(self.way, asked, keys, values, *where, scale)[None]


class Tables:
    """Of each row the pages that its turn may need: what `Plan` is where no kernel reads pages."""

    def __init__(self, tables: Sequence[Sequence[int]], pool: Pool) -> None:
        self.pool = pool
        self.pages = rectangle(tables, np.int32)

    def attend_to(self, lengths: np.ndarray, feeds: Sequence[Feed]) -> KernelPass:
        """The attention of one pass.

        Args:
            lengths: (R,), tokens of each row that are in its pages already.
            feeds: What else is read.
        """
        counts = np.array([*[1] * len(lengths), *(len(feed.ids) for feed in feeds)])
        starts = np.array([*lengths, *(feed.start for feed in feeds)], np.int64)
        used = starts + counts
        width = pages_of(int(used.max()))
        pages = np.zeros((len(counts), width), np.int32)
        known = self.pages[:, :width]
        pages[: len(known), : known.shape[1]] = known
        for row, feed in enumerate(feeds, len(lengths)):
            pages[row, : len(feed.table)] = feed.table[:width]
        begins = np.concatenate([[0], np.cumsum(counts)])
        of = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(begins[-1]) - begins[of] + starts[of]
        slots = pages[of, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        tensor = self.pool.tensor
        return KernelPass(
            self.pool,
            tensor(positions),
            tensor(slots),
            tensor(pages),
            tensor(begins.astype(np.int32)),
            tensor(used.astype(np.int32)),
            int(counts.max()),
        )
