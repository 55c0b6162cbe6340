"""The framework's own commands. Plugins bring others: `doctor`, `index`, `credit-check`.

eval/       a recipe, a run or a server scored on questions
recipes     the recipes that come with turnrl, listed and copied
play        a trained agent in a terminal
report/     an HTML page about runs
compare     runs compared on the same questions
sweep/      a recipe trained with several seeds and settings
scaffold/   the beginning of a plugin, and the list of the installed ones
warmup      a policy that learns the form of its turns before `fit`

`fit` is `turnrl.recipe.fit`, because every command that takes a recipe is made there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands

COMMANDS: Mapping[str, str] = {
    "fit": "turnrl.recipe.fit:add_fit_command",
    "eval": "turnrl.commands.eval.command:add_eval_command",
    "recipes": "turnrl.commands.recipes:add_recipes_command",
    "compare": "turnrl.commands.compare:add_compare_command",
    "play": "turnrl.commands.play:add_play_command",
    "plugin": "turnrl.commands.scaffold.command:add_plugin_command",
    "plugins": "turnrl.commands.scaffold.listing:add_plugins_command",
    "report": "turnrl.commands.report.command:add_report_command",
    "sweep": "turnrl.commands.sweep.command:add_sweep_command",
    "warmup": "turnrl.commands.warmup:add_warmup_command",
}
"""For each command, its module, which only it imports, and the function that adds it to argparse's
sub-parsers."""


def load_adder(name: str) -> Callable[[Commands], None]:
    """The function that adds a command to argparse's sub-parsers."""
    module, _, function = COMMANDS[name].partition(":")
    add: Callable[[Commands], None] = getattr(importlib.import_module(module), function)
    return add
