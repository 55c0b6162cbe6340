"""Rows of a record, restored to the scored group, the turns and the calls that they record.

Another program may have written the rows, so parts may be missing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnrl.runs.columns import UNREAD
from turnrl.types.group import Group, RewardComponent
from turnrl.types.questions import Question
from turnrl.types.trajectory import Reading, Sample, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
"""One trajectory, by column name."""
Columns = Mapping[str, Any]
"""A read-only row, or a part of one."""


def group(rows: Sequence[Row]) -> Group:
    """The scored group that rows record, for giving it credit again.

    Its token ids are zeros, as many as were sampled. The record lacks the other inputs of
    estimators (state values, a critic's values).

    Args:
        rows: All members of one group, in order; see `record.groups`.
    """
    import torch

    turns = max(len(row["turns"]) for row in rows)
    turn_rewards = torch.zeros(len(rows), turns)
    reached = torch.zeros(len(rows), turns, dtype=torch.bool)
    for i, row in enumerate(rows):
        earned = [turn["reward"] or 0.0 for turn in row["turns"]]
        turn_rewards[i, : len(earned)] = torch.tensor(earned)
        reached[i, row["begins"] : len(earned)] = True
    trajectories = tuple(map(_trajectory, rows))
    outcome = torch.tensor([row["outcome"] for row in rows])
    parents = [row["parent"] for row in rows]
    branched = any(parent is not None for parent in parents)
    trunks = tuple(i if parent is None else parent for i, parent in enumerate(parents))
    return Group(
        trajectories[0].question,
        trajectories,
        turn_rewards,
        outcome,
        reached,
        _components(rows, turns),
        parents=trunks if branched else (),
    )


def _components(rows: Sequence[Row], turns: int) -> dict[str, RewardComponent]:
    first, costs = rows[0], rows[0].get("costs")
    right_at = {part["name"]: part["value"] for part in first.get("right_at") or ()}
    return {
        name: RewardComponent(
            values,
            None if costs is None else name in costs,
            right_at.get(name),
        )
        for name, values in _values(rows, turns).items()
    }


def _values(rows: Sequence[Row], turns: int) -> "dict[str, Tensor]":
    """The values of each reward, by its name."""
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
    # if the answers are unknown, any will do, because nothing is scored again
    question = Question(
        row["question_id"] or row["question"],
        row["question"],
        tuple(filter(None, row["answers"] or ())) or ("",),
    )
    turns = tuple(map(turn_of, row["turns"]))
    sample = Sample().read((0,) * (row["prompt_tokens"] or 0))
    for k, turn in enumerate(row["turns"]):
        sample = sample.wrote(k, (0,) * turn["tokens"], (0.0,) * turn["tokens"])
    return Trajectory(
        question=question,
        turns=turns,
        ended_by=row["ended_by"],
        samples=(sample,),
        begins=row["begins"] or 0,
        opening=row.get("opening") or "",
    )


def call(part: Columns) -> ToolCall:
    """The call that an item of a row's `calls` records. If its arguments are not a JSON object
    (another program may have written the record), it becomes an unreadable call, with an
    `error`."""
    arguments = json_object(part["arguments"])
    unread = None if arguments is not None else f"no JSON object: {part['arguments']!r:.200}"
    return ToolCall(part["name"], arguments or {}, part["error"] or unread, part["mended"])


def json_object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a column; None if the text is not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _result(part: Columns) -> ToolResult:
    metadata = json_object(part["metadata"]) or {}
    unread = metadata.pop(UNREAD, None)
    return ToolResult(part["content"], part["ok"], metadata, unread=unread)


def turn_of(turn: Columns) -> Turn:
    """The turn that an item of a row's `turns` records."""
    calls = tuple(map(call, turn["calls"]))
    results = tuple(map(_result, turn["results"] or ()))
    reading = Reading(calls, None, turn["format_error"])
    return Turn(
        turn["text"] or "", reading, results, turn["world_reward"] or 0.0, bool(turn["cut"])
    )
