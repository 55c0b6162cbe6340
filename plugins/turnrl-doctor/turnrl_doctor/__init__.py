"""`turnrl doctor [RECIPE]` examines now whatever could fail later, and plans a GPU's memory.

command    the command line
checks     the examinations, as `Check`s; `turnrl fit` runs the quick ones too
rehearsal  the recipe's own parts, tried on a few questions
staged     the turn scheme of scripted attempts
tools      tools, called with arguments that they allow, and judged
miniature  the recipe's model, small enough for any machine
memory     the plan, applied to a recipe
plan       the plan itself: functions of numbers, like work, counts, speed and table
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
