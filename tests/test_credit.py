"""Credit, against numbers worked by hand, naive loops, and exact enumeration."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnrl import (
    AdvantageEstimator,
    Group,
    Merged,
    OutcomeOnly,
    Question,
    RecipeError,
    TurnLevel,
)
from turnrl.credit import returns_to_go, standardize

BOTH = list(itertools.product(["mean", "leave_one_out"], ["std", "none"]))


def tensors(turn, outcome, lengths):
    """Turn rewards given as one list per trajectory, of its own length, as padded
    (G, K) tensors."""
    turns = max(lengths)
    rewards = torch.zeros(len(outcome), turns, dtype=torch.float64)
    reached = torch.zeros(len(outcome), turns, dtype=torch.bool)
    for i, row in enumerate(turn):
        rewards[i, : lengths[i]] = torch.tensor(row, dtype=torch.float64)
        reached[i, : lengths[i]] = True
    return rewards, torch.tensor(outcome, dtype=torch.float64), reached


@st.composite
def groups(draw):
    size = draw(st.integers(2, 7))
    value = st.floats(-2, 2).map(lambda x: round(x, 3))
    lengths = draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    turn = [draw(st.lists(value, min_size=n, max_size=n)) for n in lengths]
    return turn, draw(st.lists(value, min_size=size, max_size=size)), lengths


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


@given(groups(), st.sampled_from(BOTH), st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_turn_level_equals_its_equation_written_as_loops(group, options, gamma):
    baseline, scale = options
    estimator = TurnLevel(baseline, scale, 0.05, outcome_coef=0.7, turn_coef=1.3, gamma=gamma)
    expected = naive_turn_level(*group, 0.7, 1.3, gamma, baseline, scale, 0.05)
    found = estimator.advantages(*tensors(*group))
    assert torch.allclose(found, expected, atol=1e-9)


@given(groups(), st.sampled_from(BOTH))
@settings(deadline=None)
def test_the_baselines_equal_their_equations_written_as_loops(group, options):
    turn, outcome, lengths = group
    merged = [r + sum(row) for r, row in zip(outcome, turn, strict=True)]
    for estimator, totals in [(OutcomeOnly(*options), outcome), (Merged(*options), merged)]:
        z = naive_z(totals, *options, 0.1)
        expected = [
            [z[i] if k < lengths[i] else 0.0 for k in range(max(lengths))] for i in range(len(z))
        ]
        found = estimator.advantages(*tensors(*group))
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9)


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


@given(groups(), st.sampled_from(["std", "none"]), st.floats(-5, 5))
@settings(deadline=None)
def test_a_constant_added_to_every_outcome_changes_nothing(group, scale, constant):
    rewards, outcome, reached = tensors(*group)
    for estimator in (TurnLevel(scale=scale), OutcomeOnly(scale=scale), Merged(scale=scale)):
        before, after = (
            estimator.advantages(rewards, outcome, reached),
            estimator.advantages(rewards, outcome + constant, reached),
        )
        assert torch.allclose(before, after, atol=1e-8)


@given(groups(), st.sampled_from(["std", "none"]), st.floats(-5, 5))
@settings(deadline=None)
def test_a_constant_added_to_the_last_turn_of_all_changes_nothing(group, scale, constant):
    turn, outcome, _ = group
    rewards, outcome, reached = tensors([row[:1] for row in turn], outcome, [1] * len(outcome))
    for estimator in (TurnLevel(scale=scale), Merged(scale=scale)):
        before, after = (
            estimator.advantages(rewards, outcome, reached),
            estimator.advantages(rewards + constant, outcome, reached),
        )
        assert torch.allclose(before, after, atol=1e-8)


@given(groups(), st.sampled_from(BOTH), st.randoms())
@settings(deadline=None)
def test_permuting_a_group_permutes_its_advantages(group, options, random):
    streams = tensors(*group)
    order = list(range(len(group[1])))
    random.shuffle(order)
    for estimator in (
        TurnLevel(baseline=options[0], scale=options[1]),
        OutcomeOnly(*options),
        Merged(*options),
    ):
        permuted = estimator.advantages(*(s[order] for s in streams))
        assert torch.allclose(permuted, estimator.advantages(*streams)[order], atol=1e-9)


def test_a_trajectory_alone_at_a_turn():
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


# The toy: a policy says in each of up to 3 turns whether to go on. Every turn it takes has a reward
# that depends on the turn and the choice, and so has the outcome. With so few trajectories, the
# expectation of the policy gradient over all groups can be computed exactly.
LOGITS = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64)
TURN_REWARD = [[0.3, -0.1], [0.9, 0.2], [0.5, -0.7]]
OUTCOMES = {(0,): 0.1, (1, 0): 1.0, (1, 1, 0): -0.4, (1, 1, 1): 0.8}


def log_prob(choices, logits):
    chance = torch.sigmoid(logits)
    return torch.stack(
        [torch.log(chance[k] if c else 1 - chance[k]) for k, c in enumerate(choices)]
    )


def true_gradient(value):
    """d/d logits of E[value(choices)], by summing over all trajectories."""
    logits = LOGITS.clone().requires_grad_()
    total = sum(log_prob(c, logits).sum().exp() * value(c) for c in OUTCOMES)
    return torch.autograd.grad(total, logits)[0]


def expected_gradient(estimator, size):
    """The exact expectation over all groups of (1/G) sum_i sum_k A_{i,k} grad log pi(a_{i,k})."""
    scores = {}
    for choices in OUTCOMES:
        rows = []
        for k in range(len(choices)):
            logits = LOGITS.clone().requires_grad_()
            rows.append(torch.autograd.grad(log_prob(choices, logits)[k], logits)[0])
        scores[choices] = torch.stack(rows)
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(OUTCOMES, repeat=size):
        chance = torch.stack([log_prob(c, LOGITS).sum() for c in group]).sum().exp()
        turn = [[TURN_REWARD[k][c] for k, c in enumerate(choices)] for choices in group]
        rewards, outcome, reached = tensors(
            turn, [OUTCOMES[c] for c in group], [len(c) for c in group]
        )
        advantages = estimator.advantages(rewards, outcome, reached)
        for i, choices in enumerate(group):
            total += chance * (advantages[i, : len(choices), None] * scores[choices]).sum(0) / size
    return total


def turn_return(choices):
    return sum(TURN_REWARD[k][c] for k, c in enumerate(choices))


@pytest.mark.parametrize("size", [2, 3])
def test_the_estimators_are_unbiased_by_exact_enumeration(size):
    options = {"baseline": "leave_one_out", "scale": "none"}
    both = true_gradient(lambda c: OUTCOMES[c] + turn_return(c))
    assert torch.allclose(expected_gradient(TurnLevel(**options), size), both, atol=1e-12)
    assert torch.allclose(expected_gradient(Merged(**options), size), both, atol=1e-12)
    outcome = true_gradient(OUTCOMES.__getitem__)
    assert torch.allclose(expected_gradient(OutcomeOnly(**options), size), outcome, atol=1e-12)


def test_the_mean_baseline_shrinks_the_outcomes_gradient_by_one_over_g():
    expected = true_gradient(OUTCOMES.__getitem__) * (3 - 1) / 3
    assert torch.allclose(expected_gradient(OutcomeOnly(scale="none"), 3), expected, atol=1e-12)


def test_normalising_each_turns_own_reward_is_biased_when_the_policy_chooses_to_stop():
    naive = TurnLevel(outcome_coef=0, gamma=0, baseline="leave_one_out", scale="none")
    found, wanted = expected_gradient(naive, 3), true_gradient(turn_return)
    assert (found - wanted).abs().max() > 0.05


def test_returns_to_go_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    assert returns_to_go(rewards, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0]]


def test_options_out_of_range_are_refused():
    with pytest.raises(RecipeError, match=r"gamma is 1\.5; it must be from 0 to 1"):
        TurnLevel(gamma=1.5)
    with pytest.raises(RecipeError, match=r"min_std is 0\. Set it above 0: 1e-4 all but removes"):
        OutcomeOnly(min_std=0)
    with pytest.raises(RecipeError, match=r"OutcomeOnly\.baseline is 'median'; choose one of mean"):
        OutcomeOnly(baseline="median")
    with pytest.raises(RecipeError, match=r"TurnLevel\.scale is 'var'; choose one of std, none"):
        TurnLevel(scale="var")


def test_only_unscaled_leave_one_out_works_on_a_group_of_one():
    assert TurnLevel().min_group_size == 2
    assert TurnLevel(baseline="leave_one_out").min_group_size == 2
    assert TurnLevel(baseline="leave_one_out", scale="none").min_group_size == 1
