"""`turnrl doctor [RECIPE]`: what can fail later is examined now, and a GPU's memory planned.

command    the command line
checks     what is examined, as `Check`s, of which `turnrl fit` runs the quick ones too
rehearsal  the recipe's own parts, tried on a few questions
staged     the turn scheme of attempts that are scripted
tools      tools as they are tried
arguments  what a tool is called with
miniature  the recipe's model and engine, small enough for any machine
memory     the plan, applied to a recipe
plan       the plan itself: functions of numbers, as are work, counts, speed and table
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
    from turnrl_doctor.rehearsal import Rehearsal

    return [
        checks.Versions,
        checks.Gpu,
        checks.FourBit,
        checks.RunFolder,
        checks.Disk,
        checks.ModelFiles,
        checks.Window,
        checks.Sampler,
        checks.Template,
        MemoryPlan,
        Rehearsal,
    ]
