"""Intervals: ours against a naive one or a published example, and how often they hold the mean."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from turnrl.runs.statistics import (
    all_or_nothing,
    difference_by_seed,
    difference_over_seeds,
    mcnemar_p,
    mean_interval,
    newcombe_interval,
    paired_difference,
    rate_interval,
    student_interval,
)
from turnrl.runs.table import Line, format_difference, side_letter, table_lines


def paid(k, n, unit=1.0):
    return [unit] * k + [0.0] * (n - k)


def paired(both, gained, lost, neither):
    """Two lists of 0 and 1, question by question."""
    first = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    return first, [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither


# ------------------------------------------------------------------------------------ one run


def test_a_perfect_score_is_not_certain():
    # of 256 right answers it begins at 1 / (1 + z^2 / 256)
    assert mean_interval(paid(256, 256)) == pytest.approx((0.98522, 1), abs=1e-5)
    assert mean_interval(paid(0, 256)) == pytest.approx((0, 1 - 0.98522), abs=1e-5)


def test_an_all_or_nothing_reward_is_a_rate_times_its_weight():
    low, high = rate_interval(7, 40)
    assert mean_interval(paid(7, 40, 0.4), 0.4) == pytest.approx((0.4 * low, 0.4 * high))
    assert mean_interval(paid(7, 40, -0.5), -0.5) == pytest.approx((-0.5 * high, -0.5 * low))
    # Wilson's interval of 40 of 40 begins at 40 / (40 + z^2)
    least = 0.2 * 40 / (40 + 1.959964**2)
    assert mean_interval([0.2] * 40, 0.2) == pytest.approx((least, 0.2))


def test_any_other_mean_has_students_interval():
    values = [0.0, 0.25, 0.5, 0.5, 1.0]
    # mean .45, sd .3708, t(.975, 4) = 2.7764
    assert mean_interval(values) == pytest.approx((0.45 - 0.46045, 0.45 + 0.46045), abs=1e-4)
    assert mean_interval(values) == mean_interval(values[::-1])
    assert student_interval([0.3]) is None
    assert student_interval([0.1 + 0.2, 0.3]) == pytest.approx((0.3, 0.3))  # alike but for rounding
    assert student_interval(values, 0.99)[1] > student_interval(values)[1]


def test_values_that_are_equal_but_for_rounding_are_equal():
    rounded = [0.1 + 0.2] * 5 + [0.3] * 45 + [0.0] * 20  # 0.30000000000000004 and 0.3
    assert mean_interval(rounded, 0.3) == pytest.approx(mean_interval(paid(50, 70, 0.3), 0.3))
    close = paired_difference(rounded, [0.3] * 60 + [0.0] * 10, 0.3)
    exact = paired_difference(paid(50, 70, 0.3), paid(60, 70, 0.3), 0.3)
    assert (close.low, close.high, close.p) == pytest.approx((exact.low, exact.high, exact.p))


def test_values_without_an_interval_are_refused():
    for values in ([], [0.5, math.nan], [math.inf]):
        with pytest.raises(ValueError, match=f"an interval of {len(values)} values"):
            mean_interval(values)


def test_a_reward_that_paid_one_value_is_all_or_nothing():
    assert all_or_nothing([0.0, 0.4, 0.4]) == 0.4
    assert all_or_nothing([0.0, 0.0]) == 1
    assert all_or_nothing([0.2, 0.4]) is None
    # numbers of turns are no successes
    assert mean_interval([2.0] * 9, None) == (2, 2)


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
    own = paired_difference(*paired(*table))
    assert (own.low, own.high) == pytest.approx((low, high), abs=5e-5)
    assert (own.gained, own.lost, own.pairs) == (*table[1:3], sum(table))
    backwards = paired_difference(*paired(*table)[::-1])
    assert (backwards.low, backwards.high) == pytest.approx((-high, -low), abs=5e-5)
    costs = paired_difference(*([-0.5 * v for v in side] for side in paired(*table)), -0.5)
    assert (costs.low, costs.high) == pytest.approx((-0.5 * high, -0.5 * low), abs=5e-5)
    assert (costs.gained, costs.lost, costs.p) == (*table[2:0:-1], own.p)


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
    low = math.sqrt(max((p - l2) ** 2 - 2 * phi * (p - l2) * (u3 - q) + (u3 - q) ** 2, 0))
    high = math.sqrt(max((u2 - p) ** 2 - 2 * phi * (u2 - p) * (q - l3) + (q - l3) ** 2, 0))
    return p - q - low, p - q + high


@given(st.tuples(*[st.integers(0, 40)] * 4).filter(any))
def test_newcombes_interval_follows_its_steps_and_includes_the_difference(table):
    low, high = newcombe_interval(*table)
    assert (low, high) == pytest.approx(newcombe_in_words(*table), abs=1e-5)
    assert low - 1e-9 <= (table[1] - table[2]) / sum(table) <= high + 1e-9


def test_the_p_value_is_the_share_of_coin_tosses_that_fall_as_unevenly():
    for gained, lost in product(range(5), repeat=2):
        n, least = gained + lost, max(gained, lost)
        tosses = [*product((0, 1), repeat=n)]
        uneven = sum(max(sum(t), n - sum(t)) >= least for t in tosses)
        assert mcnemar_p(gained, lost) == pytest.approx(uneven / len(tosses))


def test_other_means_are_paired_by_question():
    first, second = [0.1, 0.5, 0.9, 0.3], [0.4, 0.5, 0.7, 0.8]
    own = paired_difference(first, second)
    # the differences .3, 0, -.2, .5: mean .15, sd .3109, t(.975, 3) = 3.1824
    assert (own.low, own.high) == pytest.approx((0.15 - 0.4948, 0.15 + 0.4948), abs=1e-3)
    assert (own.gained, own.lost, own.p, own.verdict) == (2, 1, None, "level")
    assert own.first_ends == mean_interval(first)
    assert own.second_ends == mean_interval(second)


@pytest.mark.parametrize(
    ("first", "second"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [math.nan]), ([math.inf], [1.0])]
)
def test_values_that_cannot_be_paired_are_refused(first, second):
    with pytest.raises(ValueError, match=r"values\. Give one|not all finite"):
        paired_difference(first, second)


# ------------------------------------------------------------------------------------- over seeds


def test_the_interval_of_a_difference_over_seeds_is_students():
    first, second = [0.4, 0.2, 0.6, 0.3], [0.8, 0.4, 1.0, 0.2]
    gains = [b - a for a, b in zip(first, second, strict=True)]
    own = difference_over_seeds(first, second)
    half = stats.t.ppf(0.975, 3) * np.std(gains, ddof=1) / 2
    assert (own.low, own.high) == pytest.approx((np.mean(gains) - half, np.mean(gains) + half))
    assert (own.gained, own.lost, own.over) == (3, 1, "seeds")
    alike = difference_over_seeds([0.3, 0.5, 0.1], [0.4, 0.6, 0.2])
    assert alike.verdict == "undecided"
    with pytest.raises(ValueError, match="one seed says nothing"):
        difference_over_seeds([0.1], [0.2])
    seeds = {7: 0.2, 1: 0.4, 2: 0.6}, {1: 0.8, 2: 1.0, 3: 0.0}
    assert difference_by_seed(*seeds) == difference_over_seeds([0.4, 0.6], [0.8, 1.0])
    assert difference_by_seed({0: 0.1, 1: 0.2}, {1: 0.3}) is None


# --------------------------------------------------------------------------------------- coverage


def test_wilsons_interval_covers_as_the_docstring_says():
    def covered(n, p):
        ends = [rate_interval(k, n) for k in range(n + 1)]
        chance = stats.binom.pmf(np.arange(n + 1), n, p)
        return sum(c for c, (low, high) in zip(chance, ends, strict=True) if low <= p <= high)

    rates = np.linspace(0.025, 0.975, 39)
    for n in (20, 64):
        assert 0.945 <= np.mean([covered(n, p) for p in rates]) <= 0.965
    # where fewer than one success is expected
    assert 0.83 < min(covered(20, p) for p in np.linspace(0.005, 0.02, 16)) < 0.86


# -------------------------------------------------------------------------------------- the table


def test_every_command_prints_one_table():
    gain = paired_difference([1.0] * 3 + [0.0] * 7, [1.0] * 7 + [0.0] * 3)
    lines = [
        Line("exact_match", gain.first, gain.first_ends, "A"),
        Line("exact_match", gain.second, gain.second_ends, "B", gain),
        Line("a_rather_long_name", 12345.6, (12300.0, 12400.0), "A"),
    ]
    low, high = gain.first_ends
    shown = [*table_lines(lines)]
    assert shown[0].split() == [
        "mean",
        "95",
        "%",
        "interval",
        "vs",
        "A",
        "95",
        "%",
        "interval",
        "p",
    ]
    assert shown[1] == f"exact_match       A   0.300  [{low:.3f}, {high:.3f}]"
    assert shown[2].split()[:2] == ["B", "0.700"]
    assert format_difference(gain) in f"{' '.join(shown[2].split())}"
    assert shown[2].endswith("  0.125")
    assert shown[3:] == ["a_rather_long_name", f"{'':18}A   12346  [12,300, 12,400]"]
    assert max(map(len, shown)) <= 80
    # one side, and nothing to average
    alone = [*table_lines([Line("val/x", None, None, note="  of 0 questions")])]
    assert alone[1].split() == ["val/x", "-", "of", "0", "questions"]
    assert [side_letter(n) for n in (0, 25, 26)] == ["A", "Z", "AA"]
