"""One token for each row, by inverting the cumulative distribution.

One number for each token of a vocabulary of 152,064 takes 156 MB at 256 rows. So only two
such arrays exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from turnrl import Sampling
from turnrl_slots.sizes import ROWS
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
    """A token for each row, and its log-probability at the row's temperature.

    Args:
        logits: (R, V), in float32. Later results overwrite their memory.
        samplings: How each row is sampled. Greedy rows get log-probabilities of temperature 1.
        uniforms: R numbers in (0, 1].
        forced: R tokens to take instead; None for a draw.
    Returns:
        (R,) and (R,).
    """
    temperatures = [s.temperature for s in samplings]
    wanted = [-1 if token is None else token for token in forced]
    packed = pack(
        [
            np.array(uniforms, np.float32),
            np.array([t or 1.0 for t in temperatures], np.float32),
            np.array([t == 0 for t in temperatures], np.int32),
            np.array(wanted, np.int32),
        ],
        logits.device,
    )
    points, divisors, is_greedy, wanted_ids = packed
    greedy = logits.argmax(-1) if min(temperatures) == 0 else None
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits.div_(divisors[:, None])
    log_p = torch.log_softmax(logits, dim=-1)
    if max(temperatures) == 0:
        assert greedy is not None
        tokens = greedy
    else:
        cumulative = torch.exp(log_p, out=logits).cumsum_(-1)
        draws = points[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, draws)[:, 0].clamp(max=logits.shape[-1] - 1)
        if greedy is not None:
            tokens = torch.where(is_greedy > 0, greedy, tokens)
    tokens = torch.where(wanted_ids >= 0, wanted_ids.long(), tokens)
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]
