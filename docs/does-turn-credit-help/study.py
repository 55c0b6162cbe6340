"""Trains what the study lacks, and makes its tables and pictures from the lines of its runs.

    python docs/does-turn-credit-help/study.py               all parts, then tables and pictures
    python docs/does-turn-credit-help/study.py one-hop       one part
    python docs/does-turn-credit-help/study.py --draw        tables and pictures of what is there

Each part is one `turnrl sweep` or several, whose lines are kept in lines/PART.jsonl. Stop it as you
like, and give the same command again: it goes on. To train everything anew, name a new folder with
--folder: lines, tables and pictures are written there.

    parts.py        what is trained, and what it is compared with
    conditions.py   what some parts change: a reward, and training questions
    measures.py     the figures of one run
    rows.py         the runs of a part, and differences between them
    page.py         tables                          pictures.py     pictures
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from page import TABLES, bare, changes, fill
from parts import HERE, PARTS
from pictures import curves, forest
from rows import Rows, done, rows

from turnrl import TurnRLError
from turnrl.cli import main as turnrl

CONDITIONS = ("groups", "noise", "temptation", "no-search-cost", "updates")
"""The parts that change one thing of a main comparison."""


def train(name: str, folder: Path, jobs: Sequence[str]) -> int:
    """Train the runs of a part that have no line.

    Args:
        name: Of the part.
        folder: Where `lines` is.
        jobs: Options of `turnrl sweep`.
    Returns:
        The worst exit code; 1 if a run failed.
    """
    lines = folder / "lines" / f"{name}.jsonl"
    worst = 0
    for label, sweep in PARTS[name].sweeps.items():
        print(f"\n{', '.join(filter(None, (name, label)))}", flush=True)
        runs = Path("runs") / folder.name / name / label.replace(" ", "-")
        code = turnrl(["sweep", *sweep.words, "-o", str(runs), "--results", str(lines), *jobs])
        worst = max(worst, code)
        if code > 1:
            break
    return worst


def draw(folder: Path) -> None:
    """Make the tables and pictures of the parts that have a run.

    Args:
        folder: Where `lines` is. That of the study has a page, which is filled; any other gets
            `tables.md`.
    Raises:
        TurnRLError: If the page asks for a table that no part has.
    """
    runs = done(folder)
    every = {name: rows(part, runs) for name, part in PARTS.items()}
    parts = {name: one for name, one in every.items() if one.trained}
    tables = {
        f"{name}: {kind}": [*table(one)] if one.trained else []
        for name, one in every.items()
        for kind, table in TABLES.items()
    }
    when = {name: parts[name] for name in CONDITIONS if name in parts}
    tables["when: changes"] = [*changes(when)] if when else []
    files = _pictures(folder, parts, when)
    if folder.resolve() == HERE.resolve():
        fill(page := folder / "index.md", tables)
    else:
        bare(page := folder / "tables.md", tables, files)
    print(f"tables are in {page}, pictures beside it", flush=True)


def _pictures(folder: Path, parts: Mapping[str, Rows], when: Mapping[str, Rows]) -> list[str]:
    """Draw, and name the files."""
    files = []
    for name in ("one-hop", "two-hop"):
        if name in parts:
            curves(parts[name], folder / f"{name}.svg")
            files.append(f"{name}.svg")
    if when:
        forest(when, folder / "when.svg")
        files.append("when.svg")
    return files


def main(words: Sequence[str] | None = None) -> int:
    """Run parts, then make tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where lines and page are")
    parser.add_argument("--jobs", help="runs at a time; the number of cores if not given")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    given = parser.parse_args(words)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}. There are {', '.join(PARTS)}.")
    (given.folder / "lines").mkdir(parents=True, exist_ok=True)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(HERE) not in paths:  # conditions.py, for the runs too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), *paths)))
    jobs = ["--jobs", given.jobs] if given.jobs else []
    worst = 0
    for name in () if given.draw else given.parts or PARTS:
        worst = max(worst, train(name, given.folder, jobs))
        if worst > 1:  # 1 is of a run that failed: the others count
            return worst
    try:
        draw(given.folder)
    except TurnRLError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
