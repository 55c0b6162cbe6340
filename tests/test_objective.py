"""Objectives, against numbers worked by hand and naive loops over tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnrl import ClippedSurrogate, Objective, RecipeError, TokenObjective, testing
from turnrl.objectives.applying import compute_loss
from turnrl.objectives.tokens import k3
from turnrl.plugin.errors import PluginError
from turnrl.types import SampledTokens
from turnrl_objectives import CISPO, SAPO

number = st.floats(-2, 2)


def sampled(logprobs, old, advantages, ref=None, sampler=None, segments=None, weights=None):
    """Sampled tokens as a module gives them to an objective: one segment unless told otherwise."""
    compared = {"old": old, "reference": ref, "sampler": sampler}
    numbers = torch.zeros(len(logprobs)).long() if segments is None else segments
    return SampledTokens(
        logprobs,
        advantages,
        torch.ones(len(logprobs)) if weights is None else weights,
        entropies=torch.zeros(len(logprobs)),
        trajectories=numbers,
        turns=numbers,
        compared={need: stream for need, stream in compared.items() if stream is not None},
    )


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
    objective = ClippedSurrogate(low, high, kl_coef=kl_coef)
    weights = torch.full_like(new, 1 / len(rows))
    loss = objective.loss(sampled(new, old, advantage, ref, weights=weights))[0]
    assert float(loss) == pytest.approx(naive_loss(rows, low, high, kl_coef), abs=1e-9)


def test_the_gradient_is_cut_where_the_ratio_has_gone_far_enough():
    #            ratio 1.5 up  1.5 down  0.5 up  0.5 down     (up: positive advantage)
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    tokens = sampled(logprobs, torch.zeros(4), advantage)
    loss, watched = ClippedSurrogate(0.2, 0.2).loss(tokens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # d(-ratio A)/dl = -ratio A where not cut
    assert gradient.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    # the first and the last; a sum over tokens, which the module divides
    assert float(watched["clip_fraction"]) == 2
    assert float(watched["ratio"]) == pytest.approx(1.5 + 1.5 + 0.5 + 0.5)


def test_the_upper_bound_can_be_wider_than_the_lower():
    logprobs = torch.tensor([1.25, 0.75]).log().requires_grad_()
    tokens = sampled(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]))
    loss, _ = ClippedSurrogate(0.2, 0.3).loss(tokens)
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
        weights = objective.token_weights(COUNTS[list(rank)], tokens, trajectories)
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
    weights = ClippedSurrogate(aggregation="trajectory").token_weights(torch.tensor([0, 2]), 2, 2)
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
        ({"importance_cap": True}, "importance_cap is true"),
        ({"importance_cap": 0.5}, "importance_cap is 0.5"),
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
    loss, watched = ClippedSurrogate().loss(sampled(now, old, advantages))
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
        importance = 1.0 if cap is False else min(math.exp(old - sampler), cap)
        total -= importance * min(ratio * advantage, clipped * advantage)
    return total / len(rows)


@given(segmented, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([False, 1.0, 2.0]))
@settings(deadline=None)
def test_the_loss_of_segments_equals_its_equation_written_as_a_loop(rows, low, high, cap):
    segments = torch.tensor([row[0] for row in rows])
    new, old, advantage, sampler = torch.tensor([row[1:] for row in rows], dtype=torch.float64).T
    objective = ClippedSurrogate(low, high, ratio_level="turn", importance_cap=cap)
    weights = torch.full_like(new, 1 / len(rows))
    tokens = sampled(new, old, advantage, None, sampler, segments, weights)
    loss, watched = objective.loss(tokens)
    assert float(loss) == pytest.approx(naive_segment_loss(rows, low, high, cap), abs=1e-9)
    assert ("importance" in watched) == (cap is not False)


def test_a_token_of_a_segment_moves_the_ratio_of_them_all():
    # two tokens of one turn, one of another; d/dl_1 of -(2 s_0 A_0) is -(2 s_0 A_0) / 2
    logprobs = torch.zeros(3, requires_grad=True)
    advantage, segments = torch.tensor([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    tokens = sampled(logprobs, torch.zeros(3), advantage, segments=segments)
    loss, _ = ClippedSurrogate(ratio_level="turn").loss(tokens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-3.0, -3.0, -5.0]


def test_tokens_of_a_segment_learn_by_their_own_advantages():
    # before any update the ratio is 1 whatever its level, and so the gradient is that of tokens
    logprobs = torch.zeros(4, requires_grad=True)
    advantage, segments = torch.tensor([2.0, 0.0, -2.0, 1.0]), torch.tensor([0, 0, 0, 1])
    tokens = sampled(logprobs, torch.zeros(4), advantage, segments=segments)
    loss, _ = ClippedSurrogate(ratio_level="trajectory").loss(tokens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-2.0, 0.0, 2.0, -1.0]


def test_a_segment_that_has_gone_far_enough_is_cut_as_a_whole():
    # its mean ratio is above the bound, though one of its tokens fell: neither learns upwards
    logprobs = torch.tensor([0.5, -0.1]).requires_grad_()
    tokens = sampled(logprobs, torch.zeros(2), torch.ones(2))
    loss, watched = ClippedSurrogate(0.1, 0.1, ratio_level="turn").loss(tokens)
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
    tokens = sampled(old, old.detach(), torch.ones(3), sampler=sampler)
    loss, watched = ClippedSurrogate(importance_cap=2.0).loss(tokens)
    (gradient,) = torch.autograd.grad(loss, old)
    assert gradient.tolist() == pytest.approx([-1.5, -0.5, -2.0])
    assert float(watched["importance"]) == pytest.approx(4.0)


# ------------------------------------------------------------------- other objectives

rows_of_tokens = st.lists(
    st.tuples(number, number, number, number, number), min_size=1, max_size=12
)


def naive_cispo(new, old, advantage):
    """Loss and gradient by the current log-probability: the weight is a constant."""
    weight = min(max(math.exp(new - old), 1 - 0.5), 1 + 1.5)
    return -weight * advantage * new, -weight * advantage


def naive_sapo(new, old, advantage):
    """The paper's surrogate, and its gradient written as a weight on the log-probability's."""
    ratio, tau = math.exp(new - old), 0.7 if advantage > 0 else 1.3
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * p * advantage, -4 * p * (1 - p) * ratio * advantage


FURTHER = {
    "cispo": (partial(CISPO, clip_low=0.5, clip_high=1.5), naive_cispo),
    "sapo": (partial(SAPO, temperature_positive=0.7, temperature_negative=1.3), naive_sapo),
}


@pytest.mark.parametrize("name", FURTHER)
@given(
    rows=rows_of_tokens,
    kl_coef=st.sampled_from([0.0, 0.1]),
    cap=st.sampled_from([False, 1.5]),
    aggregation=st.sampled_from(["token", "trajectory", "constant"]),
)
@settings(deadline=None, max_examples=60)
def test_a_further_objective_has_the_value_and_the_gradient_of_its_equation(
    name, rows, kl_coef, cap, aggregation
):
    make, naive = FURTHER[name]
    objective = make(kl_coef=kl_coef, importance_cap=cap, aggregation=aggregation)
    new, old, advantages, ref, sampler = torch.tensor(rows, dtype=torch.float64).T
    # two trajectories, the first of one token: shares worked out from the names
    counts = torch.tensor([1, len(rows) - 1])
    shares = {
        "token": [1 / len(rows)] * 2,
        "trajectory": [1 / 2, 1 / (2 * max(len(rows) - 1, 1))],
        "constant": [1 / (2 * 1024)] * 2,
    }[aggregation]
    of_tokens = objective.token_weights(counts, len(rows), 2).repeat_interleave(counts).double()

    wanted, gradients = 0.0, []
    for i, (now, before, advantage, start, drew) in enumerate(rows):
        value, slope = naive(now, before, advantage)
        importance = 1.0 if cap is False else min(math.exp(before - drew), cap)
        d, share = start - now, shares[min(i, 1)]
        wanted += share * (importance * value + kl_coef * (math.exp(d) - d - 1))
        gradients.append(share * (importance * slope + kl_coef * (1 - math.exp(d))))

    new = new.clone().requires_grad_()
    tokens = sampled(new, old, advantages, ref, sampler, weights=of_tokens)
    tokens = replace(tokens, compared={n: tokens.compared[n] for n in objective.needs})
    loss, sums = objective.loss(tokens)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert gradient.tolist() == pytest.approx(gradients, rel=1e-5, abs=1e-6)
    ratios = [math.exp(now - before) for now, before, *_ in rows]
    assert float(sums["ratio"]) == pytest.approx(sum(ratios))


def test_cispo_keeps_the_gradient_of_a_token_that_has_gone_too_far():
    logprobs = torch.tensor([8.0, 1.2]).log().requires_grad_()
    loss, sums = CISPO(clip_high=4.0).loss(sampled(logprobs, torch.zeros(2), torch.ones(2)))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([-5.0, -1.2])
    assert float(sums["clip_fraction"]) == 1
    low = torch.tensor([0.01]).log().requires_grad_()
    loss, _ = CISPO().loss(sampled(low, torch.zeros(1), torch.ones(1)))
    assert torch.autograd.grad(loss, low)[0].tolist() == pytest.approx([-0.01])


def test_sapo_begins_as_a_policy_gradient():
    # at ratio 1 the gate passes the whole gradient, for either sign
    logprobs = torch.zeros(2, requires_grad=True)
    loss, sums = SAPO().loss(sampled(logprobs, torch.zeros(2), torch.tensor([3.0, -2.0])))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-3.0, 2.0])
    assert float(sums["gate"]) == 2


@pytest.mark.parametrize("objective", [ClippedSurrogate(), CISPO(), SAPO()])
def test_objectives_keep_to_their_contract(objective):
    testing.check_objective(objective)
    testing.check_objective(replace(objective, kl_coef=0.1, importance_cap=2.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CISPO(clip_low=0), "clip_low is 0"),
        (lambda: CISPO(clip_high=0), "clip_high 0"),
        (lambda: SAPO(temperature_negative=0), "temperature_negative is 0"),
    ],
)
def test_impossible_settings_of_further_objectives_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


# ------------------------------------------------------------------- the contract


def test_the_engine_decides_the_importance_cap_that_a_recipe_leaves_open():
    near, exact = SimpleNamespace(approximates=True), SimpleNamespace(approximates=False)
    for make in (ClippedSurrogate, CISPO, SAPO):
        assert make().for_engine(near).importance_cap == 2
        assert make().for_engine(exact).importance_cap is False
        assert make(importance_cap=False).for_engine(near).needs == {"old"}
        assert make(importance_cap=3.0).for_engine(exact).importance_cap == 3


@dataclass(frozen=True)
class Changed(TokenObjective):
    """A loss that breaks a rule."""

    breaks: str = ""

    @property
    def needs(self):
        return frozenset({"olds"}) if self.breaks == "needs" else frozenset()

    def loss(self, tokens):
        if self.breaks == "reads":
            return -(tokens.logprobs - tokens.old_logprobs).sum(), {}
        loss = -(tokens.logprobs * tokens.advantages * tokens.weights)
        if self.breaks == "vector":
            return loss, {}
        if self.breaks == "mean":
            return loss.mean(), {}
        if self.breaks == "detached":
            return loss.sum().detach(), {}
        if self.breaks == "in place":
            tokens.advantages.zero_()
        return loss.sum(), {"entropy" if self.breaks == "metric" else "mine": loss.detach().sum()}

    def token_losses(self, tokens):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("needs", "olds"),
        ("reads", "old_logprobs"),
        ("vector", "the loss is"),
        ("mean", "minibatch"),
        ("detached", "gradient"),
        ("in place", "changes"),
        ("metric", "'entropy'"),
    ],
)
def test_the_check_finds_a_broken_objective(breaks, message):
    testing.check_objective(Changed())
    with pytest.raises(AssertionError, match=message):
        testing.check_objective(Changed(breaks=breaks))


def test_an_error_in_an_objective_names_the_objective():
    tokens = sampled(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(PluginError, match=r"Broken\.loss raised KeyError"):
        compute_loss(Broken(), tokens)


class Broken(Objective):
    def loss(self, tokens):
        raise KeyError("nothing")

    def token_weights(self, token_counts, tokens, trajectories):
        return torch.ones(len(token_counts))
