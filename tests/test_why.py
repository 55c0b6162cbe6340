"""The numbers behind an advantage add up to it, and say whom a turn was compared with."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

import trajectories
from pages import example
from trajectories import RULES
from turnrl import AdvantageEstimator, OutcomeOnly, TurnLevel, assign_credit
from turnrl.credit.why import compute_terms
from turnrl.plugin.hooks import load_classes
from turnrl_estimators import CostsAmongRight, GroupInGroup


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_terms_of_a_turn_add_up_to_its_advantage(rule):
    draw = random.Random(1)
    for size in (2, 5):
        for _ in range(20):
            group = trajectories.group(draw, 0, size)
            advantages = assign_credit(group, rule).turns
            by_member = compute_terms(rule, group)
            for i, turns in enumerate(by_member):
                for k, summands in enumerate(turns):
                    total = sum(t.weight * (t.value - t.baseline) / t.divisor for t in summands)
                    assert total == pytest.approx(float(advantages[i, k]), abs=1e-6)


def test_every_installed_estimator_that_needs_only_rewards_is_explained():
    group = trajectories.group(random.Random(0), 0)
    for kind in load_classes("turnrl_estimators").values():
        rule = kind()
        if not rule.probes and rule.critic is None:
            assert compute_terms(rule, group) is not None, kind


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_costs_among_right_explains_gains_as_turn_level_does(gamma):
    group = trajectories.group(random.Random(0), 0)
    both = [compute_terms(rule(gamma=gamma), group) for rule in (TurnLevel, CostsAmongRight)]
    paid, every = (
        {term.name for row in by_member for summands in row for term in summands}
        for by_member in both
    )
    assert paid == {"outcome", "turn reward" if gamma == 0 else "turn rewards from here on"}
    assert every == {*paid, "costs from here on, among right attempts"}


def test_a_term_says_whom_a_turn_is_compared_with():
    group = trajectories.group(random.Random(0), 0, size=3, turns=(1, 1))
    group.outcome[:] = torch.tensor([0.0, 0.3, 0.9])
    ((only,),), *_ = compute_terms(OutcomeOnly(), group)
    # mean 0.4; deviations -0.4, -0.1, 0.5; variance (0.16 + 0.01 + 0.25) / 2 = 0.21
    assert (only.count, only.value) == (3, 0.0)
    assert (only.mean, only.baseline) == (pytest.approx(0.4), pytest.approx(0.4))
    assert only.std == only.divisor == pytest.approx(0.21**0.5)
    assert only.advantage == pytest.approx(-0.4 / 0.21**0.5)


def test_turns_share_a_state_if_the_same_passages_were_read_before_them():
    draw = random.Random(2)
    for _ in range(20):
        group, states = trajectories.group(draw, 0, size=6), []
        for attempt in group.trajectories:
            read = [{r.content for r in turn.results if r.ok} for turn in attempt.turns]
            befores = (set().union(*read[:k]) for k in range(len(read)))
            states.append([str(sorted(before)) for before in befores])
        counts = Counter(state for row in states for state in row)
        for row, turns in zip(states, compute_terms(GroupInGroup(), group), strict=True):
            assert [among.count for _, among in turns] == [counts[state] for state in row]


def test_your_own_estimator_can_be_explained():
    @dataclass
    class MyEstimator(AdvantageEstimator):
        def __call__(self, group):
            return (group.outcome - group.outcome.mean())[:, None] * group.reached

    group = trajectories.group(random.Random(0), 0)
    assert compute_terms(MyEstimator(), group) is None
    exec(example("docs/howto/report.md", "why"), {"MyEstimator": MyEstimator})
    for i, turns in enumerate(compute_terms(MyEstimator(), group)):
        wanted = float(group.outcome[i] - group.outcome.mean())
        assert [sum(t.advantage for t in summands) for summands in turns] == [
            pytest.approx(wanted)
        ] * len(turns)
