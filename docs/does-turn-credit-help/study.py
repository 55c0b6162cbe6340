"""Trains what the study lacks, and makes its tables and pictures from the lines of its runs.

    python docs/does-turn-credit-help/study.py               all parts, then tables and pictures
    python docs/does-turn-credit-help/study.py one-hop       one part
    python docs/does-turn-credit-help/study.py --draw        tables and pictures of what is there

Each part is one `turnrl sweep` or several, whose lines are kept in lines/PART.jsonl, and whose runs
in runs/does-turn-credit-help of the clone. Stop it as you like, and give the same command again: it
resumes. To train everything anew, name a new folder with --folder: it then holds all of these.

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from page import TABLES, bare, changes, fill, marks, primary
from parts import CONDITIONS, HERE, PARTS, STARTERS, Part
from pictures import THEMES, WORLDS, curves, first_look, forest, pretrained
from rows import Rows, done, rows

from turnrl.cli import main as turnrl
from turnrl.commands.sweep.matrix import read_seeds
from turnrl.plugin.errors import TurnRLError

CURVES = ("one-hop", "two-hop", "split", "paid-hops")
"""The parts that have a picture of their curves."""
PRIMARY = {"one-hop": "one hop, 8 seeds", "two-hop": "two hops, each search costs, 8 seeds"}
"""The parts of the planned result, and what their worlds are called."""


def train(name: str, part: Part, folder: Path, jobs: Sequence[str]) -> int:
    """Train the runs of a part that have no line.

    Args:
        name: Of the part.
        part: The part.
        folder: Where `lines` is, and where `runs` are if it is not that of the study.
        jobs: Options of `turnrl sweep`.
    Returns:
        The worst exit code; 1 if a run failed.
    """
    lines = folder / "lines" / f"{name}.jsonl"
    home = HERE.parents[1] / "runs" / HERE.name if _is_ours(folder) else folder / "runs"
    worst = 0
    for label, sweep in part.sweeps.items():
        print(f"\n{', '.join(filter(None, (name, label)))}", flush=True)
        runs = os.path.relpath(home / name / label.replace(" ", "-"))
        # lets the processes of the sweep import `conditions.py`
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        with patch.dict(os.environ, PYTHONPATH=path):
            code = begin(sweep.starter) if sweep.starter else 0
            if not code:
                code = turnrl(["sweep", *sweep.words, "-o", runs, "--results", str(lines), *jobs])
        worst = max(worst, code)
        if code > 1:
            break
    return worst


def begin(starter: str) -> int:
    """Make a policy that some parts start from, if it is not there.

    Args:
        starter: A name of `STARTERS`.
    Returns:
        The exit code.
    """
    folder = HERE / "starters" / starter
    if (folder / "config.json").is_file():
        return 0
    print(f"making the starter policy {starter}", flush=True)
    how = STARTERS[starter]
    if isinstance(how, tuple):
        return turnrl([*how, os.path.relpath(folder)])
    # imported here, because it loads torch
    from atlas_starter import make, phases_with

    make(str(folder), phases_with(**how))
    return 0


def _is_ours(folder: Path) -> bool:
    return folder.resolve() == HERE.resolve()


def draw(folder: Path, parts: Mapping[str, Part]) -> None:
    """Make the tables and pictures of the parts that have a run.

    Args:
        folder: Where `lines` is. That of the study has pages, which are filled; any other gets
            `tables.md`.
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
    tables["when: changes"] = [*changes(when)] if when else []
    worlds = {title: begun[name] for name, title in PRIMARY.items() if name in begun}
    tables["primary"] = [*primary(worlds)] if len(worlds) == len(PRIMARY) else []
    files = _pictures(folder, begun, when)
    if _is_ours(folder):
        pages = [page for page in sorted(folder.glob("*.md")) if marks(page)]
        shown = {mark.partition(":")[0] for page in pages for mark in marks(page)}
        for page in pages:
            fill(page, tables)
        for name in begun.keys() - shown:
            asked = f"<!-- {name}: figures --> and <!-- end -->"
            print(f"{name} has runs, and no page has a table of it. Put {asked} into one.")
    else:
        pages = [folder / "tables.md"]
        bare(pages[0], tables, files)
    print(f"tables are in {', '.join(map(str, pages))}, pictures beside", flush=True)


def _pictures(folder: Path, begun: Mapping[str, Rows], when: Mapping[str, Rows]) -> list[str]:
    """Draw, and name the files."""
    files = []
    for name in CURVES:
        if name in begun:
            curves(begun[name], folder / f"{name}.svg")
            files.append(f"{name}.svg")
    if when:
        forest(when, folder / "when.svg")
        files.append("when.svg")
    if WORLDS.keys() <= begun.keys():
        for theme in THEMES:
            first_look(begun, theme, folder / f"first-look-{theme}.svg")
            files.append(f"first-look-{theme}.svg")
    if (table := folder / "pretrained.csv").exists():
        pretrained(table, folder / "pretrained.svg")
        files.append("pretrained.svg")
    return files


def main(words: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run parts, then make tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = ", ".join(parts)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{there}; none for all of them")
    parser.add_argument("--folder", type=Path, default=HERE, help="where lines and page are")
    parser.add_argument("--seeds", help="some of a part's seeds, as 0..1; all if not given")
    parser.add_argument("--jobs", type=_count, help="runs at a time; one per core if not given")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    given = parser.parse_args(words)
    if unknown := [name for name in given.parts if name not in parts]:
        parser.error(f"no part {unknown[0]!r}. There are {there}.")
    if given.draw and (given.parts or given.seeds or given.jobs):
        parser.error("--draw trains nothing, and draws all parts. Give it with --folder alone.")
    jobs = ["--jobs", str(given.jobs)] if given.jobs else []
    if given.folder.is_file():
        parser.error(f"--folder {given.folder} is a file. Name a folder, which need not be there.")
    try:
        if given.draw:
            if not (lines := given.folder / "lines").is_dir():
                raise TurnRLError(f"there is no folder {str(lines)!r}, so there is no run to draw.")
            draw(given.folder, parts)
            return 0
        chosen = {name: _seeds(name, parts[name], given.seeds) for name in given.parts or parts}
        (given.folder / "lines").mkdir(parents=True, exist_ok=True)
        worst = 0
        for name, part in chosen.items():
            worst = max(worst, train(name, part, given.folder, jobs))
            if worst > 1:  # 1 is of a run that failed: the others count
                if worst == TurnRLError.exit_code:
                    print(f"study.py: {name} was not run. Where it says -o, give --folder here.")
                return worst
        draw(given.folder, parts)
    except (TurnRLError, OSError) as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1
    return worst


def _count(word: str) -> int:
    """A number of 1 or more, else an error that says so."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is no number of 1 or more")
    return int(word)


def _seeds(name: str, part: Part, seeds: str | None) -> Part:
    """A part with only these seeds; with all if None."""
    if seeds is None:
        return part
    for sweep in part.sweeps.values():
        if others := {*read_seeds(seeds)} - {*read_seeds(sweep.seeds)}:
            raise TurnRLError(
                f"--seeds {seeds}: {name} has the seeds {sweep.seeds}, and not {min(others)}. Add "
                "it in parts.py."
            )
    return replace(part, sweeps={k: replace(v, seeds=seeds) for k, v in part.sweeps.items()})


if __name__ == "__main__":
    sys.exit(main())
