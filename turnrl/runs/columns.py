"""The record on disk, derived from types: one row per trajectory, in Parquet.

`RecordedAttempt` documents each column. Its turns have all that `turnrl.types.trajectory.Turn` has,
calls and results included: `SCHEMA` has the Parquet types of the types,
`plain` turns a value into one for a row, and `restore` turns it back. A mapping is JSON in a row,
and fields that do not count in a comparison (`ToolCall.session`) are left out.

The metadata of a file names the version of its columns. Files of another version are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from turnrl.plugin.errors import DataError
from turnrl.types.trajectory import Ending, Turn

Row = dict[str, Any]
"""One trajectory, by column name."""
Columns = Mapping[str, Any]
"""A read-only row, or a part of one."""
Int32 = Annotated[int, pa.int32()]
Float32 = Annotated[float, pa.float32()]


@dataclass(frozen=True)
class NamedValue:
    """A number with a name."""

    name: str
    value: float


@dataclass(frozen=True)
class NamedValues:
    """Numbers with a name."""

    name: str
    values: tuple[float, ...]


def _flat() -> Any:
    """A field whose own fields stand in the row in its place."""
    return dataclasses.field(metadata={"flat": True})


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """A turn as the record keeps it; its `reward` is what the world paid.

    Args:
        turn: The turn, whose fields stand beside the others.
        tokens: Number of its tokens.
        sample: Number of the token history that it was sampled in; None without tokens.
        turn_reward: Its turn reward.
        rewards: The components of `turn_reward`.
        advantage: Null where nothing was learned: in an evaluation, and in turns that a branch
            shares with the trajectory that it came from.
    """

    turn: Turn = _flat()  # noqa: RUF009
    tokens: int
    sample: int | None
    turn_reward: float
    rewards: tuple[NamedValue, ...]
    advantage: float | None


@dataclass(frozen=True, kw_only=True)
class RecordedTokens:
    """The columns that `record.tokens` adds: lists of the same length, one entry per token of the
    prompt, the turns and the results, history after history; null without it.

    Log-probabilities and entropies are at the temperature of sampling, and at 1 for greedy turns.

    Args:
        token_ids: The first `prompt_tokens` of them are the prompt's.
        turn_index: Number of the turn that sampled the token; -1 if no turn of its own did.
        sampler_logprobs: Of each sampled token, as the engine computed it; null elsewhere.
        learner_logprobs: Of the same by the weights of `policy_version`, as the learner computes
            it.
        entropies: Of the whole distribution before each sampled token, in nats, from the same pass
            of the learner.
        versions: Optimiser steps behind the weights that sampled each token; null elsewhere.
        token_texts: What each token adds to the text.
    """

    token_ids: tuple[Int32, ...] | None = None
    turn_index: tuple[Int32, ...] | None = None
    sampler_logprobs: tuple[Float32 | None, ...] | None = None
    learner_logprobs: tuple[Float32 | None, ...] | None = None
    entropies: tuple[Float32 | None, ...] | None = None
    versions: tuple[Int32 | None, ...] | None = None
    token_texts: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """The columns of a row. Those of `RecordedTokens` stand beside the others.

    Args:
        iteration: metrics.csv's `iteration`: the one that collected it, from 1; of an evaluation
            the last one behind the policy, 0 for the untrained.
        policy_version: Optimiser steps behind the weights that learned from it, or that were
            evaluated. With `max_staleness`, older ones may have sampled it: see `versions`.
        split: `train` (sampled), or what was evaluated: `val`, `test`, a data set by its name
            (greedy, unless `turnrl eval --samples` asked for more).
        question_id: Id of the question.
        question: Its text.
        answers: Accepted answers.
        opening: What tool sessions added to the question, as the policy read it.
        group: Number of the question in the collection, over all processes.
        member: Number of the attempt at it.
        begins: Its first turn of its own: above 0 for a branch, which shares those before it.
        parent: Of a branch, the member that it came from; null for others.
        ended_by: Why the trajectory ended.
        answer: The final answer; null if there is none.
        exact_match: One of the four curves (`compute_curves`), like the next three.
        tool_execution: See `exact_match`.
        answer_in_results: See `exact_match`; null where it would say nothing.
        format: See `exact_match`.
        f1: Words that the answer shares with an accepted one; see `turnrl.rewards.answers.f1`.
        prompt_tokens: Tokens of the prompt; null if a `MessageSampler` wrote the turns.
        sample_tokens: Tokens of each of its token histories: one, or several if its player rewrote
            the history on the way.
        outcome: Outcome reward.
        rewards: Each component's total.
        costs: Names of the components that are costs (`Reward.is_cost`).
        right_at: The least that a right attempt gets of a component, of those that say what is
            right (`Reward.right_at`).
        figures: Numbers that tool sessions handed over, one each, or one per turn.
        group_mean: Mean of the total reward over the group; null where there was no group.
        group_std: Its standard deviation.
        estimator: The rule that gave the credit: its `name`, the path of its `class`, and its
            `arguments` as far as its attributes tell them; null where nothing was learned.
        turns: The turns.
        tokens: The tokens; see `RecordedTokens`.
    """

    iteration: int
    policy_version: int
    split: str
    question_id: str
    question: str
    answers: tuple[str, ...]
    opening: str
    group: int
    member: int
    begins: int
    parent: int | None
    ended_by: Ending
    answer: str | None
    exact_match: float | None
    tool_execution: float | None
    answer_in_results: float | None
    format: float | None
    f1: float | None
    prompt_tokens: int | None
    sample_tokens: tuple[int, ...]
    outcome: float
    rewards: tuple[NamedValue, ...]
    costs: tuple[str, ...]
    right_at: tuple[NamedValue, ...]
    figures: tuple[NamedValues, ...]
    group_mean: float | None
    group_std: float | None
    estimator: Mapping[str, Any] | None
    turns: tuple[RecordedTurn, ...]
    tokens: RecordedTokens = _flat()  # noqa: RUF009


# ------------------------------------------------------------------------- types to Parquet


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """The name and the type of each recorded field of a dataclass, and whether it is flat."""
    hints = get_type_hints(kind, include_extras=True)
    recorded = (f for f in dataclasses.fields(kind) if f.compare)
    return tuple((f.name, hints[f.name], "flat" in f.metadata) for f in recorded)


def _kinds(kind: type) -> dict[str, Any]:
    """The types of what a row has of a dataclass, by name."""
    kinds: dict[str, Any] = {}
    for name, part, flat in _fields(kind):
        kinds |= _kinds(part) if flat else {name: part}
    return kinds


def _without_none(kind: Any) -> tuple[Any, bool]:
    """A type without None, and whether it has None."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not types.NoneType)
        return kind, True
    return kind, False


def _parquet_type(kind: Any) -> pa.DataType:
    kind, _ = _without_none(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return pa.struct({name: _parquet_type(part) for name, part in _kinds(kind).items()})
    if origin is Annotated:
        return parts[1]
    if origin is tuple:
        return pa.list_(_parquet_type(parts[0]))
    if origin in (Mapping, Literal):
        return pa.string()
    return {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}[kind]


VERSION = 4
"""Version of the columns that this turnrl writes and reads."""
VERSION_KEY = b"turnrl.record"
COLUMNS = {name: _parquet_type(kind) for name, kind in _kinds(RecordedAttempt).items()}
"""Types of the columns, by name."""
SCHEMA = pa.schema(COLUMNS, {VERSION_KEY: str(VERSION)})
"""Columns and types of the record, with their version."""
TOKENS = tuple(_kinds(RecordedTokens))
"""Names of the columns that `record.tokens` adds."""

# ----------------------------------------------------------------------------- values to rows


def plain(kind: Any, value: Any) -> Any:
    """A value of a type as a row has it. Texts lose halves of surrogate pairs, which JSON allows
    and Parquet refuses."""
    kind, _ = _without_none(kind)
    if value is None:
        return None
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        row: Row = {}
        for name, of, flat in _fields(kind):
            part = plain(of, getattr(value, name))
            row |= part if flat else {name: part}
        return row
    if origin is tuple:
        return [plain(parts[0], part) for part in value]
    if origin is Mapping:
        return _json(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _json(value: object) -> str:
    """JSON of anything, in which a short text stands for a value that JSON cannot express."""
    try:
        return json.dumps(_json_value(value))
    except Exception as error:  # a package's object may raise anything on access
        return json.dumps(f"{type(value).__name__}, which raised {type(error).__name__}")


def _json_value(value: Any) -> object:
    if isinstance(value, Mapping):
        return {str(key): _json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_value(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _json_value({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if hasattr(value, "tolist"):  # an array, or a number of one
        return _json_value(value.tolist())
    finite = isinstance(value, float) and math.isfinite(value)
    return value if value is None or finite or isinstance(value, str | int) else str(value)[:200]


# ----------------------------------------------------------------------------- rows to values

_MOST = 10_000_000
"""No number of tokens, turns or steps in a record is as large."""


def restore(kind: Any, value: Any, name: str = "") -> Any:
    """The value of a type that a part of a row records. A stranger may have written it.

    Args:
        kind: The type, such as `RecordedAttempt`.
        value: What `plain` made of the value.
        name: The column, for messages.
    Raises:
        DataError: If no turnrl writes such a value.
    """
    kind, optional = _without_none(kind)
    if value is None:
        if optional:
            return None
        raise DataError(f"{name} is null")
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        parts_of = ((n, of, value if flat else value[n]) for n, of, flat in _fields(kind))
        return kind(**{part: restore(of, own, part) for part, of, own in parts_of})
    if origin is tuple:
        items = dataclasses.is_dataclass(parts[0])
        return tuple(restore(parts[0], item, name) for item in value) if items else tuple(value)
    if origin is Mapping:
        return parse_json_object(value) or {}
    if kind is int and not 0 <= value <= _MOST:
        raise DataError(f"{name} is {value}")
    return value


def check_row(row: Columns) -> None:
    """Check some columns of a row, which a stranger may have written.

    Raises:
        DataError: If no turnrl writes such values.
    """
    kinds = _kinds(RecordedAttempt)
    for name, value in row.items():
        restore(kinds[name], value, name)
    if row.get("begins", 0) > len(row.get("turns", range(_MOST))):
        raise DataError("begins is beyond the turns")


def parse_json_object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a column; None if the text is not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
