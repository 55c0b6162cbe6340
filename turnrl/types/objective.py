"""The contract of an objective, the loss, and the streams of tokens that it sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from turnrl.plugin.errors import PluginError
from turnrl.plugin.hooks import contract
from turnrl.types.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["old", "reference", "sampler"]
"""Log-probabilities that an objective may compare the policy's own with:

    old         the learner's, before the first step of the iteration
    reference   those of the policy that training began from; needs LoRA, and one more forward pass
    sampler     those that the engine computed when it sampled the tokens
"""
RatioLevel = Literal["token", "turn", "trajectory"]
"""What one probability ratio is of."""


@dataclass(frozen=True)
class SampledTokens:
    """The N sampled tokens of a minibatch, as streams of one number for each, (N,).

    Args:
        logprobs: Log-probabilities under the current policy. They carry the gradient.
        advantages: In units of normalised reward. A token has the advantage of its turn.
        weights: Each token's share of the optimiser step's loss, from `Objective.token_weights`.
        entropies: Entropies of the policy's distributions in nats, without a gradient.
        trajectories: The number of each token's trajectory.
        turns: The number of each token's turn. Two trajectories never share one.
        compared: The other log-probabilities that the objective needs.
        exact_logprobs: The old log-probabilities without dropout, for the comparison with the
            sampler's; None if they are the old ones.
    """

    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    entropies: Tensor
    trajectories: Tensor
    turns: Tensor
    compared: Mapping[Need, Tensor] = field(default_factory=dict)
    exact_logprobs: Tensor | None = None

    @property
    def old_logprobs(self) -> Tensor:
        """The learner's, before the first step. In the first step they are the current ones."""
        return self._compared("old")

    @property
    def reference_logprobs(self) -> Tensor:
        """Those of the policy that training began from."""
        return self._compared("reference")

    @property
    def sampler_logprobs(self) -> Tensor:
        """Those that the engine computed."""
        return self._compared("sampler")

    def _compared(self, need: Need) -> Tensor:
        if need not in self.compared:
            raise PluginError(
                f"an objective reads {need}_logprobs, and its needs lack {need!r}. Add it to needs."
            )
        return self.compared[need]

    def importance_weights(self, cap: float) -> Tensor:
        """Truncated importance weights, min(p_old / p_sampler, cap). They correct for a sampler
        whose probabilities differ from the learner's. A sampler has no dropout, so p_old is here
        computed without it."""
        old = self.old_logprobs if self.exact_logprobs is None else self.exact_logprobs
        return (old - self.sampler_logprobs).exp().clamp(max=cap)


@contract("turnrl_objectives")
class Objective(ABC):
    """Maps the sampled tokens of a minibatch to a loss. It sees no groups, no rewards and no text;
    turns and trajectories only as numbers by which tokens belong together.

    Extend `TokenObjective` instead if the loss is a sum over tokens: it brings the aggregation, the
    KL penalty and importance weights.

    Attributes:
        value_coef: Weight of the value loss of an estimator's critic, beside the policy's loss.
    """

    value_coef: float = 0.1

    @property
    def needs(self) -> frozenset[Need]:
        """The log-probabilities that `loss` reads beside the policy's own. Others are not computed,
        and reading them is an error."""
        return frozenset({"old"})

    @abstractmethod
    def loss(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch. The losses of a step's minibatches are added up, and processes
        average their sums.

        Args:
            tokens: The sampled tokens of whole trajectories.
        Returns:
            The loss, a scalar that carries the gradient; and for each metric `train/NAME` of the
            objective's own the sum over the tokens, a scalar.
        """

    @abstractmethod
    def token_weights(self, token_counts: Tensor, tokens: float, trajectories: float) -> Tensor:
        """The weight of each sampled token of each trajectory of one optimiser step.

        A step's loss is a plain sum over its minibatches, and processes are averaged. So weights
        are shares of the *whole* step: a mean of minibatch means would differ from the stated mean
        if their lengths differ.

        Args:
            token_counts: (B,), sampled tokens of each of the step's trajectories in this process.
            tokens: The step's sampled tokens, averaged over processes.
            trajectories: The step's trajectories, averaged over processes.
        Returns:
            (B,), the weight of each token of each trajectory.
        """

    def for_engine(self, engine: Engine) -> Objective:
        """The objective for tokens that an engine samples, with settings that depend on the engine
        filled in. By default this one."""
        return self
