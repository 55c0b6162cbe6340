"""The objective: a clipped surrogate on per-token advantages. It sees only tokens, no turns or
groups.

For a sampled token with log-probability l (now), l_old (before the first step) and advantage A,

    ratio = exp(l - l_old)
    loss  = -w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_coef k3(l_ref - l)
    k3(d) = exp(d) - d - 1

Both log-probabilities are the learner's own. The sampler computes slightly different ones, and this
mismatch does not belong in the clip. The weight w corrects for it: w is 1, or the truncated ratio
of the learner's and the sampler's probability of the token, w = min(exp(l_old - l_sampler), C). A
sampler has no dropout, so if the learner has one, this l_old is computed without it.

The ratio may also be that of a whole turn or trajectory, the geometric mean over its tokens
(GSPO-token, arXiv 2507.18071, eq. 13 and 14): for each token,
ratio = sg[exp(mean of l - l_old over the segment)] exp(l - sg[l]), where sg stops the gradient.
Whole segments are clipped, but each token learns with its own advantage, which may differ from the
others in its segment.

PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476), and the
non-negative, unbiased KL estimate of GRPO (arXiv 2402.03300, eq. 4). Each token's loss is
multiplied by a weight that `ClippedSurrogate.weights` gives it, and summed.
"""

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from turnrl.errors import RecipeError, at_least, check_numbers, one_of

Aggregation = Literal["token", "trajectory", "constant"]
RatioLevel = Literal["token", "turn", "trajectory"]
_CLIPS: dict[RatioLevel, tuple[float, float]] = {
    "token": (0.2, 0.2),
    "turn": (3e-4, 4e-4),
    "trajectory": (3e-4, 4e-4),
}
"""Default bounds: PPO's for tokens, and GSPO's for segments, whose mean ratios are much nearer to
1."""


@final
@dataclass(frozen=True)
class ClippedSurrogate:
    """The clipped surrogate, with an optional KL penalty to the reference policy.

    Args:
        clip_low: Lower clip bound: a token with a negative advantage has no gradient once its ratio
            is below 1 - clip_low. Null takes the usual value for the ratio's level, 0.2 for tokens
            and 3e-4 for turns and trajectories.
        clip_high: Upper clip bound: a token with a positive advantage has no gradient once its
            ratio is above 1 + clip_high. Null takes 0.2, or 4e-4.
        kl_coef: Weight of the KL penalty against the policy that training began from; needs LoRA if
            above 0.
        aggregation: `token` weighs all sampled tokens of an optimiser step equally; `trajectory`
            first takes the mean of each trajectory, as the paper does; `constant` divides each
            trajectory's sum by `constant_tokens`, so that there is no bias towards long or short
            trajectories (arXiv 2503.20783).
        constant_tokens: The divisor of `constant`.
        ratio_level: `token` uses the probability ratio of each token; `turn` and `trajectory` use
            the geometric mean over a turn or a trajectory.
        importance_cap: C of truncated importance sampling, which corrects for a sampler whose
            probabilities differ from the learner's (2 is usual). Null takes the engine's own: 2
            for `VLLM` and `SGLang`, no correction for `Slots`.
        value_coef: Weight of the value loss of an estimator's critic, beside the policy's loss.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    aggregation: Aggregation = "token"
    constant_tokens: int = 1024
    ratio_level: RatioLevel = "token"
    importance_cap: float | None = None
    value_coef: float = 0.1

    def __post_init__(self) -> None:
        one_of(get_args(Aggregation), "model.objective.", self, "aggregation")
        one_of(get_args(RatioLevel), "model.objective.", self, "ratio_level")
        check_numbers("model.objective.", self, "clip_low", "clip_high")
        low, high = self.clips
        if not 0 < low < 1 or not high > 0:
            raise RecipeError(
                f"model.objective.clip_low is {low} and clip_high {high}. "
                "Set clip_low between 0 and 1, clip_high above 0."
            )
        at_least(0, "model.objective.", self, "kl_coef", "value_coef", optional=False)
        at_least(1, "model.objective.", self, "constant_tokens", whole=True, optional=False)
        at_least(1, "model.objective.", self, "importance_cap")

    @property
    def clips(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, with defaults filled in."""
        low, high = _CLIPS[self.ratio_level]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        sampler_logprobs: Tensor | None = None,
        segments: Tensor | None = None,
        exact_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of N sampled tokens.

        Args:
            logprobs: (N,), under the current policy; carries the gradient.
            old_logprobs: (N,), the learner's own before the first step.
            advantages: (N,), in units of normalised reward.
            weights: (N,), from `weights`.
            ref_logprobs: (N,), under the reference policy; needed if `kl_coef` is above 0.
            sampler_logprobs: (N,), as the sampler computed them; needed for `importance_cap`.
            segments: (N,), the number of each token's turn or trajectory; needed for a
                `ratio_level` above the token.
            exact_logprobs: (N,), `old_logprobs` without dropout, for the comparison with the
                sampler's; None if they are the same.
        Returns:
            The loss, a scalar that carries the gradient; and metrics, as detached sums over the N
            tokens: `ratio`, `clip_fraction` (tokens whose gradient the clipping removes), `kl` with
            a penalty, and `importance`, w, with a correction.
        """
        change = logprobs - old_logprobs
        if self.ratio_level != "token":
            assert segments is not None
            change = segment_mean(change, segments).detach() + (change - change.detach())
        ratio, (low, high) = change.exp(), self.clips
        gain = ratio * advantages
        clipped = ratio.clamp(1 - low, 1 + high) * advantages
        watched = {"ratio": ratio.detach().sum(), "clip_fraction": (clipped < gain).float().sum()}
        surrogate = torch.minimum(gain, clipped)
        if self.importance_cap is not None:
            assert sampler_logprobs is not None
            exact = old_logprobs if exact_logprobs is None else exact_logprobs
            trust = (exact - sampler_logprobs).exp().clamp(max=self.importance_cap)
            surrogate, watched["importance"] = trust * surrogate, trust.sum()
        loss = -(surrogate * weights).sum()
        if self.kl_coef > 0:
            assert ref_logprobs is not None
            kl = k3(logprobs, ref_logprobs)
            loss = loss + self.kl_coef * (kl * weights).sum()
            watched["kl"] = kl.detach().sum()
        return loss, watched

    def weights(self, token_counts: Tensor, tokens: float, trajectories: float) -> Tensor:
        """The weight of each sampled token of each trajectory of one optimiser step.

        The step's loss is the plain sum over its minibatches, and Lightning averages over
        processes. So the weights are shares of the *whole* step: a mean of minibatch means would
        differ from the stated mean if their lengths differ.

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


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """For each value, the mean over its segment.

    Args:
        values: (N,).
        segments: (N,), whole numbers from 0; values with the same number form a segment.
    """
    sums = values.new_zeros(int(segments.max()) + 1 if len(segments) else 0)
    counts = sums.index_add(0, segments, torch.ones_like(values))
    return (sums.index_add(0, segments, values) / counts.clamp(min=1))[segments]


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = l_ref - l: an unbiased, non-negative estimate of
    KL(policy || reference)."""
    d = ref_logprobs - logprobs
    return d.exp() - d - 1
