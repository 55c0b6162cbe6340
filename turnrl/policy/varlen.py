"""torch 2.13's variable-length attention, also for torch 2.11.

torch 2.11 has the same kernel and fewer arguments to it:

enable_gqa    It always takes query heads that share keys.
seqused_k     Here the unused keys of a sequence become a sequence of their own, without queries.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
) -> Tensor:
    """Attention of S sequences. The last query of each is aligned with its last key.

    Args:
        query: (N, heads, D), one sequence after the other.
        key: (M, key-value heads, D), one sequence after the other.
        value: The same.
        cu_seq_q: (S + 1,), int32, where each sequence's queries begin, and the end.
        cu_seq_k: The same for the keys.
        max_q: The most queries of any sequence, or an upper bound.
        max_k: The most keys of any sequence, or an upper bound.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window_size: How many keys before its own each query sees, and how many after; -1 for all.
        seqused_k: (S,), int32, how many of its keys each sequence uses; None for all. It allows no
            gradient.
    Returns:
        (N, heads, D).
    """
    takes = _arguments(torch_varlen_attn)
    options: dict[str, object] = {"enable_gqa": True} if "enable_gqa" in takes else {}
    if "seqused_k" in takes:
        options["seqused_k"] = seqused_k
    elif seqused_k is not None:
        cu_seq_q, cu_seq_k = _with_unused(cu_seq_q, cu_seq_k, seqused_k)
        # without an end to the window, the kernel expects a query in every sequence
        window_size = (window_size[0], 0)
    attended = torch_varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        **cast(Any, options),
    )
    return cast(Tensor, attended)


def _with_unused(cu_seq_q: Tensor, cu_seq_k: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Where queries and keys begin if the unused keys of each sequence are a sequence of their own,
    without queries."""
    begins, end = cu_seq_k[:-1], cu_seq_k[-1:]
    keys = torch.cat([torch.stack([begins, begins + used], 1).flatten(), end])
    return torch.stack([cu_seq_q, cu_seq_q], 1).flatten()[1:], keys


@functools.cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
