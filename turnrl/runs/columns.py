"""The columns of the record, their types and what they mean.

    iteration       metrics.csv's `iteration`: the one that collected it, from 1; of an evaluation
                    the last one behind the policy, 0 for the untrained
    policy_version  optimiser steps behind the weights that learned from it, or that were evaluated.
                    With `max_staleness`, older ones may have sampled it: see `versions`
    split           `train` (sampled), or what was evaluated: `val`, `test`, a data set by its name
                    (greedy, unless `turnrl eval --samples` asked for more)
    question_id, question, answers      what was asked, and what counts as right
    opening         what tool sessions added to the question, as the policy read it: the first
                    observation of an environment; null if they added nothing
    group, member   number of the question in the collection, over all processes; of the attempt
    begins          its first turn of its own: above 0 for a branch, which shares those before it
    parent          of a branch, the member that it came from; null of what is none
    ended_by        why the trajectory ended: `answer`, `tool`, `player`, `turns` or `length`
    answer          the final answer; null if there is none
    exact_match, tool_execution, answer_in_results, format      the four curves (`turnrl.rewards.scoring.curves`);
                    `answer_in_results` is null where it would say nothing
    f1              words that the answer shares with an accepted one; see `turnrl.rewards.answers.f1`
    prompt_tokens   tokens of the prompt; null if a `MessageSampler` wrote the turns
    sample_tokens   tokens of each of its token histories: one, or several if its player rewrote
                    the history on the way
    outcome         outcome reward
    rewards         each component's total: a list of {name, value}
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
    token_texts     what each token adds to the text

Log-probabilities and entropies are at the temperature of sampling, and at 1 for greedy turns.

The metadata of a file names the version of its columns (`turnrl.runs.record`). Files of another version
are refused. Columns that a file lacks are null.
"""

import pyarrow as pa
import pyarrow.compute as pc

from turnrl.rewards.answers import CURVES

TOKENS = {
    **dict.fromkeys(("token_ids", "turn_index"), pa.list_(pa.int32())),
    **dict.fromkeys(("sampler_logprobs", "learner_logprobs", "entropies"), pa.list_(pa.float32())),
    "versions": pa.list_(pa.int32()),
    "token_texts": pa.list_(pa.string()),
}
"""Columns that `record.tokens` adds, and their types."""

VERSION = 3
"""Version of the columns that this turnrl writes and reads."""

VERSION_KEY = b"turnrl.record"
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
COLUMNS = {
    **dict.fromkeys(("iteration", "policy_version", "group", "member"), pa.int64()),
    **dict.fromkeys(("begins", "parent"), pa.int64()),
    **dict.fromkeys(("split", "question_id", "question", "ended_by", "answer"), pa.string()),
    **dict.fromkeys((*CURVES, "f1", "outcome", "group_mean", "group_std"), pa.float64()),
    "answers": pa.list_(pa.string()),
    "opening": pa.string(),
    "prompt_tokens": pa.int64(),
    "sample_tokens": pa.list_(pa.int64()),
    "rewards": _REWARDS,
    "costs": pa.list_(pa.string()),
    "right_at": _REWARDS,
    "figures": pa.list_(pa.struct({"name": pa.string(), "values": pa.list_(pa.float64())})),
    "extra": pa.string(),
    "estimator": pa.string(),
    "turns": pa.list_(pa.struct(_TURN)),
    **TOKENS,
}
SCHEMA = pa.schema(COLUMNS, {VERSION_KEY: str(VERSION)})
"""Columns and types of the record, with their version."""

UNREAD = "turnrl.unread"
"""Key, in the JSON of a result's metadata, of the text that the policy did not read."""
ALWAYS = {"iteration", "policy_version", "split", "question", "group", "turns"}
"""Columns by which a file is known that names no version."""

_NEVER_NULL = (
    *("iteration", "policy_version", "split", "question", "group"),
    *("ended_by", "outcome", "rewards", "turns"),
)
_NEVER_NULL_IN = {
    "rewards": ("name", "value"),
    "turns": ("tokens", "calls"),
    "calls": ("name",),
    "results": ("content", "ok"),
}
"""By the name of a list, the parts of its items that are never null."""
_MOST_TOKENS = 10_000_000


def fault_in(table: pa.Table) -> str:
    """A phrase about the first value that no turnrl writes; empty if there is none. A stranger may
    have written the record.

    Args:
        table: Some columns of a record.
    """
    for name in table.column_names:
        if fault := _fault(table[name].combine_chunks(), name, name in _NEVER_NULL):
            return fault
    if {"begins", "turns"} <= {*table.column_names}:
        beyond = pc.greater(pc.fill_null(table["begins"], 0), pc.list_value_length(table["turns"]))
        if pc.any(beyond).as_py():
            return "begins is beyond the turns"
    return ""


def _fault(values: pa.Array, name: str, never_null: bool) -> str:
    if never_null and values.null_count:
        return f"{name} is null"
    if name in ("tokens", "prompt_tokens", "begins", "member", "group", "parent", "sample"):
        ends = pc.min_max(values).as_py()
        if (ends["min"] or 0) < 0 or (ends["max"] or 0) > _MOST_TOKENS:
            return f"{name} is {ends['min']} to {ends['max']}"
    if pa.types.is_list(values.type):
        items = pc.list_flatten(values)
        if not pa.types.is_struct(items.type):
            return ""
        if items.null_count:
            return f"{name} has a null"
        for field in items.type:
            part = pc.struct_field(items, field.name)
            needed = field.name in _NEVER_NULL_IN.get(name, ())
            if fault := _fault(part, field.name, needed):
                return f"{fault} in {name}"
    return ""
