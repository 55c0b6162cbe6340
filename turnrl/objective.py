"""The objective: a clipped surrogate on per-token advantages.
It knows tokens only, not turns or groups.

For a sampled token with log-probability l (now), l_old (when sampled) and advantage A,

    ratio = exp(l - l_old)
    loss  = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_coef k3(l_ref - l)
    k3(d) = exp(d) - d - 1

PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476), and the
non-negative, unbiased KL estimate of GRPO (arXiv 2402.03300, eq. 4). Each token's loss is
multiplied by a weight that `loss_weights` gives it, and summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from turnrl.errors import RecipeError

Aggregation = Literal["token", "trajectory", "constant"]


@dataclass
class Loss:
    """The loss and what to watch beside it. All but `loss` are detached scalars, means over tokens.

    `clip_fraction` counts tokens whose gradient the clipping removes.
    """

    loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    kl: Tensor | None


@final
class ClippedSurrogate:
    """The clipped surrogate, with an optional KL penalty to the reference policy.

    Args:
        clip_low: The ratio is not rewarded for falling below 1 - clip_low.
        clip_high: The ratio is not rewarded for rising above 1 + clip_high.
        kl_coef: Weight of the KL penalty to the policy with its adapter switched off; needs LoRA if
            above 0.
        aggregation: `token` weighs all sampled tokens of an optimiser step alike; `trajectory`
            first takes the mean of each trajectory, as the paper does; `constant` divides each
            trajectory's sum by `constant_tokens`, so that long and short trajectories have no bias
            (arXiv 2503.20783).
        constant_tokens: The divisor of `constant`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        kl_coef: float = 0.0,
        aggregation: Aggregation = "token",
        constant_tokens: int = 1024,
    ) -> None:
        if not 0 < clip_low < 1 or clip_high <= 0:
            raise RecipeError(
                f"clip_low is {clip_low} and clip_high {clip_high}; "
                "clip_low lies between 0 and 1, clip_high above 0"
            )
        if aggregation not in get_args(Aggregation):
            raise RecipeError(
                f"aggregation is {aggregation!r}, but it is one of {get_args(Aggregation)}"
            )
        if kl_coef < 0:
            raise RecipeError(f"kl_coef is {kl_coef}; it must be 0 (no penalty) or above")
        if constant_tokens < 1:
            raise RecipeError(f"constant_tokens is {constant_tokens}; it must be at least 1")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl_coef = kl_coef
        self.aggregation = aggregation
        self.constant_tokens = constant_tokens

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> Loss:
        """The loss of N sampled tokens.

        Args:
            logprobs: (N,), under the policy now; carries the gradient.
            old_logprobs: (N,), under the policy that sampled.
            advantages: (N,), in units of normalised reward.
            weights: (N,), from `loss_weights`.
            ref_logprobs: (N,), under the reference policy; needed if `kl_coef` is above 0.
        """
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        loss = (-gain * weights).sum()
        mean_kl = None
        if self.kl_coef > 0:
            assert ref_logprobs is not None
            kl = k3(logprobs, ref_logprobs)
            loss = loss + self.kl_coef * (kl * weights).sum()
            mean_kl = kl.detach().mean()
        with torch.no_grad():
            removed = ((ratio > 1 + self.clip_high) & (advantages > 0)) | (
                (ratio < 1 - self.clip_low) & (advantages < 0)
            )
            return Loss(loss, ratio.mean(), removed.float().mean(), mean_kl)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = l_ref - l: an unbiased, non-negative estimate of
    KL(policy || reference)."""
    d = ref_logprobs - logprobs
    return d.exp() - d - 1


def loss_weights(
    token_counts: Tensor,
    aggregation: Aggregation,
    minibatches: int = 1,
    constant_tokens: int = 1024,
    tokens_per_rank: float | None = None,
) -> Tensor:
    """The weight of each sampled token of each trajectory of one optimiser step.

    Lightning averages the step's accumulated minibatches, and ranks. The weights are such that this
    average comes out as the stated mean over the *whole* step: with minibatches of unequal length,
    the average of their means would not.

    Args:
        token_counts: (B,), sampled tokens of each of the step's trajectories on this rank.
        aggregation: See `ClippedSurrogate`.
        minibatches: How many backward passes the step accumulates on this rank.
        constant_tokens: The divisor of `constant`.
        tokens_per_rank: The step's sampled tokens, averaged over ranks; `token_counts.sum()` if
            alone.
    Returns:
        (B,), weight of each token of each trajectory.
    """
    counts = token_counts.float()
    if aggregation == "token":
        total = float(counts.sum()) if tokens_per_rank is None else tokens_per_rank
        weights = torch.full_like(counts, 1 / max(total, 1.0))
    elif aggregation == "trajectory":
        weights = 1 / (counts.clamp(min=1) * len(counts))
    else:
        weights = torch.full_like(counts, 1 / (constant_tokens * len(counts)))
    return weights * minibatches
