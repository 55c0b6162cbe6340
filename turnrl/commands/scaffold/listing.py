"""`turnrl plugins`: the installed plugins, and what they bring."""

from __future__ import annotations

import argparse

from turnrl.commands import COMMANDS
from turnrl.commands.parser import build_parser
from turnrl.plugin.errors import PluginError
from turnrl.plugin.hooks import HOOKS, Commands, Plugin, working_plugins
from turnrl.plugin.text import say


def add_plugins_command(commands: Commands) -> None:
    """Add `plugins` to argparse's sub-parsers."""
    listing = commands.add_parser("plugins", help="list installed plugins and what they bring")
    listing.set_defaults(run=_list)


def _list(_: argparse.Namespace) -> int:
    """Print each plugin with its distribution, version, hooks and components, and the faults of
    those that do not work."""
    working, faults = working_plugins(*HOOKS)
    for plugin in working:
        print(f"{plugin.name}  ({plugin.distribution} {plugin.version})")
        for hook in sorted(HOOKS):
            brought = plugin.load_components(hook)
            if hook == "turnrl_commands":
                names = _commands_of(plugin, faults)
            else:
                names = [getattr(thing, "__name__", repr(thing)) for thing in brought]
            if names:
                say(f"    {hook:18} {', '.join(names)}", indent=" " * 19)
    for fault in faults:
        say(f"{type(fault).__name__}: {fault}", indent="    ")
    return faults[0].exit_code if faults else 0


def _commands_of(plugin: Plugin, faults: list[PluginError]) -> list[str]:
    """The names of the commands that a plugin adds to turnrl's own; their faults go to `faults`."""
    _, commands = build_parser(COMMANDS, [plugin], faults)
    return [name for name in commands.choices if name not in COMMANDS]
