"""Estimators applied to a group that was played without them: the run's own first, then what every
other installed one would give.

An estimator of somebody else may fail in its constructor, in its advantages or in what it says that
it compares. The others keep their credit, and the reason is said in place of the missing part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnrl.credit import Credit, assign_credit
from turnrl.errors import RecipeError, TurnRLError
from turnrl.plugins import installed
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.trajectory import Group, Trajectory
from turnrl.why import Term, terms

Made = AdvantageEstimator | Exception
"""An estimator, or the error that was raised in place of one."""


@dataclass(frozen=True, eq=False)
class Applied:
    """The credit that an estimator gives a group, and the numbers behind it.

    Args:
        name: Name of the estimator.
        own: True for the run's own estimator.
        credit: Of the `members`, in their order; None where there is a `reason`.
        reason: Why there is no credit; empty where there is some.
        members: The trajectories that got credit, by their number in the group. An estimator other
            than the run's gives none to branches.
        terms: For each member, by its number, the terms of each of its turns; None where the credit
            is `unexplained`.
        unexplained: Why there are no terms; empty where there are some.
    """

    name: str
    own: bool
    credit: Credit | None = None
    reason: str = ""
    members: Mapping[int, Trajectory] = field(default_factory=dict)
    terms: Mapping[int, Sequence[Sequence[Term]]] | None = None
    unexplained: str = ""

    @property
    def advantages(self) -> dict[int, list[float]]:
        """For each member, by its number, the advantage of each of its turns."""
        rows = [] if self.credit is None else self.credit.turns.tolist()
        pairs = zip(self.members.items(), rows, strict=True)
        return {i: row[: len(member.turns)] for (i, member), row in pairs}


def applied(group: Group, own: Made, name: str) -> list[Applied]:
    """Apply the run's own estimator to a group, then every other installed one.

    The others are given the attempts that branched off no other. They are left out if the group has
    branches and does not say of which attempts, and so is one that equals the run's own.

    Args:
        group: A scored group.
        own: The run's own estimator, or the error that says why it cannot be made again.
        name: Its name.
    """
    found = [_apply(name, own, group, dict(enumerate(group.trajectories)), own=True)]
    attempts = _attempts(group)
    if attempts is None:
        return found
    members = dict(zip(group.trunks, attempts.trajectories, strict=True))
    for other, kind in installed("turnrl_estimators").items():
        rule = make(kind)
        if rule != own:
            label = f"{other}, its defaults" if kind is type(own) else other
            found.append(_apply(label, rule, attempts, members))
    return found


def make(kind: Callable[..., AdvantageEstimator], **options: object) -> Made:
    """An estimator of a class, or the error that was raised in place of one.

    Args:
        kind: The class.
        options: Its arguments.
    """
    try:
        return kind(**options)
    except Exception as error:  # a third party's constructor may do anything
        return error


def usable(made: Made, size: int) -> AdvantageEstimator:
    """The estimator, if it can judge rollouts that were played without it.

    Args:
        made: The estimator, or the error that was raised in place of one.
        size: Trajectories of a group.
    Raises:
        RecipeError: With the reason, if it cannot.
    """
    if isinstance(made, Exception):
        raise RecipeError(one_line(made)) from made
    if made.probes:
        raise RecipeError("it needs probes")
    if made.critic is not None:
        raise RecipeError("it needs a critic's values")
    if size < made.min_group_size:
        raise RecipeError(f"it compares {made.min_group_size} trajectories or more")
    return made


def one_line(error: Exception) -> str:
    """The text of an error in one line; its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _attempts(group: Group) -> Group | None:
    """The group without its branches; None if it does not say of which attempts they are."""
    at = group.trunks
    trajectories = tuple(group.trajectories[i] for i in at)
    if len(at) == len(group.trajectories):
        return None if any(attempt.begins for attempt in trajectories) else group
    turns = max(len(attempt.turns) for attempt in trajectories)
    parts = group.components.items()
    return Group(
        group.question,
        trajectories,
        group.turn_rewards[at, :turns],
        group.outcome[at],
        group.reached[at, :turns],
        {name: part[at, :turns] if part.ndim == 2 else part[at] for name, part in parts},
    )


def _apply(
    name: str, made: Made, group: Group, members: Mapping[int, Trajectory], own: bool = False
) -> Applied:
    try:
        rule = usable(made, len(group.trajectories))
        given = Applied(name, own, assign_credit(group, rule), members=members)
    except TurnRLError as error:
        return Applied(name, own, reason=one_line(error))
    try:
        told = terms(rule, group)
    except Exception as error:  # a third party's explanation may do anything
        problem = f"failed to say what it compares ({type(error).__name__}: {error})"
        return replace(given, unexplained=problem)
    if told is None:
        return replace(given, unexplained="does not say what it compares")
    return replace(given, terms=dict(zip(members, told, strict=True)))
