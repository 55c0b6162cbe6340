"""`turnrl report RUN ...`: writes one HTML page about runs.

    turnrl report quickstart                     the newest run in runs/quickstart
    turnrl report a b c -o report.html           several runs side by side

The page is one file that needs no server and no network: send it, or keep it beside a paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.plugin.errors import DataError
from turnrl.plugin.text import make_visible, say
from turnrl.runs.files import whole_file

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands


def add_report_command(commands: Commands) -> None:
    """Add `report` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "report",
        help="write an HTML page about runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    text = "a run, a folder of runs, or its name under runs/: the newest that trained"
    add("runs", nargs="+", metavar="RUN", help=text)
    add("-o", "--output", default="report.html", metavar="FILE", help="(default: %(default)s)")
    text = "keep about N of each run, in whole groups from all of its parts (default: all)"
    add("--trajectories", type=int, metavar="N", help=text)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.trajectories is not None and args.trajectories < 1:
        raise DataError(f"--trajectories is {args.trajectories}; it must be 1 or more.")
    file = Path(args.output)
    write_report(args.runs, file, args.trajectories)
    say(f"written to {file} ({file.stat().st_size / 1e6:.1f} MB). Open it in a browser.")


def write_report(
    runs: Sequence[str | Path],
    file: Path,
    most: int | None = None,
) -> None:
    """Write the report of some runs.

    Args:
        runs: See `open_runs`.
        file: The page. It is replaced in one move when it is complete.
        most: Trajectories of each run; None for all.
    Raises:
        DataError: If there is no run at one of the places, or the page cannot be written.
    """
    from turnrl.commands.report.page import render_page
    from turnrl.runs.load import open_runs

    opened = open_runs(runs)
    if file.is_dir():
        raise DataError(f"{str(file)!r} is a folder. Name a file in it: -o FILE.html.")
    try:
        with whole_file(file) as part, part.open("w", encoding="utf-8") as out:
            out.writelines(render_page(opened, most))
    except OSError as error:
        raise DataError(f"cannot write {str(file)!r}: {error.strerror}. Name another.") from error
    for run in opened:
        for problem in run.problems:
            say(make_visible(f"{run.name}: {problem}"))
