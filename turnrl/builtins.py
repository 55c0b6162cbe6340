"""Classes that the core itself brings to a recipe, through the hooks that every plugin uses.

Those that need torch are imported when they are asked for.
"""

from turnrl.plugins import hookimpl
from turnrl.types import AdvantageEstimator, AnswerRule, Phrase


@hookimpl
def turnrl_estimators() -> list[type[AdvantageEstimator]]:
    """MT-GRPO and the paper's baselines."""
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel

    return [TurnLevel, OutcomeOnly, Merged]


@hookimpl
def turnrl_answers() -> list[type[AnswerRule]]:
    """SQuAD's comparison of phrases."""
    return [Phrase]
