"""`turnrl fit`, which trains a recipe, and `add_recipe_command`, for other commands that take one.

Nothing here imports torch before a recipe is read, so a mistake in the YAML shows at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from turnrl.plugin.errors import OutputClosed
from turnrl.plugin.hooks import Commands
from turnrl.plugin.signals import is_first_process
from turnrl.plugin.text import say
from turnrl.recipe.bundled import recipe_name
from turnrl.recipe.invocation import DECISIONS, Invocation, Settings, read_invocation
from turnrl.runs.claim import claim_number, find_writable
from turnrl.runs.files import remove_torn

if TYPE_CHECKING:
    from turnrl.recipe.build import Built


def add_fit_command(commands: Commands) -> None:
    """Add `fit` to argparse's sub-parsers."""
    add_recipe_command(commands, "fit", "train a recipe", _fit)


def _fit(built: Built) -> None:
    from turnrl.training.checkpoints import read_safely  # loads torch

    path = built.checkpoint
    with read_safely(path):  # a checkpoint may come from anywhere, so no code in it may run
        built.trainer.fit(built.module, datamodule=built.data, ckpt_path=path, weights_only=True)


def add_recipe_command(
    commands: Commands,
    name: str,
    summary: str,
    work: Callable[[Built], None],
    settings: Settings | None = None,
    *,
    takes_run: bool = False,
    prepare: Callable[[Invocation], Invocation] | None = None,
) -> argparse.ArgumentParser:
    """Add a command that builds what a recipe describes, and acts with it, as `turnrl fit` does.

    The command takes recipes and options as `fit` does, and prints what it will do before it loads
    torch. Its runs lie in `runs/RECIPE-NAME`. On several devices, the other processes of a run are
    started with the same command.

    Args:
        commands: argparse's sub-parsers, as the hook `turnrl_commands` hands them out.
        name: The command's name.
        summary: Its line in `turnrl --help`.
        work: Called with the objects of the recipe, in every process of the run.
        settings: Keys at the top of a recipe that only this command has, with their types, defaults
            and lines of help, such as
            `{"split": (Literal["val", "test"], "val", "What to score")}`. Their values are in
            `Built.settings`. A key whose type may be a list takes several words, and one of type
            `bool` takes none: `--json` means `--json true`.
        takes_run: Accept a run in the place of the first recipe, by any word that
            `turnrl.runs.find_run` takes. The recipe is then the run's `config.yaml` without
            `ckpt_path` and `trainer.logger`. `Invocation.agent` has the folder and the checkpoint.
        prepare: Called before anything is built, with the recipes and options merged in `contents`.
            Returns the invocation with the command's own changes, such as
            `dataclasses.replace(invocation, contents={**invocation.contents, "ckpt_path": None})`.
    Returns:
        The command's own parser.
    """
    # argparse treats no word as an option: options are the recipe's, which has hundreds
    parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    parser.add_argument("recipe", nargs=argparse.REMAINDER)

    read = partial(read_invocation, name, settings=settings, takes_run=takes_run, prepare=prepare)

    def run(parsed: argparse.Namespace) -> int:
        return _run(read(parsed.recipe), work)

    parser.set_defaults(run=run)
    return parser


def _run(invocation: Invocation, work: Callable[[Built], None]) -> int:
    """Build what a recipe describes, and act with it. Returns the exit code."""
    if invocation.help_options:
        return _build_for(invocation, work)
    invocation = invocation.with_checkpoint()  # before anything is announced
    if invocation.location.folder is not None:
        find_writable(invocation.location.folder)  # fails here, before a logger tries to write
    is_first = is_first_process()
    home = invocation.location.home
    with contextlib.ExitStack() as ending:
        for folder in home.glob("*/checkpoints") if is_first and home is not None else ():
            remove_torn(folder)  # of runs that were killed
        if is_first and invocation.location.is_numbered and home is not None:
            invocation = replace(invocation, number=ending.enter_context(claim_number(home)))
        if is_first:
            announce(invocation)
        return _build_for(invocation, work)


def _build_for(invocation: Invocation, work: Callable[[Built], None]) -> int:
    imports_now = "turnrl.recipe.build" not in sys.modules
    if imports_now:
        gc.disable()  # saves a fifth of the time to import torch and Lightning
    from turnrl.recipe.build import instantiate

    if imports_now:
        gc.freeze()  # modules stay for good, so no later collection needs to scan them
        gc.enable()
    # DDP starts its other processes from sys.argv, and they inherit the environment
    argv, sys.argv = sys.argv, [sys.argv[0], invocation.command]
    os.environ[DECISIONS] = _decisions(invocation)
    try:
        work(instantiate(invocation))
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    except BrokenPipeError as error:
        raise OutputClosed(
            "the program that read the output, such as head, has ended, so the run was stopped. To "
            "keep a run, write its output to a file: > run.log."
        ) from error
    finally:
        sys.argv = argv
        os.environ.pop(DECISIONS, None)
    return 0


def _decisions(invocation: Invocation) -> str:
    """The parts of an invocation that the other processes of a run need, as JSON."""
    names = ("contents", "arguments", "files", "help_options", "number")
    kept = {name: getattr(invocation, name) for name in names}
    return json.dumps({**kept, "destination": invocation.destination}, default=str)


def announce(invocation: Invocation) -> None:
    """Print the recipe, the run's folder and the checkpoint, before torch loads."""
    say(f"turnrl {invocation.command}: {' + '.join(map(recipe_name, invocation.files))}")
    say(f"writing {invocation.location}")
    if checkpoint := invocation.contents.get("ckpt_path"):
        say(f"checkpoint {checkpoint}")
    say("loading torch and Lightning")
