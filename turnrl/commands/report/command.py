"""`turnrl report RUN ...`: runs as one page to look at.

    turnrl report quickstart                     the newest run in runs/quickstart
    turnrl report a b c -o report.html           several runs side by side
    turnrl report --watch quickstart             written again whenever the run has something new

The page is one file that needs no server and no network: send it, or keep it beside a paper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnrl.errors import DataError
from turnrl.recipe.folders import is_beginning
from turnrl.run.folders import whole_file
from turnrl.text import visible

_EVERY_S = 2.0
"""Time between two looks at the runs that are watched."""


def add_report_command(commands: Any) -> None:
    """Add `report` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "report",
        help="write runs as a page to look at",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "a run, a folder of runs, or its name under runs/: the newest that trained"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=told)
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("--title", help="title of the page (default: the names of the runs)")
    parser.add_argument(
        "--trajectories",
        type=int,
        metavar="N",
        help="about how many of each run: whole groups, from all of its parts (default: all)",
    )
    parser.add_argument(
        "--watch", action="store_true", help="write it again as the runs go on, until Ctrl-C"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.trajectories is not None and args.trajectories < 1:
        raise DataError(f"--trajectories is {args.trajectories}; it must be 1 or more.")
    file = Path(args.output)
    more = (args.title, args.trajectories)
    if args.watch:
        _wait(args.runs)
    seen = _state(args.runs)  # before it is written: what comes meanwhile is written again
    write(args.runs, file, *more)
    print(f"written to {file} ({file.stat().st_size / 1e6:.1f} MB). Open it in a browser.")
    if args.watch:
        print("watching: it is written again after every iteration. Ctrl-C ends this.", flush=True)
        _watch(args.runs, file, seen, *more)


def write(
    runs: Sequence[str | Path], file: Path, title: str | None = None, most: int | None = None
) -> None:
    """Write the report of some runs.

    Args:
        runs: See `open_runs`.
        file: The page. It is replaced in one move when it is complete.
        title: Title of the page; None for the names of the runs.
        most: Trajectories of each run; None for all.
    Raises:
        DataError: If there is no run at one of the places, or the page cannot be written.
    """
    from turnrl.commands.report.page import page
    from turnrl.run.runs import open_runs

    opened = open_runs(runs)
    name = title or ", ".join(run.name for run in opened)
    if file.is_dir():
        raise DataError(f"{str(file)!r} is a folder. Name a file in it: -o FILE.html.")
    try:
        with whole_file(file) as part, part.open("w", encoding="utf-8") as out:
            out.writelines(page(opened, name, most))
    except OSError as error:
        raise DataError(f"cannot write {str(file)!r}: {error.strerror}. Name another.") from error
    for run in opened:
        for problem in run.problems:
            print(visible(f"{run.name}: {problem}"))


def _wait(runs: Sequence[str]) -> None:
    """Wait until every run has something to show."""
    told = ""
    while begins := [run for run in runs if is_beginning(run)]:
        if told != begins[0]:
            told = begins[0]
            print(f"waiting: {told} has nothing to show yet. Ctrl-C ends this.", flush=True)
        time.sleep(_EVERY_S)


def _watch(
    runs: Sequence[str],
    file: Path,
    seen: dict[Path, tuple[int, int]],
    title: str | None,
    most: int | None,
) -> None:
    while True:
        time.sleep(_EVERY_S)
        now = _state(runs)
        if now != seen:
            write(runs, file, title, most)
            print(f"{time.strftime('%H:%M:%S')} written again. Reload the page.", flush=True)
        seen = now


def _state(runs: Sequence[str]) -> dict[Path, tuple[int, int]]:
    """When each file that the report reads was written last, and its size."""
    from turnrl.run.runs import open_runs

    files = [
        path
        for run in open_runs(runs)
        for path in (run.folder / "metrics.csv", *run.files)
        if path.exists()
    ]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}
