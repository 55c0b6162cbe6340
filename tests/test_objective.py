"""The clipped surrogate, against numbers worked by hand and a naive loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnrl import ClippedSurrogate, RecipeError
from turnrl.objective import k3

number = st.floats(-2, 2)
tokens = st.lists(st.tuples(number, number, number, number), min_size=1, max_size=12)


def naive_loss(rows, low, high, kl_coef):
    """The equations of the module's docstring, a token at a time."""
    total = 0.0
    for new, old, advantage, ref in rows:
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - low), 1 + high)
        d = ref - new
        total += -min(ratio * advantage, clipped * advantage) + kl_coef * (math.exp(d) - d - 1)
    return total / len(rows)


@given(tokens, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([0.0, 0.1]))
@settings(deadline=None)
def test_the_loss_equals_its_equation_written_as_a_loop(rows, low, high, kl_coef):
    new, old, advantage, ref = torch.tensor(rows, dtype=torch.float64).T
    objective = ClippedSurrogate(low, high, kl_coef)
    weights = torch.full_like(new, 1 / len(rows))
    loss = objective(new, old, advantage, weights, ref)[0]
    assert float(loss) == pytest.approx(naive_loss(rows, low, high, kl_coef), abs=1e-9)


def test_the_gradient_is_cut_where_the_ratio_has_gone_far_enough():
    #            ratio 1.5 up  1.5 down  0.5 up  0.5 down     (up: positive advantage)
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    loss, watched = ClippedSurrogate(0.2, 0.2)(logprobs, torch.zeros(4), advantage, torch.ones(4))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # d(-ratio A)/dl = -ratio A where not cut
    assert gradient.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    # the first and the last; a sum over tokens, which the module divides
    assert float(watched["clip_fraction"]) == 2
    assert float(watched["ratio"]) == pytest.approx(1.5 + 1.5 + 0.5 + 0.5)


def test_the_upper_bound_can_be_wider_than_the_lower():
    logprobs = torch.tensor([1.25, 0.75]).log().requires_grad_()
    loss, _ = ClippedSurrogate(0.2, 0.3)(
        logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([-1.25, 0.0])


def test_k3_is_unbiased_for_the_divergence_and_never_negative():
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    estimates = k3(p.log(), q.log())
    assert (estimates >= 0).all()
    divergence = float((p * (p / q).log()).sum())
    assert float((p * estimates).sum()) == pytest.approx(divergence, abs=1e-12)


LOSSES = [[0.5] * 4, [-3.0], [1.0, 2, 3, 4, 5, 6, 7], [0.0, 8.0]]
COUNTS = torch.tensor([len(row) for row in LOSSES])


def step_loss(aggregation, ranks=((0, 1, 2, 3),)):
    """What Lightning makes of a step whose trajectories are spread over processes: the mean over
    processes of each one's weighted sum."""
    tokens = float(COUNTS.sum()) / len(ranks)
    trajectories = len(LOSSES) / len(ranks)
    total = 0.0
    for rank in ranks:
        objective = ClippedSurrogate(aggregation=aggregation, constant_tokens=10)
        weights = objective.weights(COUNTS[list(rank)], tokens, trajectories)
        total += sum(float(w) * sum(LOSSES[i]) for w, i in zip(weights, rank, strict=True))
    return total / len(ranks)


FLAT = [x for row in LOSSES for x in row]
MEANS = [sum(row) / len(row) for row in LOSSES]
WANTED = {
    "token": sum(FLAT) / len(FLAT),
    "trajectory": sum(MEANS) / 4,
    "constant": sum(FLAT) / (10 * 4),
}


@pytest.mark.parametrize("aggregation", WANTED)
def test_each_aggregation_is_the_mean_that_its_name_says(aggregation):
    assert step_loss(aggregation) == pytest.approx(WANTED[aggregation])


@pytest.mark.parametrize("aggregation", WANTED)
# 5 and 9 tokens; 4 and 10 tokens in one trajectory and three
@pytest.mark.parametrize("ranks", [((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_processes_with_unequal_shares_compute_the_same_mean_as_one_process(aggregation, ranks):
    assert step_loss(aggregation, ranks) == pytest.approx(WANTED[aggregation])


def test_a_trajectory_without_tokens_is_counted_and_weighs_nothing():
    weights = ClippedSurrogate(aggregation="trajectory").weights(torch.tensor([0, 2]), 2, 2)
    assert weights.isfinite().all()
    assert float(weights[1]) == 0.25  # 1 / (2 trajectories x 2 tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": 0}, "clip_high 0"),
        ({"kl_coef": -1}, "kl_coef is -1"),
        ({"constant_tokens": 0}, "constant_tokens is 0"),
        ({"aggregation": "tokens"}, "'tokens'; choose one of token, trajectory, constant"),
        ({"ratio_level": "step"}, "model.objective.ratio_level is 'step'; choose one of token"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        ClippedSurrogate(**options)


def test_the_clip_fraction_counts_tokens_clipped_on_either_side():
    # ratios 0.5 and 2 with either sign of the advantage: clipped below only if it is negative,
    # above only if it is positive
    old, now = torch.zeros(4), torch.tensor([0.5, 0.5, 2.0, 2.0]).log().requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    loss, watched = ClippedSurrogate()(now, old, advantages, torch.ones(4))
    loss.backward()
    assert (now.grad == 0).tolist() == [True, False, False, True]
    assert float(watched["clip_fraction"]) == 2


# ------------------------------------------------------------------- segments, and the sampler

segmented = st.lists(
    st.tuples(st.integers(0, 3), number, number, number, number), min_size=1, max_size=12
)


def naive_segment_loss(rows, low, high, cap):
    """A segment's ratio is the exponential of the mean of its tokens' differences."""
    total = 0.0
    for segment, _, old, advantage, sampler in rows:
        own = [new - before for other, new, before, _, _ in rows if other == segment]
        ratio = math.exp(sum(own) / len(own))
        clipped = min(max(ratio, 1 - low), 1 + high)
        trust = 1.0 if cap is None else min(math.exp(old - sampler), cap)
        total -= trust * min(ratio * advantage, clipped * advantage)
    return total / len(rows)


@given(segmented, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([None, 1.0, 2.0]))
@settings(deadline=None)
def test_the_loss_of_segments_equals_its_equation_written_as_a_loop(rows, low, high, cap):
    segments = torch.tensor([row[0] for row in rows])
    new, old, advantage, sampler = torch.tensor([row[1:] for row in rows], dtype=torch.float64).T
    objective = ClippedSurrogate(low, high, ratio_level="turn", importance_cap=cap)
    weights = torch.full_like(new, 1 / len(rows))
    loss, watched = objective(new, old, advantage, weights, None, sampler, segments)
    assert float(loss) == pytest.approx(naive_segment_loss(rows, low, high, cap), abs=1e-9)
    assert ("importance" in watched) == (cap is not None)


def test_a_token_of_a_segment_moves_the_ratio_of_them_all():
    # two tokens of one turn, one of another; d/dl_1 of -(2 s_0 A_0) is -(2 s_0 A_0) / 2
    logprobs = torch.zeros(3, requires_grad=True)
    advantage, segments = torch.tensor([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    loss, _ = ClippedSurrogate(ratio_level="turn")(
        logprobs, torch.zeros(3), advantage, torch.ones(3), segments=segments
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-3.0, -3.0, -5.0]


def test_tokens_of_a_segment_learn_by_their_own_advantages():
    # before any update the ratio is 1 whatever its level, and so the gradient is that of tokens
    logprobs = torch.zeros(4, requires_grad=True)
    advantage, segments = torch.tensor([2.0, 0.0, -2.0, 1.0]), torch.tensor([0, 0, 0, 1])
    loss, _ = ClippedSurrogate(ratio_level="trajectory")(
        logprobs, torch.zeros(4), advantage, torch.ones(4), segments=segments
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-2.0, 0.0, 2.0, -1.0]


def test_a_segment_that_has_gone_far_enough_is_cut_as_a_whole():
    # its mean ratio is above the bound, though one of its tokens fell: neither learns upwards
    logprobs = torch.tensor([0.5, -0.1]).requires_grad_()
    loss, watched = ClippedSurrogate(0.1, 0.1, ratio_level="turn")(
        logprobs, torch.zeros(2), torch.ones(2), torch.ones(2), segments=torch.zeros(2).long()
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [0.0, 0.0]
    assert float(watched["clip_fraction"]) == 2


def test_clip_bounds_default_by_the_level_of_the_ratio():
    assert ClippedSurrogate().clips == (0.2, 0.2)
    assert ClippedSurrogate(ratio_level="turn").clips == (3e-4, 4e-4)
    assert ClippedSurrogate(clip_high=0.1, ratio_level="trajectory").clips == (3e-4, 0.1)


def test_tokens_the_sampler_found_less_likely_weigh_more_up_to_the_cap():
    # w = 1.5, 1 / 2, and exp(3) cut to 2; before any update the ratio is 1
    old = torch.zeros(3, requires_grad=True)
    sampler = -torch.tensor([1.5, 0.5, math.exp(3)]).log()
    loss, watched = ClippedSurrogate(importance_cap=2.0)(
        old, old.detach(), torch.ones(3), torch.ones(3), None, sampler
    )
    (gradient,) = torch.autograd.grad(loss, old)
    assert gradient.tolist() == pytest.approx([-1.5, -0.5, -2.0])
    assert float(watched["importance"]) == pytest.approx(4.0)
