"""turnrl's own components, in the hooks that every plugin uses.

Each hook imports its classes when it is called, because some need torch. turnrl's commands are in
`turnrl.commands`, so that one command imports no other.
"""

from collections.abc import Callable, Iterable

from turnrl.plugins import hookimpl
from turnrl.types import (
    AdvantageEstimator,
    AnswerRule,
    Check,
    Phrase,
    QuestionSource,
    Reward,
    Toolset,
)


@hookimpl
def turnrl_estimators() -> list[type[AdvantageEstimator]]:
    """MT-GRPO and the paper's baselines."""
    from turnrl.credit import Merged, OutcomeOnly, TurnLevel

    return [TurnLevel, OutcomeOnly, Merged]


@hookimpl
def turnrl_tools() -> list[type[Toolset]]:
    """A function as a tool."""
    from turnrl.agent.function_tools import FunctionTool

    return [FunctionTool]


@hookimpl
def turnrl_rewards() -> list[type[Reward]]:
    """A function as a reward."""
    from turnrl.function_rewards import FunctionReward

    return [FunctionReward]


@hookimpl
def turnrl_answers() -> list[type[AnswerRule]]:
    """SQuAD's comparison of phrases."""
    return [Phrase]


@hookimpl
def turnrl_openers() -> Iterable[object]:
    """Question sets by name: files, presets and the hub."""
    from turnrl.data.known import ByName

    return [ByName()]


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    """Question sets with settings and a corpus."""
    from turnrl.data.paragraphs import HotpotParagraphs, SquadParagraphs

    return [HotpotParagraphs, SquadParagraphs]


@hookimpl
def turnrl_checks() -> Iterable[type[Check]]:
    """Checks of settings that matter only to a run."""
    from turnrl.checks import SamplingAhead

    return [SamplingAhead]


@hookimpl
def turnrl_callbacks() -> Iterable[Callable[..., object]]:
    """The callbacks of every run: alarms, console, memory plan, record, export, curves."""
    from turnrl.checks import Plan
    from turnrl.recipe.tidying import Tidy
    from turnrl.watch.alarms import Alarms
    from turnrl.watch.card import ExportsPolicy
    from turnrl.watch.console import iteration_lines
    from turnrl.watch.curves import Curves
    from turnrl.watch.loggers import ToLoggers
    from turnrl.watch.recorder import Recorder
    from turnrl.watch.resumed import FirstFigures

    printing = (FirstFigures, iteration_lines)
    return [Alarms, ExportsPolicy, *printing, Tidy, Plan, Recorder, ToLoggers, Curves]
