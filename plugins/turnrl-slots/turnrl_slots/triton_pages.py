"""Attention of one token per sequence, over pages in place: a Triton kernel.

A program computes the query heads that share one key-value head, for one row, over one part of its
keys. The heads are the rows of one matrix product, padded to 16, the least that tensor cores take.
If a card can compute more at once than all rows and heads, keys are divided into parts, and a
second kernel weighs the parts by their sums of exponentials:

    o = sum_p o_p 2^{l_p - l} / sum_p 2^{l_p - l},  l = max_p l_p

(flash-decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The number of parts
depends on the shapes alone, and the device computes the beginning of each from the row's own
length. So no number returns to the host, and a CUDA graph can replay the kernel.

Numbers are read in half precision (or float32) and summed in float32. Weights are rounded to the
values' precision before the second product, as in FlashAttention.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnrl_slots.sizes import PAGE

KEYS = 2 * PAGE
"""Keys that a program reads at a time: 16 KB of keys and 16 KB of values at D = 128."""

_LEAST = 2 * KEYS
"""The fewest keys of a part, if a row's pages were full. With fewer, the second kernel takes longer
than the division saves."""

_MOST = 64
"""The most parts."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    out, parts, sums, query, keys, values, table, used,
    scale, heads, width, count,
    query_row, query_head, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, key-value head and part: the output, or, unless `WHOLE`, this part's share of it."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(used + row)
    # each part has whole tiles, so that none is read twice
    tiles = tl.cdiv(tl.cdiv(length, KEYS), count)
    begin = part * tiles * KEYS
    end = tl.minimum(begin + tiles * KEYS, length)

    group, size = tl.arange(0, GROUP_PAD), tl.arange(0, SIZE_PAD)
    real = (group < GROUP)[:, None] & (size < SIZE)[None, :]
    asker = head * GROUP + group
    row_ = row.to(tl.int64)
    queries = tl.load(
        query + row_ * query_row + asker[:, None] * query_head + size[None, :], mask=real, other=0.0
    )
    peak = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    weighed = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)
    pages = table + row_ * width
    for first in range(begin, end, KEYS):
        at = first + tl.arange(0, KEYS)
        valid = at < end
        page = tl.load(pages + at // PAGE, mask=valid, other=0).to(tl.int64)
        lies = page * page_stride + (at % PAGE) * token_stride + head * head_stride
        seen = valid[:, None] & (size < SIZE)[None, :]
        key = tl.load(keys + lies[:, None] + size[None, :], mask=seen, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: a tile has at least one key
        weights = tl.exp2(scores - new_peak[:, None])
        before = tl.exp2(peak - new_peak)
        value = tl.load(values + lies[:, None] + size[None, :], mask=seen, other=0.0)
        total = total * before + tl.sum(weights, 1)
        weighed = weighed * before[:, None]
        weighed += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        peak = new_peak
    total = tl.where(total > 0, total, 1.0)  # of a part without keys, whose `peak` is -inf
    weighed = weighed / total[:, None]
    if WHOLE:
        to = (row_ * heads + asker) * SIZE
        tl.store(out + to[:, None] + size[None, :], weighed.to(out.dtype.element_ty), mask=real)
    else:
        to = (row_ * heads + asker) * count + part
        tl.store(parts + (to * SIZE)[:, None] + size[None, :], weighed, mask=real)
        tl.store(sums + to, peak + tl.log2(total), mask=group < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    out, parts, sums,
    COUNT: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    """One row and query head: its parts, weighed."""
    asker = tl.program_id(0).to(tl.int64)
    part, size = tl.arange(0, COUNT), tl.arange(0, SIZE_PAD)
    logs = tl.load(sums + asker * COUNT + part)
    peak = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(peak == -float("inf"), 0.0, peak))
    at = (asker * COUNT + part) * SIZE
    outputs = tl.load(parts + at[:, None] + size[None, :], mask=(size < SIZE)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    mean = tl.sum(outputs * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + asker * SIZE + size, mean.to(out.dtype.element_ty), mask=size < SIZE)


@cache
def _at_once(device: torch.device) -> int:
    """The number of programs that fill a device: four for each of its processors."""
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return 512


def count_parts(rows: int, heads: int, width: int, programs: int) -> int:
    """The number of parts into which each row's keys are divided: a power of two that does not
    depend on the lengths of the rows.

    Args:
        rows: Rows of the pass.
        heads: Key-value heads.
        width: Pages of the longest row that the table has room for.
        programs: Number of programs that the device computes at once.
    """
    wanted = min(-(-programs // (rows * heads)), width * PAGE // _LEAST, _MOST)
    return 1 << (max(wanted, 1).bit_length() - 1)


def settings(
    group: int, size: int, dtype: torch.dtype, parts: int
) -> tuple[dict[str, object], dict[str, int]]:
    """Constants that `_attend` is compiled with, and the compiler's options.

    Args:
        group: Query heads that share a key-value head.
        size: D, of a head. Products take 16 numbers at least, so smaller heads are padded.
        dtype: Of queries, keys and values.
        parts: Parts that each row's keys are divided into.
    """
    padded = max(16, triton.next_power_of_2(size))
    constants = {
        "GROUP": group,
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "SIZE": size,
        "SIZE_PAD": padded,
        "PAGE": PAGE,
        "KEYS": KEYS,
        "WHOLE": parts == 1,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return constants, {"num_warps": 4, "num_stages": 3 if padded <= 128 else 2}


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    used: Tensor,
    scale: float,
    parts: int | None = None,
) -> Tensor:
    """Attention of R sequences with one query each, to all tokens of the same sequence.

    Args:
        query: (R, heads, D), adjacent in memory along the last dimension.
        keys: (pages, page, key-value heads, D), contiguous.
        values: The same.
        table: (R, W), int32, contiguous, the pages of each sequence in order; after the last, any.
        used: (R,), int32, tokens of each sequence in its pages, the query's own included.
        scale: Factor of the scores.
        parts: Number of parts that each row's keys are divided into, a power of two; None for as
            many as fill the device.
    Returns:
        (R, heads, D), contiguous, of the query's type; zero for a sequence without tokens.
    """
    rows, asking, size = query.shape
    heads, width = keys.shape[2], table.shape[1]
    group = asking // heads
    if parts is None:
        parts = count_parts(rows, heads, width, _at_once(query.device))
    out = torch.empty(rows, asking, size, dtype=query.dtype, device=query.device)
    outputs: object = out
    logs: object = out
    if parts > 1:
        outputs = torch.empty(rows, asking, parts, size, dtype=torch.float32, device=query.device)
        logs = torch.empty(rows, asking, parts, dtype=torch.float32, device=query.device)
    constants, options = settings(group, size, query.dtype, parts)
    padded = constants["SIZE_PAD"]
    with torch.cuda.device_of(query):  # Triton launches on the thread's own GPU
        _attend[(rows, heads, parts)](
            out, outputs, logs, query, keys, values, table, used,
            scale * 1.4426950408889634, asking, width, parts,
            query.stride(0), query.stride(1), *keys.stride()[:3],
            **constants, **options,
        )  # fmt: skip
        if parts > 1:
            _weigh[(rows * asking,)](
                out, outputs, logs, COUNT=parts, SIZE=size, SIZE_PAD=padded, num_warps=4
            )
    return out
