"""Environments: worlds in which an agent acts, and which pay for its steps.

world     the common part: attempts, their steps, their time, their end, and their faults
own       an attempt whose environment is an object of this process
threads   the thread of environments that are not thread-safe
classes   `Environment`: classes of your own
gym       `Gymnasium`: environments of Gymnasium's form
openenv   `OpenEnv`: environments behind a server of OpenEnv
client    a client of OpenEnv's server
tasks     `Seeds`: questions without a data file
rewards   `EnvironmentReward`, `EnvironmentOutcome`, `StepCost`: rewards and costs of steps
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_environments.classes import Environment as Environment
    from turnrl_environments.gym import Gymnasium as Gymnasium
    from turnrl_environments.openenv import OpenEnv as OpenEnv
    from turnrl_environments.rewards import EnvironmentOutcome as EnvironmentOutcome
    from turnrl_environments.rewards import EnvironmentReward as EnvironmentReward
    from turnrl_environments.rewards import StepCost as StepCost
    from turnrl_environments.tasks import Seeds as Seeds

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_tools() -> list[str]:
    """The environments."""
    return [
        "turnrl_environments.classes:Environment",
        "turnrl_environments.gym:Gymnasium",
        "turnrl_environments.openenv:OpenEnv",
    ]


@hookimpl
def turnrl_datasets() -> list[str]:
    """The tasks."""
    return ["turnrl_environments.tasks:Seeds"]


@hookimpl
def turnrl_rewards() -> list[str]:
    """The rewards that environments pay."""
    names = ("EnvironmentReward", "EnvironmentOutcome", "StepCost")
    return [f"turnrl_environments.rewards:{name}" for name in names]
