"""Layout: token sequences as one forward pass, which reads their shared prefixes once.

Sequences are laid out one after the other in lexicographic order, each without the prefix that it
shares with the one before it:

    sequences    S S p q a b        laid out   S S p q a b | c d e | r a | ...
                 S S p q c d e
                 S S p r a
    the third one sees                         x x x                 x x     (and learns p -> r)

So the prompt of a group is read once, and so are the system message that all prompts begin with,
the turns that the branches of a tree share, and the common part of a trajectory's histories.
Nothing is padded. A token's position is its place in its own sequence, and it attends to the tokens
before it there. `Layout.attend` computes this attention in a few batches of segments of similar
size, or, on a GPU that has the kernel, as sequences of any length. A flat index counts the tokens
of all rows, one row after another.

The plain way, rows padded on the right and a mask, is the reference. It also serves models whose
code takes no attention but its own.
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
from turnrl.types import TokenRow

_WASTE, _CALL = 1.03, 2**14
"""Limits of padding: scores that a batch of segments may compute for each one needed, and the cost
of another batch, in scores."""


@dataclass
class Segments:
    """S segments of a layout whose attention is computed at once. Each has at most Q tokens of its
    own, which see at most K.

    Args:
        queries: (S, Q), flat indices of the segments' own tokens; 0 for padding.
        keys: (S, K), flat indices of the tokens of their sequences up to their end; 0 for padding.
        seen: (S,), number of keys before each segment's own tokens; None if 0 for all.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor | None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """(S, 1, Q, K), added to the scores: minus infinity where a query does not see a key. None
        if each query sees all keys up to its own. Made once, because each layer keeps it for its
        gradient."""
        if self.seen is None and window is None:
            return None
        if window not in self._masks:
            key, own = (
                torch.arange(n.shape[1], device=n.device) for n in (self.keys, self.queries)
            )
            before = torch.zeros_like(self.keys[:, 0]) if self.seen is None else self.seen
            # padding sees what the last query sees, so that it sees something with any window
            at = (before[:, None] + own).clamp(max=len(key) - 1)[:, None, :, None]
            unseen = key > at if window is None else (key > at) | (key <= at - window)
            empty = torch.zeros(unseen.shape, dtype=like.dtype, device=like.device)
            self._masks[window] = empty.masked_fill_(unseen, -torch.inf)
        return self._masks[window]


@dataclass
class Ragged:
    """All segments of a layout one after the other, for a kernel that takes any length.

    Args:
        keys: What each segment sees, one after the other, as flat indices.
        own: (S + 1,), where each segment's own tokens begin, and the end.
        reach: (S + 1,), where its keys begin in `keys`, and the end.
        longest: The most tokens that one segment has of its own, and the most that one sees.
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
        before: (M,), flat indices of the tokens whose hidden states predict.
        targets: (M,), the token that each of them predicts; every pair occurs once.
        wanted: (N,), for each token asked for, the number of its pair.
        segments: The segments, if sequences share beginnings.
        order: (T,), position of each flat index among the segments' queries.
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
        if (ragged := self.ragged) is not None:
            from turnrl.policy.varlen import varlen_attn  # a GPU's kernel

            return varlen_attn(
                query,
                key[ragged.keys],
                value[ragged.keys],
                ragged.own,
                ragged.reach,
                *ragged.longest,
                scale=scale,
                window_size=(-1 if window is None else window - 1, 0),
            )[None]
        reads = []
        for batch in self.segments:
            parts = (query[batch.queries], key[batch.keys], value[batch.keys])
            own, keys, values = (part.transpose(1, 2) for part in parts)
            if (shared := own.shape[1] // keys.shape[1]) > 1 and own.device.type != "cpu":
                # in float32 no fused kernel of a GPU takes heads that share keys
                keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
            mask = batch.mask(window, query)
            read = scaled_dot_product_attention(
                own, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            reads.append(read.transpose(1, 2).flatten(0, 1))
        return torch.cat(reads)[self.order][None]


ForwardPass = tuple[list[int], Layout]
"""Numbers of the sequences that are read in one forward pass, and their layout."""


def forward_passes(
    rows: Sequence[TokenRow],
    budget: int,
    share: bool = True,
    kernel: bool = False,
    owners: Sequence[int] | None = None,
) -> Iterator[ForwardPass]:
    """Divide sequences among forward passes of at most `budget` tokens as they are laid out.

    Sequences that begin alike come together, or, if rows are padded, sequences of similar length. A
    sequence that is longer than the budget has its own forward pass.

    Args:
        rows: The sequences, and which of their tokens are asked for.
        budget: The most tokens of a forward pass, padding included. Sequences that share much are
            gathered in full by attention, so together they have at most four times as many.
        share: Read shared prefixes once; see `lay_out`.
        kernel: Lay them out for a kernel that takes any length; see `supports_ragged`.
        owners: A number for each sequence; those with the same number come in the same forward
            pass, side by side. None if each stands alone.
    """
    ids = [np.asarray(ids) for ids, _ in rows]
    owned: dict[int, list[int]] = {}
    for i, owner in enumerate(range(len(rows)) if owners is None else owners):
        owned.setdefault(owner, []).append(i)
    together = [*owned.values()]
    firsts = [ids[own[0]] for own in together]
    order = (
        _sort_by_prefix(firsts)
        if share
        else sorted(range(len(firsts)), key=lambda n: len(firsts[n]))
    )

    def tokens_of(numbers: Sequence[int]) -> int:
        """Tokens of a forward pass over these sequences, in this order."""
        if not share:
            return len(numbers) * max(len(ids[i]) for i in numbers)
        shared = (_common_prefix(ids[a], ids[b]) for a, b in itertools.pairwise(numbers))
        return sum(len(ids[i]) for i in numbers) - sum(shared)

    batch: list[int] = []
    laid = seen = 0
    for own in (together[n] for n in order):
        size = sum(len(ids[i]) for i in own)
        if share and batch:  # counts only what is new: there may be thousands of sequences
            more = laid + tokens_of([batch[-1], *own]) - len(ids[batch[-1]])
        else:
            more = tokens_of([*batch, *own])
        if batch and (more > budget or seen + size > GATHERED * budget):
            yield batch, lay_out([rows[j] for j in batch], share, kernel)
            batch, more, seen = [], tokens_of(own), 0
        batch, laid, seen = [*batch, *own], more, seen + size
    if batch:
        yield batch, lay_out([rows[j] for j in batch], share, kernel)


def supports_ragged(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernel for sequences of any length supports this device and type."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def lay_out(rows: Sequence[TokenRow], share: bool = True, kernel: bool = False) -> Layout:
    """Token sequences as one forward pass.

    Args:
        rows: The sequences, and which of their tokens are asked for.
        share: Read shared prefixes once; otherwise rows are padded.
        kernel: Lay them out for the kernel too.
    Raises:
        ValueError: If a sequence's first token is asked for.
    """
    ids = [np.asarray(ids) for ids, _ in rows]
    segments: list[_Segment] = []
    mask: Tensor | None = None
    if share:
        indices, segments = _find_shared_prefixes(ids)
        laid = torch.zeros(2, 1, sum(len(path) - seen for seen, path in segments)).long()
        for sequence, at in zip(ids, indices, strict=True):
            laid[:, 0, at] = torch.from_numpy(np.stack([sequence, np.arange(len(sequence))]))
    else:
        padded = pad_sequence([torch.from_numpy(sequence) for sequence in ids], True)
        indices = [padded.shape[1] * n + np.arange(len(sequence)) for n, sequence in enumerate(ids)]
        column = torch.arange(padded.shape[1])
        laid = torch.stack([padded, column.expand_as(padded)])
        mask = column < torch.tensor([[len(sequence)] for sequence in ids])
    pairs = []
    for sequence, at, (_, asked) in zip(ids, indices, rows, strict=True):
        wanted = np.flatnonzero(asked)
        if len(asked) != len(sequence) or 0 in wanted:
            raise ValueError(
                f"a row of {len(sequence)} tokens has {len(asked)} flags that ask for them. Give "
                "one for each token, and False for the first, which nothing predicts."
            )
        pairs.append(at[wanted - 1] << 32 | sequence[wanted])  # token ids are less than 2**32
    pair, number = np.unique(np.concatenate(pairs), return_inverse=True)
    before, targets = torch.from_numpy(pair >> 32), torch.from_numpy(pair & (2**32 - 1))
    batches, order = _batch_segments(segments)
    return Layout(
        input_ids=laid[0],
        position_ids=laid[1],
        attention_mask=mask,
        before=before,
        targets=targets,
        wanted=torch.from_numpy(number),
        segments=batches,
        order=order,
        ragged=_make_ragged(segments) if share and kernel else None,
    )


_Segment = tuple[int, np.ndarray]
"""Number of tokens that a segment sees before its own, and the flat indices of all that it sees."""


def _find_shared_prefixes(
    sequences: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[_Segment]]:
    """The flat indices of each sequence's tokens, and the segments that hold them."""
    last = path = np.empty(0, np.int64)
    indices, segments, laid = [path] * len(sequences), [], 0
    for i in _sort_by_prefix(sequences):
        seen, last = _common_prefix(last, sequences[i]), sequences[i]
        own = np.arange(laid, laid + len(last) - seen)
        indices[i] = path = np.concatenate([path[:seen], own])
        laid += len(own)
        if len(own):
            segments.append((seen, path))
    return indices, segments


def _sort_by_prefix(sequences: Sequence[np.ndarray]) -> list[int]:
    """Numbers of the sequences, sorted so that sequences with long shared prefixes are
    neighbours."""
    return sorted(range(len(sequences)), key=lambda i: tuple(sequences[i]))


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the prefix that two sequences share."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def _batch_segments(segments: Sequence[_Segment]) -> tuple[list[Segments], Tensor]:
    """The segments in batches of similar size, and the `order` of a `Layout`."""
    sizes = [(len(path) - seen, len(path)) for seen, path in segments]
    batches: list[list[int]] = []
    needed = 0
    for i in sorted(range(len(segments)), key=sizes.__getitem__, reverse=True):
        batch = [*batches[-1], i] if batches else [i]
        own, reach = (max(sizes[j][side] for j in batch) for side in (0, 1))
        needed += sizes[i][0] * sizes[i][1]
        if batches and len(batch) * own * reach <= _WASTE * needed + _CALL:
            batches[-1] = batch
        else:
            batches.append([i])
            needed = sizes[i][0] * sizes[i][1]
    padded = []
    order, before = torch.zeros(sum(own for own, _ in sizes)).long(), 0
    for batch in batches:
        paths = [torch.from_numpy(segments[i][1]) for i in batch]
        seen = [segments[i][0] for i in batch]
        queries = pad_sequence([path[n:] for path, n in zip(paths, seen, strict=True)], True)
        real = torch.arange(queries.shape[1]) < torch.tensor([[sizes[i][0]] for i in batch])
        order[queries[real]] = before + real.flatten().nonzero()[:, 0]
        before += real.numel()
        ahead = torch.tensor(seen) if any(seen) else None
        padded.append(Segments(queries, pad_sequence(paths, True), ahead))
    return padded, order


def _make_ragged(segments: Sequence[_Segment]) -> Ragged:
    own = [len(path) - seen for seen, path in segments]
    reach = [len(path) for _, path in segments]
    begins = [np.concatenate([[0], np.cumsum(size)]).astype(np.int32) for size in (own, reach)]
    keys = np.concatenate([np.empty(0, np.int64), *(path for _, path in segments)])
    return Ragged(
        keys=torch.from_numpy(keys),
        own=torch.from_numpy(begins[0]),
        reach=torch.from_numpy(begins[1]),
        longest=(max(own, default=0), max(reach, default=0)),
    )
