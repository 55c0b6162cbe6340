"""Layout: token sequences as one forward pass, which reads what several of them begin with once.

Sequences are laid out one after the other in lexicographic order, each without what it shares with
the one before it:

    sequences    S S p q a b        laid out   S S p q a b | c d e | r a | ...
                 S S p q c d e
                 S S p r a
    the third one sees                         x x x                 x x     (and learns p -> r)

So the prompt of a group is read once, and so are the system's words that all prompts begin with,
the turns that the branches of a tree share, and all histories of one trajectory. Nothing is padded.
A token's position is its place in its own sequence, and it attends to those before it there:
`Layout.attend` computes that, in a few batches of segments of like size, or, on a GPU that has the
kernel, as sequences of any length.

The plain way, rows padded on the right and a mask, is the reference, and what models are given
whose code takes no attention but its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from turnrl.policy.sizes import GATHERED
from turnrl.policy.varlen import varlen_attn
from turnrl.types import TokenRow

_WASTE, _CALL = 1.03, 2**14
"""Scores that a batch of segments may have for each that is needed, and what a batch more costs."""


@dataclass
class Segments:
    """S segments of a layout whose attention is computed at once, of at most Q tokens of their own,
    which see at most K.

    Args:
        queries: (S, Q), places of their own tokens; 0 where there is none.
        keys: (S, K), places of the tokens of their sequences up to their end; 0 where none is.
        seen: (S,), how many of these come before each segment's own; None if 0 for all.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor | None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """(S, 1, Q, K), what is added to the scores: minus infinity where a query does not see a
        key. None for all keys up to its own. Made once, because each layer keeps it for its
        gradient."""
        if self.seen is None and window is None:
            return None
        if window not in self._masks:
            key, own = (
                torch.arange(n.shape[1], device=n.device) for n in (self.keys, self.queries)
            )
            before = torch.zeros_like(self.keys[:, 0]) if self.seen is None else self.seen
            # padding sees what the last does: something, whatever the window
            at = (before[:, None] + own).clamp(max=len(key) - 1)[:, None, :, None]
            unseen = key > at if window is None else (key > at) | (key <= at - window)
            empty = torch.zeros(unseen.shape, dtype=like.dtype, device=like.device)
            self._masks[window] = empty.masked_fill_(unseen, -torch.inf)
        return self._masks[window]


@dataclass
class Ragged:
    """The same for all segments as they lie, for a kernel that takes any length.

    Args:
        keys: What each segment sees, one after the other, as places.
        own: (S + 1,), where each segment's own tokens begin, and the end.
        reach: (S + 1,), where its keys begin in `keys`, and the end.
        longest: The most tokens of one segment's own, and the most that one sees.
    """

    keys: Tensor
    own: Tensor
    reach: Tensor
    longest: tuple[int, int]


@dataclass
class Layout:
    """Token sequences laid out for one forward pass, and the N tokens to score, those of the first
    sequence first. Not frozen, because Lightning moves its tensors in place.

    Args:
        input_ids: (B, T).
        position_ids: (B, T).
        attention_mask: (B, T), bool, False for padding; None where sequences share beginnings.
        before: (M,), places, in the flattened rows, of the tokens whose hidden states predict.
        targets: (M,), what each of them is to predict; no pair is there twice.
        wanted: (N,), the pair of each token that is asked for.
        segments: Those that sequences with shared beginnings are laid out in.
        order: (T,), where each place comes among the segments' queries.
        ragged: The segments as `Ragged`, if a kernel takes them.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    before: Tensor
    targets: Tensor
    wanted: Tensor
    segments: list[Segments]
    order: Tensor
    ragged: Ragged | None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """See `Attend`."""
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        if (it := self.ragged) is not None:
            return varlen_attn(
                query,
                key[it.keys],
                value[it.keys],
                it.own,
                it.reach,
                *it.longest,
                scale=scale,
                window_size=(-1 if window is None else window - 1, 0),
            )[None]
        reads = []
        for some in self.segments:
            parts = (query[some.queries], key[some.keys], value[some.keys])
            own, keys, values = (part.transpose(1, 2) for part in parts)
            if (shared := own.shape[1] // keys.shape[1]) > 1 and own.device.type != "cpu":
                # in float32 no fused kernel of a GPU takes heads that share keys
                keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
            mask = some.mask(window, query)
            read = scaled_dot_product_attention(
                own, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            reads.append(read.transpose(1, 2).flatten(0, 1))
        return torch.cat(reads)[self.order][None]


Pass = tuple[list[int], Layout]
"""Numbers of the sequences that are read at once, and their layout."""


def passes(
    rows: Sequence[TokenRow],
    budget: int,
    share: bool = True,
    kernel: bool = False,
    owners: Sequence[int] | None = None,
) -> Iterator[Pass]:
    """Divide sequences among forward passes of at most `budget` tokens as they are laid out.

    Sequences that begin alike come together; where they are padded, those of like length. One that
    is longer than the budget has a pass of its own.

    Args:
        rows: The sequences, and which of their tokens are asked for.
        budget: The most tokens of a pass, padding included. Sequences that share much are
            gathered in full by attention, so together they have at most four times as many.
        share: Read what sequences begin with in common once; see `lay_out`.
        kernel: Lay them out for a kernel that takes any length; see `takes_ragged`.
        owners: A number for each sequence; those with the same number come in the same pass, side
            by side. None if each stands alone.
    """
    ids = [np.asarray(ids) for ids, _ in rows]
    owned: dict[int, list[int]] = {}
    for i, owner in enumerate(range(len(rows)) if owners is None else owners):
        owned.setdefault(owner, []).append(i)
    together = [*owned.values()]
    firsts = [ids[own[0]] for own in together]
    order = _alike(firsts) if share else sorted(range(len(firsts)), key=lambda n: len(firsts[n]))

    def laid_by(some: Sequence[int]) -> int:
        """Tokens of a pass over these sequences, in this order."""
        if not share:
            return len(some) * max(len(ids[i]) for i in some)
        shared = (_common(ids[a], ids[b]) for a, b in itertools.pairwise(some))
        return sum(len(ids[i]) for i in some) - sum(shared)

    some: list[int] = []
    laid = seen = 0
    for own in (together[n] for n in order):
        size = sum(len(ids[i]) for i in own)
        if share and some:  # only what comes is counted, as a pass may have thousands of sequences
            more = laid + laid_by([some[-1], *own]) - len(ids[some[-1]])
        else:
            more = laid_by([*some, *own])
        if some and (more > budget or seen + size > GATHERED * budget):
            yield some, lay_out([rows[j] for j in some], share, kernel)
            some, more, seen = [], laid_by(own), 0
        some, laid, seen = [*some, *own], more, seen + size
    if some:
        yield some, lay_out([rows[j] for j in some], share, kernel)


def takes_ragged(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernel for sequences of any length is made for this device and type."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def lay_out(rows: Sequence[TokenRow], share: bool = True, kernel: bool = False) -> Layout:
    """Token sequences as one forward pass.

    Args:
        rows: The sequences, and which of their tokens are asked for.
        share: Read what sequences begin with in common once; otherwise rows are padded.
        kernel: Lay them out for the kernel too.
    Raises:
        ValueError: If a sequence's first token is asked for.
    """
    ids = [np.asarray(ids) for ids, _ in rows]
    segments: list[_Segment] = []
    mask: Tensor | None = None
    if share:
        places, segments = _shared(ids)
        laid = torch.zeros(2, 1, sum(len(path) - seen for seen, path in segments)).long()
        for some, at in zip(ids, places, strict=True):
            laid[:, 0, at] = torch.from_numpy(np.stack([some, np.arange(len(some))]))
    else:
        padded = pad_sequence([torch.from_numpy(some) for some in ids], True)
        places = [padded.shape[1] * n + np.arange(len(some)) for n, some in enumerate(ids)]
        column = torch.arange(padded.shape[1])
        laid = torch.stack([padded, column.expand_as(padded)])
        mask = column < torch.tensor([[len(some)] for some in ids])
    pairs = []
    for some, at, (_, asked) in zip(ids, places, rows, strict=True):
        wanted = np.flatnonzero(asked)
        if len(asked) != len(some) or 0 in wanted:
            raise ValueError(
                f"a row of {len(some)} tokens has {len(asked)} flags that ask for them. Give one "
                "for each token, and False for the first, which nothing predicts."
            )
        pairs.append(at[wanted - 1] << 32 | some[wanted])  # token ids are less than 2**32
    pair, number = np.unique(np.concatenate(pairs), return_inverse=True)
    before, targets = torch.from_numpy(pair >> 32), torch.from_numpy(pair & (2**32 - 1))
    batches, order = _batched(segments)
    return Layout(
        input_ids=laid[0],
        position_ids=laid[1],
        attention_mask=mask,
        before=before,
        targets=targets,
        wanted=torch.from_numpy(number),
        segments=batches,
        order=order,
        ragged=_ragged(segments) if share and kernel else None,
    )


_Segment = tuple[int, np.ndarray]
"""Number of tokens that a segment sees before its own, and the places of these and its own."""


def _shared(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[_Segment]]:
    """Where each sequence's tokens are laid, and the segments that lay them."""
    last = path = np.empty(0, np.int64)
    places, segments, laid = [path] * len(sequences), [], 0
    for i in _alike(sequences):
        seen, last = _common(last, sequences[i]), sequences[i]
        own = np.arange(laid, laid + len(last) - seen)
        places[i] = path = np.concatenate([path[:seen], own])
        laid += len(own)
        if len(own):
            segments.append((seen, path))
    return places, segments


def _alike(sequences: Sequence[np.ndarray]) -> list[int]:
    """Numbers of the sequences, those with much in common one after the other."""
    return sorted(range(len(sequences)), key=lambda i: tuple(sequences[i]))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Number of tokens that two sequences begin with in common."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _batched(segments: Sequence[_Segment]) -> tuple[list[Segments], Tensor]:
    """The segments in batches of like size, and where each place comes among their queries."""
    sizes = [(len(path) - seen, len(path)) for seen, path in segments]
    batches: list[list[int]] = []
    needed = 0
    for i in sorted(range(len(segments)), key=sizes.__getitem__, reverse=True):
        some = [*batches[-1], i] if batches else [i]
        own, reach = (max(sizes[j][side] for j in some) for side in (0, 1))
        needed += sizes[i][0] * sizes[i][1]
        if batches and len(some) * own * reach <= _WASTE * needed + _CALL:
            batches[-1] = some
        else:
            batches.append([i])
            needed = sizes[i][0] * sizes[i][1]
    padded = []
    order, before = torch.zeros(sum(own for own, _ in sizes)).long(), 0
    for some in batches:
        paths = [torch.from_numpy(segments[i][1]) for i in some]
        seen = [segments[i][0] for i in some]
        queries = pad_sequence([path[n:] for path, n in zip(paths, seen, strict=True)], True)
        real = torch.arange(queries.shape[1]) < torch.tensor([[sizes[i][0]] for i in some])
        order[queries[real]] = before + real.flatten().nonzero()[:, 0]
        before += real.numel()
        ahead = torch.tensor(seen) if any(seen) else None
        padded.append(Segments(queries, pad_sequence(paths, True), ahead))
    return padded, order


def _ragged(segments: Sequence[_Segment]) -> Ragged:
    own = [len(path) - seen for seen, path in segments]
    reach = [len(path) for _, path in segments]
    begins = [np.concatenate([[0], np.cumsum(some)]).astype(np.int32) for some in (own, reach)]
    keys = np.concatenate([np.empty(0, np.int64), *(path for _, path in segments)])
    return Ragged(
        keys=torch.from_numpy(keys),
        own=torch.from_numpy(begins[0]),
        reach=torch.from_numpy(begins[1]),
        longest=(max(own, default=0), max(reach, default=0)),
    )
