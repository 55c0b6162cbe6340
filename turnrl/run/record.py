"""The record: what a run did, as rows to read. One row per trajectory, in Parquet.

    from turnrl.run import record

    rows = record.read("runs/quickstart/version_0", split="val")
    for name, figure in record.figures(rows).items():
        print(name, figure.mean, figure.low, figure.high)
    print(record.transcript(rows[0]))

The columns:

    iteration       metrics.csv's `iteration`: the one that collected it, from 1; of an evaluation
                    the last one behind the policy, 0 for the untrained
    policy_version  optimiser steps behind the weights that learned from it, or that were evaluated.
                    With `max_staleness`, older ones may have sampled it: see `versions`
    split           `train` (sampled), or what was evaluated: `val`, `test`, a data set by its name
                    (greedy, unless `turnrl eval --samples` asked for more)
    question_id, question, answers      what was asked, and what counts as right
    opening         what tool sessions added to the question, as the policy read it: the first
                    observation of an environment; null if they added nothing, and in records of
                    turnrl 0.13 and before
    group, member   number of the question in the collection, over all processes; of the attempt
    begins          its first turn of its own: above 0 for a branch, which shares those before it
    parent          of a branch, the member that it came from; null of what is none
    ended_by        why the trajectory ended: `answer`, `tool`, `player`, `turns` or `length`
    answer          the final answer; null if there is none
    exact_match, tool_execution, answer_in_results, format      the four curves (`turnrl.curves`);
                    `answer_in_results` is null where it would say nothing
    f1              words that the answer shares with an accepted one; see `turnrl.f1`
    prompt_tokens   tokens of the prompt; null if a `MessageSampler` wrote the turns
    sample_tokens   tokens of each of its token histories: one, or several if its player rewrote
                    the history on the way
    outcome         outcome reward
    rewards         each component's total: a list of {name, value}
    reward_bounds   the least and the most that one score of a component can be, of those that say
                    so (`Reward.bounds`): a list of {name, low, high}
    costs           names of the components that are costs (`Reward.is_cost`)
    right_at        the least that a right attempt gets of a component, of those that say what is
                    right (`Reward.right_at`): a list of {name, value}
    figures         numbers that tool sessions handed over: a list of {name, values}, with one
                    value, or one per turn
    extra           JSON of what the notes of rewards say of the trajectory, by column;
                    null without any
    group_mean, group_std       of the total reward over the group; null where there was no group
    estimator       JSON of the rule that gave the credit: its `name`, the path of its `class`, and
                    its `arguments` as far as its attributes tell them; null where nothing was
                    learned
    turns           a list of {text, tokens, sample, cut, calls, results, format_error, reward,
                    rewards, world_reward, advantage}; `sample` is the number of the history that
                    it was sampled in, and `world_reward` what the world paid for it; a call is
                    {name, arguments (JSON), error, mended}, a result {content, ok, metadata
                    (JSON; with `turnrl.unread`, the text of a result that the policy did not
                    read)}; `rewards` has the components of `reward`, as {name, value}; the
                    advantage is null where nothing was learned: in an evaluation, and in turns
                    that a branch shares with the trajectory that it came from

With `record.tokens`, seven lists of the same length, one entry per token of the prompt, the
turns and the results, history after history; null without it:

    token_ids       the first `prompt_tokens` of them are the prompt's
    turn_index      number of the turn that sampled the token; -1 if no turn of its own did
    sampler_logprobs    of each sampled token, as the engine computed it; null elsewhere
    learner_logprobs    of the same by the weights of `policy_version`, as the learner computes it
    entropies       of the whole distribution before each sampled token, in nats, from the same pass
                    of the learner; the sampler's, which `top_k` and the like cut, is not known
    versions        optimiser steps behind the weights that sampled each token; null elsewhere
    token_texts     what each token adds to the text; null in records of turnrl 0.16 and before

Log-probabilities and entropies are at the temperature of sampling, and at 1 for greedy turns.

The metadata of a file names the version of its columns (`turnrl.record`), which is 2. Files of
turnrl 0.5 to 0.7 name none and are refused. Columns that a file lacks are null.

Files are named SPLIT-POLICY_VERSION-PROCESS, and each is there whole or not at all, so you can read
the record of a run that is still training. Everything that reads Parquet reads them too, such as
`datasets.load_dataset("parquet", data_files="runs/NAME/version_0/record/*.parquet")`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from turnrl.answers import CURVES as CURVES
from turnrl.errors import DataError, did_you_mean, in_short
from turnrl.recipe.folders import find_run
from turnrl.run.statistics import interval as interval
from turnrl.text import labelled, visible
from turnrl.types.questions import Question
from turnrl.types.trajectory import Group, Reading, Sample, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
"""One trajectory, by the names of the columns."""
Columns = Mapping[str, Any]
"""A row, or a part of one, that is only read."""

_Some = TypeVar("_Some", bound=Columns)

_SHARE = (0.0, 1.0)
"""The range of a share."""

TOKENS = {
    **dict.fromkeys(("token_ids", "turn_index"), pa.list_(pa.int32())),
    **dict.fromkeys(("sampler_logprobs", "learner_logprobs", "entropies"), pa.list_(pa.float32())),
    "versions": pa.list_(pa.int32()),
    "token_texts": pa.list_(pa.string()),
}
"""Columns that `record.tokens` adds, and their types."""

VERSION = 2
"""Version of the columns that this turnrl writes, and the newest that it reads."""

_VERSION_KEY = b"turnrl.record"
_CALL = pa.struct(dict.fromkeys(("name", "arguments", "error", "mended"), pa.string()))
_RESULT = pa.struct({"content": pa.string(), "ok": pa.bool_(), "metadata": pa.string()})
_REWARDS = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))
_TURN = {
    **dict.fromkeys(("text", "format_error"), pa.string()),
    **dict.fromkeys(("reward", "world_reward", "advantage"), pa.float64()),
    **dict.fromkeys(("tokens", "sample"), pa.int64()),
    "cut": pa.bool_(),
    "calls": pa.list_(_CALL),
    "results": pa.list_(_RESULT),
    "rewards": _REWARDS,
}
_COLUMNS = {
    **dict.fromkeys(("iteration", "policy_version", "group", "member"), pa.int64()),
    **dict.fromkeys(("begins", "parent"), pa.int64()),
    **dict.fromkeys(("split", "question_id", "question", "ended_by", "answer"), pa.string()),
    **dict.fromkeys((*CURVES, "f1", "outcome", "group_mean", "group_std"), pa.float64()),
    "answers": pa.list_(pa.string()),
    "opening": pa.string(),
    "prompt_tokens": pa.int64(),
    "sample_tokens": pa.list_(pa.int64()),
    "rewards": _REWARDS,
    "reward_bounds": pa.list_(
        pa.struct({"name": pa.string(), "low": pa.float64(), "high": pa.float64()})
    ),
    "costs": pa.list_(pa.string()),
    "right_at": _REWARDS,
    "figures": pa.list_(pa.struct({"name": pa.string(), "values": pa.list_(pa.float64())})),
    "extra": pa.string(),
    "estimator": pa.string(),
    "turns": pa.list_(pa.struct(_TURN)),
    **TOKENS,
}
SCHEMA = pa.schema(_COLUMNS, {_VERSION_KEY: str(VERSION)})
"""Columns and types of the record, with their version."""

UNREAD = "turnrl.unread"
"""Key, in the JSON of a result's metadata, of the text that the policy did not read."""
_ALWAYS = {"iteration", "policy_version", "split", "question", "group", "turns"}
"""Columns by which a file is known that names no version."""


# ------------------------------------------------------------------------ files


@dataclass(frozen=True)
class FileName:
    """The name of a file of a record, SPLIT-POLICY_VERSION-PROCESS.

    Args:
        split: Which questions, such as `val`. It may have hyphens.
        policy_version: Optimiser steps behind the weights that learn from it, or are evaluated.
        process: Number of the process that collected its rows.
    """

    split: str
    policy_version: int
    process: int = 0

    @classmethod
    def of(cls, file: Path) -> Self:
        """The parts of a file's name. A file of another name is all split, of no version."""
        split, *numbers = file.stem.rsplit("-", 2)
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            return cls(split, *map(int, numbers))
        return cls(file.stem, -1)

    def __str__(self) -> str:
        return f"{self.split}-{self.policy_version:06d}-{self.process}.parquet"


def files(run: str | Path, split: str | None = None) -> list[Path]:
    """The files of a record, in order of their names.

    Args:
        run: A run, as `turnrl.find_run` takes it, or any folder with such files, or one file
            that ends in `.parquet`.
        split: Take only files of this split, such as `val`; None for all.
    Raises:
        DataError: If there is no run or no record of it, or it has nothing of the split.
    """
    path = Path(run)
    if path.suffix == ".parquet" and path.is_file():
        return [path]
    bare = sorted(path.glob("*.parquet"))
    kept = bare or sorted((find_run(path) / "record").glob("*.parquet"))
    splits = [FileName.of(file).split for file in kept]
    if split is not None and split not in splits:
        known = ", ".join(sorted(set(splits)))
        raise DataError(f"the record of {str(run)!r} has no split {split!r}. Take {known}.")
    return [file for file, own in zip(kept, splits, strict=True) if split in (None, own)]


def table(
    run: str | Path, columns: Sequence[str] | None = None, split: str | None = None
) -> pa.Table:
    """The record as a pyarrow table. Only the columns that you name are read from disk.

    Args:
        run: See `files`.
        columns: Names of columns; None for all.
        split: See `files`.
    Raises:
        DataError: As `files` does; or if there is no such column, or a file is torn, not a record,
            or of a newer version than this turnrl reads.
    """
    for name in columns or ():
        if name not in _COLUMNS:
            near = did_you_mean(name, _COLUMNS) or f" There are {', '.join(_COLUMNS)}."
            raise DataError(f"the record has no column {name!r}.{near}")
    return pa.concat_tables([_opened(file, columns) for file in files(run, split)])


def _opened(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        schema = pq.read_schema(file)
        version = int((schema.metadata or {}).get(_VERSION_KEY, 1))
        if not set(schema.names) >= _ALWAYS:
            step = "Give the folder of a run, or a file of its record/."
            raise DataError(f"{str(file)!r} is not a record of turnrl. {step}")
        if version < VERSION:
            older = f"{str(file)!r} is a record of turnrl 0.5, 0.6 or 0.7, and is no longer read"
            raise DataError(f"{older}. Read it with turnrl 0.8: 'pip install turnrl==0.8.*'.")
        if version > VERSION:
            step = "Update turnrl: 'pip install --upgrade turnrl'."
            newer = f"{str(file)!r} has version {version} of the record"
            raise DataError(f"{newer}, and this turnrl reads {VERSION}. {step}")
        wanted = None if columns is None else list(columns)
        return pq.read_table(file, columns=wanted, schema=SCHEMA, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        step = "Copy it again, or remove it."
        raise DataError(f"{str(file)!r} cannot be read ({in_short(error)}). {step}") from error


def read(
    run: str | Path, columns: Sequence[str] | None = None, split: str | None = None
) -> list[Row]:
    """The rows of a record, in order of its files' names. All of them are in memory: of a long run
    take `table` with a few columns, or one of `files` after the other.

    Args:
        run: See `files`.
        columns: Names of columns; None for all.
        split: See `files`.
    Raises:
        DataError: As `table` does.
    """
    rows: list[Row] = table(run, columns, split).to_pylist()
    return rows


def groups(rows: Iterable[_Some]) -> list[list[_Some]]:
    """The rows by what they were compared in: those of one question of one collection, in order."""
    found: dict[tuple[object, ...], list[_Some]] = {}
    for row in rows:
        found.setdefault((row["split"], row["policy_version"], row["group"]), []).append(row)
    # without the column they keep the order in which they were recorded
    return [sorted(members, key=lambda row: row.get("member") or 0) for members in found.values()]


def group(rows: Sequence[Row]) -> Group:
    """The scored group that some rows are the record of, to give it credit again.

    Its token ids are zeros, as many as were sampled. What estimators ask for beside rewards (state
    values, a critic's values) is not in the record.

    Args:
        rows: All members of one group, in order; see `groups`.
    """
    import torch

    turns = max(len(row["turns"]) for row in rows)
    turn_rewards = torch.zeros(len(rows), turns)
    reached = torch.zeros(len(rows), turns, dtype=torch.bool)
    for i, row in enumerate(rows):
        earned = [turn["reward"] for turn in row["turns"]]
        turn_rewards[i, : len(earned)] = torch.tensor(earned)
        reached[i, row["begins"] : len(earned)] = True
    trajectories = tuple(map(_trajectory, rows))
    outcome = torch.tensor([row["outcome"] for row in rows])
    parents = [row["parent"] for row in rows]
    branched = any(parent is not None for parent in parents)
    given = tuple(i if parent is None else parent for i, parent in enumerate(parents))
    first, costs = rows[0], rows[0].get("costs")
    return Group(
        trajectories[0].question,
        trajectories,
        turn_rewards,
        outcome,
        reached,
        _components(rows, turns),
        parents=given if branched else (),
        costs=None if costs is None else tuple(costs),
        right_at={part["name"]: part["value"] for part in first.get("right_at") or ()},
    )


def _components(rows: Sequence[Row], turns: int) -> "dict[str, Tensor]":
    """Each reward of a group by its name, as `Group.components` has them."""
    import torch

    parts: dict[str, Tensor] = {}
    for i, row in enumerate(rows):
        for part in row["rewards"] or ():
            if not part["name"].startswith("turn/"):
                new = torch.zeros(len(rows), dtype=torch.float64)
                parts.setdefault(part["name"], new)[i] = part["value"]
        for k, turn in enumerate(row["turns"]):
            for part in turn["rewards"] or ():
                new = torch.zeros(len(rows), turns, dtype=torch.float64)
                parts.setdefault(part["name"], new)[i, k] = part["value"]
    return parts


def _trajectory(row: Row) -> Trajectory:
    # Unknown answers are as good as any: nothing is scored again
    question = Question(row["question_id"], row["question"], tuple(row["answers"] or ("",)))
    turns = tuple(map(_turn, row["turns"]))
    sample = Sample().read((0,) * (row["prompt_tokens"] or 0))
    for k, turn in enumerate(row["turns"]):
        sample = sample.wrote(k, (0,) * turn["tokens"], (0.0,) * turn["tokens"])
    whole = (question, turns, row["ended_by"], (sample,), row["begins"] or 0)
    return Trajectory(*whole, opening=row.get("opening") or "")


def call(part: Columns) -> ToolCall:
    """The call that a part of a row's `calls` is the record of. If somebody else wrote it with
    arguments that are no JSON object, it is a call that could not be read, as its `error` says."""
    arguments = json_object(part["arguments"])
    unread = None if arguments is not None else f"no JSON object: {part['arguments']!r:.200}"
    return ToolCall(part["name"], arguments or {}, part["error"] or unread, part["mended"])


def json_object(text: str | None) -> dict[str, Any] | None:
    """The JSON object that a column holds; None if it holds none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _result(part: Columns) -> ToolResult:
    metadata = json_object(part["metadata"]) or {}
    # turnrl 0.11 wrote "unread"
    unread = metadata.pop(UNREAD, None if part["content"] else metadata.pop("unread", None))
    return ToolResult(part["content"], part["ok"], metadata, unread=unread)


def _turn(turn: Row) -> Turn:
    calls = tuple(map(call, turn["calls"]))
    results = tuple(map(_result, turn["results"]))
    reading = Reading(calls, None, turn["format_error"])
    return Turn(turn["text"], reading, results, turn["world_reward"] or 0.0, bool(turn["cut"]))


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """A mean over questions with its 95 % interval.

    Args:
        mean: The mean; None over no question.
        low: Where the interval begins; see `interval`.
        high: Where it ends.
        questions: How many questions it is a mean over.
    """

    mean: float | None
    low: float | None
    high: float | None
    questions: int


def scores(row: Columns) -> dict[str, float | None]:
    """The figures of one trajectory: the four curves, `f1`, each reward and their total, by the
    names that they have in `metrics.csv`, and its `turns`, `calls` and `sampled_tokens`. None where
    a figure would say nothing."""
    rewards = {f"reward/{part['name']}": part["value"] for part in row["rewards"]}
    turns, sampled = row["turns"], row["prompt_tokens"] is not None
    size = {
        "turns": float(len(turns)),
        "calls": float(sum(len(turn["calls"]) for turn in turns)),
        "sampled_tokens": float(sum(turn["tokens"] for turn in turns)) if sampled else None,
    }
    curves = {name: row[name] for name in (*CURVES, "f1")}
    return curves | rewards | {"reward/total": sum(rewards.values())} | size


def figures(rows: Iterable[Row]) -> dict[str, Figure]:
    """The figures of some trajectories, by the names of `scores`.

    Trajectories of one group are averaged first, because they share their question: the interval is
    over questions. Branches do not count, as in `metrics.csv`. An interval lies within what its
    figure can be; for numbers of turns and calls, one less and one more than was seen.
    """
    trunks = [row for row in rows if row.get("parent") is None and not row.get("begins")]
    scored = [[scores(row) for row in members] for members in groups(trunks)]
    names = dict.fromkeys(name for members in scored for row in members for name in row)
    possible = bounds(trunks)
    return {
        name: _figure(
            [_mean(row.get(name) for row in members) for members in scored], possible.get(name)
        )
        for name in names
    }


def bounds(rows: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """The least and the most that figures can be, by the names of `scores`, as far as the rows tell
    it: shares, the rewards that declare it, and their total if all do. For numbers of turns and
    calls, it is one less and one more than was seen; there is always one turn."""
    some = list(rows)
    ends = dict.fromkeys((*CURVES, "f1"), _SHARE)
    for row in some:
        for part in row.get("reward_bounds") or ():
            ends[f"reward/{part['name']}"] = (float(part["low"]), float(part["high"]))
    rewards = {f"reward/{part['name']}" for row in some for part in row["rewards"]}
    if rewards <= {*ends}:
        low, high = zip((0.0, 0.0), *(ends[name] for name in rewards), strict=True)
        ends["reward/total"] = (sum(low), sum(high))
    for name, least in (("turns", 1.0), ("calls", 0.0)) if some else ():
        counts = [scores(row)[name] or 0.0 for row in some]
        ends[name] = (max(min(counts) - 1, least), max(counts) + 1)
    return ends


def passes(rows: Iterable[Row]) -> dict[str, Figure]:
    """Exact match of several attempts at each question, as rates over questions.

    With c of a question's n attempts right, `mean@n` is c / n, and `pass@k` the chance that one of
    k is right, 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al. 2021, arXiv 2107.03374,
    equation 1). k is 2, 4, 8, ... and n.

    Args:
        rows: Trajectories of groups of one size.
    """
    right = [[row["exact_match"] for row in members] for members in groups(rows)]
    n = min(map(len, right), default=0)
    ks = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * bool(n)
    found = {f"mean@{n}": _figure([_mean(one) for one in right], _SHARE)} if n else {}
    for k in ks:
        missed = [math.comb(n - round(sum(one)), k) / math.comb(n, k) for one in right]
        found[f"pass@{k}"] = _figure([1.0 - share for share in missed], _SHARE)
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    some = [value for value in values if value is not None]
    return sum(some) / len(some) if some else None


def _figure(values: Sequence[float | None], possible: tuple[float, float] | None) -> Figure:
    some = [value for value in values if value is not None]
    low, high = interval(some, possible) if some else (None, None)
    return Figure(_mean(some), low, high, len(some))


# --------------------------------------------------------------------- as text


def transcript(row: Columns, sent: Sequence[str] = ()) -> str:
    """One trajectory as text to read: the question, what tool sessions added to it, each turn with
    its rewards and its advantage, and the rewards of the whole. See `turnrl.visible` for characters
    that nobody would see.

    Args:
        row: A row of the record.
        sent: What the policy read before each turn, which the record does not have.
    """
    lines = [
        f"question   {row['question']}",
        *([labelled("opening", row["opening"])] if row.get("opening") else []),
        f"accepted   {' | '.join(row['answers'][:5])}",
        f"outcome    {row['outcome']:.3f}   ended by {row['ended_by']}",
    ]
    for k, turn in enumerate(row["turns"], 1):
        parts = f" ({_parts(turn['rewards'])})" if turn["rewards"] else ""
        credit = "" if turn["advantage"] is None else f"   advantage {turn['advantage']:+.3f}"
        shown = _turn(turn)
        several = len(row.get("sample_tokens") or ()) > 1
        history = f"   history {turn['sample'] + 1}" if several else ""
        lines.append(f"-- turn {k}{history}   reward {turn['reward']:.3f}{parts}{credit}")
        lines += [*sent[k - 1 : k], str(shown)]
    return visible("\n".join([*lines, _parts(row["rewards"])]))


def _parts(rewards: Iterable[Columns]) -> str:
    return "   ".join(f"{part['name']} {part['value']:.3f}" for part in rewards)
