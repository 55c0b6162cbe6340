"""One token for each row, by inverting the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnrl import Sampling


def draw(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    forced: Sequence[int | None],
) -> tuple[Tensor, Tensor]:
    """A token for each row, and its log-probability under what it was drawn from.

    Args:
        logits: (R, V), in float32.
        samplings: How each row is sampled. Greedy ones have log-probabilities of temperature 1.
        uniforms: R numbers in (0, 1].
        forced: R tokens to take instead; None for a draw. Their log-probabilities are those of the
            whole distribution.
    Returns:
        (R,) and (R,).
    """
    temperatures = [s.temperature for s in samplings]
    some_greedy = min(temperatures) == 0
    if any(t not in (0.0, 1.0) for t in temperatures):
        by = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        log_p = torch.log_softmax(logits / by[:, None], dim=-1)
    else:
        log_p = torch.log_softmax(logits, dim=-1)
    whole = log_p
    if cut := [i for i, s in enumerate(samplings) if s.truncated]:
        log_p = log_p.index_copy(
            0,
            torch.tensor(cut, device=log_p.device),
            truncated(log_p[cut], [samplings[i] for i in cut]),
        )
    if max(temperatures) == 0:
        tokens = logits.argmax(-1)
    else:
        cumulative = log_p.exp().cumsum(-1)
        draws = torch.tensor(uniforms, device=logits.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, draws)[:, 0].clamp(max=logits.shape[-1] - 1)
        if some_greedy:
            greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    if taken := [i for i, token in enumerate(forced) if token is not None]:
        tokens[taken] = torch.tensor([forced[i] for i in taken], device=tokens.device)
        log_p = log_p.index_copy(0, torch.tensor(taken, device=log_p.device), whole[taken])
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def truncated(log_p: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What is left of each distribution by its `top_k`, `min_p` and `top_p`, renormalised.

    Args:
        log_p: (R, V).
        samplings: How each row is sampled.
    Returns:
        (R, V); minus infinity where nothing is left.
    """
    most = log_p.shape[-1]

    def of_each(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=log_p.device)[:, None]

    ranked, order = log_p.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(most, device=log_p.device) < of_each([s.top_k or most for s in samplings])
    # the likeliest token stays, whatever rounding does to e^0 and to the first sum
    p = (ranked - ranked[:, :1]).exp()
    kept &= p >= of_each([s.min_p for s in samplings])
    p = p * kept
    before = p.cumsum(-1) - p
    kept &= before < of_each([s.top_p for s in samplings]) * p.sum(-1, keepdim=True)
    left = ranked.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return torch.empty_like(log_p).scatter_(-1, order, left)
