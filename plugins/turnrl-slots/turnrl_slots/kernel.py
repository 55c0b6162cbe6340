"""Attention over pages by a GPU's own kernels, for half precision.

A forward pass is then a call or two a layer, of sequences of one token (those being sampled) or
several (those being read), each over all pages of its own. There are three ways to it:

pages     torch's `varlen_attn` takes pages as they lie, where FlashAttention 3 or 4 is installed
          and active (`torch.nn.attention.activate_flash_attention_impl`). Not that of torch 2.11.
triton    A kernel of our own (`triton_pages`) takes them as they lie for sequences of one token.
          For the others, torch's kernel is given those in use gathered, in each layer.
gathered  torch's kernel is given all that are in use gathered, in each layer.

Which of them work here is found by trying (`ways`).

On a CPU this is tested with a function that does what torch documents of its kernel, and with
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from turnrl import varlen_attn
from turnrl_slots.attention import Feed
from turnrl_slots.pages import Pool, Way, rectangle
from turnrl_slots.sizes import PAGE, pages_of
from turnrl_slots.transfer import pack


@dataclass(frozen=True)
class Sequences:
    """Some sequences of a pass, one after the other, and where their keys and values lie.

    Args:
        table: (S, W), int32, the pages of each sequence in order; any page after its last.
        begins: (S + 1,), int32, where each one's queries begin, and the end.
        used: (S,), int32, tokens of each in its pages, those that ask included.
        count: Queries of all.
        longest: The most queries of a sequence.
    """

    table: Tensor
    begins: Tensor
    used: Tensor
    count: int
    longest: int


def attend(
    way: Way,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    of: Sequences,
    scale: float,
    parts: int | None = None,
) -> Tensor:
    """Attention of S sequences, each to all tokens of its own up to the one that asks.

    Args:
        way: How the kernel is given the pages.
        query: (N, heads, D), the last tokens of each sequence, one sequence after the other.
        keys: (pages, page, key-value heads, D).
        values: The same.
        of: The sequences.
        scale: Factor of the scores.
        parts: See `triton_pages.attend_rows`.
    Returns:
        (N, heads, D).
    """
    table, used = of.table, of.used
    if way == "triton" and of.longest == 1:
        from turnrl_slots.triton_pages import attend_rows  # Triton may not be there

        return attend_rows(query, keys, values, table, used, scale, parts)
    count, width = table.shape
    reach = pages = None
    if way == "pages":
        pages = table
    else:
        gathered = table.flatten()
        keys, values = (side.index_select(0, gathered).flatten(0, 1) for side in (keys, values))
        reach = torch.arange(count + 1, dtype=torch.int32, device=table.device) * (width * PAGE)
    return varlen_attn(
        query,
        keys,
        values,
        of.begins,
        reach,
        of.longest,
        width * PAGE,
        scale=scale,
        # a token alone sees all that is there; with no window, queries that share a head are packed
        window_size=(-1, 0 if of.longest > 1 else -1),
        seqused_k=used,
        block_table=pages,
    )


class KernelPass:
    """The attention of one forward pass: an `Attend`.

    Args:
        pool: Where keys and values are.
        positions: (N,), of the tokens that are read, in their sequences.
        slots: (N,), where their keys and values are put.
        sequences: Whose tokens they are, a call of the kernel each.
    """

    def __init__(
        self, pool: Pool, positions: Tensor, slots: Tensor, sequences: Sequence[Sequences]
    ) -> None:
        assert pool.kernel is not None
        self.pool, self.way, self.positions, self.slots = pool, pool.kernel, positions, slots
        self.sequences = sequences

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
        asked = query[0].transpose(0, 1).split([some.count for some in self.sequences])
        attended = [
            attend(self.way, part, keys, values, some, scale)
            for part, some in zip(asked, self.sequences, strict=True)
        ]
        return (attended[0] if len(attended) == 1 else torch.cat(attended))[None]


class Tables:
    """Each row's pages, all that its turn may need: the kernel's counterpart of `GatherPlan`."""

    def __init__(self, tables: Sequence[Sequence[int]], pool: Pool) -> None:
        self.pool = pool
        self.pages = rectangle(tables, np.int32)

    def attend_to(self, lengths: np.ndarray, feeds: Sequence[Feed]) -> KernelPass:
        """The attention of one pass.

        Args:
            lengths: (R,), tokens of each row that are in its pages already.
            feeds: What else is read.
        """
        rows = len(lengths)
        counts = np.array([*[1] * rows, *(len(feed.ids) for feed in feeds)])
        starts = np.array([*lengths, *(feed.start for feed in feeds)], np.int64)
        used = starts + counts
        width = pages_of(int(used.max()))
        pages = np.zeros((len(counts), width), np.int32)
        known = self.pages[:, :width]
        pages[: len(known), : known.shape[1]] = known
        for row, feed in enumerate(feeds, rows):
            pages[row, : len(feed.table)] = feed.table[:width]
        firsts = np.cumsum(counts) - counts
        whose = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(whose)) - firsts[whose] + starts[whose]
        slots = pages[whose, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        # a kernel for one token to a sequence is not given the others
        apart = self.pool.kernel == "triton" and 0 < rows < len(counts)
        parts = [slice(0, rows), slice(rows, None)] if apart else [slice(None)]
        arrays = [
            (
                pages[part, : pages_of(int(used[part].max()))],
                np.concatenate([[0], np.cumsum(counts[part])]),
                used[part],
            )
            for part in parts
        ]
        numbers = [positions, slots, *chain.from_iterable(arrays)]
        at, to, *rest = pack([some.astype(np.int32) for some in numbers], self.pool.device)
        sequences = [
            Sequences(table, begins, lasts, int(counts[part].sum()), int(counts[part].max()))
            for part, table, begins, lasts in zip(
                parts, rest[::3], rest[1::3], rest[2::3], strict=True
            )
        ]
        return KernelPass(self.pool, at.long(), to.long(), sequences)
