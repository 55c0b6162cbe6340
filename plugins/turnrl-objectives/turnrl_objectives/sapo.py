"""SAPO: a soft gate in place of the clip.

For a token with log-probability l (now), l_old (before the first step) and advantage A,

    r    = exp(l - l_old)
    tau  = temperature_positive if A > 0 else temperature_negative
    loss = -(4 / tau) sigmoid(tau (r - 1)) A

Its gradient is that of -r A, times 4 p (1 - p) with p = sigmoid(tau (r - 1)): the whole gradient at
r = 1, and ever less the further the token has gone, in either direction. Tokens with a negative
advantage are gated more sharply, because lowering one token raises many others.

Source: Soft Adaptive Policy Optimization, arXiv 2511.20347, eq. 5 to 7, with its temperatures. The
paper takes the mean of each answer first (`aggregation: trajectory`); the default here is that of
all objectives, the mean over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnrl import RecipeError, TokenObjective
from turnrl.types import SampledTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SAPO(TokenObjective):
    """A surrogate that fades out softly as the policy moves away from the old one.

    Args:
        temperature_positive: How sharply tokens with a positive advantage fade out.
        temperature_negative: How sharply the others do.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature_positive", "temperature_negative"):
            if not (value := getattr(self, name)) > 0:
                raise RecipeError(f"model.objective.{name} is {value}; it must be above 0")

    def token_losses(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The equation; with `ratio`, and `gate`: the share of its gradient that a token keeps."""
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        positive = (tokens.advantages > 0).to(ratio.dtype)
        tau = positive * self.temperature_positive + (1 - positive) * self.temperature_negative
        gate = (tau * (ratio - 1)).sigmoid()
        metrics = {"ratio": ratio, "gate": 4 * gate * (1 - gate)}
        return -(4 / tau) * gate * tokens.advantages, metrics
