"""`turnrl doctor [RECIPE]`: what can fail later is examined now, and a GPU's memory planned.

command   the command line
checks    what is examined, as `Check`s, of which `turnrl fit` runs the quick ones too
trial     a few tokens sampled and learned from by a miniature of the recipe's model
memory    the plan, applied to a recipe
plan      the plan itself: functions of numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import Check, hookimpl
from turnrl_doctor.command import add_doctor_command


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """The command `doctor`."""
    return [add_doctor_command]


@hookimpl
def turnrl_checks() -> Iterable[type[Check]]:
    """Checks of `turnrl doctor`, in the order in which they are shown."""
    from turnrl_doctor import checks
    from turnrl_doctor.memory import MemoryPlan
    from turnrl_doctor.trial import Trial

    return [
        checks.Versions,
        checks.Gpu,
        checks.FourBit,
        checks.RunFolder,
        checks.Disk,
        checks.ModelFiles,
        checks.Questions,
        checks.Window,
        checks.Template,
        checks.Tools,
        MemoryPlan,
        Trial,
    ]
