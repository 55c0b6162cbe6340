"""Estimators applied to a finished group: the run's own first, then every other installed one.

A third party's estimator may fail in its constructor, its advantages or its explanation. Then the
other estimators still give their credit, and the reason replaces the missing part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnrl.credit.estimators import Credit, assign_credit
from turnrl.credit.why import Term, compute_terms
from turnrl.plugin.errors import RecipeError, TurnRLError
from turnrl.plugin.hooks import load_classes
from turnrl.types.contracts import AdvantageEstimator
from turnrl.types.group import Group
from turnrl.types.trajectory import Trajectory

Made = AdvantageEstimator | Exception
"""An estimator, or the error of its constructor."""


@dataclass(frozen=True, eq=False)
class AppliedCredit:
    """The credit that an estimator gives a group, and the numbers behind it.

    Args:
        name: Name of the estimator.
        own: True for the run's own estimator.
        credit: Credit of the `members`, in their order; None if there is a `reason`.
        reason: Why there is no credit; empty if there is credit.
        members: The trajectories with credit, by their number in the group. Only the run's own
            estimator gives credit to branches.
        terms: The terms of each turn of each member, by its number; None if `unexplained`.
        unexplained: Why there are no terms; empty if there are terms.
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
        """The advantage of each turn of each member, by its number."""
        rows = [] if self.credit is None else self.credit.turns.tolist()
        pairs = zip(self.members.items(), rows, strict=True)
        return {i: row[: len(member.turns)] for (i, member), row in pairs}


def apply_estimators(group: Group, own: Made, name: str) -> list[AppliedCredit]:
    """Apply the run's own estimator to a group, then every other installed one.

    The other estimators get only the trunks. They are left out if the group has branches of unknown
    trunks. An estimator that equals the run's own is left out too.

    Args:
        group: A scored group.
        own: The run's own estimator, or the error of making it again.
        name: The name of the run's own estimator.
    """
    results = [_apply(name, own, group, dict(enumerate(group.trajectories)), own=True)]
    attempts = _attempts(group)
    if attempts is None:
        return results
    members = dict(zip(group.trunks, attempts.trajectories, strict=True))
    for kind_name, kind in load_classes("turnrl_estimators").items():
        rule = make_estimator(kind)
        if rule != own:
            label = f"{kind_name}, its defaults" if kind is type(own) else kind_name
            results.append(_apply(label, rule, attempts, members))
    return results


def make_estimator(kind: Callable[..., AdvantageEstimator], **options: object) -> Made:
    """Make an estimator, or return the error of its constructor.

    Args:
        kind: The estimator's class.
        options: The constructor's arguments.
    """
    try:
        return kind(**options)
    except Exception as error:  # a third party's constructor may do anything
        return error


def check_applicable(made: Made, size: int) -> AdvantageEstimator:
    """The estimator, if it can judge rollouts that were played without it.

    Args:
        made: The estimator, or the error of its constructor.
        size: Trajectories in a group.
    Raises:
        RecipeError: With the reason, if it cannot.
    """
    if isinstance(made, Exception):
        raise RecipeError(error_line(made)) from made
    if made.probes:
        raise RecipeError("it needs probes")
    if made.critic is not None:
        raise RecipeError("it needs a critic's values")
    if size < made.min_group_size:
        raise RecipeError(f"it compares {made.min_group_size} trajectories or more")
    return made


def error_line(error: Exception) -> str:
    """The text of an error in one line; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _attempts(group: Group) -> Group | None:
    """The group without its branches; None if their trunks are unknown."""
    at = group.trunks
    trajectories = tuple(group.trajectories[i] for i in at)
    if len(at) == len(group.trajectories):
        return None if any(attempt.begins for attempt in trajectories) else group
    turns = max(len(attempt.turns) for attempt in trajectories)
    parts = {
        name: replace(part, values=part.values[at, :turns] if part.by_turn else part.values[at])
        for name, part in group.components.items()
    }
    return replace(
        group,
        trajectories=trajectories,
        turn_rewards=group.turn_rewards[at, :turns],
        outcome=group.outcome[at],
        reached=group.reached[at, :turns],
        components=parts,
        state_values=None,
        token_values=(),
        parents=(),
    )


def _apply(
    name: str, made: Made, group: Group, members: Mapping[int, Trajectory], own: bool = False
) -> AppliedCredit:
    try:
        rule = check_applicable(made, len(group.trajectories))
        result = AppliedCredit(name, own, assign_credit(group, rule), members=members)
    except TurnRLError as error:
        return AppliedCredit(name, own, reason=error_line(error))
    try:
        rows = compute_terms(rule, group)
    except Exception as error:  # a third party's explanation may do anything
        problem = f"failed to say what it compares ({type(error).__name__}: {error})"
        return replace(result, unexplained=problem)
    if rows is None:
        return replace(result, unexplained="does not say what it compares")
    return replace(result, terms=dict(zip(members, rows, strict=True)))
