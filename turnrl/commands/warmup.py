"""`turnrl warmup RECIPE --to FOLDER`: teach a policy the form of its turns before `turnrl fit`.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import yaml

from turnrl.errors import RecipeError, at_least
from turnrl.plugins import named
from turnrl.recipe.bundled import shown_recipe
from turnrl.recipe.fit import add_recipe_command
from turnrl.recipe.given import Given
from turnrl.run.folders import TRANSCRIPT
from turnrl.text import say

if TYPE_CHECKING:
    from turnrl.commands import Commands
    from turnrl.recipe.build import Built

_SETTINGS = {
    "to": (str | None, None, "Folder that the policy is written to, for policy.model"),
    "steps": (int, 50, "Optimiser steps"),
    "batch_size": (int, 16, "Demonstrated attempts per step"),
    "lr": (float | None, None, "Peak of the learning rate (default: 5e-4 under LoRA, else 2e-4)"),
    "by": (
        str | None,
        None,
        "A function of an attempt and of random numbers that gives the text of the next turn, by "
        "its dotted path; null for random play",
    ),
    "held_out": (int, 32, "Questions that the policy is tried on before and after; 0 for none"),
}


def add_warmup_command(commands: Commands) -> None:
    """Add `warmup` to argparse's sub-parsers."""
    summary = "teach a policy the form of its turns, before fit"
    add_recipe_command(commands, "warmup", summary, _warm_up, _SETTINGS, prepare=_prepare)


def _prepare(given: Given) -> Given:
    """Refuse a missing folder before torch is loaded. The run keeps no folder of its own."""
    if given.asks_for_help:
        return given
    if not given.contents.get("to"):
        raise RecipeError(
            "turnrl warmup writes a policy, and --to does not say where. Give a folder that "
            "'turnrl fit' then begins with: --to warm."
        )
    place = Path(given.contents["to"])
    held = sorted(file.name for file in place.iterdir()) if place.is_dir() else []
    if place.is_file() or (held and TRANSCRIPT not in held):
        is_what = f"holds {held[0]}" if held else "is a file"
        raise RecipeError(
            f"--to is {str(place)!r}, which {is_what}. Give a new folder, or one that a warm-up "
            "wrote, which is replaced."
        )
    written = {
        name: given.contents.get(name, _SETTINGS[name][1]) for name in ("steps", "batch_size")
    }
    numbers = {name: yaml.safe_load(str(value)) for name, value in written.items()}
    at_least(1, "", SimpleNamespace(**numbers), *numbers, whole=True, optional=False)
    if given.contents.get("by"):
        named("--by", given.contents["by"])
    trainer = {**given.contents["trainer"], "logger": False}
    contents = {**given.contents, "trainer": trainer}
    return replace(given, contents=contents, destination=str(place))


def _warm_up(built: Built) -> None:
    from turnrl.data.questions import QuestionData
    from turnrl.module import MTGRPO
    from turnrl.warmup import warm_up

    module, data, settings = built.module, built.data, built.settings
    if not isinstance(module, MTGRPO) or not isinstance(data, QuestionData):
        has = f"{type(module).__name__} and {type(data).__name__}"
        raise RecipeError(f"'turnrl warmup' warms up MTGRPO on QuestionData, not {has}.")
    kept = ("accelerator", "devices", "precision", "gradient_clip_val")
    given = built.given.contents["trainer"]
    chosen = {name: given[name] for name in kept if given.get(name) is not None}
    done = warm_up(
        module,
        data,
        settings["to"],
        settings["steps"],
        settings["batch_size"],
        settings["lr"],
        named("--by", settings["by"]) if settings["by"] else None,
        settings["held_out"],
        chosen,
    )
    if done.before is not None and done.after is not None:
        rows = {
            "turns with a call that worked or an answer in the right form": "in_form",
            "attempts with a call that worked": "calls",
            "attempts that ended by an answer or their environment": "ends",
        }
        print("before  after")
        for text, name in rows.items():
            before, after = (one._asdict()[name] for one in (done.before, done.after))
            print(f"{before:6.2f} {after:6.2f}  {text}")
    print(f"{done.losses[0]:6.3f} {done.losses[1]:6.3f}  loss of the first and the last batch")
    place = Path(settings["to"])
    say(f"written to {place}; some of what it was taught is in {place / TRANSCRIPT}")
    if done.after is not None and module.rollout.specs and not done.after.calls:
        say(
            "no call worked after the warm-up: take more --steps (it took "
            f"{settings['steps']}), or another --lr, before you begin with it"
        )
        return
    print(f"begin with it: turnrl fit {_same(built.given)} --model.policy.model {place}")


def _same(given: Given) -> str:
    """The recipes and options of the command, for `fit`: without its own, and the model's."""
    words, kept = [*given.arguments], list[str]()
    own = [f"--{name}" for name in (*_SETTINGS, "model.policy.model")]
    while words:
        word = words.pop(0)
        if word in own and words:
            words.pop(0)
        elif word.partition("=")[0] not in own:
            kept.append(shown_recipe(word.removeprefix("--config=")))
    return shlex.join(kept)
