"""Scoring: rewards applied to trajectories, and the figures of what they earned."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from turnrl.agent.parts import convert_functions
from turnrl.plugin.errors import (
    ArgumentTypeError,
    DataError,
    PluginError,
    blaming,
    describe_value,
    is_finite,
)
from turnrl.rewards.answers import CURVES as CURVES
from turnrl.rewards.answers import exact_match, finds_answer, is_searchable
from turnrl.types import Group, Reward, RewardComponent, SampledPolicy, Trajectory

MOST = 1e9
"""The largest reward, either way. Beside it, float32 has no room for other rewards."""


@dataclass(frozen=True)
class Tally:
    """A mean in parts: a sum, and the number of trajectories, tokens or groups in it."""

    total: float
    count: float


def component_name(reward: Reward) -> str:
    """`turn/tool_executed`, `outcome/llm_judge`: the name of a reward in metrics."""
    words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    name = reward.name or re.sub(words, "_", type(reward).__name__).lower()
    return f"{'turn' if reward.by_turn else 'outcome'}/{name}"


def score_group(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward | Callable[..., object]],
    turns: int | None = None,
    policy: SampledPolicy | None = None,
) -> Group:
    """Apply every reward to the G trajectories of a question.

    Args:
        trajectories: G attempts at one question, at least one.
        rewards: Rewards, or functions; each kind is summed.
        turns: K, columns of the group's tensors; by default the most turns that any of them took.
        policy: The policy that acted, for rewards that use it.
    Raises:
        ArgumentTypeError: If an item is not a trajectory.
        DataError: If there is no trajectory, or they are of several questions.
        PluginError: If a reward raises, or returns something that is not a finite number.

    """
    return score_groups([trajectories], convert_rewards(rewards), turns, policy)[0]


def score_groups(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[Reward],
    turns: int | None = None,
    policy: SampledPolicy | None = None,
) -> tuple[Group, ...]:
    """Apply every reward to the trajectories of several questions; see `score_group`."""
    for group in groups:
        _check_group(group)
    every = [trajectory for group in groups for trajectory in group]
    figures: dict[str, list[float]] = {}
    for reward in rewards:
        for name, figure in _prepare(reward, every, policy).items():
            figures.setdefault(name, []).append(figure)
    logged = {name: fmean(values) for name, values in figures.items()}
    return tuple(replace(_make_group(group, rewards, turns), logged=logged) for group in groups)


def _prepare(
    reward: Reward, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
) -> Mapping[str, float]:
    """Show a reward the trajectories before it scores them; return its figures."""
    scored = f"{reward} on {len(trajectories)} trajectories"
    with blaming(PluginError, scored, "A reward must score any trajectory."):
        figures = reward.prepare(trajectories, policy)
    if figures is None:
        return {}
    if not isinstance(figures, Mapping) or not all(map(is_finite, figures.values())):
        raise PluginError(
            f"{scored} gave {figures!r:.200} from prepare. Return None, or finite numbers by name."
        )
    return figures


def _check_group(trajectories: Sequence[Trajectory]) -> None:
    alone = isinstance(trajectories, str) or not isinstance(trajectories, Sequence)
    for item in [trajectories] if alone else trajectories:
        if alone or not isinstance(item, Trajectory):
            raise ArgumentTypeError(
                f"a group to score {'is' if alone else 'holds'} {describe_value(item)}. Give a "
                "list of the attempts at one question, such as module.ask([question], samples=4)."
            )
    if len({(t.question.id, t.question.text) for t in trajectories}) != 1:
        raise DataError(
            f"a group has {len(trajectories)} attempts, not all at one question. Give at least one "
            "attempt, and score each question's on their own."
        )


def _make_group(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], turns: int | None
) -> Group:
    size = len(trajectories)
    turns = max(len(t.turns) for t in trajectories) if turns is None else turns
    # in float64, so that equal rewards in another order have an equal sum
    turn_rewards = torch.zeros(size, turns, dtype=torch.float64)
    outcome = torch.zeros(size, dtype=torch.float64)
    reached = torch.zeros(size, turns, dtype=torch.bool)
    for i, trajectory in enumerate(trajectories):
        reached[i, trajectory.begins : len(trajectory.turns)] = True
    components: dict[str, RewardComponent] = {}
    for reward in rewards:
        name, by_turn = component_name(reward), reward.by_turn
        values = torch.zeros((size, turns) if by_turn else size, dtype=torch.float64)
        for i, trajectory in enumerate(trajectories):
            if by_turn:
                for k in range(len(trajectory.turns)):
                    values[i, k] = _value(reward, trajectory, k)
            else:
                values[i] = _value(reward, trajectory)
        (turn_rewards if by_turn else outcome).add_(values)
        if name in components:
            values += components[name].values
        components[name] = RewardComponent(values, reward.is_cost, reward.right_at)
    return Group(
        trajectories[0].question,
        tuple(trajectories),
        turn_rewards.float(),
        outcome.float(),
        reached,
        components,
    )


def _value(reward: Any, trajectory: Trajectory, *turn: int) -> float:
    scored = f"{reward} on question {trajectory.question.id!r}"
    with blaming(PluginError, scored, "A reward must score any trajectory."):
        score = reward.score(trajectory, *turn)
    value = math.nan
    if not isinstance(score, str):
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            value = float(score)
    if not math.isfinite(value):
        gave = f"{scored} gave {score!r:.80} from score, which is not a finite number"
        raise PluginError(f"{gave}. Return one, such as 0.0 where it has nothing to pay for.")
    if abs(value) > MOST:
        gave = f"{scored} gave {value:g} from score, and rewards go from -{MOST:g} to {MOST:g}"
        raise PluginError(f"{gave}. Divide it by a constant, as its weight does.")
    return value


def compute_curves(trajectory: Trajectory) -> dict[str, float | None]:
    """The paper's four curves for one trajectory.

    `exact_match`: the question accepts the answer; None if it has no accepted answer.
    `tool_execution`: share of attempted calls that succeeded, 0 if none was attempted; a call that
    was never answered did not succeed. `answer_in_results`: an accepted answer occurs in the tool
    results as the policy read them, and not in the calls before (`finds_answer`); None where that
    says nothing (see `is_searchable`). `format`:
    every turn was well formed and the last one answered, or a tool ended the attempt.
    """
    question, results = trajectory.question, trajectory.results
    attempted = sum(len(turn.reading.calls) for turn in trajectory.turns)
    well_formed = all(turn.reading.format_error is None for turn in trajectory.turns)
    values = (
        exact_match(trajectory.answer, question) if question.answers else None,
        sum(r.ok for r in results) / max(attempted, 1),
        any(map(partial(finds_answer, trajectory), range(len(trajectory.turns))))
        if is_searchable(question)
        else None,
        well_formed and (trajectory.answer is not None or trajectory.ended_by == "tool"),
    )
    return {k: None if v is None else float(v) for k, v in zip(CURVES, values, strict=True)}


def tally_curves(shown: Sequence[Mapping[str, float | None]]) -> dict[str, Tally]:
    """The curves of several trajectories, each over the trajectories for which it is not None.

    Args:
        shown: The `compute_curves` of each trajectory.
    """
    columns = {name: [v for row in shown if (v := row[name]) is not None] for name in CURVES}
    return {name: Tally(sum(values), len(values)) for name, values in columns.items()}


def tally_groups(groups: Sequence[Group], rewards: Sequence[Reward]) -> dict[str, Tally]:
    """The figures of scored groups over their trajectories, without branches.

    They are the four curves, `findable` (the share of trajectories that have an
    `answer_in_results`, whose mean is over those alone), the rewards by component, by kind and in
    total, and the figures that their `prepare` returns.
    """
    shown = [compute_curves(group.trajectories[i]) for group in groups for i in group.trunks]
    size = len(shown)
    tallies = tally_curves(shown)
    tallies["findable"] = Tally(tallies["answer_in_results"].count, size)
    totals = [(group.component_totals, group.trunks) for group in groups]
    for name in dict.fromkeys(component_name(reward) for reward in rewards):
        values = (value for parts, trunks in totals for value in parts[name][trunks].tolist())
        tallies[f"reward/{name}"] = Tally(sum(values), size)
    for name in dict.fromkeys(name for group in groups for name in group.logged):
        means = [(g.logged[name], len(g.trunks)) for g in groups if name in g.logged]
        counts = sum(count for _, count in means)
        tallies[f"log/{name}"] = Tally(sum(mean * count for mean, count in means), counts)
    turn = sum(float(group.turn_rewards[group.trunks].sum()) for group in groups)
    outcome = sum(float(group.outcome[group.trunks].sum()) for group in groups)
    sums = {"turn": turn, "outcome": outcome, "total": turn + outcome}
    return tallies | {f"reward/{name}": Tally(value, size) for name, value in sums.items()}


def convert_rewards(rewards: Sequence[Reward | Callable[..., object]]) -> list[Reward]:
    """The rewards of a list that may contain functions.

    Raises:
        ArgumentTypeError: If it is not a list of rewards and functions.
        RecipeError: If a function takes something other than an attempt.
    """
    return convert_functions(
        Reward, "rewards", rewards, _make_reward, "TurnReward or OutcomeReward"
    )


def _make_reward(function: Callable[..., object]) -> Reward:
    from turnrl.rewards.functions import FunctionReward

    return FunctionReward(function)
