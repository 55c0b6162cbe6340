"""CISPO: the importance weight is clipped, and not the update.

For a token with log-probability l (now), l_old (before the first step) and advantage A,

    r    = exp(l - l_old)
    loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A l

where sg stops the gradient. The clipped surrogate drops tokens whose ratio has gone too far; here
their gradient is only bounded, so that rare tokens which open a new line of thought keep learning.

Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. As there, the lower bound is off by default. The
paper publishes no value for the upper one; the default of 4 lets weights go up to 5, within the
range of 4 to 8 over which arXiv 2510.13786 found the choice of little effect. The paper divides by
the tokens of the group, here `aggregation` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnrl import RecipeError, TokenObjective
from turnrl.types import SampledTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CISPO(TokenObjective):
    """A policy gradient whose importance weights are clipped (MiniMax-M1).

    Args:
        clip_low: The weight of a token is at least 1 - clip_low. Null sets no lower bound.
        clip_high: The weight of a token is at most 1 + clip_high.
    """

    clip_low: float | None = None
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low = 1.0 if self.clip_low is None else self.clip_low
        if not 0 < low <= 1 or not self.clip_high > 0:
            raise RecipeError(
                f"model.objective.clip_low is {self.clip_low} and clip_high {self.clip_high}. Set "
                "clip_low between 0 and 1, or to null, and clip_high above 0."
            )

    def token_losses(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The equation; with `ratio`, and `clip_fraction`: 1 for tokens whose weight is clipped."""
        ratio = (tokens.logprobs - tokens.old_logprobs).exp().detach()
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        weight = ratio.clamp(low, 1 + self.clip_high)
        metrics = {"ratio": ratio, "clip_fraction": (weight != ratio).float()}
        return -weight * tokens.advantages * tokens.logprobs, metrics
