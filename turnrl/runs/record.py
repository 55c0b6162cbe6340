"""The record of a run: one row per trajectory, in Parquet.

    from turnrl.runs import record

    rows = record.read("runs/quickstart/version_0", split="val")
    for name, figure in record.compute_metrics(rows).items():
        print(name, figure.mean, figure.low, figure.high)
    print(record.format_transcript(rows[0]))

`help(turnrl.runs.columns.RecordedAttempt)` explains the columns.

Files are named SPLIT-POLICY_VERSION-PROCESS, and each is there whole or not at all, so you can read
the record of a run that is still training. Any Parquet reader can read them, such as
`datasets.load_dataset("parquet", data_files="runs/NAME/version_0/record/*.parquet")`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from turnrl.plugin.errors import DataError, suggest_name, summarize_error
from turnrl.plugin.text import format_labelled, make_visible
from turnrl.rewards.answers import CURVES as CURVES
from turnrl.runs.columns import COLUMNS, VERSION, VERSION_KEY, check_row, restore
from turnrl.runs.columns import SCHEMA as SCHEMA
from turnrl.runs.columns import TOKENS as TOKENS
from turnrl.runs.columns import Columns as Columns
from turnrl.runs.columns import Row as Row
from turnrl.runs.columns import parse_json_object as parse_json_object
from turnrl.runs.find import find_run
from turnrl.runs.restoring import restore_group as restore_group
from turnrl.runs.statistics import all_or_nothing
from turnrl.runs.statistics import mean_interval as mean_interval
from turnrl.types.trajectory import Turn

_AnyRow = TypeVar("_AnyRow", bound=Columns)
_SIZES = ("turns", "calls", "sampled_tokens")

# ------------------------------------------------------------------------ files


@dataclass(frozen=True)
class FileName:
    """The name of a file of a record, SPLIT-POLICY_VERSION-PROCESS.

    Args:
        split: Name of the questions, such as `val`. It may have hyphens.
        policy_version: Optimiser steps behind the weights that learn from its rows, or that are
            evaluated.
        process: Number of the process that collected its rows.
    """

    split: str
    policy_version: int
    process: int = 0

    @classmethod
    def of(cls, file: Path) -> Self:
        """The parts of a file's name. Any other name counts as a split without a version."""
        split, *numbers = file.stem.rsplit("-", 2)
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            return cls(split, *map(int, numbers))
        return cls(file.stem, -1)

    def __str__(self) -> str:
        return f"{self.split}-{self.policy_version:06d}-{self.process}.parquet"


def list_files(run: str | Path, split: str | None = None) -> list[Path]:
    """The files of a record, in order of their names.

    Args:
        run: A run, as `turnrl.runs.find_run` takes it, or any folder with such files, or one file
            that ends in `.parquet`.
        split: Take only files of this split, such as `val`; None for all.
    Raises:
        DataError: If there is no run, it has no record, or its record has no such split.
    """
    path = Path(run)
    if path.suffix == ".parquet" and path.is_file():
        return [path]
    bare = sorted(path.glob("*.parquet"))
    kept = bare or sorted((find_run(path) / "record").glob("*.parquet"))
    splits = [FileName.of(file).split for file in kept]
    if split is not None and split not in splits:
        names = ", ".join(sorted(set(splits)))
        raise DataError(f"the record of {str(run)!r} has no split {split!r}. Take {names}.")
    return [file for file, own in zip(kept, splits, strict=True) if split in (None, own)]


def table(
    run: str | Path, columns: Sequence[str] | None = None, split: str | None = None
) -> pa.Table:
    """The record as a pyarrow table. Only the columns that you name are read from disk.

    Args:
        run: See `list_files`.
        columns: Names of columns; None for all.
        split: See `list_files`.
    Raises:
        DataError: As in `list_files`. Also if there is no such column, or if a file is torn, is not
            a record, or has a newer version than this turnrl reads.
    """
    for name in columns or ():
        if name not in COLUMNS:
            near = suggest_name(name, COLUMNS) or f" There are {', '.join(COLUMNS)}."
            raise DataError(f"the record has no column {name!r}.{near}")
    return pa.concat_tables([_open_file(file, columns) for file in list_files(run, split)])


def _open_file(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        schema = pq.read_schema(file)
        version = (schema.metadata or {}).get(VERSION_KEY, b"").decode()
        if not version:
            step = "Give the folder of a run, or a file of its record/."
            raise DataError(f"{str(file)!r} is not a record of turnrl. {step}")
        if version != str(VERSION):
            raise DataError(
                f"{str(file)!r} has version {version} of the record, and this turnrl reads "
                f"{VERSION}. Update your clone of turnrl, or read it with the one that wrote it."
            )
        wanted = None if columns is None else list(columns)
        return pq.read_table(file, columns=wanted, schema=SCHEMA, partitioning=None)
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        step = "Copy it again, or remove it."
        raise DataError(
            f"{str(file)!r} cannot be read ({summarize_error(error)}). {step}"
        ) from error


def read(
    run: str | Path, columns: Sequence[str] | None = None, split: str | None = None
) -> list[Row]:
    """The rows of a record, in order of its files' names. All of them are in memory: for a long
    run, use `table` with a few columns, or read one of `list_files` at a time.

    Args:
        run: See `list_files`.
        columns: Names of columns; None for all.
        split: See `list_files`.
    Raises:
        DataError: As in `table`.
    """
    rows: list[Row] = table(run, columns, split).to_pylist()
    return rows


def read_checked(file: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of one file, which anybody may have written.

    Raises:
        DataError: As in `table`. Also if a value is one that no turnrl writes.
    """
    rows: list[Row] = _open_file(file, columns).to_pylist()
    try:
        for row in rows:
            check_row(row)
        if any(map(_has_odd_parents, groups(rows) if columns is None else ())):
            raise DataError("a branch comes from no attempt of its group")
    except DataError as fault:
        step = "Copy it again, or remove it."
        raise DataError(f"{str(file)!r} is not a record of turnrl: {fault}. {step}") from fault
    return rows


def _has_odd_parents(members: Sequence[Row]) -> bool:
    trunks = {n for n, row in enumerate(members) if row["parent"] in (None, n)}
    return any(row["parent"] not in (None, *trunks) for row in members)


def groups(rows: Iterable[_AnyRow]) -> list[list[_AnyRow]]:
    """The rows by group: those of one question in one collection, in order."""
    by_group: dict[tuple[object, ...], list[_AnyRow]] = {}
    for row in rows:
        by_group.setdefault((row["split"], row["policy_version"], row["group"]), []).append(row)
    # without the column `member`, rows stay in the order in which they were recorded
    return [
        sorted(members, key=lambda row: row.get("member") or 0) for members in by_group.values()
    ]


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Metric:
    """A mean over questions with its 95 % interval.

    Args:
        mean: The mean; None if there are no questions.
        low: Lower end of the interval; see `mean_interval`. None if one question shows nothing.
        high: Upper end of the interval.
        questions: Number of questions in the mean.
    """

    mean: float | None
    low: float | None
    high: float | None
    questions: int


def scores(row: Columns) -> dict[str, float | None]:
    """The figures of one trajectory: the four curves, `f1`, each reward and their total, by their
    names in `metrics.csv`, and its `turns`, `calls` and `sampled_tokens`. None where a figure would
    say nothing."""
    rewards = {f"reward/{part['name']}": part["value"] for part in row["rewards"]}
    turns, sampled = row["turns"], row["prompt_tokens"] is not None
    sizes = (
        float(len(turns)),
        float(sum(len(turn["reading"]["calls"]) for turn in turns)),
        float(sum(turn["tokens"] for turn in turns)) if sampled else None,
    )
    curves = {name: row[name] for name in (*CURVES, "f1")}
    return (
        curves
        | rewards
        | {"reward/total": sum(rewards.values())}
        | dict(zip(_SIZES, sizes, strict=True))
    )


def compute_metrics(rows: Iterable[Row]) -> dict[str, Metric]:
    """The figures of trajectories, by the names of `scores`.

    Trajectories of one group are averaged first, because they share their question: the interval is
    over questions. Branches do not count, as in `metrics.csv`.
    """
    scored = [[scores(row) for row in members] for members in groups(_drop_branches(rows))]
    names = dict.fromkeys(name for members in scored for row in members for name in row)
    return {
        name: _figure(name, [_mean(row.get(name) for row in members) for members in scored])
        for name in names
    }


def _drop_branches(rows: Iterable[Row]) -> list[Row]:
    """The rows without those of branches."""
    return [row for row in rows if row.get("parent") is None and not row.get("begins")]


def pass_at_k(rows: Iterable[Row]) -> dict[str, Metric]:
    """Exact match of several attempts at each question, as rates over questions.

    If c of a question's n attempts are right, `mean@n` is c / n, and `pass@k` is the chance that at
    least one of k is right, 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al. 2021, arXiv
    2107.03374, equation 1). k is 2, 4, 8, ... and n.

    A question without accepted answers is in none of the rates. Branches do not count. If groups
    differ in size, n is the size of the smallest, and each group's c is out of its own size.

    Args:
        rows: Trajectories, several of each question.
    """
    matches = [[row["exact_match"] for row in members] for members in groups(_drop_branches(rows))]
    n = min(map(len, matches), default=0)
    ks = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * bool(n)
    rates = {f"mean@{n}": _figure("", [_mean(of_group) for of_group in matches])} if n else {}
    for k in ks:
        rates[f"pass@{k}"] = _figure("", [_hit_rate(of_group, k) for of_group in matches])
    return rates


def _hit_rate(matches: Sequence[float | None], k: int) -> float | None:
    """The chance that one of k attempts is right; None if the question has no accepted answer."""
    if any(match is None for match in matches):
        return None
    wrong = sum(not match for match in matches)
    return 1.0 - math.comb(wrong, k) / math.comb(len(matches), k)


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _figure(name: str, values: Sequence[float | None]) -> Metric:
    present = [value for value in values if value is not None]
    ends = mean_interval(present, success_value(name, present)) if present else None
    low, high = ends or (None, None)
    return Metric(_mean(present), low, high, len(present))


def success_value(name: str, values: Sequence[float]) -> float | None:
    """What a figure is if it succeeds, for the interval of a rate (`mean_interval`): 1 for a share,
    its weight for a reward that is all or nothing. None for any other."""
    if name.startswith("reward/"):
        return all_or_nothing(values)
    return None if name in _SIZES else 1.0


# --------------------------------------------------------------------- as text


def format_transcript(row: Columns, sent: Sequence[str] = ()) -> str:
    """One trajectory as text to read: the question with the opening of tool sessions, each turn
    with its rewards and its advantage, and the rewards of the whole. Invisible characters are shown
    as in `turnrl.plugin.text.make_visible`.

    Args:
        row: A row of the record.
        sent: The text that the policy read before each turn, which is not in the record.
    """
    lines = [
        f"question   {row['question']}",
        *([format_labelled("opening", row["opening"])] if row.get("opening") else []),
        f"accepted   {' | '.join(row['answers'][:5])}",
        f"outcome    {row['outcome']:.3f}   ended by {row['ended_by']}",
    ]
    for k, turn in enumerate(row["turns"], 1):
        parts = f" ({_parts(turn['rewards'])})" if turn["rewards"] else ""
        credit = "" if turn["advantage"] is None else f"   advantage {turn['advantage']:+.3f}"
        several = len(row.get("sample_tokens") or ()) > 1
        history = f"   history {turn['sample'] + 1}" if several else ""
        lines.append(f"-- turn {k}{history}   reward {turn['turn_reward']:.3f}{parts}{credit}")
        lines += [*sent[k - 1 : k], str(restore(Turn, turn))]
    return make_visible("\n".join([*lines, _parts(row["rewards"])]))


def _parts(rewards: Iterable[Columns]) -> str:
    return "   ".join(f"{part['name']} {part['value']:.3f}" for part in rewards)
