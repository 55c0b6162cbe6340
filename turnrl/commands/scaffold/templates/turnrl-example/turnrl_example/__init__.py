"""Classes that the package brings to turnrl: each hook returns some, which recipes know by name."""

from collections.abc import Iterable

import turnrl
from turnrl import AdvantageEstimator, Player, QuestionSource, Segmenter, Tool
from turnrl.engines import EngineSettings
from turnrl.types import Reward
from turnrl_example.estimator import ExampleToGo
from turnrl_example.outcome_reward import ExampleLookedUp
from turnrl_example.player import ExampleDesk
from turnrl_example.segmenter import ExampleTurns
from turnrl_example.source import ExampleQuestions
from turnrl_example.tool import ExampleLookup
from turnrl_example.turn_reward import ExampleNewlyFound


@turnrl.hookimpl
def turnrl_tools() -> Iterable[type[Tool]]:
    return [ExampleLookup]


@turnrl.hookimpl
def turnrl_segmenters() -> Iterable[type[Segmenter]]:
    return [ExampleTurns]


@turnrl.hookimpl
def turnrl_players() -> Iterable[type[Player]]:
    return [ExampleDesk]


@turnrl.hookimpl
def turnrl_rewards() -> Iterable[type[Reward]]:
    return [ExampleNewlyFound, ExampleLookedUp]


@turnrl.hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    return [ExampleQuestions]


@turnrl.hookimpl
def turnrl_estimators() -> Iterable[type[AdvantageEstimator]]:
    return [ExampleToGo]


@turnrl.hookimpl
def turnrl_objectives() -> Iterable[type[turnrl.Objective]]:
    from turnrl_example.objective import ExampleProximal  # needs torch, which few commands do

    return [ExampleProximal]


@turnrl.hookimpl
def turnrl_engines() -> Iterable[type[EngineSettings]]:
    from turnrl_example.engine import ExampleEngine  # needs torch, which few commands do

    return [ExampleEngine]
