"""The record: what a run did, as data. One row per trajectory, in Parquet.

    iteration       metrics.csv's `iteration`: the one that collected it, from 1; of an evaluation
                    the last one behind the policy, 0 for the untrained
    policy_version  optimiser steps behind the weights that acted
    split           `train` (sampled), or what was evaluated: `val`, `test`, ... (greedy)
    question_id, question, answers      what was asked, and what counts as right
    group, member   number of the question in the collection, over all processes; of the attempt
    begins          its first turn of its own: above 0 for a branch, which shares those before it
    stop            why the trajectory ended: `answer`, `turns` or `length`
    answer          the final answer; null if there is none
    exact_match, tool_execution, answer_in_results, format      the four curves (`scoring.curves`);
                    `answer_in_results` is null where it would say nothing
    prompt_tokens   tokens of the prompt
    outcome         outcome reward
    rewards         each component's total: a list of {name, value}
    group_mean, group_std       of the total reward over the group; null where there was no group
    turns           a list of {text, tokens, cut, calls, results, format_error, reward, advantage};
                    a call is {name, arguments (JSON), error, mended}, a result {content, ok}; the
                    advantage is null where nothing was learnt: in an evaluation, and in turns that
                    a branch shares with the trajectory that it came from

`datasets.load_dataset("parquet", data_files="runs/NAME/version_0/record/*.parquet")` reads it, and
so does everything else that reads Parquet. Files are named SPLIT-POLICY_VERSION-PROCESS, and each
is there whole or not at all.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from turnrl.run.folders import whole
from turnrl.scoring import CURVES, Credit, curves
from turnrl.types import Group, Reading, ToolCall, ToolResult, Turn

Row = dict[str, Any]

_CALL = pa.struct(dict.fromkeys(("name", "arguments", "error", "mended"), pa.string()))
_TURN = {
    **dict.fromkeys(("text", "format_error"), pa.string()),
    **dict.fromkeys(("reward", "advantage"), pa.float64()),
    "tokens": pa.int64(),
    "cut": pa.bool_(),
    "calls": pa.list_(_CALL),
    "results": pa.list_(pa.struct({"content": pa.string(), "ok": pa.bool_()})),
}
_COLUMNS = {
    **dict.fromkeys(("iteration", "policy_version", "group", "member", "begins"), pa.int64()),
    **dict.fromkeys(("split", "question_id", "question", "stop", "answer"), pa.string()),
    **dict.fromkeys((*CURVES, "outcome", "group_mean", "group_std"), pa.float64()),
    "answers": pa.list_(pa.string()),
    "prompt_tokens": pa.int64(),
    "rewards": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})),
    "turns": pa.list_(pa.struct(_TURN)),
}
SCHEMA = pa.schema(_COLUMNS)
"""Columns and types of the record."""


def rows(
    groups: Iterable[Group],
    credit: Iterable[Credit | None],
    split: str,
    iteration: int,
    policy_version: int,
    first: int = 0,
    step: int = 1,
) -> Iterator[Row]:
    """The record of scored groups.

    Args:
        groups: The groups.
        credit: Of each group, or None where nothing is learnt.
        split: What the questions are from.
        iteration: See the module.
        policy_version: See the module.
        first: Number of the first group.
        step: From one group's number to the next: processes number theirs in turn.
    """
    scored = zip(groups, credit, strict=True)
    for number, (group, given) in zip(itertools.count(first, step), scored):
        totals, parts = group.totals[group.trunks], group.component_totals
        for i, trajectory in enumerate(group.trajectories):
            yield {
                "iteration": iteration,
                "policy_version": policy_version,
                "split": split,
                "question_id": _text(group.question.id),
                "question": _text(group.question.text),
                "answers": [_text(answer) for answer in group.question.answers],
                "group": number,
                "member": i,
                "begins": trajectory.begins,
                "stop": trajectory.stop,
                "answer": _text(trajectory.answer),
                **curves(trajectory),
                "prompt_tokens": len(trajectory.prompt_ids),
                "outcome": float(group.outcome[i]),
                "rewards": [{"name": k, "value": float(v[i])} for k, v in parts.items()],
                "group_mean": float(totals.mean()) if len(totals) > 1 else None,
                "group_std": float(totals.std()) if len(totals) > 1 else None,
                "turns": [
                    _turn(turn, float(group.turn_rewards[i, k]), _advantage(given, group, i, k))
                    for k, turn in enumerate(trajectory.turns)
                ],
            }


def _advantage(credit: Credit | None, group: Group, i: int, k: int) -> float | None:
    """A turn's advantage, where it was learnt."""
    if credit is None or k < group.trajectories[i].begins:
        return None
    return float(credit.turns[i, k])


def _turn(turn: Turn, reward: float, advantage: float | None) -> Row:
    return {
        "text": _text(turn.text),
        "tokens": len(turn.token_ids),
        "cut": turn.cut,
        "calls": [_call(call) for call in turn.reading.calls],
        "results": [{"content": _text(r.content), "ok": r.ok} for r in turn.results],
        "format_error": _text(turn.reading.format_error),
        "reward": reward,
        "advantage": advantage,
    }


def _call(call: ToolCall) -> Row:
    arguments = json.dumps(dict(call.arguments), default=str)
    told = {"error": _text(call.error), "mended": _text(call.mended)}
    return {"name": _text(call.name), "arguments": arguments, **told}


def _text(text: str | None) -> str | None:
    """Half a surrogate pair, which JSON lets anyone write, is no text, and Parquet refuses it."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def write(some: Sequence[Row], file: Path) -> None:
    """Write rows as one Parquet file, replacing it in one move when it is complete."""
    with whole(file) as written:
        pq.write_table(pa.Table.from_pylist(list(some), SCHEMA), written, compression="zstd")


def keep(some: Sequence[Row], folder: Path, rank: int, transcripts: int) -> None:
    """Write the rows of one collection in this process, number `rank`, into a run's folder, and of
    those that were sampled some as text to read."""
    if not some:
        return
    first = some[0]
    name = f"{first['split']}-{first['policy_version']:06d}-{rank}.parquet"
    write(some, folder / "record" / name)
    if first["split"] == "train" and rank == 0 and transcripts:
        file = folder / "transcripts" / f"iteration_{first['iteration']:04d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(transcript(some, transcripts), encoding="utf-8")


def read(folder: str | Path, pattern: str = "*.parquet") -> list[Row]:
    """The rows of a record's files, in order of their names."""
    files = sorted(Path(folder).glob(pattern))
    return [row for file in files for row in pq.read_table(file, schema=SCHEMA).to_pylist()]


def transcript(some: Iterable[Row], count: int) -> str:
    """A few trajectories as text to read: the best and the worst of the first groups, in turns."""
    groups = [list(members) for _, members in itertools.groupby(some, lambda row: row["group"])]

    def total(row: Row) -> float:
        return float(row["outcome"] + sum(turn["reward"] for turn in row["turns"]))

    chosen = [(min if n % 2 else max)(g, key=total) for n, g in enumerate(groups[:count])]
    return ("\n" + "=" * 80 + "\n").join(map(_as_text, chosen)) + "\n"


def _as_text(row: Mapping[str, Any]) -> str:
    lines = [
        f"question   {row['question']}",
        f"accepted   {' | '.join(row['answers'][:5])}",
        f"outcome    {row['outcome']:.3f}   ended by {row['stop']}",
    ]
    for k, turn in enumerate(row["turns"]):
        credit = "" if turn["advantage"] is None else f"   advantage {turn['advantage']:+.3f}"
        results = tuple(ToolResult(r["content"], r["ok"]) for r in turn["results"])
        shown = Turn(turn["text"], (), (), Reading(format_error=turn["format_error"]), results)
        lines += [f"-- turn {k}   reward {turn['reward']:.3f}{credit}", str(shown)]
    lines.append("   ".join(f"{part['name']} {part['value']:.3f}" for part in row["rewards"]))
    return "\n".join(lines)
