"""Environments: worlds that an agent acts in, and that pay for its steps.

world     what all environments share: attempts, their steps, time and end, and what is wrong
own       an attempt whose environment is an object of this process
worker    the thread of environments that are not thread-safe, and random numbers of an attempt
classes   `Environment`: classes of your own
gym       `Gymnasium`: environments of Gymnasium's form
openenv   `OpenEnv`: environments behind a server of OpenEnv
client    a client of its server
tasks     `Seeds`: questions without a data file
rewards   `EnvironmentReward`, `EnvironmentOutcome`, `StepCost`: what steps pay, and what costs
watch     the warning that no attempt ends by its environment
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from turnrl import QuestionSource, Reward, Toolset, hookimpl
from turnrl_environments.classes import Environment as Environment
from turnrl_environments.gym import Gymnasium as Gymnasium
from turnrl_environments.openenv import OpenEnv as OpenEnv
from turnrl_environments.rewards import EnvironmentOutcome as EnvironmentOutcome
from turnrl_environments.rewards import EnvironmentReward as EnvironmentReward
from turnrl_environments.rewards import StepCost as StepCost
from turnrl_environments.tasks import Seeds as Seeds


@hookimpl
def turnrl_tools() -> Iterable[type[Toolset]]:
    """The environments."""
    return [Environment, Gymnasium, OpenEnv]


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    """The tasks."""
    return [Seeds]


@hookimpl
def turnrl_rewards() -> Iterable[type[Reward]]:
    """What environments pay."""
    return [EnvironmentReward, EnvironmentOutcome, StepCost]


@hookimpl
def turnrl_callbacks() -> Iterable[Callable[..., object]]:
    """The warning that no attempt ends by its environment."""
    from turnrl_environments.watch import Endings

    return [Endings]
