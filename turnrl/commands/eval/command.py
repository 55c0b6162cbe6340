"""`turnrl eval RECIPE_OR_RUN`: questions asked and scored, with an interval for every figure; and
`turnrl export`, the record of an evaluation as a log of inspect_ai.

Nothing but `asked` is imported before a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from turnrl.commands.eval.asked import prepare
from turnrl.recipe.fit import add_recipe_command
from turnrl.types.contracts import QuestionSource
from turnrl_openai import Server

if TYPE_CHECKING:
    from turnrl.recipe.build import Built

_SETTINGS = {
    "split": (Literal["train", "val", "test"], "val", "Split of the data to score"),
    "questions": (
        list[QuestionSource | str] | QuestionSource | str | None,
        None,
        "Data sets to score in place of data.val, each a file or a name as data.val takes it",
    ),
    "samples": (
        int | None,
        None,
        "Trajectories to sample of each question, at rollout.temperature; null for a greedy one",
    ),
    "endpoint": (
        Server | None,
        None,
        "A server of chat completions that acts in place of the policy: base_url and model",
    ),
}
_FLAGS = {"json": "Print the figures as JSON, and nothing else, on standard output"}


def add_eval_command(commands: Any) -> None:
    """Add `eval` to argparse's sub-parsers."""
    out, summary = sys.stdout, "score a recipe, a run or a server"

    def act(built: Built) -> None:
        from turnrl.commands.eval.evaluating import evaluate

        evaluate(built, out)

    parser = add_recipe_command(
        commands, "eval", summary, act, _SETTINGS, flags=_FLAGS, takes_run=True, prepare=prepare
    )
    parser.set_defaults(run=partial(_start, parser.get_default("run")))


def _start(run: Callable[[argparse.Namespace], int], parsed: argparse.Namespace) -> int:
    # a run says what it does on standard output, where a program wants to read figures alone
    with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext():
        return run(parsed)


def add_export_command(commands: Any) -> None:
    """Add `export` to argparse's sub-parsers."""
    summary = "write trajectories of a run as a log of inspect_ai"
    parser = commands.add_parser("export", help=summary, description=summary)
    parser.add_argument("run_folder", metavar="RUN", help="a run, or the name of its runs")
    parser.add_argument("file", metavar="FILE", help="the log to write: NAME.eval or NAME.json")
    parser.add_argument("--split", help="the split to take; the newest evaluation by default")
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> None:
    from turnrl.commands.eval.inspecting import export

    export(parsed.run_folder, parsed.file, parsed.split)
