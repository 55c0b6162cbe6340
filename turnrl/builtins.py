"""Classes that the core itself brings to a recipe, through the hooks that every plugin uses.

The classes are imported when they are asked for, because they need torch.
"""

from turnrl.plugins import hookimpl
from turnrl.types import AdvantageEstimator


@hookimpl
def turnrl_estimators() -> list[type[AdvantageEstimator]]:
    """MT-GRPO and the paper's baselines."""
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel

    return [TurnLevel, OutcomeOnly, Merged]
