"""`turnrl completion SHELL`: prints a completion script for commands, recipes and settings."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import shtab

from turnrl.commands.parser import command_line
from turnrl.plugin.hooks import Commands
from turnrl.recipe.bundled import bundled_recipes


def add_completion_command(commands: Commands) -> None:
    """Add `completion` to argparse's sub-parsers."""
    parser = commands.add_parser("completion", help="print a script for tab completion")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    parser.set_defaults(run=lambda parsed: print(_script(parsed.shell)))


def _recipe() -> dict[str, object]:
    """Completion of a recipe: files and, in shells that can mix the two, the names of the recipes
    that come with turnrl."""
    names, function = " ".join(bundled_recipes()), "_turnrl_recipe_file"
    bash = f"{function}() {{ compgen -W '{names}' -- $1; compgen -f -- $1; }}"
    zsh = f"{function}() {{ compadd -- {names}; _files; }}"
    fish = f"{shtab.FILE['fish']} {names}"
    ours = {"bash": function, "zsh": function, "fish": fish}
    return {**shtab.FILE, **ours, "preamble": {"bash": bash, "zsh": zsh}}


def _script(shell: str) -> str:
    every: Any = command_line()
    (commands,) = every._subparsers._group_actions
    for parser in commands.choices.values():
        for action in [action for action in parser._actions if action.dest == "recipe"]:
            action.complete = _recipe()
            if action.nargs == argparse.REMAINDER:  # a recipe's settings follow
                action.nargs, parser.prefix_chars = "*", "-"
                present = {option for a in parser._actions for option in a.option_strings}
                for option in sorted({f"--{key}" for key in _settings()} - present):
                    parser.add_argument(option)
    return str(shtab.complete(every, shell))


@functools.cache
def _settings() -> set[str]:
    """Dotted keys of every setting of turnrl's own classes."""
    from lightning.pytorch.cli import LightningArgumentParser

    from turnrl.recipe.build import CLASSES

    parser = LightningArgumentParser()
    for section, cls in CLASSES.items():
        parser.add_lightning_class_args(cls, section)
    keys = {action.dest for action in parser._actions if ".help" not in action.dest}
    top = {"seed_everything", "ckpt_path", "split"}
    return (keys | top) - {"help", "config", "print_config", *CLASSES}
