"""A line of figures for each run of a sweep that finished: `results.jsonl` in its folder.

A run with a line is done, whether its folder is there or not. So lines can be committed, and copied
from another machine. A line names its recipe by digest, not by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turnrl.run import record
from turnrl.run.folders import whole_file

FILE = "results.jsonl"
MAIN = ("val/exact_match", "val/reward/total")
"""The figures that a run is judged by: the first of them that it has, as in `BestCheckpoint`."""
_DIGITS = 9  # more than float32 has


@dataclass(frozen=True)
class Result:
    """The figures of a run that finished.

    Args:
        digest: Of its recipe; see `Cell`.
        seed: Its seed.
        settings: Its values of `--set`, by key.
        recipe: Name of the recipe.
        turnrl: The version that trained it.
        threads: Threads that it had, which decide its last digits on a CPU.
        ended: When it ended, in ISO 8601.
        curves: A value for each validation. `iteration` and `step` are behind the policy then.
            `sampled_tokens` and `seconds` are totals of all iterations until then; the tokens are
            of one process, and both are None from a row on that lacks its share. The others are
            figures of `metrics.csv`: all of the validation, such as `val/exact_match`, and the
            curves of the iteration before it (`train/exact_match`, `rollout/turns`) and of
            questions that were scored beside it (`famous/exact_match`). None where there was none.
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
        """A figure by the tokens that were sampled until then, or by another curve."""
        places, values = self.curves[by], self.curves.get(name, ())
        pairs = zip(places, values, strict=bool(values))
        return [(x, y) for x, y in pairs if x is not None and y is not None]


Results = dict[tuple[str, int], Result]
"""Finished runs, by digest and seed."""


def read(file: Path) -> tuple[Results, list[str]]:
    """The finished runs in a file, and a sentence for each broken line.

    Args:
        file: The file, or the folder of a sweep. It may not be there yet.
    """
    results: Results = {}
    problems = []
    file = file / FILE if file.is_dir() else file
    for number, line in enumerate(_lines(file), 1):
        if one := _result(line):
            results.setdefault((one.digest, one.seed), one)
        else:
            problems.append(f"ignored line {number} of {file}, which is torn or broken.")
    return results, problems


def append(file: Path, result: Result) -> None:
    """Add a line for a run, which is there whole or not at all. It replaces a torn last line."""
    lines = _lines(file)
    if lines and not _text(file).endswith("\n") and _result(lines[-1]) is None:
        lines.pop()
    lines.append(json.dumps(asdict(result)))
    with whole_file(file) as new:
        new.write_text("\n".join(lines) + "\n", "utf-8", "surrogateescape")


def curves(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """The curves of a run.

    Args:
        metrics: The rows of its `metrics.csv`, as `turnrl.run.runs.Run` has them.
    Returns:
        Nothing if no row is of a validation.
    """
    validated = []
    tokens, seconds = 0.0, 0.0  # not a number from where a row lacks its share
    for row in metrics:
        if any(name.startswith(("rollout/", "train/")) for name in row):  # an iteration's
            sampled_s = row.get("rollout/seconds", math.nan)
            sampled = row.get("rollout/tokens_per_s", math.nan) * sampled_s
            tokens += float(f"{sampled:.0f}")  # a count, read from a rate
            others = ("rollout/scoring_seconds", "train/seconds")
            seconds += sampled_s + sum(row.get(name, math.nan) for name in others)
        if any(name.startswith("val/") for name in row):
            validated.append({**row, "sampled_tokens": tokens, "seconds": round(seconds, 1)})
    names = sorted({name for row in validated for name in row if _is_kept(name)})
    places = ("iteration", "step", "sampled_tokens", "seconds")
    return {n: [_short(row.get(n)) for row in validated] for n in (*places, *names) if validated}


def _is_kept(name: str) -> bool:
    split, _, figure = name.partition("/")
    return split == "val" or figure in record.CURVES or name == "rollout/turns"


def _short(value: float | None) -> float | None:
    short = None if value is None or math.isnan(value) else float(f"{value:.{_DIGITS}g}")
    return int(short) if short is not None and short == int(short) else short


def _text(file: Path) -> str:
    return file.read_text("utf-8", "surrogateescape") if file.is_file() else ""


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _result(line: str) -> Result | None:
    """Read a line; None if it is torn or broken."""
    try:
        read = json.loads(line)
        curves = {str(name): [*values] for name, values in read["curves"].items()}
        values = [value for values in curves.values() for value in values]
        alike = len({len(values) for values in curves.values()}) == 1
        numbers = all(isinstance(value, int | float | None) for value in values)
        if not alike or not numbers or not curves.keys() >= {"sampled_tokens", "iteration"}:
            return None
        return Result(
            digest=str(read["digest"]),
            seed=int(read["seed"]),
            settings={str(key): str(value) for key, value in read["settings"].items()},
            recipe=str(read["recipe"]),
            turnrl=str(read["turnrl"]),
            threads=int(read["threads"]),
            ended=str(read["ended"]),
            curves=curves,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
