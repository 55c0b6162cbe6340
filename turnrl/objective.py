"""The objective: a clipped surrogate on per-token advantages.
It knows tokens only, not turns or groups.

For a sampled token with log-probability l (now), l_old (before the first update) and advantage A,

    ratio = exp(l - l_old)
    loss  = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_coef k3(l_ref - l)
    k3(d) = exp(d) - d - 1

Both log-probabilities are the learner's own: what the sampler computed is another thing, and a
mismatch between the two has no business in the clip.

PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476), and the
non-negative, unbiased KL estimate of GRPO (arXiv 2402.03300, eq. 4). Each token's loss is
multiplied by a weight that `ClippedSurrogate.weights` gives it, and summed.
"""

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from turnrl.errors import RecipeError, at_least

Aggregation = Literal["token", "trajectory", "constant"]


@final
@dataclass(frozen=True)
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

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    aggregation: Aggregation = "token"
    constant_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise RecipeError(
                f"objective.clip_low is {self.clip_low} and clip_high {self.clip_high}. "
                "Set clip_low between 0 and 1, clip_high above 0."
            )
        if self.aggregation not in (known := get_args(Aggregation)):
            raise RecipeError(f"aggregation is {self.aggregation!r}, not of {known}")
        at_least(0, "objective.", self, "kl_coef")
        at_least(1, "objective.", self, "constant_tokens")

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of N sampled tokens.

        Args:
            logprobs: (N,), under the policy now; carries the gradient.
            old_logprobs: (N,), the learner's own before the first update.
            advantages: (N,), in units of normalised reward.
            weights: (N,), from `weights`.
            ref_logprobs: (N,), under the reference policy; needed if `kl_coef` is above 0.
        Returns:
            The loss, a scalar that carries the gradient; and what to watch, detached sums over the
            N tokens: `ratio`, `clip_fraction` (tokens whose gradient the clipping removes), and
            `kl` if there is a penalty.
        """
        ratio = (logprobs - old_logprobs).exp()
        gain = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        loss = -(torch.minimum(gain, clipped) * weights).sum()
        watched = {"ratio": ratio.detach().sum(), "clip_fraction": (clipped < gain).float().sum()}
        if self.kl_coef > 0:
            assert ref_logprobs is not None
            kl = k3(logprobs, ref_logprobs)
            loss = loss + self.kl_coef * (kl * weights).sum()
            watched["kl"] = kl.detach().sum()
        return loss, watched

    def weights(self, token_counts: Tensor, tokens: float, trajectories: float) -> Tensor:
        """The weight of each sampled token of each trajectory of one optimiser step.

        The step's loss is the plain sum over its minibatches, and Lightning averages over
        processes. So the weights are shares of the *whole* step: the mean of its minibatches' means
        would not be the stated one where their lengths differ.

        Args:
            token_counts: (B,), sampled tokens of each of the step's trajectories in this process.
            tokens: The step's sampled tokens, averaged over processes.
            trajectories: The step's trajectories, averaged over processes.
        Returns:
            (B,), weight of each token of each trajectory.
        """
        counts = token_counts.float()
        if self.aggregation == "token":
            return torch.full_like(counts, 1 / max(tokens, 1.0))
        if self.aggregation == "trajectory":
            return 1 / (counts.clamp(min=1) * trajectories)
        return torch.full_like(counts, 1 / (self.constant_tokens * trajectories))


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = l_ref - l: an unbiased, non-negative estimate of
    KL(policy || reference)."""
    d = ref_logprobs - logprobs
    return d.exp() - d - 1
