"""`turnrl plugins`: the installed plugins, and what they bring."""

from __future__ import annotations

import argparse

from turnrl.plugins import HOOKS, Commands, load_plugins
from turnrl.text import say


def add_plugins_command(commands: Commands) -> None:
    """Add `plugins` to argparse's sub-parsers."""
    listing = commands.add_parser("plugins", help="list installed plugins and what they bring")
    listing.set_defaults(run=_list)


def _list(_: argparse.Namespace) -> None:
    """Print each plugin with its distribution, version, hooks and components."""
    for plugin in load_plugins():
        print(f"{plugin.name}  ({plugin.distribution} {plugin.version})")
        for hook in sorted(HOOKS):
            brought = plugin.brings(hook)
            if hook == "turnrl_commands":
                subparsers = argparse.ArgumentParser().add_subparsers()
                for add in brought:
                    add(subparsers)
                names = list(subparsers.choices)
            elif hook == "turnrl_openers":
                names = [opener.takes for opener in brought]
            else:
                names = [getattr(thing, "__name__", repr(thing)) for thing in brought]
            if names:
                say(f"    {hook:18} {', '.join(names)}", indent=" " * 19)
