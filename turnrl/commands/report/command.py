"""`turnrl report RUN ...`: writes one HTML page about runs.

    turnrl report quickstart                     the newest run in runs/quickstart
    turnrl report a b c -o report.html           several runs side by side
    turnrl report --watch quickstart             rewritten whenever the run has something new

The page is one file that needs no server and no network: send it, or keep it beside a paper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnrl.plugin.errors import DataError
from turnrl.plugin.text import say, visible
from turnrl.runs.files import whole_file
from turnrl.runs.find import is_beginning

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands

_EVERY_S = 2.0
"""Time between two looks at the runs that are watched."""
_RELOAD_S = 10.0
"""Time after which a watched page that is open loads itself again."""


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
    add("--title", help="title of the page (default: the names of the runs)")
    text = "keep about N of each run, in whole groups from all of its parts (default: all)"
    add("--trajectories", type=int, metavar="N", help=text)
    add("--watch", action="store_true", help="rewrite it while the runs train, until Ctrl-C")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.trajectories is not None and args.trajectories < 1:
        raise DataError(f"--trajectories is {args.trajectories}; it must be 1 or more.")
    file = Path(args.output)
    if args.watch:
        _wait(args.runs)
    reload_s = _RELOAD_S if args.watch else 0.0
    seen = _state(args.runs)  # before the page is written, so that it catches later changes
    write(args.runs, file, args.title, args.trajectories, reload_s)
    say(f"written to {file} ({file.stat().st_size / 1e6:.1f} MB). Open it in a browser.")
    if not args.watch:
        return
    say("watching: the page is rewritten after every iteration, and follows. Ctrl-C ends this.")
    try:
        while True:
            time.sleep(_EVERY_S)
            if (now := _state(args.runs)) != seen:
                write(args.runs, file, args.title, args.trajectories, reload_s)
                print(f"{time.strftime('%H:%M:%S')} rewritten.", flush=True)
            seen = now
    except KeyboardInterrupt:
        say("\nwriting the last page ...")
        write(args.runs, file, args.title, args.trajectories)  # a page that stays as it is
        raise


def write(
    runs: Sequence[str | Path],
    file: Path,
    title: str | None = None,
    most: int | None = None,
    reload_s: float = 0.0,
) -> None:
    """Write the report of some runs.

    Args:
        runs: See `open_runs`.
        file: The page. It is replaced in one move when it is complete.
        title: Title of the page; None for the names of the runs.
        most: Trajectories of each run; None for all.
        reload_s: Seconds after which an open page loads itself again; 0 for never.
    Raises:
        DataError: If there is no run at one of the places, or the page cannot be written.
    """
    from turnrl.commands.report.page import page
    from turnrl.runs.load import open_runs

    opened = open_runs(runs)
    name = title or ", ".join(run.name for run in opened)
    if file.is_dir():
        raise DataError(f"{str(file)!r} is a folder. Name a file in it: -o FILE.html.")
    try:
        with whole_file(file) as part, part.open("w", encoding="utf-8") as out:
            out.writelines(page(opened, name, most, reload_s))
    except OSError as error:
        raise DataError(f"cannot write {str(file)!r}: {error.strerror}. Name another.") from error
    for run in opened:
        for problem in run.problems:
            say(visible(f"{run.name}: {problem}"))


def _wait(runs: Sequence[str]) -> None:
    """Wait until every run has something to show."""
    waited = ""
    while begins := [run for run in runs if is_beginning(run)]:
        if waited != begins[0]:
            waited = begins[0]
            say(f"waiting: {waited} has nothing to show yet. Ctrl-C ends this.")
        time.sleep(_EVERY_S)


def _state(runs: Sequence[str]) -> dict[Path, tuple[int, int]]:
    """The time and the size of each file that the report reads."""
    from turnrl.runs.load import open_runs

    files = [
        path
        for run in open_runs(runs)
        for path in (run.folder / "metrics.csv", *run.files)
        if path.exists()
    ]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}
