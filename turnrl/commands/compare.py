"""`turnrl compare RUN RUN ...`: runs on the questions that all of them answered.

    turnrl compare quickstart@0 quickstart       the untrained policy and the last one of a run
    turnrl compare a b c --iteration 40          b and c with a, each after 40 iterations
    turnrl compare a0 a1 a2 b0 b1 b2             two recipes with three seeds each

The first run is the baseline. Every metric is paired by question, and its difference has a 95 %
interval. Runs that differ only in their seeds are compared together, with intervals over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from turnrl.plugin.text import format_count, make_visible, paint, say

if TYPE_CHECKING:
    from turnrl.plugin.hooks import Commands
    from turnrl.runs.compare import Comparison, Side

_FEW = 3
_WIDTH = 80


def add_compare_command(commands: Commands) -> None:
    """Add `compare` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "compare",
        help="compare runs on the questions that all answered",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    text = (
        "a run, a folder of runs, or its name under runs/; NAME@10: the policy after iteration 10"
    )
    add("runs", nargs="+", metavar="RUN", help=text)
    text = "the split that was evaluated (default: %(default)s)"
    add("--split", default="val", metavar="NAME", help=text)
    add("--iteration", type=int, metavar="N", help="iteration of each run (default: its last)")
    add("--all", action="store_true", help=f"every question won or lost, not {_FEW} of each")
    add("--json", action="store_true", help="print JSON, one object a comparison")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    from turnrl.runs.compare import compare, open_sides
    from turnrl.runs.table import side_letter

    sides = open_sides(args.runs, args.split, args.iteration)
    for number, comparison in enumerate(compare(sides), 1):
        if args.json:
            print(json.dumps(to_json(comparison)))
        else:
            # the baseline is A in each comparison, and the others are B, C and so on
            text = "\n".join(to_text(comparison, args.split, args.all, side_letter(number)))
            say("\n" * (number > 1) + text)


def to_json(comparison: Comparison) -> dict[str, object]:
    """A comparison as plain values, for JSON."""

    def plain(side: Side) -> list[dict[str, object]]:
        return [
            {"run": e.run.name, "folder": str(e.run.folder), "iteration": e.iteration}
            for e in side.evaluations
        ]

    return {
        "first": plain(comparison.first),
        "second": plain(comparison.second),
        "questions": len(comparison.questions),
        "figures": {name: asdict(figure) for name, figure in comparison.figures.items()},
        "asked": comparison.asked,
        "won": comparison.won,
        "lost": comparison.lost,
        "notes": comparison.notes,
    }


def to_text(
    comparison: Comparison, split: str, every: bool = False, letter: str = "B"
) -> Iterator[str]:
    """The lines of a comparison, of at most 80 columns except for names.

    Args:
        comparison: The comparison.
        split: The split that was evaluated.
        every: Show every question that was won or lost, not only the first few.
        letter: The letter of the side that is not the baseline.
    """
    from turnrl.runs.table import Line, table_lines, wrap_lines

    first, second = comparison.first, comparison.second
    common = len(comparison.questions)
    shares = " and ".join(f"{common / asked:.0%} of {asked}" for asked in comparison.asked)
    yield f"{split}: {format_count(common, 'question')} in common, {shares}"
    for name, side, role in (("A", first, ", the baseline"), (letter, second, "")):
        after = ", ".join(map(str, dict.fromkeys(e.iteration for e in side.evaluations)))
        yield f"{name}  {side.name}, iteration {after}{role}"
    yield _result(comparison, letter)
    yield from _differences(comparison)
    yield ""
    lines = []
    for name, figure in comparison.figures.items():
        lines.append(Line(name, figure.first, figure.first_ends, "A"))
        lines.append(Line(name, figure.second, figure.second_ends, letter, figure))
    yield from table_lines(lines)
    yield ""
    for sentence in _notes(comparison):
        yield from wrap_lines(sentence)
    for outcome, ids in (("won", comparison.won), ("lost", comparison.lost)):
        yield f"\n{outcome} by {letter} in {comparison.main.replace('_', ' ')}: {len(ids)}"
        for question in ids if every else ids[:_FEW]:
            yield from _question(comparison, question, letter)
        if len(ids) > _FEW and not every:
            yield f"    and {len(ids) - _FEW} more: --all"


def _differences(comparison: Comparison) -> Iterator[str]:
    """The settings in which the two sides differ, except for the seeds within a side."""
    from turnrl.runs.config import SEEDS
    from turnrl.runs.load import differing_settings

    one = len(comparison.first.evaluations) == 1
    for name, values in differing_settings(
        [comparison.first.one.run, comparison.second.one.run]
    ).items():
        if one or name not in SEEDS:
            yield _clean_line(f"   {name}: {' -> '.join(value or '(none)' for value in values)}")


def _notes(comparison: Comparison) -> Iterator[str]:
    """Sentences about the basis of the figures, and the parts that were left out."""
    seeds = len(comparison.first.evaluations)
    if seeds > 1:
        yield (
            f"Intervals: Student's t over {seeds} seeds; those of differences are paired by seed. "
            "They hold for other seeds of these recipes, on these questions."
        )
    else:
        yield (
            "Intervals: over questions, for these policies. Another seed trains another policy. To "
            "compare recipes, name runs of several seeds of each. p: how likely a difference as "
            "large is by chance alone."
        )
        for key, figure in comparison.figures.items():
            if figure.pairs < len(comparison.questions):
                yield (
                    f"{key} is over {format_count(figure.pairs, 'question')}. The others do not "
                    "have it."
                )
    yield from comparison.notes


def _result(comparison: Comparison, letter: str) -> str:
    """A sentence that names the better side in the main figure, if that is known."""
    name, verdict = comparison.main, comparison.figures[comparison.main].verdict
    if verdict == "undecided":
        return f"{name}: undecided. All seeds differ by the same: add more seeds."
    if verdict == "level":
        return f"{name}: no significant difference: the interval includes 0."
    return paint(f"{name}: {letter} is {verdict} than A.", "strong")


def _question(comparison: Comparison, question: str, letter: str) -> Iterator[str]:
    """A question, its accepted answers, and the answers of both sides, for the first seed in which
    the sides differ."""
    main = comparison.main
    pairs = zip(comparison.first.evaluations, comparison.second.evaluations, strict=True)
    pair = next(p for p in pairs if p[0].value(question, main) != p[1].value(question, main))
    row = pair[0].questions[question][0]
    yield _clean_line(f"  {row['question']}")
    yield _clean_line(f"    accepted  {' | '.join(row['answers'] or ())}")
    for name, evaluation in zip(("A", letter), pair, strict=True):
        rows = evaluation.questions[question]
        answer = rows[0]["answer"] or "(no answer)"
        if main != "exact_match" or len(rows) > 1:
            answer = f"{main} {evaluation.value(question, main):.3f}"
        yield _clean_line(f"    {name}  {answer}")


def _clean_line(text: str, width: int = _WIDTH) -> str:
    """A foreign text as one line, with control characters made visible."""
    line = make_visible(text).replace("\n", " ").replace("\t", " ")
    return line if len(line) <= width else line[: width - 3] + "..."
