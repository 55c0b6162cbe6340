"""turnrl's own components, in the hooks that every plugin uses.

The hooks return references, because most classes need torch, and a run needs few of them. turnrl's
commands are in `turnrl.commands`, so that one command imports no other.
"""

from turnrl.plugin.hooks import hookimpl


@hookimpl
def turnrl_estimators() -> list[str]:
    """MT-GRPO and the paper's baselines."""
    return [f"turnrl.credit.estimators:{name}" for name in ("TurnLevel", "OutcomeOnly", "Merged")]


@hookimpl
def turnrl_objectives() -> list[str]:
    """PPO's clipped surrogate."""
    return ["turnrl.objectives.clipped:ClippedSurrogate"]


@hookimpl
def turnrl_tools() -> list[str]:
    """A function as a tool."""
    return ["turnrl.agent.function_tools:FunctionTool"]


@hookimpl
def turnrl_rewards() -> list[str]:
    """A function as a reward."""
    return ["turnrl.rewards.functions:FunctionReward"]


@hookimpl
def turnrl_answers() -> list[str]:
    """SQuAD's comparison of phrases."""
    return ["turnrl.types:Phrase"]


@hookimpl
def turnrl_datasets() -> list[str]:
    """Question sets with settings and a corpus."""
    return [f"turnrl.data.paragraphs:{name}" for name in ("HotpotParagraphs", "SquadParagraphs")]


@hookimpl
def turnrl_callbacks() -> list[str]:
    """The callbacks of every run: alarms, export, console, record, curves."""
    return [
        "turnrl.watch.alarms:Alarms",
        "turnrl.watch.card:ExportsPolicy",
        "turnrl.watch.resume_notes:ResumeNotes",
        "turnrl.watch.console:iteration_lines",
        "turnrl.recipe.tidying:Tidy",
        "turnrl.watch.recorder:Recorder",
        "turnrl.watch.curves:Curves",
    ]
