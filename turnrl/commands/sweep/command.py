"""`turnrl sweep RECIPE`: train a recipe with several seeds and settings.

    turnrl sweep quickstart --seeds 0..4
    turnrl sweep quickstart --seeds 0..4 --set model.estimator=OutcomeOnly,TurnLevel
    turnrl sweep quickstart --set config=a.yaml,b.yaml --trainer.max_epochs 20

Every seed with every setting is a run of its own, as of 'turnrl fit'. Several
--set give all combinations. Commas part the values, except inside brackets.
'config' takes recipes that go over the others. Other options are settings of
every run.

Run the same command again, and it goes on: runs that are done are left out,
unfinished ones go on from their last checkpoint, and failed ones are tried
again. At the end you get a table with intervals over seeds, and a report.
results.jsonl in the sweep's folder has a line for each run that is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnrl.errors import RecipeError
from turnrl.recipe.folders import writable_part

_USAGE = "turnrl sweep RECIPE [--seeds 0..4] [--set KEY=VALUE,...] [--key value]"


def add_sweep_command(commands: Any) -> None:
    """Add `sweep` to argparse's sub-parsers."""
    options = argparse.ArgumentParser("turnrl sweep", add_help=False, allow_abbrev=False)
    own = [
        options.add_argument(
            "--seeds", metavar="0..4", help="or 0,2,5 (default: that of the recipe)"
        ),
        options.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE,...",
            help="a setting, and the values to try; the first is what the others are compared with",
        ),
        options.add_argument(
            "-o",
            "--output",
            metavar="FOLDER",
            help="folder of the sweep (default: runs/NAME-sweep)",
        ),
        options.add_argument(
            "--results",
            metavar="FILE",
            help="file of the lines of runs that are done (default: results.jsonl in the folder)",
        ),
        options.add_argument(
            "--jobs",
            type=int,
            metavar="N",
            help="runs at a time, which share the cores (default: one for each GPU, or each core)",
        ),
        options.add_argument(
            "--devices", metavar="0,1", help="GPUs, of which each run gets one (default: all)"
        ),
        options.add_argument(
            "--list", action="store_true", help="check and list the runs, start none"
        ),
        options.add_argument("--json", action="store_true", help="print the table as JSON"),
    ]
    parser = commands.add_parser(
        "sweep",
        usage=_USAGE,
        help="train a recipe with several seeds and settings",
        description=__doc__,
        parents=[options],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # its words are as of 'turnrl fit', but for the options above
    text = "recipes, and settings of every run, as of 'turnrl fit'"
    parser.add_argument("recipe", nargs=argparse.REMAINDER, metavar="RECIPE", help=text)

    def run(args: argparse.Namespace) -> int:
        args, words = options.parse_known_args(args.recipe, args)
        if {"-h", "--help"} & {*words}:
            parser.print_help()
            return 0
        # a program wants to read the table alone
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            flags = [flag for one in own for flag in one.option_strings]
            code, table = _run(args, words, flags)
        if table is not None:
            print(json.dumps(table))
        return code

    parser.set_defaults(run=run)


def _run(
    args: argparse.Namespace, words: list[str], own: Sequence[str]
) -> tuple[int, dict[str, Any] | None]:
    """Run the command; the exit code, and the table as plain values if it was asked for."""
    from filelock import FileLock, Timeout

    from turnrl.commands.sweep.matrix import default_folder, read_cells, refuse_options
    from turnrl.commands.sweep.sweep import Sweep

    refuse_options(words, own)
    given, cells = read_cells(words, args.seeds, args.set)
    folder = Path(args.output) if args.output else default_folder(given)
    writable_part(folder)
    print(f"turnrl sweep: {' + '.join(given.files)}")
    lines = None if args.results is None else _lines(Path(args.results))
    sweep = Sweep(folder, cells, given.name, lines)
    if args.list:
        sweep.read()
        sweep.prepare(args.jobs, args.devices)
        sweep.show()
        return 0, None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "sweep.lock", timeout=0):
            sweep.read()
            if sweep.todo:
                sweep.work(sweep.prepare(args.jobs, args.devices))
            return sweep.close(args.json)
    except Timeout:
        step = "Wait until it ends, or give another folder with -o."
        raise RecipeError(f"another sweep is at work in {str(folder)!r}. {step}") from None


def _lines(file: Path) -> Path:
    """The file of `--results`, which need not be there yet.

    Raises:
        RecipeError: If it is a folder, or cannot be written.
    """
    if file.is_dir():
        raise RecipeError(f"--results is {str(file)!r}, which is a folder. Name a file.")
    writable_part(file.parent)
    return file
