"""An objective of anybody's, applied to a minibatch."""

from typing import get_args

from torch import Tensor

from turnrl.plugin.errors import PluginError, blaming, describe_value
from turnrl.types import Objective
from turnrl.types.objective import Need, SampledTokens

OWN_METRICS = ("loss", "entropy", "value_loss", "logprob_gap")
"""Metrics of every run's tokens, which an objective may not name."""


def check_needs(objective: Objective) -> None:
    """Refuse an objective that needs log-probabilities which do not exist.

    Raises:
        PluginError: Naming them.
    """
    known = get_args(Need)
    if unknown := [need for need in objective.needs if need not in known]:
        raise PluginError(
            f"{type(objective).__name__}.needs has {unknown[0]!r}. Choose from {', '.join(known)}."
        )


def compute_loss(objective: Objective, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a minibatch, and sums of metrics over its tokens; see `Objective.loss`.

    Raises:
        PluginError: If the objective raises, or returns something else.
    """
    name = f"{type(objective).__name__}.loss"
    with blaming(PluginError, name, "Fix the objective."):
        loss, sums = objective.loss(tokens)
        scalars = {
            "the loss": loss,
            **{f"the metric {key!r}": value for key, value in sums.items()},
        }
    for what, value in scalars.items():
        if not isinstance(value, Tensor) or value.ndim:
            shape = tuple(value.shape) if isinstance(value, Tensor) else describe_value(value)
            raise PluginError(f"{name}: {what} is {shape}. Return a tensor without dimensions.")
    if taken := [key for key in sums if key in OWN_METRICS]:
        raise PluginError(f"{name} has the metric {taken[0]!r}, which every run has. Rename it.")
    return loss, dict(sums)
