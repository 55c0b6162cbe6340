"""Costs of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, final

from turnrl import RecipeError, Trajectory, TurnReward


def lost(reward: TurnReward, name: str, value: float) -> float:
    """Check the amount of a cost, which would be a reward below 0.

    Raises:
        RecipeError: If it is below 0.
    """
    if not value >= 0:
        what = f"{type(reward).__name__}.{name} is {value}, which would pay for what is to cost"
        raise RecipeError(f"{what}. It is taken off: give it without a minus.")
    return value


@final
class SearchCost(TurnReward):
    """r_k = -weight x n_k in a turn that calls, with n_k the calls attempted up to and including
    turn k; 0 in a turn that does not. In units of reward.

    So every call costs more than the one before it: n turns of one call each cost
    weight x n (n + 1) / 2. Not potential-based: it changes which policy is best, to one that calls
    less. v2 of the paper (arXiv 2505.11821) has -0.1 x searches so far as a part of what a search
    turn earns. Here every attempted call counts, of whatever tool, those that failed or could not
    be read included, or calling badly would be the cheap way to call; and the calls of one turn are
    paid for together, once.

    Args:
        weight: Reward lost for each call so far.
    """

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = lost(self, "weight", weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        calls = [len(taken.reading.calls) for taken in trajectory.turns[: turn + 1]]
        return -self.weight * sum(calls) if calls[-1] else 0.0


@final
class Repetition(TurnReward):
    """r_k = -weight x calls of turn k that repeat a call of the same trajectory, in units of
    reward.

    A call repeats another if it names the same tool with equal arguments, where texts are compared
    without regard to case and white space. Punctuation counts: 1+2 is not 12. Calls that could not
    be read repeat nothing. Not potential-based: it changes which policy is best, to one that does
    not ask twice, also where asking again would have helped.

    Args:
        weight: Reward lost for each repeated call.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self.weight = lost(self, "weight", weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        before = set(_signatures(trajectory, 0, turn))
        repeated = 0
        for call in _signatures(trajectory, turn, turn + 1):
            repeated += call in before
            before.add(call)
        return -self.weight * repeated if repeated else 0.0


def _signatures(trajectory: Trajectory, first: int, end: int) -> Iterator[str]:
    """Signature of each readable call of some turns, as a text."""
    for turn in trajectory.turns[first:end]:
        for call in turn.reading.calls:
            if call.error is None:
                parts = [call.name, _normal(dict(call.arguments))]
                yield json.dumps(parts, sort_keys=True, default=repr)


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, dict):
        return {str(name): _normal(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(part) for part in value]
    return value
