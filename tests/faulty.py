"""Estimators that fail in one way each."""

from __future__ import annotations

from turnrl import AdvantageEstimator, Group
from turnrl.why import compares


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
