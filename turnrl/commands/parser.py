"""The parser of the command line: the framework's commands and those of plugins."""

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from turnrl.commands import load_adder
from turnrl.plugin.errors import PluginError, RecipeError, blaming, suggest_name
from turnrl.plugin.hooks import LOAD_VARIABLE, Commands, Plugin

_USUAL = ("fit", "eval", "recipes", "doctor")
"""Commands that `turnrl --help` lists first."""


class _Parser(argparse.ArgumentParser):
    """Raises mistakes as errors of turnrl, and suggests similar options. Every command's parser has
    this class."""

    # argparse calls it for a sub-command too, so the message names the sub-command
    def parse_known_args(self, *args: object, **options: object) -> Any:
        parsed, unknown = super().parse_known_args(*args, **options)
        if unknown:
            near = suggest_name(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unknown argument {unknown[0]!r}.{near}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith((".", "?")) else "."
        raise RecipeError(f"{message}{stop} '{self.prog} --help' lists what there is.")


def build_parser(
    own: Iterable[str], plugins: Sequence[Plugin], faults: list[PluginError] | None = None
) -> tuple[argparse.ArgumentParser, Commands]:
    """The parser with these commands of turnrl and those of the plugins, and its sub-parsers. A
    command that cannot be added is left out and put into `faults`, if given."""
    parser: argparse.ArgumentParser = _Parser(
        prog="turnrl",
        description="Train agents that use tools over several turns, with credit turn by turn.",
    )
    parser.add_argument("--version", action="version", version=f"turnrl {version('turnrl')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    adders = [(name, load_adder(name), "turnrl") for name in own]
    for plugin in plugins:
        adders += [
            (plugin.name, add, str(plugin)) for add in plugin.load_components("turnrl_commands")
        ]
    for _, add, owner in sorted(adders, key=lambda each: (*_USUAL, each[0]).index(each[0])):
        try:
            with blaming(PluginError, f"a command of {owner}", f"Fix it, or see {LOAD_VARIABLE}."):
                add(commands)
        except PluginError as fault:
            if faults is None:
                raise
            faults.append(fault)
    return parser, commands
