"""What the framework itself brings, through the hooks that every plugin uses.

Classes that need torch are imported when they are asked for. The framework's own commands are in
`turnrl.commands`, so that one command imports no other.
"""

from collections.abc import Callable, Iterable
from typing import Any

from turnrl.plugins import hookimpl
from turnrl.types import AdvantageEstimator, AnswerRule, Phrase, QuestionSource


@hookimpl
def turnrl_estimators() -> list[type[AdvantageEstimator]]:
    """MT-GRPO and the paper's baselines."""
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel

    return [TurnLevel, OutcomeOnly, Merged]


@hookimpl
def turnrl_answers() -> list[type[AnswerRule]]:
    """SQuAD's comparison of phrases."""
    return [Phrase]


@hookimpl
def turnrl_openers() -> Iterable[Any]:
    """Question sets by name: files, presets and the hub."""
    from turnrl.data.known import ByName

    return [ByName()]


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    """The question sets that are components, with settings and a corpus."""
    from turnrl.data.paragraphs import HotpotParagraphs

    return [HotpotParagraphs]


@hookimpl
def turnrl_callbacks() -> Iterable[Callable[..., Any]]:
    """What watches every run: alarms, its console, its record, its export, its curves."""
    from turnrl.commands.report.curves import Curves
    from turnrl.recipe.tidying import Tidy
    from turnrl.run.alarms.watch import Alarms
    from turnrl.run.card.ending import ExportsPolicy
    from turnrl.run.console.health import LearnsNothing
    from turnrl.run.console.lines import iteration_lines
    from turnrl.run.console.resumed import FirstFigures
    from turnrl.run.loggers import ToLoggers
    from turnrl.run.recording import Recorder

    printing = (LearnsNothing, FirstFigures, iteration_lines)
    return [Alarms, ExportsPolicy, *printing, Tidy, Recorder, ToLoggers, Curves]
