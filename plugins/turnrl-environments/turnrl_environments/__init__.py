"""Environments: worlds in which an agent acts, and which pay for its steps.

world     the common part: attempts, their steps, their time, their end, and their faults
own       an attempt whose environment is an object of this process
worker    the thread of environments that are not thread-safe, and random numbers of an attempt
classes   `Environment`: classes of your own
gym       `Gymnasium`: environments of Gymnasium's form
openenv   `OpenEnv`: environments behind a server of OpenEnv
client    a client of OpenEnv's server
tasks     `Seeds`: questions without a data file
rewards   `EnvironmentReward`, `EnvironmentOutcome`, `StepCost`: rewards and costs of steps
watch     the warning that environments end no attempt
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
    """The rewards that environments pay."""
    return [EnvironmentReward, EnvironmentOutcome, StepCost]


@hookimpl
def turnrl_callbacks() -> Iterable[Callable[..., object]]:
    """The warning that environments end no attempt."""
    from turnrl_environments.watch import Endings

    return [Endings]
