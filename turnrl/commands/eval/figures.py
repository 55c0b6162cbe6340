"""Figures of an evaluation: of each data set and of all, as lines to read or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from turnrl.run import record

Figures = dict[str, dict[str, record.Figure]]
"""By data set, then by name. The last of several is `overall`."""


def report_of(rows: Mapping[str, Sequence[record.Row]], sampled: bool) -> Figures:
    """The figures of each data set. If there are several, `overall` has those of all questions
    together, each question counting the same.

    Args:
        rows: Rows of the record, by data set.
        sampled: Add `mean@n` and `pass@k` of exact match; see `turnrl.record.passes`.
    """
    sets = {name: list(some) for name, some in rows.items()}
    if len(sets) > 1:
        sets["overall"] = [row for some in rows.values() for row in some]
    return {
        name: record.figures(some) | (record.passes(some) if sampled else {})
        for name, some in sets.items()
    }


def lines(figures: Figures, how: str) -> Iterator[str]:
    """A line for each figure: its mean over the questions, and its interval.

    Args:
        figures: See `report_of`.
        how: How the trajectories were made: `greedy`, for example.
    """
    for name, some in figures.items():
        questions = some["exact_match"].questions
        yield f"\n{questions} questions, {how}; mean and 95 % interval"
        for key, figure in some.items():
            value, few = "-", ""
            if figure.mean is not None:
                value = f"{figure.mean:.4f}  [{figure.low:.4f}, {figure.high:.4f}]"
            elif key != "answer_in_results":
                continue
            if figure.questions < questions:
                why = ", whose answer can be found" if key == "answer_in_results" else ""
                few = f"  of {figure.questions} questions{why}"
            yield f"    {f'{name}/{key}':36} {value}{few}"


def as_json(asked: Mapping[str, Any], figures: Figures) -> str:
    """What was asked, and every figure with `mean`, `low`, `high` and its number of `questions`;
    null where it says nothing."""
    found = {
        name: {key: asdict(one) for key, one in some.items()} for name, some in figures.items()
    }
    return json.dumps({**asked, "figures": found}, indent=2)
