"""Attention over pages by a GPU's own kernels, for half precision.

A forward pass then makes one or two calls per layer. For sequences of one token, which are being
sampled, a kernel of our own (`triton_pages`) reads pages in place. For sequences of several, which
are being read, torch's `varlen_attn` gets a gathered copy of the used pages.

`kernel_trial` finds out whether both work here. On a CPU they are tested with functions that behave
as torch documents its kernel, and with Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from turnrl.policy.varlen import varlen_attn
from turnrl_slots.attention import Feed
from turnrl_slots.pages import Pool, rectangle
from turnrl_slots.sizes import PAGE, count_pages
from turnrl_slots.transfer import pack


@dataclass(frozen=True)
class Sequences:
    """Sequences of a pass, one after the other, and the pages of their keys and values.

    Args:
        table: (S, W), int32, the pages of each sequence in order; after the last, any page.
        begins: (S + 1,), int32, where each sequence's queries begin, and the end.
        used: (S,), int32, tokens of each sequence in its pages, queries included.
        count: Number of all queries.
        longest: The most queries of a sequence.
    """

    table: Tensor
    begins: Tensor
    used: Tensor
    count: int
    longest: int


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    of: Sequences,
    scale: float,
    parts: int | None = None,
) -> Tensor:
    """Attention of S sequences: each query sees all tokens of its own sequence up to itself.

    Args:
        query: (N, heads, D), the last tokens of each sequence, one sequence after the other.
        keys: (pages, page, key-value heads, D).
        values: The same.
        of: The sequences.
        scale: Factor of the scores.
        parts: See `triton_pages.attend_rows`.
    Returns:
        (N, heads, D).
    """
    if of.longest == 1:
        from turnrl_slots.triton_pages import attend_rows  # Triton may not be installed

        return attend_rows(query, keys, values, of.table, of.used, scale, parts)
    count, width = of.table.shape
    gathered = of.table.flatten()
    keys, values = (side.index_select(0, gathered).flatten(0, 1) for side in (keys, values))
    reach = torch.arange(count + 1, dtype=torch.int32, device=gathered.device) * (width * PAGE)
    return varlen_attn(
        query,
        keys,
        values,
        of.begins,
        reach,
        of.longest,
        width * PAGE,
        scale=scale,
        window_size=(-1, 0),
        seqused_k=of.used,
    )


class KernelPass:
    """The attention of one forward pass: an `Attend`.

    Args:
        pool: The pages of keys and values.
        positions: (N,), the positions of the tokens in their sequences.
        slots: (N,), where their keys and values are written.
        sequences: The sequences of these tokens, one call of the kernel for each item.
    """

    def __init__(
        self, pool: Pool, positions: Tensor, slots: Tensor, sequences: Sequence[Sequences]
    ) -> None:
        self.pool, self.positions, self.slots = pool, positions, slots
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
        """See `Attend`. The window is ignored: the engine refuses a model if it could matter."""
        self.pool.write(layer, self.slots, key[0], value[0])
        keys, values = self.pool.store[layer]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        queries = query[0].transpose(0, 1).split([item.count for item in self.sequences])
        attended = [
            attend(part, keys, values, sequences, scale)
            for part, sequences in zip(queries, self.sequences, strict=True)
        ]
        return (attended[0] if len(attended) == 1 else torch.cat(attended))[None]


class Tables:
    """All pages that each row's turn may need: the kernel's counterpart of `GatherPlan`."""

    def __init__(self, tables: Sequence[Sequence[int]], pool: Pool) -> None:
        self.pool = pool
        self.pages = rectangle(tables, np.int32)

    def attend_to(self, lengths: np.ndarray, feeds: Sequence[Feed]) -> KernelPass:
        """The attention of one pass.

        Args:
            lengths: (R,), tokens of each row that are in its pages already.
            feeds: The tokens to read in the same pass.
        """
        rows = len(lengths)
        counts = np.array([*[1] * rows, *(len(feed.ids) for feed in feeds)])
        starts = np.array([*lengths, *(feed.start for feed in feeds)], np.int64)
        used = starts + counts
        width = count_pages(int(used.max()))
        pages = np.zeros((len(counts), width), np.int32)
        of_rows = self.pages[:, :width]
        pages[: len(of_rows), : of_rows.shape[1]] = of_rows
        for row, feed in enumerate(feeds, rows):
            pages[row, : len(feed.table)] = feed.table[:width]
        firsts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(owner)) - firsts[owner] + starts[owner]
        slots = pages[owner, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        # the kernel for one token per sequence must not get other sequences
        apart = 0 < rows < len(counts)
        parts = [slice(0, rows), slice(rows, None)] if apart else [slice(None)]
        arrays = [
            (
                pages[part, : count_pages(int(used[part].max()))],
                np.concatenate([[0], np.cumsum(counts[part])]),
                used[part],
            )
            for part in parts
        ]
        numbers = [positions, slots, *chain.from_iterable(arrays)]
        at, to, *packed = pack([array.astype(np.int32) for array in numbers], self.pool.device)
        sequences = [
            Sequences(table, begins, lasts, int(counts[part].sum()), int(counts[part].max()))
            for part, table, begins, lasts in zip(
                parts, packed[::3], packed[1::3], packed[2::3], strict=True
            )
        ]
        return KernelPass(self.pool, at.long(), to.long(), sequences)
