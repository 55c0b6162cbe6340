"""`turnrl fit`: train a recipe; and how a command that takes a recipe is made.

Nothing here imports torch before a recipe is read: a mistake in the YAML is told at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from turnrl import hookimpl
from turnrl_recipes.folders import writable_part
from turnrl_recipes.given import Given, Settings, read_given

if TYPE_CHECKING:
    from turnrl_recipes.build import Built


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """The command `fit`."""
    return [partial(add_recipe_command, name="fit", summary="train a recipe", act=_fit)]


def _fit(built: Built) -> None:
    # a checkpoint is data from somewhere: no code in it is run
    path = built.checkpoint
    built.trainer.fit(built.module, datamodule=built.data, ckpt_path=path, weights_only=True)


def add_recipe_command(
    commands: Any,
    name: str,
    summary: str,
    act: Callable[[Built], None],
    settings: Settings | None = None,
) -> Any:
    """Add a command that makes what a recipe describes, and acts with it, as `turnrl fit` does.

    The command takes recipes and options as `fit` does, and prints what it will do before it loads
    torch. Its runs lie in `runs/RECIPE-NAME`. The other processes of a run on several devices are
    started as the same command.

    Args:
        commands: argparse's sub-parsers, as the hook `turnrl_commands` hands them out.
        name: The command's name.
        summary: Its line in `turnrl --help`.
        act: Called with what the recipe makes, in every process of the run.
        settings: Keys at the top of a recipe that the command knows besides those of `fit`, with
            their types, defaults and lines of help, such as
            `{"split": (Literal["val", "test"], "val", "What to score")}`. Their values are in
            `Built.settings`.
    Returns:
        The command's own parser, an `argparse.ArgumentParser`.
    """
    # no word is an option to argparse: they are the recipe's, which knows hundreds
    parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    parser.add_argument("recipe", nargs=argparse.REMAINDER)
    parser.set_defaults(run=lambda parsed: _run(read_given(name, parsed.recipe, settings), act))
    return parser


def _run(given: Given, act: Callable[[Built], None]) -> int:
    """Make what was given, and act with it; the exit code."""
    if not given.asks_for_help:
        given.checkpoint()  # before anything is announced
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _announce(given)
        if given.folder is not None:
            writable_part(given.folder)  # before a logger tries to
    first = "turnrl_recipes.build" not in sys.modules
    if first:
        gc.disable()  # a fifth of the time that importing torch and Lightning takes
    from turnrl_recipes.build import make

    if first:
        gc.freeze()  # what was imported stays; later it would be what a program has made
        gc.enable()
    # DDP starts its other processes from sys.argv, so this is where the arguments have to be
    argv, sys.argv = sys.argv, [sys.argv[0], given.command, *given.arguments]
    try:
        act(make(given))
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    finally:
        sys.argv = argv
    return 0


def _announce(given: Given) -> None:
    print(f"turnrl {given.command}: {' + '.join(given.files)}")
    print(f"writing {given.place}, on {given.device}")
    if checkpoint := given.contents.get("ckpt_path"):
        print(f"checkpoint {checkpoint}")
    print("loading torch and Lightning", flush=True)
