"""`turnrl warmup RECIPE --to FOLDER`: teach a policy the form of its turns before `turnrl fit`.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docstring_parser

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import import_object
from turnrl.plugin.text import say
from turnrl.recipe.fit import add_recipe_command
from turnrl.recipe.invocation import Invocation
from turnrl.recipe.merging import expand_variables
from turnrl.sft.settings import TRANSCRIPT, WarmUp

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands
    from turnrl.recipe.build import Built

_KINDS = {"lr": float | None, "by": str | None}
_HELP = {
    parameter.arg_name: " ".join((parameter.description or "").split())
    for parameter in docstring_parser.parse(WarmUp.__doc__ or "").params
}
_SETTINGS = {
    "to": (str | None, None, "Folder that the policy is written to, for model.policy.model"),
    **{
        field.name: (_KINDS.get(field.name, int), field.default, _HELP[field.name])
        for field in fields(WarmUp)
    },
}


def add_warmup_command(commands: Commands) -> None:
    """Add `warmup` to argparse's sub-parsers."""
    summary = "teach a policy the form of its turns, before fit"
    add_recipe_command(commands, "warmup", summary, _warm_up, _SETTINGS, prepare=_prepare)


def _prepare(invocation: Invocation) -> Invocation:
    """Refuse a missing folder before torch is loaded. The run has no folder of its own."""
    if invocation.help_options:
        return invocation
    if not invocation.contents.get("to"):
        raise RecipeError(
            "turnrl warmup writes a policy, and --to does not say where. Give a folder that "
            "'turnrl fit' then begins with: --to warm."
        )
    folder = Path(str(expand_variables(invocation.contents["to"], "to")))
    held = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if folder.is_file() or (held and TRANSCRIPT not in held):
        is_what = f"holds {held[0]}" if held else "is a file"
        raise RecipeError(
            f"--to is {str(folder)!r}, which {is_what}. Give a new folder, or one that a warm-up "
            "wrote, which is replaced."
        )
    trainer = {**invocation.contents["trainer"], "logger": False}
    contents = {**invocation.contents, "trainer": trainer}
    return replace(invocation, contents=contents, destination=str(folder))


def _parse_settings(settings: Mapping[str, Any]) -> WarmUp:
    """The warm-up's settings, from those of the command.

    Raises:
        RecipeError: If one is out of range, or `by` names nothing that can be called.
    """
    chosen = {f.name: settings[f.name] for f in fields(WarmUp)}
    chosen["by"] = import_object("--by", chosen["by"]) if chosen["by"] else None
    return WarmUp(**chosen)


def _warm_up(built: Built) -> None:
    from turnrl.sft.warmup import warm_up

    (module, data), settings = built.agent("turnrl warmup"), _parse_settings(built.settings)
    kept = ("accelerator", "devices", "precision", "gradient_clip_val")
    trainer = built.invocation.contents["trainer"]
    chosen = {name: trainer[name] for name in kept if trainer.get(name) is not None}
    folder = Path(built.settings["to"])
    losses = warm_up(module, data, folder, settings, chosen)
    print(f"loss of the first batch {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    say(f"written to {folder}; some of what it was taught is in {folder / TRANSCRIPT}")
    same = built.invocation.words(without=(*_SETTINGS, "model.policy.model"))
    print(f"begin with it: turnrl fit {same} --model.policy.model {folder}")
