"""Attention over pages. Keys and values that several rows share are read once for all of them.

A pass has *rows* of one token each, which are being sampled, and *feeds* of several tokens. A row
attends to the pages that it shares with others, in chains of full pages, and to pages of its own.
Each part p gives an output o_p and the log of its sum of exponentials, l_p, which weighs the parts:

    o = sum_p o_p e^{l_p} / sum_p e^{l_p}

`GatherPlan` computes its numbers once for as long as the rows stay the same, and `Pass` once per
pass; a layer only gathers, attends and merges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turnrl_slots.pages import Pool, rectangle
from turnrl_slots.sizes import PAGE, count_pages

_ROWS = 64
"""The most rows that read a chain in one go."""


def partial(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys, and the log of its sum of exponentials.

    Plain products of matrices: decoding has few queries per key, and then a CPU computes them
    faster than its fused attention.

    Args:
        query: (B, T, D).
        key: (B, S, D).
        value: The same.
        bias: (B, 1, S), added to the scores; zero or minus infinity, not for all keys.
        scale: Factor of the scores.
    Returns:
        (B, T, D) and, in float32, (B, T, 1).
    """
    scores = torch.bmm(query * scale, key.mT).float()
    if bias is not None:
        scores += bias
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    attended = torch.bmm(weights.to(value.dtype), value)
    return attended.div_(total), total.log_().add_(peak)


@dataclass(frozen=True)
class _Chains:
    """Runs of pages of similar length, each read by several rows; no row is in two of them.

    Args:
        units: The parts to gather, one per head and page; a short chain is padded.
        shape: Number of chains, and of rows; short lists of rows are padded.
        bias: (chains x key-value heads, 1, tokens) if any chain is padded.
        readers: (chains x rows), the rows that read each chain.
        rows: (n,), the rows that read any chain; None for all, in order.
        places: (n,), the places of their results; None for in order.
    """

    units: Tensor
    shape: tuple[int, int]
    bias: Tensor | None
    readers: Tensor
    rows: Tensor | None
    places: Tensor | None


def _runs(
    tables: Sequence[tuple[int, ...]],
) -> tuple[list[list[tuple[int, int, list[int]]]], list[int]]:
    """The pages that rows share, as runs (begin, end, rows) by depth in the tree of shared pages,
    and the number of shared pages of each row."""
    levels: list[list[tuple[int, int, list[int]]]] = []
    shared = [0] * len(tables)
    todo = [(0, 0, list(range(len(tables))))]
    while todo:
        level, begin, rows = todo.pop()
        by_page: dict[int, list[int]] = {}
        for row in rows:
            by_page.setdefault(tables[row][begin], []).append(row)
        for sharers in by_page.values():
            if len(sharers) > 1:
                # the pages that the first and the last table share, all tables between share too
                first, last = min(tables[r] for r in sharers), max(tables[r] for r in sharers)
                end = begin
                while first[end] == last[end]:
                    end += 1
                if level == len(levels):
                    levels.append([])
                levels[level].append((begin, end, sharers))
                for row in sharers:
                    shared[row] = end
                todo.append((level + 1, end, sharers))
    return levels, shared


class GatherPlan:
    """The pages that rows read together, and the pages that each reads alone. Valid as long as the
    rows stay the same.

    Args:
        tables: For each row, all pages that its turn may need. A page that a row writes to is in no
            other table.
        pool: The pages.
    """

    def __init__(self, tables: Sequence[Sequence[int]], pool: Pool) -> None:
        self.pool, self.heads = pool, pool.shapes.heads
        levels, skipped = _runs([tuple(table) for table in tables])
        self.tables = rectangle(tables)
        self.private = rectangle([t[k:] for t, k in zip(tables, skipped, strict=True)])
        self.skipped = np.array(skipped, np.int64) * PAGE
        self.chains = [
            chains
            for level in levels
            for runs in self._alike(level)
            if (chains := self._chains(runs, tables))
        ]

    def attend_to(self, lengths: np.ndarray, feeds: Sequence[Feed]) -> Pass:
        """The attention of one pass of these rows; see `Pass`."""
        return Pass(self, lengths, feeds)

    @staticmethod
    def _alike(
        runs: list[tuple[int, int, list[int]]],
    ) -> list[list[tuple[int, int, list[int]]]]:
        """Runs grouped roughly by length and width, so that padding costs little."""
        kinds: dict[tuple[int, bool], list[tuple[int, int, list[int]]]] = {}
        for begin, end, rows in runs:
            kind = ((end - begin - 1).bit_length(), len(rows) > 16)
            parts = (rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS))
            kinds.setdefault(kind, []).extend((begin, end, part) for part in parts)
        return list(kinds.values())

    def _chains(
        self, runs: list[tuple[int, int, list[int]]], tables: Sequence[Sequence[int]]
    ) -> _Chains:
        pages = max(end - begin for begin, end, _ in runs)
        width = max(len(rows) for _, _, rows in runs)
        ids = rectangle([tables[rows[0]][begin:end] for begin, end, rows in runs])
        readers = rectangle([rows for *_, rows in runs])
        rows_of: list[int] = []
        places: list[int] = []
        for n, (*_, rows) in enumerate(runs):
            rows_of += rows
            places += range(n * width, n * width + len(rows))
        count = np.array([end - begin for begin, end, _ in runs])
        bias = None
        if (count < pages).any():
            bias = self.bias(count * PAGE, pages * PAGE)
        all_rows = rows_of == list(range(len(tables)))
        packed = places == list(range(len(runs) * width))
        return _Chains(
            self.units(ids),
            (len(runs), width),
            bias,
            self.pool.tensor(readers.ravel()),
            None if all_rows else self.pool.tensor(np.array(rows_of)),
            None if packed else self.pool.tensor(np.array(places)),
        )

    def units(self, pages: np.ndarray) -> Tensor:
        """(n, pages) -> (n x heads x pages), the place of each head's part of each page."""
        at = pages[:, None] * self.heads + np.arange(self.heads)[:, None]
        return self.pool.tensor(at.ravel())

    def bias(self, lengths: np.ndarray, width: int) -> Tensor:
        """(n x heads, 1, width), minus infinity from each length on."""
        lengths = lengths.repeat(self.heads)[:, None, None]
        masked = np.where(np.arange(width) < lengths, np.float32(0), np.float32(-math.inf))
        return self.pool.tensor(masked)


@dataclass(frozen=True)
class _Feeds:
    """Feeds of similar length, as a rectangle.

    Args:
        units: The parts of pages to gather.
        tokens: (feeds, T), the token of the pass at each place; padding repeats the first.
        real: (n,), the places of the rectangle that are not padding.
        target: (n,), the tokens of the pass at these places.
        mask: (feeds, 1, T, S), the keys that each token may read; None for all up to itself.
    """

    units: Tensor
    tokens: Tensor
    real: Tensor
    target: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Feed:
    """Several tokens of one session, read in a pass.

    Args:
        table: The session's pages.
        start: Number of its tokens that are in the pages already.
        ids: The tokens of this pass.
        ends: True if these are the last tokens to read.
    """

    table: Sequence[int]
    start: int
    ids: Sequence[int]
    ends: bool = True


class Pass:
    """The attention of one forward pass: an `Attend`. Its tokens are one per row, then the tokens
    of the feeds.

    Args:
        plan: The plan of the rows.
        lengths: (R,), tokens of each row that are in its pages already.
        feeds: The tokens to read in the same pass.
    """

    def __init__(self, plan: GatherPlan, lengths: np.ndarray, feeds: Sequence[Feed]) -> None:
        self.pool, self.plan, self.rows = plan.pool, plan, len(lengths)
        at = np.arange(self.rows)
        pages, positions = [plan.tables[at, lengths // PAGE]], [lengths]
        for feed in feeds:
            where = np.arange(feed.start, feed.start + len(feed.ids))
            pages.append(np.asarray(feed.table)[where // PAGE])
            positions.append(where)
        where, page = np.concatenate(positions), np.concatenate(pages)
        self.positions = self.pool.tensor(where)
        units = page * plan.heads + np.arange(plan.heads)[:, None]
        self.slots = self.pool.tensor((units * PAGE + where % PAGE).ravel())
        if self.rows:
            unshared = lengths + 1 - plan.skipped
            pages_read = count_pages(int(unshared.max()))
            self.private = plan.units(plan.private[:, :pages_read])
            self.bias = plan.bias(unshared, pages_read * PAGE)
        self.feeds = [self._feeds(placed) for placed in self._alike(feeds)]

    def _alike(self, feeds: Sequence[Feed]) -> list[list[tuple[int, Feed]]]:
        """Feeds with the place of their first token, grouped so that padding costs little."""
        starts = np.cumsum([self.rows, *(len(feed.ids) for feed in feeds)]).tolist()
        placed = sorted(
            zip(starts, feeds, strict=False), key=lambda pair: (len(pair[1].ids), pair[0])
        )
        alike: list[list[tuple[int, Feed]]] = []
        for place, feed in placed:
            if not alike or len(feed.ids) > 1.5 * len(alike[-1][0][1].ids):
                alike.append([])
            alike[-1].append((place, feed))
        return alike

    def _feeds(self, feeds: Sequence[tuple[int, Feed]]) -> _Feeds:
        counts = np.array([len(feed.ids) for _, feed in feeds])
        begins = np.array([feed.start for _, feed in feeds])
        places = np.array([place for place, _ in feeds])
        longest = int(counts.max())
        pages = count_pages(int((begins + counts).max()))
        ids = rectangle([feed.table[:pages] for _, feed in feeds])
        step = np.arange(longest)
        real = step < counts[:, None]
        tokens = np.where(real, places[:, None] + step, places[:, None])
        mask = None
        if begins.any():
            last = np.where(real, begins[:, None] + step, 0)
            seen = np.arange(pages * PAGE) <= last[:, :, None]
            mask = self.pool.tensor(seen)[:, None]
        tensor = self.pool.tensor
        return _Feeds(
            self.plan.units(ids), tensor(tokens), tensor(real.ravel().nonzero()[0]),
            tensor(tokens[real]), mask,
        )  # fmt: skip

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
        pool, (heads, count, size) = self.pool, query.shape[1:]
        scale = size**-0.5 if scale is None else scale
        pool.write(layer, self.slots, key[0], value[0])
        attended = query.new_empty(count, heads, size)
        if self.rows:
            self._attend_rows(attended[: self.rows], layer, query[0], scale)
        for feeds in self.feeds:
            self._attend_feeds(attended, feeds, layer, query[0], scale)
        return attended[None]

    def _attend_rows(self, out: Tensor, layer: int, query: Tensor, scale: float) -> None:
        """Fill in (R, heads, D). The query heads that share a key-value head are rows of one
        attention."""
        rows, heads, size = out.shape
        kv_heads = self.plan.heads
        query = (
            query[:, : self.rows].view(kv_heads, heads // kv_heads, rows, size).permute(2, 0, 1, 3)
        )
        query = query.contiguous()
        keys, values = self.pool.gather(layer, self.private, rows)
        attended, total = partial(query.flatten(0, 1), keys, values, self.bias, scale)
        attended, total = attended.view_as(query), total.view(rows, kv_heads, -1, 1)
        for chains in self.plan.chains:
            keys, values = self.pool.gather(layer, chains.units, chains.shape[0])
            queries = query.index_select(0, chains.readers).unflatten(0, chains.shape)
            queries = queries.transpose(1, 2).flatten(2, 3).flatten(0, 1)
            parts = (
                part.view(chains.shape[0], kv_heads, chains.shape[1], heads // kv_heads, -1)
                .transpose(1, 2)
                .flatten(0, 1)
                for part in partial(queries, keys, values, chains.bias, scale)
            )
            if chains.places is not None:
                parts = (part.index_select(0, chains.places) for part in parts)
            if chains.rows is None:
                attended, total = _merge(attended, total, *parts)
            else:
                before = attended.index_select(0, chains.rows), total.index_select(0, chains.rows)
                merged, merged_total = _merge(*before, *parts)
                attended.index_copy_(0, chains.rows, merged)
                total.index_copy_(0, chains.rows, merged_total)
        out.copy_(attended.flatten(1, 2))

    def _attend_feeds(
        self, out: Tensor, feeds: _Feeds, layer: int, query: Tensor, scale: float
    ) -> None:
        """Fill in (N, heads, D) at the feeds' tokens."""
        count, heads = len(feeds.tokens), self.plan.heads
        keys, values = self.pool.gather(layer, feeds.units, count)
        attended = F.scaled_dot_product_attention(
            query[:, feeds.tokens].transpose(0, 1),
            keys.unflatten(0, (count, heads)),
            values.unflatten(0, (count, heads)),
            attn_mask=feeds.mask,
            is_causal=feeds.mask is None,
            scale=scale,
            enable_gqa=heads != query.shape[0],
        )
        out[feeds.target] = attended.transpose(1, 2).flatten(0, 1).index_select(0, feeds.real)


def _merge(a: Tensor, log_a: Tensor, b: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts of an attention, weighed by their logs of sums of exponentials."""
    weight = torch.sigmoid(log_b - log_a).to(a.dtype)
    return torch.lerp(a, b, weight), torch.logaddexp(log_a, log_b)
