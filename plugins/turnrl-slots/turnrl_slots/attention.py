"""Attention over pages. Keys and values that several rows share are read once for all of them.

A pass has *rows* of one token each, which are being sampled, and *feeds* of several. A row attends
to what it shares with others, in chains of full pages, and to pages of its own; each part gives an
output and the log of its sum of exponentials, by which the parts are weighed:

    o = sum_p o_p e^{l_p} / sum_p e^{l_p}

What is computed once per pass, or once for as long as the rows stay the same, is in `GatherPlan`
and `Pass`; a layer only gathers, attends and merges.
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
from turnrl_slots.sizes import PAGE, pages_of

_ROWS = 64
"""The most rows that read a chain in one go."""


def partial(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys, and the log of its sum of exponentials.

    Plain products of matrices: for the few queries to a key that decoding has, they are faster on a
    CPU than its fused attention.

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
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    attended = torch.bmm(weights.to(value.dtype), value)
    return attended.div_(total), total.log_().add_(most)


@dataclass(frozen=True)
class _Chains:
    """Runs of pages of like length, each read by several rows; no row stands in two of them.

    Args:
        units: What to gather: each head's part of each page; a short chain is padded.
        shape: Chains and rows; short lists of rows are padded.
        bias: (chains x key-value heads, 1, tokens) if any chain is padded.
        readers: (chains x rows), which row reads.
        rows: (n,), the rows that read any; None for all, in order.
        places: (n,), where their results are; None for in order.
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
    """Pages that rows share, as runs (begin, end, rows) of pages by depth in the tree that they
    form, and the number of shared pages of each row."""
    levels: list[list[tuple[int, int, list[int]]]] = []
    own = [0] * len(tables)
    todo = [(0, 0, list(range(len(tables))))]
    while todo:
        level, begin, rows = todo.pop()
        by_page: dict[int, list[int]] = {}
        for row in rows:
            by_page.setdefault(tables[row][begin], []).append(row)
        for some in by_page.values():
            if len(some) > 1:
                # what the least and the greatest share, all between them share
                least, most = min(tables[r] for r in some), max(tables[r] for r in some)
                end = begin
                while least[end] == most[end]:
                    end += 1
                if level == len(levels):
                    levels.append([])
                levels[level].append((begin, end, some))
                for row in some:
                    own[row] = end
                todo.append((level + 1, end, some))
    return levels, own


class GatherPlan:
    """Which pages rows read together and which each reads alone; holds while they stay the same.

    Args:
        tables: For each row, all pages that its turn may need. Those that it writes to are in no
            other's.
        pool: Where the pages are.
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
            for some in self._alike(level)
            if (chains := self._chains(some, tables))
        ]

    def attend_to(self, lengths: np.ndarray, feeds: Sequence[Feed]) -> Pass:
        """The attention of one pass of these rows; see `Pass`."""
        return Pass(self, lengths, feeds)

    @staticmethod
    def _alike(
        runs: list[tuple[int, int, list[int]]],
    ) -> list[list[tuple[int, int, list[int]]]]:
        """Runs by their length and width, roughly, so that padding costs little."""
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
        whole = rows_of == list(range(len(tables)))
        packed = places == list(range(len(runs) * width))
        return _Chains(
            self.units(ids),
            (len(runs), width),
            bias,
            self.pool.tensor(readers.ravel()),
            None if whole else self.pool.tensor(np.array(rows_of)),
            None if packed else self.pool.tensor(np.array(places)),
        )

    def units(self, pages: np.ndarray) -> Tensor:
        """(n, pages) -> (n x heads x pages), where each head's part of each page lies."""
        at = pages[:, None] * self.heads + np.arange(self.heads)[:, None]
        return self.pool.tensor(at.ravel())

    def bias(self, lengths: np.ndarray, most: int) -> Tensor:
        """(n x heads, 1, most), minus infinity from each length on."""
        lengths = lengths.repeat(self.heads)[:, None, None]
        masked = np.where(np.arange(most) < lengths, np.float32(0), np.float32(-math.inf))
        return self.pool.tensor(masked)


@dataclass(frozen=True)
class _Feeds:
    """Feeds of like length, as a rectangle.

    Args:
        units: What to gather.
        tokens: (feeds, T), which token of the pass stands there; padding repeats the first.
        real: (n,), the places of the rectangle that are not padding.
        target: (n,), which tokens of the pass they are.
        mask: (feeds, 1, T, S), what each may read; None for all up to itself.
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
        table: Its pages.
        start: Tokens that are in them already.
        ids: The tokens of this pass.
        ends: True if they are the last ones to read.
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
        feeds: What else is read.
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
            own = lengths + 1 - plan.skipped
            most = pages_of(int(own.max()))
            self.private = plan.units(plan.private[:, :most])
            self.bias = plan.bias(own, most * PAGE)
        self.feeds = [self._feeds(some) for some in self._alike(feeds)]

    def _alike(self, feeds: Sequence[Feed]) -> list[list[tuple[int, Feed]]]:
        """Feeds with the place of their first token, divided so that padding costs little."""
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
        pages = pages_of(int((begins + counts).max()))
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
        """See `Attend`. A window is of no matter: the engine refuses one that could be felt."""
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
        few = self.plan.heads
        query = query[:, : self.rows].view(few, heads // few, rows, size).permute(2, 0, 1, 3)
        query = query.contiguous()
        keys, values = self.pool.gather(layer, self.private, rows)
        attended, total = partial(query.flatten(0, 1), keys, values, self.bias, scale)
        attended, total = attended.view_as(query), total.view(rows, few, -1, 1)
        for chains in self.plan.chains:
            keys, values = self.pool.gather(layer, chains.units, chains.shape[0])
            asked = query.index_select(0, chains.readers).unflatten(0, chains.shape)
            asked = asked.transpose(1, 2).flatten(2, 3).flatten(0, 1)
            parts = (
                part.view(chains.shape[0], few, chains.shape[1], heads // few, -1)
                .transpose(1, 2)
                .flatten(0, 1)
                for part in partial(asked, keys, values, chains.bias, scale)
            )
            if chains.places is not None:
                parts = (part.index_select(0, chains.places) for part in parts)
            if chains.rows is None:
                attended, total = _merge(attended, total, *parts)
            else:
                before = attended.index_select(0, chains.rows), total.index_select(0, chains.rows)
                both, of_both = _merge(*before, *parts)
                attended.index_copy_(0, chains.rows, both)
                total.index_copy_(0, chains.rows, of_both)
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


def _merge(one: Tensor, of_one: Tensor, other: Tensor, of_other: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one attention, weighed."""
    weight = torch.sigmoid(of_other - of_one).to(one.dtype)
    return torch.lerp(one, other, weight), torch.logaddexp(of_one, of_other)
