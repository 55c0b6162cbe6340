"""Every installed estimator applied to a group, the run's own first."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import trajectories
from equations import Obscure, Raises, Unexplained, Unmade
from pages import example
from turnrl import Group, Merged, OutcomeOnly, TurnLevel, assign_credit
from turnrl.credit.apply import apply_estimators, make_estimator
from turnrl.credit.why import compute_terms
from turnrl.plugin.hooks import load_classes
from turnrl.types import RewardComponent


def test_the_runs_own_estimator_comes_first_and_differs_from_the_others():
    group, own = trajectories.group(random.Random(0), 0), TurnLevel()
    first, *others = apply_estimators(group, own, "mine")
    assert (first.name, first.own) == ("mine", True)
    assert first.credit.turns.equal(assign_credit(group, own).turns)
    assert not any(other.own for other in others)
    known = {*load_classes("turnrl_estimators")}
    assert {other.name for other in others} == known - {"TurnLevel"}
    # with other settings it is another one, and the two can be told apart
    names = {entry.name for entry in apply_estimators(group, TurnLevel(gamma=0.5), "TurnLevel")}
    assert names == known - {"TurnLevel"} | {"TurnLevel", "TurnLevel, its defaults"}


def test_an_estimator_has_credit_or_a_reason_and_terms_or_why_there_are_none(monkeypatch):
    classes = {kind.__name__: kind for kind in (Unmade, Raises, Obscure, Unexplained, Merged)}
    monkeypatch.setattr("turnrl.credit.apply.load_classes", lambda hook: classes)
    group = trajectories.group(random.Random(0), 0)
    by_name = {
        entry.name: entry for entry in apply_estimators(group, LookupError("it is gone"), "mine")
    }
    for entry in by_name.values():
        assert (entry.credit is None) == bool(entry.reason) == (not entry.advantages)
        assert (entry.terms is None) == bool(entry.reason or entry.unexplained)
    assert by_name["mine"].reason == "it is gone"
    assert by_name["Unmade"].reason == "ValueError"  # its error says nothing else
    assert by_name["Raises"].reason.startswith("Raises on a group of 4")
    failed = "failed to say what it compares (ZeroDivisionError: nothing to divide by)"
    assert by_name["Obscure"].unexplained == failed
    assert by_name["Unexplained"].unexplained == "does not say what it compares"
    assert [*by_name["Merged"].terms.values()] == compute_terms(Merged(), group)


def test_advantages_are_of_the_turns_that_a_trajectory_took():
    group = trajectories.group(random.Random(1), 0, size=5)
    (merged,) = [
        entry for entry in apply_estimators(group, Unexplained(), "mine") if entry.name == "Merged"
    ]
    wanted = assign_credit(group, Merged()).turns
    assert [*merged.advantages] == [0, 1, 2, 3, 4]
    for i, row in merged.advantages.items():
        assert row == wanted[i][group.reached[i]].tolist()


def branched():
    """Two attempts, members 0 and 2, each with a branch that is longer than it."""
    whole = trajectories.group(random.Random(4), 0, size=4, turns=(2, 4))
    attempts = list(whole.trajectories)
    attempts[0], attempts[2] = (
        replace(attempt, turns=attempt.turns[:2]) for attempt in attempts[::2]
    )
    attempts[1], attempts[3] = (replace(attempt, begins=1) for attempt in attempts[1::2])
    reached = whole.reached.clone()
    reached[::2, 2:], reached[1::2, 0] = False, False
    rewards = whole.turn_rewards * reached
    parts = {
        "turn/paid": RewardComponent(rewards.double()),
        "outcome/right": RewardComponent(whole.outcome.double()),
    }
    return Group(
        *(whole.question, tuple(attempts), rewards, whole.outcome, reached, parts),
        parents=(0, 0, 2, 2),
    )


def test_other_estimators_compare_the_attempts_and_give_branches_nothing():
    group = branched()
    own, *others = apply_estimators(group, Unexplained(), "mine")
    assert [*own.advantages] == [0, 1, 2, 3]
    (outcome,) = [entry for entry in others if entry.name == "OutcomeOnly"]
    assert [*outcome.advantages] == [*outcome.terms] == [0, 2]
    first, second = (float(group.outcome[i]) for i in (0, 2))
    assert first != second
    # of two values the deviation is |a - b| / sqrt(2), so z is half of that root
    z = 2**-0.5 if first > second else -(2**-0.5)
    assert outcome.advantages == {0: pytest.approx([z, z]), 2: pytest.approx([-z, -z])}
    assert all(len(entry.credit.turns) == 2 for entry in others if entry.credit)


def test_other_estimators_are_left_out_if_a_group_does_not_name_its_branches_parents():
    (own,) = apply_estimators(replace(branched(), parents=()), OutcomeOnly(), "mine")
    assert (own.own, len(own.advantages)) == (True, 4)


def test_an_exception_from_a_constructor_is_returned():
    made, failed = make_estimator(TurnLevel, gamma=0.5), make_estimator(TurnLevel, gamma=2)
    assert made == TurnLevel(gamma=0.5)
    assert isinstance(failed, Exception)
    assert "gamma is 2" in str(failed)


def test_the_example_in_the_readme_names_every_estimator(capsys):
    block = example("plugins/turnrl-estimators/README.md", "applied")
    group = trajectories.group(random.Random(0), 0)
    exec(block, {"group": group, "module": SimpleNamespace(estimator=TurnLevel())})
    printed = capsys.readouterr().out
    assert printed.startswith("mine tensor(")
    assert "\nTree it needs probes\n" in printed
    for name in {*load_classes("turnrl_estimators")} - {"TurnLevel"}:
        assert f"\n{name} " in printed
