"""`turnrl doctor [RECIPE]` finds what would fail later in a run, and plans a GPU's memory.

command    the command line
checks     the checks; `turnrl fit` runs the quick ones too
rehearsal  the recipe's own parts, tried on a few questions
staged     the segmenter of scripted attempts
tools      tools, called with arguments that they allow, and judged
miniature  the recipe's model, small enough for any machine
memory     the check that plans a GPU's memory
planning   the plan of a recipe, and the settings that it chooses
plan       the plan itself: functions of numbers, like work and counts
"""

from __future__ import annotations

from turnrl import hookimpl


@hookimpl
def turnrl_commands() -> list[str]:
    """The command `doctor`."""
    return ["turnrl_doctor.command:add_doctor_command"]


@hookimpl
def turnrl_checks() -> list[str]:
    """Checks of `turnrl doctor`, in the order in which they are shown."""
    before = ("Versions", "Gpu", "RunFolder", "Disk", "ModelFiles", "Window", "Sampler")
    return [
        *(f"turnrl_doctor.checks:{name}" for name in (*before, "ChatTemplate")),
        "turnrl_doctor.memory:MemoryPlan",
        "turnrl_doctor.checks:Rehearsal",
    ]
