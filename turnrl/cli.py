"""The command line: `turnrl fit | eval`, and what commands plugins add.

A mistake of the user's is one message and an exit code, never a traceback; `TURNRL_DEBUG=1` shows
the traceback all the same.
"""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from turnrl.errors import TurnRLError, stopping
from turnrl.plugins import contributed
from turnrl.recipe.given import read_given

_TRAINING = {
    "fit": "train a recipe: turnrl fit RECIPE.yaml [--key value ...]",
    "eval": "score a split: turnrl eval RECIPE.yaml --ckpt_path FILE [--split NAME]",
}
_DEBUG = "TURNRL_DEBUG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; `sys.argv` if None.
    Returns:
        The exit code: 0 if all went well, 130 after Ctrl-C, 143 after SIGTERM, otherwise that of
        the error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with stopping() as stopped:
        try:
            return _dispatch(arguments)
        except (Exception, KeyboardInterrupt) as error:
            # what breaks while a run is being stopped breaks because of that
            if stopped or isinstance(error, KeyboardInterrupt):
                return _stopped(stopped[0] if stopped else signal.SIGINT)
            return _told(error)


def _told(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError):  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if os.environ.get(_DEBUG):
        raise error
    message = str(error).strip()
    if not isinstance(error, TurnRLError):  # of Lightning, torch or the system: in their words
        message = " ".join(message.split())[:600] + f" ({_DEBUG}=1 shows where.)"
    print(f"turnrl: {type(error).__name__}: {message}", file=sys.stderr)
    return error.exit_code if isinstance(error, TurnRLError) else 1


def _stopped(number: int) -> int:
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    print(f"\nturnrl: stopped by {by}", file=sys.stderr)
    # an interrupt that passed through an `exec` counts as unhandled, and Python would end by it
    # whatever is returned; the next `exec` makes it forget that
    exec("")
    # a process that the first one started: its code would have Lightning kill that one
    return 0 if os.environ.get("LOCAL_RANK", "0") != "0" else 128 + number


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="turnrl",
        description="Train agents that use tools over several turns, with credit turn by turn.",
        epilog="'turnrl fit --help' lists every setting of a recipe.",
    )
    parser.add_argument("--version", action="version", version=f"turnrl {version('turnrl')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, text in _TRAINING.items():
        subparsers.add_parser(command, help=text, add_help=False)
    if arguments[:1] and arguments[0] in _TRAINING:
        given = read_given(arguments[0], arguments[1:])
        if not given.asks and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"turnrl {arguments[0]}: {' + '.join(given.files)}")
            print(f"writing {given.place}, on {given.device}")
            print("loading torch and Lightning", flush=True)
        first = "turnrl.recipe.build" not in sys.modules
        if first:
            gc.disable()  # a fifth of the time that importing torch and Lightning takes
        from turnrl.recipe.build import run_recipe

        if first:
            gc.freeze()  # what was imported stays; later it would be what a program has made
            gc.enable()
        return run_recipe(given)
    for add in contributed("turnrl_commands"):
        add(subparsers)
    if not arguments:
        parser.print_help()
        return 2
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed) or 0)
