"""Intervals: each formula beside a naive one or a published example, and how often each covers."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from turnrl_record.statistics import (
    difference,
    interval,
    mcnemar,
    mean_over_seeds,
    newcombe,
    over_seeds,
    wilson,
)

from turnrl import record


def rate(k, n, unit=1.0):
    return [unit] * k + [0.0] * (n - k)


def paired(both, gained, lost, neither):
    """Two lists of 0 and 1, question by question."""
    first = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    return first, [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither


# ------------------------------------------------------------------------------------ one run


@given(st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_rate_has_wilsons_interval_as_scipy_has_it(drawn):
    wanted = stats.binomtest(*drawn).proportion_ci(method="wilson")
    assert wilson(*drawn) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert interval(rate(*drawn)) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_a_perfect_score_is_not_certain():
    # of 256 right answers it begins at 1 / (1 + z^2 / 256)
    assert interval(rate(256, 256)) == pytest.approx((0.98522, 1), abs=1e-5)
    assert interval(rate(0, 256)) == pytest.approx((0, 1 - 0.98522), abs=1e-5)


def test_a_reward_that_is_all_or_nothing_is_a_rate_times_its_weight():
    low, high = wilson(7, 40)
    assert interval(rate(7, 40, 0.4)) == pytest.approx((0.4 * low, 0.4 * high))
    assert interval(rate(7, 40, -0.5)) == pytest.approx((-0.5 * high, -0.5 * low))
    # never paid: it might be in a few of the next questions
    assert interval(rate(0, 40, 0.4)) == pytest.approx((0, wilson(0, 40)[1]))


def test_a_figure_that_is_the_same_everywhere_may_be_more_or_less_elsewhere():
    # with 250 questions, at most 1 - .05^(1/250) = 1.191 % of others would be unlike, by 2 at most
    assert interval([2.0] * 250) == pytest.approx((2 - 0.02382, 2 + 0.02382), abs=1e-5)
    assert interval([-2.0] * 250) == pytest.approx((-2 - 0.02382, -2 + 0.02382), abs=1e-5)
    # a reward of this weight that was always paid, or a share: the values do not tell
    assert interval([0.4] * 40) == pytest.approx((0.3711, 0.4289), abs=1e-4)
    assert interval([0.5]) == pytest.approx((0.025, 0.975))
    both = difference([2.0] * 250, [2.0] * 250)
    assert (both.low, both.high, both.p) == (pytest.approx(-0.02382, abs=1e-5), -both.low, None)


def test_values_that_are_equal_but_for_rounding_are_equal():
    rounded = [0.1 + 0.2] * 5 + [0.3] * 45  # 0.30000000000000004 and 0.3
    assert interval(rounded) == pytest.approx(interval([0.3] * 50))
    # on both sides of where the seventh digit is cut
    low, high = interval([0.1234565 - 1e-12] * 5 + [0.1234565 + 1e-12] * 45)
    assert 0 < low < 0.1234565 < high < 0.25
    paid = rounded + [0.0] * 20
    assert interval(paid) == pytest.approx(interval(rate(50, 70, 0.3)))
    found = difference(paid, [0.3] * 60 + [0.0] * 10)
    exact = difference(rate(50, 70, 0.3), rate(60, 70, 0.3))
    assert (found.low, found.high, found.p) == pytest.approx((exact.low, exact.high, exact.p))


def test_a_mean_of_shares_has_the_interval_of_means_drawn_again():
    draw = random.Random(0)
    shares = [draw.choice((0.0, 0.5, 0.5, 1.0)) for _ in range(100)]
    means = sorted(sum(draw.choices(shares, k=100)) / 100 for _ in range(9999))
    # the percentiles of 9,999 resampled means have standard errors of some 0.001, and shares that
    # lie so evenly are hardly corrected
    assert list(interval(shares)) == pytest.approx([means[249], means[9749]], abs=0.006)
    # whichever process scored which of them
    assert interval(shares) == interval(shares[::2] + shares[1::2])
    assert record.interval is interval


def test_a_skewed_mean_has_the_corrected_percentiles_of_efron():
    draw = random.Random(1)
    values = [draw.expovariate(1) for _ in range(25)]
    mean = sum(values) / 25
    means = sorted(sum(draw.choices(values, k=25)) / 25 for _ in range(20000))
    # Efron 1987: z0 from the share of means below the mean, a from the skewness of the jackknife
    z0 = stats.norm.ppf(sum(one < mean for one in means) / 20000)
    a = sum((v - mean) ** 3 for v in values) / (6 * sum((v - mean) ** 2 for v in values) ** 1.5)
    ends = []
    for z in (-1.959964, 1.959964):
        ends.append(means[int(20000 * stats.norm.cdf(z0 + (z0 + z) / (1 - a * (z0 + z))))])
    assert list(interval(values)) == pytest.approx(ends, abs=0.012)
    # without the correction it would end lower
    assert ends[1] - means[19499] > 0.03


# ------------------------------------------------------------------------- two runs, by question


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # complete responses before and after a therapy (Cavo et al., Blood 120 (2012)), as printed
        # by `contingencytables` of Fagerland, Lydersen and Laake, whose sign is the opposite
        ((59, 16, 6, 80), 0.0046, 0.1186),
        # the same of airway hyper-responsiveness (Bentur et al., 2009)
        ((1, 7, 1, 12), 0.0256, 0.5069),
        # no pair differs: both Wilson intervals of 54 of 54 begin at 54 / (54 + z^2) = .93359
        ((54, 0, 0, 0), -0.0664, 0.0664),
    ],
)
def test_paired_rates_have_newcombes_tenth_interval(table, low, high):
    assert newcombe(*table) == pytest.approx((low, high), abs=5e-5)
    found = difference(*paired(*table))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert (found.gained, found.lost, found.pairs) == (*table[1:3], sum(table))
    backwards = difference(*paired(*table)[::-1])
    assert (backwards.low, backwards.high) == pytest.approx((-high, -low), abs=5e-5)


def newcombe_in_words(both, gained, lost, neither):
    """The same in the steps of the paper, with Wilson's ends as roots of his quadratic."""
    n = both + gained + lost + neither
    ends = []
    for k in (both + gained, both + lost):
        # (p - x)^2 = z^2 x (1 - x) / n
        z = 1.959964
        ends.append(sorted(np.roots([1 + z * z / n, -2 * k / n - z * z / n, (k / n) ** 2]).real))
    p, q = (both + gained) / n, (both + lost) / n
    d = both * neither - gained * lost
    if d > 0:
        d = max(d - n / 2, 0)
    below = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    phi = d / math.sqrt(below) if below else 0
    (l2, u2), (l3, u3) = ends
    left = (p - l2) ** 2 - 2 * phi * (p - l2) * (u3 - q) + (u3 - q) ** 2
    right = (u2 - p) ** 2 - 2 * phi * (u2 - p) * (q - l3) + (q - l3) ** 2
    return p - q - math.sqrt(max(left, 0)), p - q + math.sqrt(max(right, 0))


@given(st.tuples(*[st.integers(0, 40)] * 4).filter(any))
@example((0, 0, 14, 0))
@example((0, 14, 0, 0))
def test_newcombes_interval_is_that_of_its_steps_and_holds_the_difference(table):
    low, high = newcombe(*table)
    assert (low, high) == pytest.approx(newcombe_in_words(*table), abs=1e-5)
    _, gained, lost, _ = table
    assert -1 <= low <= (gained - lost) / sum(table) <= high <= 1


def test_the_p_of_a_rate_is_the_share_of_coins_that_fall_as_unevenly():
    for gained, lost in product(range(12), repeat=2):
        tosses = gained + lost
        ways = [math.comb(tosses, k) for k in range(tosses + 1)]
        uneven = sum(w for k, w in enumerate(ways) if abs(2 * k - tosses) >= abs(gained - lost))
        assert mcnemar(gained, lost) == pytest.approx(uneven / 2**tosses)
    assert difference(*paired(10, 6, 1, 3)).p == pytest.approx(0.125)  # 2 (1 + 7) / 2^7


def test_rewards_that_are_all_or_nothing_differ_as_rates_do():
    first, second = paired(10, 6, 1, 3)
    whole, part = (
        difference(first, second),
        difference(*([0.4 * v for v in w] for w in (first, second))),
    )
    assert (part.low, part.high) == pytest.approx((0.4 * whole.low, 0.4 * whole.high))
    assert (part.p, part.gained, part.lost) == (whole.p, 6, 1)
    cost = difference(*([-0.4 * v for v in w] for w in (first, second)))
    assert (cost.low, cost.high) == pytest.approx((-0.4 * whole.high, -0.4 * whole.low))
    assert (cost.p, cost.gained, cost.lost) == (whole.p, 1, 6)


def test_means_are_paired_by_question():
    draw = random.Random(0)
    easy = [draw.random() for _ in range(60)]
    first = [v + draw.gauss(0, 0.02) for v in easy]
    second = [v + 0.05 + draw.gauss(0, 0.02) for v in easy]
    found = difference(first, second)
    # the questions differ by .29, the runs on one question by .03: se = .03 / sqrt(60)
    assert found.low == pytest.approx(0.05 - 1.96 * 0.0283 / 60**0.5, abs=0.006)
    assert found.high == pytest.approx(0.05 + 1.96 * 0.0283 / 60**0.5, abs=0.006)
    assert found.p is None
    assert found.second - found.first == pytest.approx(sum(second) / 60 - sum(first) / 60)


def test_equal_differences_have_the_rule_of_three_and_no_warning():
    values = [0.0, 0.25, 1.0] * 20
    found = difference(values, values)
    # with 60 questions, at most 1 - .05^(1/60) = 4.87 % of others would differ, by 1 at most
    assert (found.low, found.high) == pytest.approx((-0.0487, 0.0487), abs=1e-4)
    # the range is 1.5, so the others would differ by -1.5 or by 1.5 at worst: by 2 less, or 1 more
    shifted = difference(values, [v + 0.5 for v in values])
    ends = (0.5 - 0.0487 * 2, 0.5 + 0.0487 * 1)
    assert (shifted.low, shifted.high) == pytest.approx(ends, abs=1e-4)
    back = difference([v + 0.5 for v in values], values)
    assert (back.low, back.high) == pytest.approx((-shifted.high, -shifted.low))
    # differences by the rounding of float32 are none
    rounded = difference(values, [v + random.Random(0).random() * 1e-8 for v in values])
    assert (rounded.low, rounded.high) == pytest.approx((-0.0487, 0.0487), abs=1e-4)
    assert (rounded.gained, rounded.lost) == (0, 0)


shares = st.lists(st.sampled_from((0.0, 0.2, 0.5, 1.0)), min_size=1, max_size=6)


@given(shares, st.randoms(use_true_random=False))
def test_few_questions_of_any_kind_have_an_interval_that_holds_the_difference(first, draw):
    second = [draw.choice((0.0, 0.2, 0.5, 1.0)) for _ in first]
    found = difference(first, second)
    assert found.low - 1e-9 <= found.second - found.first <= found.high + 1e-9
    low, high = interval(first)
    assert low - 1e-9 <= found.first <= high + 1e-9


def test_values_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match="2 and 1 values"):
        difference([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0 values"):
        difference([], [])


# -------------------------------------------------------------------------------- several seeds


def test_a_mean_over_seeds_is_a_difference_from_zero_and_a_share_ends_at_its_ends():
    values = [0.2, 0.9, 0.95]
    found = mean_over_seeds(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.change, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert low < 0 < 1 < high
    share = mean_over_seeds(values, share=True)
    assert (share.change, share.low, share.high) == (found.change, 0, 1)


def test_over_seeds_the_interval_is_students_own():
    # Student 1908, the sleep gained with two drugs: 1.58 a night, t = 4.06 with 9 degrees of
    # freedom; the interval .70 to 2.46 is in R's help of t.test(sleep)
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = over_seeds(first, second)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858))
    assert (found.pairs, found.gained, found.lost, found.p) == (10, 9, 0, None)
    same = over_seeds([0.5, 0.75], [0.75, 1.0])
    assert (same.low, same.high) == (0.25, 0.25)
    # 0.1, 0.09999999999999998 and 0.1
    rounded = over_seeds([0.3, 0.5, 0.1], [0.4, 0.6, 0.2])
    assert rounded.low == rounded.high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one seed says nothing"):
        over_seeds([1.0], [0.5])


# -------------------------------------------------------------------------------------- coverage


def covered_by_wilson(n, p):
    """The exact probability that Wilson's interval holds p."""
    k = np.arange(n + 1)
    low, high = wilson(k, n)
    return stats.binom.pmf(k, n, p)[(low <= p) & (p <= high)].sum()


def covered_by_newcombe(n, p, q, phi):
    """The exact probability that Newcombe's interval holds p - q, where the pairs correlate by phi:
    over all tables, but for tails of 1e-6."""
    both = p * q + phi * math.sqrt(p * (1 - p) * q * (1 - q))
    total, wanted = 0.0, p - q
    for gained in range(*within(n, p - both)):
        left = n - gained
        share = (q - both) / (1 - p + both)
        lost = np.arange(*within(left, share))
        rest = left - lost
        both_share = both / (1 - p - q + 2 * both)
        k = np.arange(within(rest.min(), both_share)[0], within(rest.max(), both_share)[1])
        lost, k = np.meshgrid(lost, k, indexing="ij")
        rest = left - lost
        there = k <= rest
        weight = stats.binom.pmf(lost, left, share) * stats.binom.pmf(k, rest, both_share)
        low, high = newcombe(k[there], gained, lost[there], (rest - k)[there])
        holds = (low <= wanted + 1e-12) & (wanted - 1e-12 <= high)
        total += stats.binom.pmf(gained, n, p - both) * weight[there][holds].sum()
    return total


def within(n, p):
    """Counts outside of which lie 1e-6 of a binomial distribution, for `range`."""
    return int(stats.binom.ppf(5e-7, n, p)), int(stats.binom.ppf(1 - 5e-7, n, p)) + 1


def covered_by_seeds(seeds, runs=100_000):
    """How often the interval over seeds holds the true difference: seeds of two recipes have rates
    about .85 and .75 of their own, and answer 256 questions each."""
    draw = np.random.default_rng(seeds)
    rates = [draw.beta(40 * p, 40 * (1 - p), (runs, seeds)) for p in (0.85, 0.75)]
    first, second = (draw.binomial(256, rate) / 256 for rate in rates)
    # all runs at once, by the same equation, and the function itself on the first of them
    d = second - first
    reach = stats.t.ppf(0.975, seeds - 1) * d.std(1, ddof=1) / seeds**0.5
    low, high = d.mean(1) - reach, d.mean(1) + reach
    for i in range(50):
        found = over_seeds(list(first[i]), list(second[i]))
        assert (found.low, found.high) == pytest.approx((low[i], high[i]))
    return ((low <= -0.1) & (high >= -0.1)).mean()


@pytest.mark.parametrize("p", [0.02, 0.5, 0.98])
@pytest.mark.parametrize(
    ("n", "least", "most"), [(30, 0.93, 0.985), *((n, 0.94, 0.965) for n in (250, 1000))]
)
def test_the_interval_of_a_rate_covers_as_often_as_it_says(n, p, least, most):
    assert least <= covered_by_wilson(n, p) <= most


@pytest.mark.parametrize(("p", "phi"), [(0.5, 0.9), (0.02, 0.3), (0.98, 0.3)])
def test_the_interval_of_paired_rates_covers_as_often_as_it_says(p, phi):
    assert 0.94 <= covered_by_newcombe(250, p, p, phi) <= (0.965 if p == 0.5 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("p", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("n", [250, 1000])
def test_paired_rates_of_any_correlation_are_covered(n, p, phi):
    found = covered_by_newcombe(n, p, p, phi)
    print(f"n {n}  p {p}  phi {phi}  covered {found:.4f}")
    assert 0.94 <= found <= (0.965 if p == 0.5 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q"), [(0.55, 0.45), (0.6, 0.5), (0.05, 0.02)])
def test_paired_rates_that_differ_are_covered(p, q):
    for phi in (0.0, 0.5):
        assert 0.94 <= covered_by_newcombe(250, p, q, phi) <= (0.965 if p > 0.1 else 1)


@pytest.mark.parametrize("p", [0.01, 0.02])
@pytest.mark.parametrize("n", [30, 256])
def test_values_that_are_rare_are_covered_also_where_none_was_seen(n, p):
    # exact: of n trajectories of two turns, k have three
    covered = 0.0
    for k in range(n + 1):
        if (share := stats.binom.pmf(k, n, p)) > 1e-5:
            low, high = interval([2.0] * (n - k) + [3.0] * k)
            covered += share * (low <= 2 + p <= high)
    assert 0.975 <= covered <= 1


@pytest.mark.parametrize("seeds", [5, 8, 10])
def test_the_interval_over_seeds_covers_as_often_as_it_says(seeds):
    assert 0.94 <= covered_by_seeds(seeds) <= 0.965


@pytest.mark.slow
def test_the_interval_of_paired_means_covers_as_often_as_it_says():
    draw, runs = random.Random(0), 1000

    def covered(values):
        wanted, hits = sum(values) / len(values), 0
        for _ in range(runs):
            found = difference([0.0] * 256, draw.choices(values, k=256))
            hits += found.low <= wanted <= found.high
        print(f"covered {hits / runs}")
        return hits / runs

    # 1.96 standard errors of 1,000 runs are .0135 at .95, and .019 at .9
    assert 0.935 <= covered([0, 0, 0, 0, 1, 1.5, -0.5]) <= 0.965
    # 3 % of the questions differ: too narrow, as the module says
    assert 0.88 <= covered([0.0] * 97 + [1.5] + [0.25] * 2) <= 0.935
