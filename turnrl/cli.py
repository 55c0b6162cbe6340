"""The command line: finds a command, of turnrl or of a plugin, and runs it.

A user's mistake prints one message and gives an exit code, never a traceback, unless
`TURNRL_DEBUG=1` asks for one.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from turnrl.commands import COMMANDS
from turnrl.commands.parser import build_parser
from turnrl.plugin.errors import (
    OutputClosed,
    PluginError,
    RecipeError,
    TurnRLError,
    WorldError,
    suggest_name,
)
from turnrl.plugin.hooks import LOAD_VARIABLE, load_plugins, working_plugins
from turnrl.plugin.signals import interrupt_on_sigterm, is_first_process
from turnrl.plugin.text import make_visible, say

_DEBUG = "TURNRL_DEBUG"
_FIRST_S = 3.0
"""Time in which the first process of a run may fail too, and end the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; `sys.argv` if None.
    Returns:
        The exit code: 0 if all went well, 130 after Ctrl-C, 143 after SIGTERM, otherwise the
        error's.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with interrupt_on_sigterm() as stopped:
        try:
            return _dispatch(arguments)
        except (Exception, KeyboardInterrupt) as error:
            # an error while a run is being stopped comes from stopping it
            if stopped or isinstance(error, KeyboardInterrupt) or _is_ended_by_the_first():
                return _stopped(stopped[0] if stopped else signal.SIGINT)
            return _report(error)


def _is_ended_by_the_first() -> bool:
    """True if this is not the first process of a run, and the first one has failed too and ends
    this one soon. The first one's message is then enough."""
    if is_first_process():
        return False
    try:
        time.sleep(_FIRST_S)
    except KeyboardInterrupt:
        return True
    return False


def _report(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError | OutputClosed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0  # a list of which the reader, such as `head`, has read enough
    if os.environ.get(_DEBUG):
        raise error
    message = str(error).strip()
    of_a_package = isinstance(error, PluginError | WorldError) and error.__cause__ is not None
    if not isinstance(error, TurnRLError):  # the words of Lightning, torch or the system
        message = " ".join(message.split())[:600]
    if of_a_package or not isinstance(error, TurnRLError):
        message += f" ({_DEBUG}=1 shows where.)"
    with contextlib.suppress(BrokenPipeError):  # nobody may read it, as in `2>&1 | head`
        say(f"turnrl: {type(error).__name__}: {make_visible(message)}", sys.stderr)
    return error.exit_code if isinstance(error, TurnRLError) else 1


def _stopped(number: int) -> int:
    if is_first_process():
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        print(f"\nturnrl: stopped by {by}", file=sys.stderr)
    # Python counts an interrupt that passed through an `exec` as unhandled, and would end with it
    # whatever this returns; another `exec` clears that mark
    exec("")
    # at any other code than 0 of a process that it started, Lightning kills the first one
    return 128 + number if os.environ.get("LOCAL_RANK", "0") == "0" else 0


def _dispatch(arguments: list[str]) -> int:
    # look for the command in the framework, or in the plugin of the same name, before any other
    # plugin is loaded
    name = arguments[0] if arguments else "--help"
    own = [name] if name in COMMANDS else []
    parser, commands = build_parser(own, [] if own else load_plugins(name))
    if name not in commands.choices:
        plugins, faults = working_plugins("turnrl_commands")
        parser, commands = build_parser(COMMANDS, plugins, faults)
        for fault in faults:
            say(f"turnrl: {type(fault).__name__}: {fault}", sys.stderr)
    if not arguments:
        parser.print_help()
        return 2
    if name not in commands.choices and not name.startswith("-"):
        chosen, names = os.environ.get(LOAD_VARIABLE), sorted(commands.choices)
        hint = f" {LOAD_VARIABLE} is {chosen!r}: add {name}, or the plugin that brings it."
        raise RecipeError(
            f"no command {name!r}.{suggest_name(name, names)} There are {', '.join(names)}."
            f"{'' if chosen is None else hint}"
        )
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed) or 0)
