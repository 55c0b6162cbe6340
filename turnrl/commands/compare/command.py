"""`turnrl compare RUN RUN ...`: runs on the questions that all of them answered.

    turnrl compare quickstart@0 quickstart       the untrained policy and the last one of a run
    turnrl compare a b c --iteration 40          b and c with a, each after 40 iterations
    turnrl compare a0 a1 a2 b0 b1 b2             two recipes with three seeds each

The first one is the baseline. Every figure is paired by question, and its difference has a 95 %
interval. Runs that differ in their seeds alone are one side, and the interval is then over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from turnrl.text import visible

if TYPE_CHECKING:
    from turnrl.commands.compare.pairing import Comparison, Side
    from turnrl.run.statistics import Difference

_FEW = 3
_WIDTH = 80


def add_compare_command(commands: Any) -> None:
    """Add `compare` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "compare",
        help="compare runs on the questions that all answered",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "a run, a folder of runs, or its name under runs/; NAME@10: its policy of iteration 10"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=told)
    parser.add_argument(
        "--split", default="val", metavar="NAME", help="what was evaluated (default: %(default)s)"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of each run (default: its last)"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"every question won or lost, not {_FEW} of each"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object a comparison")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    from turnrl.commands.compare.pairing import compare, open_sides

    sides = open_sides(args.runs, args.split, args.iteration)
    for number, comparison in enumerate(compare(sides)):
        if args.json:
            print(json.dumps(as_json(comparison)))
        else:
            print("\n" * (number > 0) + "\n".join(as_text(comparison, args.split, args.all)))
    if not args.json:
        every = [one for side in sides for one in side.evaluations]
        # the order that they were given in: by it a report numbers its runs
        folders = {one.number: str(one.run.folder) for one in every}
        print(f"\nSee them: turnrl report {' '.join(folders[n] for n in sorted(folders))}")
        print("Then open report.html with the end of a line above behind its name.")


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values, for JSON."""

    def side(one: Side) -> list[dict[str, Any]]:
        return [
            {"run": e.run.name, "folder": str(e.run.folder), "iteration": e.iteration}
            for e in one.evaluations
        ]

    plain = {name: getattr(comparison, name) for name in ("asked", "won", "lost", "notes")}
    figures = {name: asdict(figure) for name, figure in comparison.figures.items()}
    sides = {"first": side(comparison.first), "second": side(comparison.second)}
    return sides | {"questions": len(comparison.questions), "figures": figures} | plain


def as_text(comparison: Comparison, split: str, every: bool = False) -> Iterator[str]:
    """The lines of a comparison, of at most 80 columns but for names.

    Args:
        comparison: What is shown.
        split: What was evaluated.
        every: Show every question that was won or lost, not the first few.
    """
    first, second = comparison.first, comparison.second
    seeds, common = len(first.evaluations), len(comparison.questions)
    shares = " and ".join(f"{common / asked:.0%} of {asked}" for asked in comparison.asked)
    yield f"{split}: {common} questions in common, {shares}"
    for letter, side, told in (("A", first, "the baseline"), ("B", second, "")):
        after = ", ".join(map(str, dict.fromkeys(one.iteration for one in side.evaluations)))
        yield f"{letter}  {side.name}, iteration {after}{', ' * bool(told)}{told}"
    yield from _differences(comparison)
    yield ""
    yield f"{'':17}{'A':>8}{'B':>8}{'B - A':>9}  {'95 % interval':18}{'p':>7}{'won':>5}{'lost':>5}"
    for name, figure in comparison.figures.items():
        yield _line(name, figure)
    yield ""
    for sentence in _told(comparison, seeds):
        yield from wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
    for what, ids in (("won", comparison.won), ("lost", comparison.lost)):
        yield f"\n{what} by B in exact match: {len(ids)}"
        for question in ids if every else ids[:_FEW]:
            yield from _question(first, second, question)
        if len(ids) > _FEW and not every:
            yield f"    and {len(ids) - _FEW} more: --all"


def _line(name: str, figure: Difference) -> str:
    from turnrl.commands.compare.pairing import SIZES

    p = "" if figure.p is None else "<.0001" if figure.p < 1e-4 else f"{figure.p:.4f}"
    large = max(map(abs, (figure.first, figure.second, figure.low, figure.high)))
    digits = 4 if large < 100 else 1 if large < 10_000 else 0  # so that columns stay columns
    values = f"{figure.first:8.{digits}f}{figure.second:8.{digits}f}"
    change = f"{figure.change:+9.{digits}f}"
    ends = f"[{figure.low:+.{digits}f}, {figure.high:+.{digits}f}]"
    won = "" if name in SIZES else f"{figure.gained:5}{figure.lost:5}"
    return f"{name:17}{values}{change}  {ends:18}{p:>7}{won}".rstrip()


def _differences(comparison: Comparison) -> Iterator[str]:
    """The settings in which the two sides differ, but for seeds of a side; then those of their
    evaluations, without the questions, which are the same."""
    from turnrl.run.runs import SEEDS, differences, is_of_command, was_evaluated

    runs = [side.one.run for side in (comparison.first, comparison.second)]
    evaluated = any(map(was_evaluated, runs))
    for name, values in differences(runs).items():
        of_evaluation = evaluated and is_of_command(name)
        if not of_evaluation and (len(comparison.first.evaluations) == 1 or name not in SEEDS):
            yield _cut(f"   {name}: {' -> '.join(value or '(none)' for value in values)}")
    # the checkpoint of a run of `fit` is one that it went on from
    told = [run.settings if was_evaluated(run) else {} for run in runs]
    for name in dict.fromkeys(filter(is_of_command, (*told[0], *told[1]))):
        if name.partition(".")[0] in ("split", "questions"):
            continue
        given = [settings.get(name) for settings in told]
        values = ["(none)" if value in (None, "null") else str(value) for value in given]
        if len({*values}) > 1:
            shown = _ends(values) if name == "ckpt_path" else values
            yield _cut(f"   evaluated with {name}: {' -> '.join(shown)}")


def _ends(paths: Sequence[str]) -> list[str]:
    """The shortest ends of some paths that tell them apart."""
    parts = [path.split("/") for path in paths]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(some[-depth:]) for some in parts]
        if len({*ends}) == len({*paths}):
            return ends
    return [*paths]


def _told(comparison: Comparison, seeds: int) -> Iterator[str]:
    """Sentences about the intervals: their base, what was left out, and what they say."""
    match = comparison.figures["exact_match"]
    for name, figure in comparison.figures.items():
        if figure.over == "questions" and figure.pairs < len(comparison.questions):
            some = f"{figure.pairs} question{'s' * (figure.pairs > 1)}"
            yield f"{name} is over {some}: it says nothing about the others."
    if seeds > 1:
        yield (
            f"Intervals: Student's t over {seeds} seeds, paired. They hold for other seeds of "
            "these recipes, on these questions. Won and lost count seeds there."
        )
        still = [name for name, figure in comparison.figures.items() if figure.over == "questions"]
        if still:
            yield (
                f"Over questions, because all seeds differ by the same: {', '.join(still)}. This "
                "says nothing of other seeds, and won, lost and p count questions there."
            )
    else:
        yield (
            "Intervals: over questions, for these policies. Another seed trains another policy. To "
            "compare recipes, name runs of several seeds of each."
        )
    yield from comparison.notes
    if match.over == "questions" and seeds > 1:
        yield "exact_match: more seeds have to tell. These all differ by the same."
        return
    better = "B is better than A" if match.low > 0 else "B is worse than A"
    same = "no difference is shown: the interval holds 0"
    yield f"exact_match: {same if match.low <= 0 <= match.high else better}."


def _question(first: Side, second: Side, question: str) -> Iterator[str]:
    """A question, what is accepted, and both answers with their places in a report: those of the
    first seed in which the sides differ."""
    pairs = zip(first.evaluations, second.evaluations, strict=True)
    match = "exact_match"
    pair = next(p for p in pairs if p[0].value(question, match) != p[1].value(question, match))
    row = pair[0].questions[question][0]
    yield _cut(f"  {row['question']}")
    yield _cut(f"    accepted  {' | '.join(row['answers'] or ())}")
    for letter, one in zip("AB", pair, strict=True):
        rows, address = one.questions[question], one.address(question)
        answer = rows[0]["answer"] or "(no answer)"
        if len(rows) > 1:
            answer = f"right in {sum(row[match] for row in rows):g} of {len(rows)} attempts"
        width = _WIDTH - len(address) - 2
        yield f"{_cut(f'    {letter}  {answer}', width):{width}}  {address}"


def _cut(text: str, width: int = _WIDTH) -> str:
    """One line of a text that somebody else wrote, without what a terminal would obey."""
    line = visible(text).replace("\n", " ").replace("\t", " ")
    return line if len(line) <= width else line[: width - 3] + "..."
