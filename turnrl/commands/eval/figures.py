"""The figures of each data set of an evaluation and of all together, as lines or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from turnrl.plugin.text import format_count
from turnrl.runs import record
from turnrl.runs.table import Line, table_lines

Figures = dict[str, dict[str, record.Metric]]
"""By data set, then by name. If there are several data sets, the last one is `overall`."""


_MEANINGS = {
    "exact_match": "the answer is an accepted one",
    "tool_execution": "share of an attempt's calls that succeeded; 0 without a call",
    "answer_in_results": "a result has an accepted answer",
    "format": "every turn is well formed, and the last one answers",
    "f1": "words that the answer shares with an accepted one",
}
"""Descriptions of the figures of an attempt that are not named after a reward."""


def compute_report(rows: Mapping[str, Sequence[record.Row]], sampled: bool) -> Figures:
    """The figures of each data set. If there are several, `overall` has those of all questions
    together, each question counting the same.

    Args:
        rows: Rows of the record, by data set.
        sampled: Add `mean@n` and `pass@k` of exact match; see `turnrl.runs.record.pass_at_k`.
    """
    sets = {name: list(of_set) for name, of_set in rows.items()}
    if len(sets) > 1:
        sets["overall"] = [row for of_set in rows.values() for row in of_set]
    return {
        name: record.compute_metrics(of_set) | (record.pass_at_k(of_set) if sampled else {})
        for name, of_set in sets.items()
    }


def format_lines(figures: Figures, how: str) -> Iterator[str]:
    """A line for each figure: its mean over the questions, and its interval.

    Args:
        figures: See `compute_report`.
        how: How the trajectories were sampled, such as `greedy`.
    """
    for name, of_set in figures.items():
        questions = max(figure.questions for figure in of_set.values())
        yield f"\n{format_count(questions, 'question')}, {how}"
        lines = []
        for key, figure in of_set.items():
            found = key == "answer_in_results"
            if figure.mean is None and not (found and of_set["exact_match"].mean is not None):
                continue
            few = figure.questions < questions
            why = ", whose answer can be found" if found else ""
            note = f"  of {format_count(figure.questions, 'question')}{why}" if few else ""
            ends = None if figure.low is None or figure.high is None else (figure.low, figure.high)
            lines.append(Line(f"{name}/{key}", figure.mean, ends, note=note))
        yield from table_lines(lines)
    shown = {key for of_set in figures.values() for key, f in of_set.items() if f.mean is not None}
    yield ""
    yield from (f"{name:18} {text}" for name, text in _MEANINGS.items() if name in shown)


def to_json(asked: Mapping[str, object], figures: Figures) -> str:
    """The evaluated questions, and every figure with `mean`, `low`, `high` and its number of
    `questions`; null without any question."""
    plain = {name: {key: asdict(f) for key, f in of.items()} for name, of in figures.items()}
    return json.dumps({**asked, "figures": plain}, indent=2)
