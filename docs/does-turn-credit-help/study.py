"""Trains what the study lacks, and makes its tables and pictures from the lines of its runs.

    python docs/does-turn-credit-help/study.py               all parts, then tables and pictures
    python docs/does-turn-credit-help/study.py one-hop       one part
    python docs/does-turn-credit-help/study.py --draw        tables and pictures of what is there

Each part is one `turnrl sweep` or several, whose lines are kept in lines/PART.jsonl, and whose runs
in runs/does-turn-credit-help of the clone. Stop it as you like, and give the same command again: it
resumes. To train a part anew, delete its lines and its folder in runs/ first.

    parts.py        what is trained, and what it is compared with
    conditions.py   what some parts change: a reward, training questions
    atlas_starter.py  makes the starter policy of Atlas, and others like it
    doors.py        the world of `horizon`
    starters/       policies that some parts start from, made before their first run
    measures.py     the figures of one run
    rows.py         the runs of a part, and differences between them
    page.py         tables                          pictures.py     pictures
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from page import TABLES, changes, fill, marks, primary
from parts import CONDITIONS, HERE, PARTS, STARTERS, Part
from pictures import THEMES, curves, first_look, forest
from rows import done, rows

from turnrl.cli import main as turnrl
from turnrl.plugin.errors import TurnRLError

CURVES = ("one-hop", "two-hop", "split", "paid-hops")
"""The parts that have a picture of their curves."""
PRIMARY = {"one-hop": "one hop, 8 seeds", "two-hop": "two hops, each search costs, 8 seeds"}
"""The parts of the planned result, and what their worlds are called."""


def train(name: str, part: Part) -> int:
    """Train the runs of a part that have no line.

    Args:
        name: Of the part.
        part: The part.
    Returns:
        The worst exit code; 1 if a run failed.
    """
    worst = 0
    for label, sweep in part.sweeps.items():
        print(f"\n{', '.join(filter(None, (name, label)))}", flush=True)
        runs = os.path.relpath(
            HERE.parents[1] / "runs" / HERE.name / name / label.replace(" ", "-")
        )
        # lets the processes of the sweep import `conditions.py`
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        with patch.dict(os.environ, PYTHONPATH=path):
            code = make_starter(sweep.starter) if sweep.starter else 0
            if not code:
                lines = str(HERE / "lines" / f"{name}.jsonl")
                code = turnrl(["sweep", *sweep.words, "-o", runs, "--results", lines])
        worst = max(worst, code)
        if code > 1:
            break
    return worst


def make_starter(name: str) -> int:
    """Make a policy that some parts start from, if it is not there.

    Args:
        name: A name of `STARTERS`.
    Returns:
        The exit code.
    """
    folder = HERE / "starters" / name
    if (folder / "config.json").is_file():
        return 0
    print(f"making the starter policy {name}", flush=True)
    how = STARTERS[name]
    if isinstance(how, tuple):
        return turnrl([*how, os.path.relpath(folder)])
    # imported here, because it loads torch
    from atlas_starter import make, phases_with

    make(str(folder), phases_with(**how))
    return 0


def draw(folder: Path, parts: Mapping[str, Part]) -> None:
    """Fill the pages of the study with tables, and draw its pictures.

    Args:
        folder: Where `lines` and the pages are.
        parts: The parts, by name.
    Raises:
        TurnRLError: If a page asks for a table that no part has, or has one that no line is left
            for.
    """
    runs = done(folder, parts)
    every = {name: rows(part, runs) for name, part in parts.items()}
    begun = {name: one for name, one in every.items() if one.begun}
    tables = {
        f"{name}: {kind}": [*table(one)] if one.begun else []
        for name, one in every.items()
        for kind, table in TABLES.items()
    }
    when = {name: one for name, one in begun.items() if name in CONDITIONS}
    tables["when: changes"] = [*changes(when)]
    tables["primary"] = [*primary({title: every[name] for name, title in PRIMARY.items()})]
    pages = [page for page in sorted(folder.glob("*.md")) if marks(page)]
    for page in pages:
        fill(page, tables)
    for name in CURVES:
        curves(every[name], folder / f"{name}.svg")
    forest(when, folder / "when.svg")
    for theme in THEMES:
        first_look(every, theme, folder / f"first-look-{theme}.svg")
    print(f"tables are in {', '.join(map(str, pages))}, pictures beside", flush=True)


def main() -> int:
    """Run parts, then make tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}. There are {', '.join(PARTS)}.")
    worst = 0
    try:
        for name in [] if given.draw else given.parts or PARTS:
            worst = max(worst, train(name, PARTS[name]))
            if worst > 1:  # 1 is of a run that failed: the others count
                return worst
        draw(HERE, PARTS)
    except TurnRLError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
