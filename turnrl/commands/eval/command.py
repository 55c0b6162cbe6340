"""`turnrl eval RECIPE_OR_RUN`: questions asked and scored, with an interval for every figure.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from turnrl.recipe.fit import add_recipe_command
from turnrl.recipe.invocation import Invocation
from turnrl.runs.checkpoints import LATEST
from turnrl.types.contracts import QuestionSource
from turnrl_openai import EndpointServer

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands
    from turnrl.recipe.build import Built

_SETTINGS = {
    "split": (Literal["train", "val", "test"], "val", "Split of the data to score"),
    "questions": (
        list[QuestionSource | str] | QuestionSource | str | None,
        None,
        "One or more data sets to score instead of data.val, each a file or a name as for data.val",
    ),
    "samples": (
        int | None,
        None,
        "Trajectories to sample per question, at rollout.temperature; null for a greedy one",
    ),
    "endpoint": (
        EndpointServer | None,
        None,
        "A chat completions server that acts instead of the policy: base_url and model",
    ),
    "json": (bool, False, "Print the figures as JSON, and nothing else, on standard output"),
}


def add_eval_command(commands: Commands) -> None:
    """Add `eval` to argparse's sub-parsers."""
    out, summary = sys.stdout, "score a recipe, a run or a server"

    def act(built: Built) -> None:
        from turnrl.commands.eval.evaluating import evaluate

        evaluate(built, out)

    parser = add_recipe_command(
        commands,
        "eval",
        summary,
        act,
        _SETTINGS,
        takes_run=True,
        prepare=choose_checkpoint,
    )
    parser.set_defaults(run=partial(_start, parser.get_default("run")))


def choose_checkpoint(invocation: Invocation) -> Invocation:
    """Choose the checkpoint of a run that is scored, unless the user did: its best, or else its
    last. A server that acts instead of the policy needs none.

    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    if invocation.agent is None:
        return invocation
    checkpoint = invocation.contents.get("ckpt_path", "")
    if checkpoint == "" and invocation.contents.get("endpoint"):
        checkpoint = None
    elif checkpoint in ("", *LATEST):
        checkpoint = str(invocation.agent.weights(checkpoint or None))
    return replace(invocation, contents={**invocation.contents, "ckpt_path": checkpoint})


def _start(run: Callable[[argparse.Namespace], int], parsed: argparse.Namespace) -> int:
    # a run prints its progress on standard output, where a program wants to read only figures
    as_json = any(word.partition("=")[0] == "--json" for word in parsed.recipe)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return run(parsed)
