"""Every installed estimator applied to a group, the run's own first."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import recorded
from turnrl import (
    AdvantageEstimator,
    Group,
    Merged,
    OutcomeOnly,
    RewardComponent,
    TurnLevel,
    assign_credit,
    installed,
)
from turnrl.applied import applied, make
from turnrl.why import compares, terms


class Plain(AdvantageEstimator):
    def __call__(self, group):
        return group.turn_rewards * group.reached


class Unmade(Plain):
    def __init__(self):
        raise ValueError


class Raises(Plain):
    def __call__(self, group):
        raise ZeroDivisionError("nothing to divide by")


class Obscure(Plain):
    """Its explanation fails."""


@compares.register
def _(estimator: Obscure, group: Group):
    raise ZeroDivisionError("nothing to divide by")


def test_the_runs_own_estimator_comes_first_and_no_other_gives_the_same():
    group, own = recorded.group(random.Random(0), 0), TurnLevel()
    first, *others = applied(group, own, "mine")
    assert (first.name, first.own) == ("mine", True)
    assert first.credit.turns.equal(assign_credit(group, own).turns)
    assert not any(other.own for other in others)
    known = {*installed("turnrl_estimators")}
    assert {other.name for other in others} == known - {"TurnLevel"}
    # with other settings it is another one, and the two can be told apart
    names = {one.name for one in applied(group, TurnLevel(gamma=0.5), "TurnLevel")}
    assert names == known - {"TurnLevel"} | {"TurnLevel", "TurnLevel, its defaults"}


def test_an_estimator_has_credit_or_a_reason_and_terms_or_why_there_are_none(monkeypatch):
    some = {kind.__name__: kind for kind in (Unmade, Raises, Obscure, Plain, Merged)}
    monkeypatch.setattr("turnrl.applied.installed", lambda hook: some)
    group = recorded.group(random.Random(0), 0)
    found = {one.name: one for one in applied(group, LookupError("it is gone"), "mine")}
    for one in found.values():
        assert (one.credit is None) == bool(one.reason) == (not one.advantages)
        assert (one.terms is None) == bool(one.reason or one.unexplained)
    assert found["mine"].reason == "it is gone"
    assert found["Unmade"].reason == "ValueError"  # its error says nothing else
    assert found["Raises"].reason.startswith("Raises on a group of 4")
    failed = "failed to say what it compares (ZeroDivisionError: nothing to divide by)"
    assert found["Obscure"].unexplained == failed
    assert found["Plain"].unexplained == "does not say what it compares"
    assert [*found["Merged"].terms.values()] == terms(Merged(), group)


def test_advantages_are_of_the_turns_that_a_trajectory_took():
    group = recorded.group(random.Random(1), 0, size=5)
    (merged,) = [one for one in applied(group, Plain(), "mine") if one.name == "Merged"]
    wanted = assign_credit(group, Merged()).turns
    assert [*merged.advantages] == [0, 1, 2, 3, 4]
    for i, row in merged.advantages.items():
        assert row == wanted[i][group.reached[i]].tolist()


def branched():
    """Two attempts, members 0 and 2, with a branch each, which is longer than its attempt."""
    whole = recorded.group(random.Random(4), 0, size=4, turns=(2, 4))
    attempts = list(whole.trajectories)
    attempts[0], attempts[2] = (replace(one, turns=one.turns[:2]) for one in attempts[::2])
    attempts[1], attempts[3] = (replace(one, begins=1) for one in attempts[1::2])
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
    own, *others = applied(group, Plain(), "mine")
    assert [*own.advantages] == [0, 1, 2, 3]
    (outcome,) = [one for one in others if one.name == "OutcomeOnly"]
    assert [*outcome.advantages] == [*outcome.terms] == [0, 2]
    first, second = (float(group.outcome[i]) for i in (0, 2))
    assert first != second
    # of two values the deviation is |a - b| / sqrt(2), so z is half of that root
    z = 2**-0.5 if first > second else -(2**-0.5)
    assert outcome.advantages == {0: pytest.approx([z, z]), 2: pytest.approx([-z, -z])}
    assert all(len(one.credit.turns) == 2 for one in others if one.credit)


def test_others_are_left_out_where_a_group_does_not_say_what_its_branches_are_of():
    (own,) = applied(replace(branched(), parents=()), OutcomeOnly(), "mine")
    assert (own.own, len(own.advantages)) == (True, 4)


def test_what_a_constructor_raises_is_returned():
    made, failed = make(TurnLevel, gamma=0.5), make(TurnLevel, gamma=2)
    assert made == TurnLevel(gamma=0.5)
    assert isinstance(failed, Exception)
    assert "gamma is 2" in str(failed)


def test_the_example_of_the_page_names_every_estimator(capsys):
    page = Path(__file__).parents[1] / "plugins" / "turnrl-estimators" / "README.md"
    (block,) = re.findall(
        "<!-- applied example -->\n```python\n(.*?)```", page.read_text(), re.DOTALL
    )
    group = recorded.group(random.Random(0), 0)
    exec(block, {"group": group, "module": SimpleNamespace(estimator=TurnLevel())})
    told = capsys.readouterr().out
    assert told.startswith("mine tensor(")
    assert "\nTree it needs probes\n" in told
    for name in {*installed("turnrl_estimators")} - {"TurnLevel"}:
        assert f"\n{name} " in told
