"""Credit, against numbers worked by hand and naive loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equations import BOTH, VALUE, naive_turn_level, naive_z, padded
from turnrl import (
    AdvantageEstimator,
    Group,
    Merged,
    OutcomeOnly,
    Question,
    RecipeError,
    TurnLevel,
)
from turnrl.credit.estimators import returns_to_go, standardize


def tensors(turn, outcome, lengths):
    """Turn rewards given as one list per trajectory, of its own length, as padded
    (G, K) tensors."""
    reached = padded([[1.0] * length for length in lengths]).bool()
    return padded(turn, max(lengths)), torch.tensor(outcome, dtype=torch.float64), reached


@st.composite
def groups(draw):
    size = draw(st.integers(2, 7))
    lengths = draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    turn = [draw(st.lists(VALUE, min_size=n, max_size=n)) for n in lengths]
    return turn, draw(st.lists(VALUE, min_size=size, max_size=size)), lengths


@given(groups(), st.sampled_from(BOTH), st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_turn_level_equals_its_equation_written_as_loops(group, options, gamma):
    baseline, scale = options
    estimator = TurnLevel(baseline, scale, 0.05, outcome_coef=0.7, turn_coef=1.3, gamma=gamma)
    expected = naive_turn_level(*group, 0.7, 1.3, gamma, baseline, scale, 0.05)
    advantages = estimator.advantages(*tensors(*group))
    assert torch.allclose(advantages, expected, atol=1e-9)


@given(groups(), st.sampled_from(BOTH))
@settings(deadline=None)
def test_the_baselines_equal_their_equations_written_as_loops(group, options):
    turn, outcome, lengths = group
    merged = [r + sum(row) for r, row in zip(outcome, turn, strict=True)]
    for estimator, totals in [(OutcomeOnly(*options), outcome), (Merged(*options), merged)]:
        z = naive_z(totals, *options, 0.1)
        expected = [[value] * length for value, length in zip(z, lengths, strict=True)]
        advantages = estimator.advantages(*tensors(*group))
        assert torch.allclose(advantages, padded(expected), atol=1e-9)


def test_the_two_turn_search_agent_gets_the_papers_advantages():
    # turn rewards of the search turn 0.7, 0.2, 0, 0; outcomes 1.9, 0.4, 0.4, 0; all took two turns
    #   z(r): mean .225, unbiased std .330404 -> 1.437636, -.075665, -.680986, -.680986
    #   z(R): mean .675, unbiased std .838153 -> 1.461547, -.328103, -.328103, -.805342
    rewards, outcome, reached = tensors(
        [[0.7, 0], [0.2, 0], [0, 0], [0, 0]], [1.9, 0.4, 0.4, 0], [2, 2, 2, 2]
    )
    advantages = TurnLevel().advantages(rewards, outcome, reached)
    assert advantages[:, 1].tolist() == pytest.approx(
        [1.461547, -0.328103, -0.328103, -0.805342], abs=1e-5
    )
    assert advantages[:, 0].tolist() == pytest.approx(
        [2.899183, -0.403768, -1.009089, -1.486328], abs=1e-5
    )


def test_a_trajectory_without_a_call_is_judged_like_the_others():
    # the released code gives it z of the merged reward; here it has z(r) + z(R) like any first turn
    rewards, outcome, reached = tensors([[0.2, 0], [0.2, 0], [0]], [1, 0, 0], [2, 2, 1])
    advantages = TurnLevel().advantages(rewards, outcome, reached)
    z_turn = (0 - 0.4 / 3) / statistics.stdev([0.2, 0.2, 0])
    z_outcome = (0 - 1 / 3) / statistics.stdev([1, 0, 0])
    assert float(advantages[2, 0]) == pytest.approx(z_turn + z_outcome)
    assert float(advantages[2, 1]) == 0


@given(groups(), st.sampled_from(BOTH))
@settings(deadline=None)
def test_without_turn_coef_turn_level_is_outcome_only(group, options):
    streams = tensors(*group)
    assert torch.equal(
        TurnLevel(turn_coef=0, baseline=options[0], scale=options[1]).advantages(*streams),
        OutcomeOnly(*options).advantages(*streams),
    )


def test_a_trajectory_that_is_alone_at_a_turn_is_compared_with_no_other():
    streams = tensors([[0, 0.5], [0]], [0, 0], [2, 1])
    # leave one out, no scaling: nobody to compare with, baseline 0, so the reward itself
    alone = TurnLevel(outcome_coef=0, baseline="leave_one_out", scale="none")
    assert alone.advantages(*streams).tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    for baseline in ("mean", "leave_one_out"):
        scaled = TurnLevel(outcome_coef=0, baseline=baseline).advantages(*streams)
        assert float(scaled[0, 1]) == 0


@pytest.mark.parametrize("estimator", [TurnLevel(), Merged(), OutcomeOnly()])
def test_an_estimator_is_called_with_a_group_and_sees_no_reward_of_a_turn_not_taken(estimator):
    assert isinstance(estimator, AdvantageEstimator)
    rewards, outcome, reached = tensors([[0.5, 0.2], [0.1]], [1, 0], [2, 1])
    wanted = estimator.advantages(rewards, outcome, reached)
    stray = torch.where(reached, rewards, 7.0)
    question = Question("q", "?", ("x",))
    assert torch.equal(estimator(Group(question, (), stray, outcome, reached)), wanted)
    assert float(wanted[1, 1]) == 0


def test_a_tiny_difference_stays_tiny_above_the_floor():
    values = torch.zeros(21, 1)
    values[0] = -0.01
    everyone = torch.ones(21, 1, dtype=torch.bool)
    # without a floor: -(20/21) * .01 / (.01 / sqrt(21)) = -4.364
    assert float(standardize(values, everyone, min_std=1e-9)[0]) == pytest.approx(-4.364, abs=1e-3)
    assert float(standardize(values, everyone, min_std=0.1)[0]) == pytest.approx(-0.0952, abs=1e-4)


def test_returns_to_go_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    assert returns_to_go(rewards, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0]]


def test_impossible_settings_are_refused():
    with pytest.raises(RecipeError, match=r"gamma is 1\.5; it must be from 0 to 1"):
        TurnLevel(gamma=1.5)
    for odd in (0, -1.0, math.inf, math.nan):
        with pytest.raises(RecipeError, match=rf"min_std is {odd}\. Set a finite number above 0"):
            OutcomeOnly(min_std=odd)
    with pytest.raises(RecipeError, match=r"OutcomeOnly\.baseline is 'median'; choose one of mean"):
        OutcomeOnly(baseline="median")
    with pytest.raises(RecipeError, match=r"TurnLevel\.scale is 'var'; choose one of std, none"):
        TurnLevel(scale="var")


def test_only_unscaled_leave_one_out_works_on_a_group_of_one():
    assert TurnLevel().min_group_size == 2
    assert TurnLevel(baseline="leave_one_out").min_group_size == 2
    assert TurnLevel(baseline="leave_one_out", scale="none").min_group_size == 1
