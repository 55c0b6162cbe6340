"""`turnrl sweep RECIPE`: train a recipe with several seeds and settings.

    turnrl sweep quickstart --seeds 0..4
    turnrl sweep quickstart --seeds 0..4 --set model.estimator=OutcomeOnly,TurnLevel
    turnrl sweep quickstart --set config=a.yaml,b.yaml --trainer.max_epochs 20

Every seed with every setting is a run of its own, as if by 'turnrl fit'.
Several --set give all combinations. Commas separate the values, except inside
brackets. 'config' takes recipes that override the others. All other options
are settings of every run.

Repeat the command to resume the sweep: it skips finished runs, resumes
unfinished ones from their last checkpoint and retries failed ones. At the end
you get a table with intervals over seeds. results.jsonl in the sweep's folder
has a line for each finished run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.text import say
from turnrl.recipe.bundled import recipe_name
from turnrl.runs.claim import find_writable

if TYPE_CHECKING:
    from turnrl.commands.sweep.table import Table
    from turnrl.plugin.hooks import Commands


def add_sweep_command(commands: Commands) -> None:
    """Add `sweep` to argparse's sub-parsers."""
    options = _options()
    parser = commands.add_parser(
        "sweep",
        usage="turnrl sweep RECIPE [--seeds 0..4] [--set KEY=VALUE,...] [--key value]",
        help="train a recipe with several seeds and settings",
        description=__doc__,
        parents=[options],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "recipes, and settings of every run, as for 'turnrl fit'"
    parser.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE", help=text)

    def run(args: argparse.Namespace) -> int:
        # the sweep's own options may also stand among those of the recipe
        args, words = options.parse_known_args(args.recipe, args)
        if {"-h", "--help"} & {*words}:
            parser.print_help()
            return 0
        return int(bool(_run(args, words).missing))

    parser.set_defaults(run=run)


def _options() -> argparse.ArgumentParser:
    """The options of the sweep itself."""
    options = argparse.ArgumentParser("turnrl sweep", add_help=False, allow_abbrev=False)
    add = options.add_argument
    add("--seeds", metavar="0..4", help="or 0,2,5 (default: the recipe's seed)")
    text = "a setting, and the values to try; the first is what the others are compared with"
    add("--set", action="append", default=[], metavar="KEY=VALUE,...", help=text)
    text = "folder of the sweep (default: runs/NAME-sweep)"
    add("-o", "--output", metavar="FOLDER", help=text)
    text = "file for the lines of finished runs (default: results.jsonl in the folder)"
    add("--results", metavar="FILE", help=text)
    text = "runs at a time, which share the cores (default: one for each core, or one on a GPU)"
    add("--jobs", type=int, metavar="N", help=text)
    return options


def _run(args: argparse.Namespace, words: list[str]) -> Table:
    """Train what is not done, and give the table."""
    from filelock import FileLock, Timeout

    from turnrl.commands.sweep.matrix import default_folder, read_cells
    from turnrl.commands.sweep.results import FILE
    from turnrl.commands.sweep.training import Sweep

    invocation, cells = read_cells(words, args.seeds, args.set)
    folder = Path(args.output) if args.output else default_folder(invocation)
    lines = Path(args.results) if args.results else folder / FILE
    find_writable(folder)
    find_writable(lines.parent)
    say(f"turnrl sweep: {' + '.join(map(recipe_name, invocation.files))}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "sweep.lock", timeout=0):
            sweep = Sweep(folder, cells, invocation.name, lines)
            if sweep.pending:
                sweep.train(args.jobs)
            return sweep.close()
    except Timeout:
        raise RecipeError(
            f"another sweep is at work in {str(folder)!r}. Wait until it ends, or give another "
            "folder with -o."
        ) from None
