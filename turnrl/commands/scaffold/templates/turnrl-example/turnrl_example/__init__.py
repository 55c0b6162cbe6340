"""Classes that the package brings to turnrl: each hook returns some, which recipes know by name."""

from collections.abc import Iterable

from turnrl import AdvantageEstimator, Engine, QuestionSource, Reward, Segmenter, Tool, hookimpl
from turnrl_example.estimator import ExampleToGo
from turnrl_example.outcome_reward import ExampleLookedUp
from turnrl_example.segmenter import ExampleTurns
from turnrl_example.source import ExampleQuestions
from turnrl_example.tool import ExampleLookup
from turnrl_example.turn_reward import ExampleNewlyFound


@hookimpl
def turnrl_tools() -> Iterable[type[Tool]]:
    return [ExampleLookup]


@hookimpl
def turnrl_segmenters() -> Iterable[type[Segmenter]]:
    return [ExampleTurns]


@hookimpl
def turnrl_rewards() -> Iterable[type[Reward]]:
    return [ExampleNewlyFound, ExampleLookedUp]


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    return [ExampleQuestions]


@hookimpl
def turnrl_estimators() -> Iterable[type[AdvantageEstimator]]:
    return [ExampleToGo]


@hookimpl
def turnrl_engines() -> Iterable[type[Engine]]:
    from turnrl_example.engine import ExampleEngine  # needs torch, which few commands do

    return [ExampleEngine]
