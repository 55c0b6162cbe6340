"""Losses that are a weighted sum over tokens, and what they share.

    loss = sum over tokens of share (w loss(token) + kl_coef k3(l_ref - l))
    k3(d) = exp(d) - d - 1

`share` is the token's part of the optimiser step (`aggregation`). The importance weight w corrects
for a sampler that computes slightly different log-probabilities than the learner, or that samples
with older weights: w = min(exp(l_old - l_sampler), importance_cap), or 1. This mismatch does not
belong in a ratio that is clipped, so ratios compare two log-probabilities of the learner's own.

The KL estimate is non-negative and unbiased (GRPO, arXiv 2402.03300, eq. 4).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from turnrl.plugin.errors import RecipeError, check_at_least, check_one_of
from turnrl.types import Engine, Objective
from turnrl.types.objective import Need, RatioLevel, SampledTokens

Aggregation = Literal["token", "trajectory", "constant"]
_USUAL_CAP = 2.0
"""The cap of importance weights for engines that only approximate the learner."""


@dataclass(frozen=True, kw_only=True)
class TokenObjective(Objective):
    """An objective that gives each sampled token a loss: `token_losses` is its equation.

    Args:
        kl_coef: Weight of the KL penalty against the policy that training began from; needs LoRA if
            above 0.
        aggregation: `token` weighs all sampled tokens of an optimiser step equally; `trajectory`
            first takes the mean of each trajectory, as the paper does; `constant` divides each
            trajectory's sum by `constant_tokens`, so that there is no bias towards long or short
            trajectories (arXiv 2503.20783).
        constant_tokens: The divisor of `constant`.
        importance_cap: The largest importance weight of a token. The weights correct for a sampler
            whose probabilities differ from the learner's. Null takes 2 for an engine that computes
            them with other programs, such as `VLLM` and `SGLang`, and no correction for others.
            `off` turns the correction off.
        value_coef: Weight of the value loss of an estimator's critic, beside the policy's loss.
    """

    kl_coef: float = 0.0
    aggregation: Aggregation = "token"
    constant_tokens: int = 1024
    importance_cap: float | Literal[False] | None = None  # YAML reads `off` as False
    value_coef: float = 0.1

    def __post_init__(self) -> None:
        check_one_of(get_args(Aggregation), "model.objective.", self, "aggregation")
        check_at_least(0, "model.objective.", self, "kl_coef", "value_coef", optional=False)
        check_at_least(1, "model.objective.", self, "constant_tokens", whole=True, optional=False)
        if self.importance_cap is True:
            raise RecipeError(
                "model.objective.importance_cap is true. Set a number from 1 on, such as 2, or "
                "'off' for no correction."
            )
        if self.importance_cap is not False:
            check_at_least(1, "model.objective.", self, "importance_cap")

    @property
    def needs(self) -> frozenset[Need]:
        """The old log-probabilities, and those that the settings ask for."""
        needs: set[Need] = {"old"}
        if self.kl_coef > 0:
            needs.add("reference")
        if self.importance_cap:
            needs.add("sampler")
        return frozenset(needs)

    @abstractmethod
    def token_losses(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The equation.

        Args:
            tokens: N sampled tokens.
        Returns:
            (N,), the loss of each token before importance weights and its share of the step; and
            for each metric of the objective's own a number for each token, (N,).
        """

    def loss(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the sums of `token_losses` with `importance`, the importance weights, and
        `kl`, the estimate of the divergence, if the settings ask for them."""
        losses, metrics = self.token_losses(tokens)
        metrics = dict(metrics)
        if self.importance_cap:
            metrics["importance"] = tokens.importance_weights(self.importance_cap)
            losses = metrics["importance"] * losses
        loss = (losses * tokens.weights).sum()
        if self.kl_coef > 0:
            metrics["kl"] = k3(tokens.logprobs, tokens.reference_logprobs)
            loss = loss + self.kl_coef * (metrics["kl"] * tokens.weights).sum()
        return loss, {name: values.detach().sum() for name, values in metrics.items()}

    def token_weights(self, token_counts: Tensor, tokens: float, trajectories: float) -> Tensor:
        """The weights of `aggregation`: (B,) counts to (B,) weights of one token each."""
        counts = token_counts.float()
        if self.aggregation == "token":
            return torch.full_like(counts, 1 / max(tokens, 1.0))
        if self.aggregation == "trajectory":
            return 1 / (counts.clamp(min=1) * trajectories)
        return torch.full_like(counts, 1 / (self.constant_tokens * trajectories))

    def for_engine(self, engine: Engine) -> Self:
        """This objective with `importance_cap` set, if it is null."""
        if self.importance_cap is not None:
            return self
        return replace(self, importance_cap=_USUAL_CAP if engine.approximates else False)


def probability_ratio(tokens: SampledTokens, level: RatioLevel = "token") -> Tensor:
    """(N,), the ratio of each token's probability now and before the first step.

    The ratio may also be the geometric mean over a turn or a trajectory (GSPO-token,
    arXiv 2507.18071, eq. 13 and 14): sg[exp(mean of l - l_old over the segment)] exp(l - sg[l]),
    where sg stops the gradient. Then each token still learns with its own advantage.
    """
    change = tokens.logprobs - tokens.old_logprobs
    if level != "token":
        segments = tokens.turns if level == "turn" else tokens.trajectories
        change = segment_mean(change, segments).detach() + (change - change.detach())
    return change.exp()


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
