"""The equations of credit once more, as loops over lists, and what draws such lists."""

from __future__ import annotations

import itertools
import statistics

import torch
from hypothesis import strategies as st

from turnrl import AdvantageEstimator, Group
from turnrl.credit.why import compares

BOTH = list(itertools.product(["mean", "leave_one_out"], ["std", "none"]))
"""Every baseline with every scale."""
UNBIASED = {"baseline": "leave_one_out", "scale": "none"}
VALUE = st.floats(-2, 2).map(lambda x: round(x, 3))


def padded(rows, turns=None):
    """Lists of several lengths as one tensor, with zeros behind them."""
    turns = turns or max(map(len, rows))
    rows = [[*row, *[0.0] * (turns - len(row))] for row in rows]
    return torch.tensor(rows, dtype=torch.float64)


def naive_z(values, baseline, scale, min_std):
    """z over a plain list, from its definition."""
    result = []
    for i, value in enumerate(values):
        others = values[:i] + values[i + 1 :]
        if baseline == "mean":
            centred = value - statistics.fmean(values)
        else:
            centred = value - (statistics.fmean(others) if others else 0.0)
        if scale == "std":
            if len(values) == 1:
                centred = 0.0
            else:
                centred /= max(statistics.stdev(values), min_std)
        result.append(centred)
    return result


def naive_turn_level(
    turn, outcome, lengths, outcome_coef, turn_coef, gamma, baseline, scale, min_std
):
    """A_{i,k} from the equation, one trajectory and turn at a time."""
    turns = max(lengths)
    advantages = [[0.0] * turns for _ in outcome]
    z_outcome = naive_z(outcome, baseline, scale, min_std)
    for k in range(turns):
        there = [i for i in range(len(outcome)) if lengths[i] > k]
        rho = [sum(gamma ** (m - k) * turn[i][m] for m in range(k, lengths[i])) for i in there]
        for i, z in zip(there, naive_z(rho, baseline, scale, min_std), strict=True):
            advantages[i][k] = outcome_coef * z_outcome[i] + turn_coef * z
    return torch.tensor(advantages, dtype=torch.float64)


class Unexplained(AdvantageEstimator):
    """Does not say what it compares."""

    def __call__(self, group):
        return group.turn_rewards * group.reached


class Unmade(Unexplained):
    """Cannot be made, and does not say why."""

    def __init__(self):
        raise ValueError


class Raises(Unexplained):
    """Fails on every group."""

    def __call__(self, group):
        raise ZeroDivisionError("nothing to divide by")


class Obscure(Unexplained):
    """Fails when it is asked what it compares."""


@compares.register
def _(estimator: Obscure, group: Group):
    raise ZeroDivisionError("nothing to divide by")
