"""A line of figures for each run of a sweep that finished: `results.jsonl` in its folder.

A run with a line is done, even if its folder is not there. So lines can be committed, and copied
from another machine. A line identifies its recipe by digest, not by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from turnrl.runs import record
from turnrl.runs.files import whole_file

FILE = "results.jsonl"
MAIN = ("val/exact_match", "val/reward/total")
"""The figures by which a run is judged. The first one that it has counts, as in
`BestCheckpoint`."""
_DIGITS = 9  # more than float32 has


@dataclass(frozen=True)
class Result:
    """The figures of a finished run.

    Args:
        digest: Digest of its recipe; see `SweepRun`.
        seed: Its seed.
        settings: Its values of `--set`, by key.
        recipe: Name of the recipe.
        turnrl: The version of turnrl that trained it.
        threads: Number of its threads, which decides its last digits on a CPU.
        ended: The time when it ended, in ISO 8601.
        curves: By name, a value for each validation. `iteration` and `step` count the iterations
            and steps behind the policy at that time. `sampled_tokens` and `seconds` are totals of
            all iterations until then; the tokens are those of one process, and from a row on that
            lacks its share, both are None. The other curves are figures of `metrics.csv`: all of
            the validation, such as `val/exact_match`, those of the iteration before it
            (`train/exact_match`, `rollout/turns`), and those of questions that were scored beside
            it (`famous/exact_match`). None if there was no figure.
    """

    digest: str
    seed: int
    settings: Mapping[str, str]
    recipe: str
    turnrl: str
    threads: int
    ended: str
    curves: Mapping[str, Sequence[float | None]]

    def points(self, name: str, by: str = "sampled_tokens") -> list[tuple[float, float]]:
        """A figure over the tokens sampled until then, or over another curve."""
        places, values = self.curves[by], self.curves.get(name, ())
        pairs = zip(places, values, strict=bool(values))
        return [(x, y) for x, y in pairs if x is not None and y is not None]


_LINE = TypeAdapter(Result)
Results = dict[tuple[str, int], Result]
"""Finished runs, by digest and seed."""


def read_results(file: Path) -> tuple[Results, list[str]]:
    """The finished runs in a file, and a sentence for each broken line.

    Args:
        file: The file, or the folder of a sweep. It may not exist yet.
    """
    results: Results = {}
    problems = []
    file = file / FILE if file.is_dir() else file
    for number, line in enumerate(_lines(file), 1):
        if result := _result(line):
            results.setdefault((result.digest, result.seed), result)
        else:
            problems.append(f"ignored line {number} of {file}, which is torn or broken.")
    return results, problems


def append_result(file: Path, result: Result) -> None:
    """Add a line for a run. The line is there whole or not at all, and replaces a torn last
    line."""
    lines = _lines(file)
    if lines and not _text(file).endswith("\n") and _result(lines[-1]) is None:
        lines.pop()
    lines.append(json.dumps(asdict(result)))
    with whole_file(file) as new:
        new.write_text("\n".join(lines) + "\n", "utf-8", "surrogateescape")


def read_curves(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """The curves of a run.

    Args:
        metrics: The rows of its `metrics.csv`, as in `turnrl.runs.load.Run`.
    Returns:
        The curves; empty if no row is of a validation.
    """
    validated = []
    tokens, seconds = 0.0, 0.0  # NaN from the first row on that lacks its share
    for row in metrics:
        if any(name.startswith(("rollout/", "train/")) for name in row):  # an iteration's
            sampled_s = row.get("rollout/seconds", math.nan)
            sampled = row.get("rollout/tokens_per_s", math.nan) * sampled_s
            tokens += float(f"{sampled:.0f}")  # a count, read from a rate
            further = ("rollout/scoring_seconds", "train/seconds")
            seconds += sampled_s + sum(row.get(name, math.nan) for name in further)
        if any(name.startswith("val/") for name in row):
            validated.append({**row, "sampled_tokens": tokens, "seconds": round(seconds, 1)})
    names = sorted({name for row in validated for name in row if _is_recorded(name)})
    places = ("iteration", "step", "sampled_tokens", "seconds")
    return {n: [_shorten(row.get(n)) for row in validated] for n in (*places, *names) if validated}


def _is_recorded(name: str) -> bool:
    split, _, figure = name.partition("/")
    return split == "val" or figure in record.CURVES or name == "rollout/turns"


def _shorten(value: float | None) -> float | None:
    short = None if value is None or math.isnan(value) else float(f"{value:.{_DIGITS}g}")
    return int(short) if short is not None and short == int(short) else short


def _text(file: Path) -> str:
    return file.read_text("utf-8", "surrogateescape") if file.is_file() else ""


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _result(line: str) -> Result | None:
    """Read a line; None if it is torn or broken."""
    try:
        result = _LINE.validate_json(line.encode("utf-8", "surrogateescape"), strict=True)
    except ValueError:
        return None
    curves = result.curves
    alike = len({len(values) for values in curves.values()}) == 1
    return result if alike and curves.keys() >= {"sampled_tokens", "iteration"} else None


def area_under_curve(points: Sequence[tuple[float, float]], end: float) -> float:
    """The area under a curve from its first point to an end, by the trapezoid rule, divided by the
    width.

    Args:
        points: x and y, in the order of x.
        end: The x at which the area ends, at most that of the last point.
    """
    xs, ys = (np.asarray(values, float) for values in zip(*points, strict=True))
    if end <= xs[0]:
        return float(ys[0])
    until = [*xs[xs < end], end]
    return float(np.trapezoid(np.interp(until, xs, ys), until) / (end - xs[0]))
