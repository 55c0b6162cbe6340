"""`turnrl fit`: train a recipe; and how a command that takes a recipe is made.

Nothing here imports torch before a recipe is read: a mistake in the YAML is told at once.
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
from typing import TYPE_CHECKING, Any

from turnrl.recipe.folders import claimed, writable_part
from turnrl.recipe.given import (
    SETTLED,
    Flags,
    Given,
    Settings,
    read_given,
    refuse_unknown,
)

if TYPE_CHECKING:
    from turnrl.recipe.build import Built

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
"""Variables of which none is above 0 in the first process of a run, whoever starts the others."""


def add_fit_command(commands: Any) -> None:
    """Add `fit` to argparse's sub-parsers."""
    add_recipe_command(commands, "fit", "train a recipe", _fit)


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
    *,
    flags: Flags | None = None,
    takes_run: bool = False,
    prepare: Callable[[Given], Given] | None = None,
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
            `Built.settings`. One that may be a list takes several words.
        flags: Options without a value that are no settings of a recipe, with their lines of help,
            such as `{"json": "Print JSON"}`. Those that are given are in `Built.given.raised`, and
            argparse knows each as `parsed.json`.
        takes_run: A run may stand in the place of the first recipe, by any word that
            `turnrl.find_run` takes. The recipe is then the run's `config.yaml` without `ckpt_path`
            and `trainer.logger`, and `Given.agent` has the folder and the checkpoint.
        prepare: Called with what was given, before anything is built: recipes and options are one
            mapping in `contents`. Returns it with what the command says over it, as
            `dataclasses.replace(given, contents={**given.contents, "ckpt_path": None})`.
    Returns:
        The command's own parser, an `argparse.ArgumentParser`.
    """
    flags = flags or {}
    # no word is an option to argparse: they are the recipe's, which knows hundreds
    parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    parser.add_argument("recipe", nargs=argparse.REMAINDER, action=partial(_Words, flags))

    def run(parsed: argparse.Namespace) -> int:
        raised = [flag for flag in flags if getattr(parsed, flag)]
        given = read_given(
            name,
            parsed.recipe,
            settings,
            takes_run=takes_run,
            prepare=prepare,
            flags=flags,
            raised=raised,
        )
        return _run(given, act)

    parser.set_defaults(run=run)
    return parser


class _Words(argparse.Action):
    """The words after a command, but for its flags, which may stand anywhere among them."""

    def __init__(self, flags: Flags, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._flags = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, exit_on_error=False
        )
        for flag, told in flags.items():
            self._flags.add_argument(f"--{flag}", action="store_true", help=told)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        _, words = self._flags.parse_known_args(values, namespace)
        setattr(namespace, self.dest, words)


def _run(given: Given, act: Callable[[Built], None]) -> int:
    """Make what was given, and act with it; the exit code."""
    if given.asks_for_help:
        return _act(given, act)
    refuse_unknown(given)
    given = given.with_checkpoint()  # before anything is announced
    if given.folder is not None:
        writable_part(given.folder)  # before a logger tries to
    first = all(os.environ.get(name, "0") == "0" for name in _RANKS)
    with contextlib.ExitStack() as ending:
        if first and given.counts and given.home is not None:
            given = replace(given, number=ending.enter_context(claimed(given.home)))
        if first:
            _announce(given)
        return _act(given, act)


def _act(given: Given, act: Callable[[Built], None]) -> int:
    first = "turnrl.recipe.build" not in sys.modules
    if first:
        gc.disable()  # a fifth of the time that importing torch and Lightning takes
    from turnrl.recipe.build import make

    if first:
        gc.freeze()  # what was imported stays; later it would be what a program has made
        gc.enable()
    # DDP starts its other processes from sys.argv, so this is where the arguments have to be
    argv, sys.argv = sys.argv, [sys.argv[0], given.command, *_words_of_others(given)]
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


def _words_of_others(given: Given) -> list[str]:
    """The words with which the other processes of a run come to what the first one has settled."""
    settled = {"contents": given.contents, "number": given.number}
    return [
        *(f"--{flag}" for flag in given.raised),
        *given.arguments,
        f"{SETTLED}={json.dumps(settled, default=str)}",
    ]


def _announce(given: Given) -> None:
    print(f"turnrl {given.command}: {' + '.join(given.files)}")
    print(f"writing {given.place}, on {given.device}")
    if checkpoint := given.contents.get("ckpt_path"):
        print(f"checkpoint {checkpoint}")
    print("loading torch and Lightning", flush=True)
