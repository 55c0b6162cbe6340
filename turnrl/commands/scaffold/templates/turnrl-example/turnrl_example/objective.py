"""An objective: from sampled tokens and their advantages to a loss."""

from dataclasses import dataclass

from torch import Tensor

from turnrl import TokenObjective
from turnrl.types import SampledTokens


@dataclass(frozen=True)
class ExampleProximal(TokenObjective):
    """loss = -(r A - |A| (r - 1)^2 / (2 width)) with r = exp(l - l_old): a token's ratio is pulled
    back towards 1, where the clipped surrogate only stops it. For A > 0 the loss is least at
    r = 1 + width, for A < 0 at r = 1 - width (SPO, arXiv 2401.16025).

    Args:
        width: How far a ratio may go.
    """

    width: float = 0.2

    def token_losses(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        gain = ratio * tokens.advantages
        penalty = tokens.advantages.abs() * (ratio - 1).square() / (2 * self.width)
        return penalty - gain, {"ratio": ratio}  # means over tokens are logged as train/ratio
