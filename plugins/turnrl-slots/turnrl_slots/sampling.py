"""One token for each row, by inverting the cumulative distribution.

One number for each token of a vocabulary of 152,064 takes 156 MB at 256 rows. So as few such arrays
as possible exist at once: two of full size, and seven for a slice of the rows where distributions
are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from turnrl import Sampling
from turnrl_slots.sizes import CUT_ROWS, ROWS
from turnrl_slots.transfer import download, pack


def sample(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    forced: Sequence[int | None],
) -> tuple[list[int], list[float]]:
    """A token for each row and its log-probability, with one copy to the host.

    Args:
        logits_of: (n, H) -> (n, V) in float32, which nobody else holds.
        hidden: (R, H).
        samplings: See `draw`, also for the other arguments.
    """
    slices = [slice(0, len(hidden))]
    if hidden.device.type != "cpu":
        slices = [slice(n, n + ROWS) for n in range(0, len(hidden), ROWS)]
    drawn = [
        draw(logits_of(hidden[rows]), samplings[rows], uniforms[rows], forced[rows])
        for rows in slices
    ]
    tokens, logprobs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return download(tokens, logprobs)


def draw(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    forced: Sequence[int | None],
) -> tuple[Tensor, Tensor]:
    """A token for each row, and its log-probability under the distribution that it was drawn from.

    Args:
        logits: (R, V), in float32. Later results overwrite their memory.
        samplings: How each row is sampled. Greedy rows get log-probabilities of temperature 1.
        uniforms: R numbers in (0, 1].
        forced: R tokens to take instead; None for a draw. They get their log-probabilities under
            the whole distribution, before it is cut.
    Returns:
        (R,) and (R,).
    """
    temperatures = [s.temperature for s in samplings]
    cut = [i for i, s in enumerate(samplings) if s.cuts_distribution]
    wanted = [-1 if token is None else token for token in forced]
    packed = pack(
        [
            np.array(uniforms, np.float32),
            np.array([t or 1.0 for t in temperatures], np.float32),
            np.array([t == 0 for t in temperatures], np.int32),
            np.array(wanted, np.int32),
            np.array(cut, np.int32),
            *limits_of([samplings[i] for i in cut], logits.shape[-1]),
        ],
        logits.device,
    )
    points, divisors, is_greedy, wanted_ids, cut_rows, *limits = packed
    greedy = logits.argmax(-1) if min(temperatures) == 0 else None
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits.div_(divisors[:, None])
    log_p = torch.log_softmax(logits, dim=-1)
    is_forced, forced_ids = wanted_ids >= 0, wanted_ids.clamp(min=0).long()
    forced_log_p = log_p.gather(-1, forced_ids[:, None])[:, 0]
    if cut:
        at_once = len(cut) if logits.device.type == "cpu" else CUT_ROWS
        split = (part.split(at_once) for part in (cut_rows.long(), *limits))
        for rows, *parts in zip(*split, strict=True):
            log_p.index_copy_(0, rows, cut_distributions(log_p.index_select(0, rows), *parts))
    if max(temperatures) == 0:
        assert greedy is not None
        tokens = greedy
    else:
        cumulative = torch.exp(log_p, out=logits).cumsum_(-1)
        draws = points[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, draws)[:, 0].clamp(max=logits.shape[-1] - 1)
        if cut:
            for rows in cut_rows.long().split(at_once):
                left = log_p.index_select(0, rows) > -torch.inf
                tokens.index_copy_(0, rows, _nearest(tokens.index_select(0, rows), left))
        if greedy is not None:
            tokens = torch.where(is_greedy > 0, greedy, tokens)
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    tokens = torch.where(is_forced, forced_ids, tokens)
    return tokens, torch.where(is_forced, forced_log_p, logprobs)


def limits_of(samplings: Sequence[Sampling], vocabulary: int) -> list[np.ndarray]:
    """`top_k`, `min_p` and `top_p` of each row, (R, 1) each.

    Args:
        samplings: How to sample each of the R rows.
        vocabulary: The number of tokens, which is the `top_k` of a row without one.
    """
    return [
        np.array([s.top_k or vocabulary for s in samplings], np.int32)[:, None],
        np.array([s.min_p for s in samplings], np.float32)[:, None],
        np.array([s.top_p for s in samplings], np.float32)[:, None],
    ]


def cut_distributions(log_p: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor) -> Tensor:
    """Cut each distribution by its limits, and renormalise it.

    Args:
        log_p: (R, V), log-probabilities.
        top_k: (R, 1), the number of tokens to keep.
        min_p: (R, 1), the least probability to keep, as a share of the greatest.
        top_p: (R, 1), the probability that the likeliest tokens to keep have together.
    Returns:
        (R, V), minus infinity for tokens that are cut.
    """
    ranked, order = log_p.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(log_p.shape[-1], device=log_p.device) < top_k
    # the likeliest token stays, however e^0 and the first sum are rounded
    p = (ranked - ranked[:, :1]).exp_()
    kept &= p >= min_p
    p.mul_(kept)
    before = p.cumsum(-1).sub_(p)
    kept &= before < top_p * p.sum(-1, keepdim=True)
    left = ranked.masked_fill_(kept.logical_not_(), -torch.inf).log_softmax(-1)
    return p.scatter_(-1, order, left)


def _nearest(tokens: Tensor, left: Tensor) -> Tensor:
    """The tokens, (R,), each moved to the nearest token that is left in its row, (R, V).

    A token that was cut has no probability. But a GPU computes a cumulative sum as a tree, which
    rounds differently at each token, so a token that was cut may get the width of a rounding error.
    """
    places = torch.arange(left.shape[-1], dtype=torch.int32, device=left.device)
    away = (places - tokens[:, None].int()).abs_()
    return away.masked_fill_(left.logical_not_(), left.shape[-1]).argmin(-1)
