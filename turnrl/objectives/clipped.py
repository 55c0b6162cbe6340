"""The clipped surrogate.

For a sampled token with log-probability l (now), l_old (before the first step) and advantage A,

    ratio = exp(l - l_old)
    loss  = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)

PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476). With the ratio of
a turn or a trajectory (`probability_ratio`), whole segments are clipped: GSPO.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from turnrl.objectives.tokens import TokenObjective, probability_ratio
from turnrl.plugin.errors import RecipeError, check_numbers, check_one_of
from turnrl.types.objective import RatioLevel, SampledTokens

_CLIPS: dict[RatioLevel, tuple[float, float]] = {
    "token": (0.2, 0.2),
    "turn": (3e-4, 4e-4),
    "trajectory": (3e-4, 4e-4),
}
"""Default bounds: PPO's for tokens, and GSPO's for segments, whose mean ratios are much nearer to
1."""


@dataclass(frozen=True)
class ClippedSurrogate(TokenObjective):
    """PPO's clipped surrogate, of tokens, or of whole turns or trajectories (GSPO).

    Args:
        clip_low: Lower clip bound: a token with a negative advantage has no gradient once its ratio
            is below 1 - clip_low. Null takes the usual value for the ratio's level, 0.2 for tokens
            and 3e-4 for turns and trajectories.
        clip_high: Upper clip bound: a token with a positive advantage has no gradient once its
            ratio is above 1 + clip_high. Null takes 0.2, or 4e-4.
        ratio_level: `token` uses the probability ratio of each token; `turn` and `trajectory` use
            the geometric mean over a turn or a trajectory.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    ratio_level: RatioLevel = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(get_args(RatioLevel), "model.objective.", self, "ratio_level")
        check_numbers("model.objective.", self, "clip_low", "clip_high")
        low, high = self.clips
        if not 0 < low < 1 or not high > 0:
            raise RecipeError(
                f"model.objective.clip_low is {low} and clip_high {high}. "
                "Set clip_low between 0 and 1, clip_high above 0."
            )

    @property
    def clips(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, with defaults filled in."""
        low, high = _CLIPS[self.ratio_level]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def token_losses(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The equation; with `ratio`, and `clip_fraction`: 1 for tokens whose gradient the clipping
        removes."""
        ratio, (low, high) = probability_ratio(tokens, self.ratio_level), self.clips
        gain = ratio * tokens.advantages
        clipped = ratio.clamp(1 - low, 1 + high) * tokens.advantages
        metrics = {"ratio": ratio, "clip_fraction": (clipped < gain).float()}
        return -torch.minimum(gain, clipped), metrics
