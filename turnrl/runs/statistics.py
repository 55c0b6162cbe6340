"""95 % intervals, and tests of differences: scipy's, where it has them.

    mean_interval            a mean over questions: Wilson's for rates, else Student's t
    paired_difference        two runs, paired by question: Newcombe's for rates, else
                             Student's t over the differences
    difference_over_seeds    two recipes: Student's t over the differences per seed
    difference_by_seed       `difference_over_seeds` of the seeds that two recipes share
    student_interval         a mean over seeds: Student's t

The unit is the question. If a question was asked several times, average its attempts first: they
share the question, and the spread of the averages already contains the noise of sampling
(Miller, arXiv 2411.00640).

What coverage to expect of a nominal .95: Wilson's interval covers .95 on average over the rates,
and down to .84 where fewer than one success (or failure) is expected. Newcombe's covers .947 or
more. Student's t covers .95 for values that are about normal, such as seeds, and less for few
questions with rare values: a value that the sample lacks cannot widen it.
`tests/test_statistics.py` measures the first two exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ends = tuple[float, float]
Array = NDArray[np.float64]

_SAME = 1e-6  # rewards are sums of float32, so smaller differences are rounding


def rate_interval(successes: int, count: int) -> Ends:
    """Wilson's score interval of a rate (scipy's).

    Args:
        successes: k.
        count: n, at least 1.
    """
    from scipy import stats

    ends = stats.binomtest(successes, count).proportion_ci(0.95, method="wilson")
    return float(ends.low), float(ends.high)


def student_interval(values: Sequence[float], level: float = 0.95) -> Ends | None:
    """Student's interval of a mean: mean -+ t((1 + level) / 2, n - 1) sd / sqrt(n).

    Args:
        values: n values.
        level: How often such an interval includes the true mean.
    Returns:
        The interval. It has no width if all values are the same, because then they do not show how
        they vary. None for a single value.
    """
    from scipy import stats

    if len(values) < 2:
        return None
    every = np.asarray(values, float)
    error = stats.sem(every) if np.ptp(every) >= _SAME else 0.0  # otherwise only rounding
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1) * error)
    return float(every.mean()) - half, float(every.mean()) + half


def mean_interval(values: Sequence[float], unit: float | None = 1.0) -> Ends | None:
    """The interval of a mean over questions. If every value is 0 or `unit`, this is the interval of
    a rate, times the unit. Any other mean has Student's.

    Args:
        values: One per question, at least one.
        unit: The value of a success, such as the weight of a reward that is all or nothing; None
            if the values are no successes, such as numbers of turns.
    Returns:
        The interval; None if a single question shows nothing.
    Raises:
        ValueError: If there is no value, or one is not finite.
    """
    # sorted, so that the order in which processes scored them changes no digit
    every = np.sort(np.asarray(values, float))
    if not len(every) or not np.isfinite(every).all():
        raise ValueError(f"an interval of {len(every)} values, not all finite. Give at least one.")
    if unit is None or not _are_successes(every, unit):
        return student_interval(every.tolist())
    low, high = rate_interval(int((np.abs(every) >= _SAME).sum()), len(every))
    return (low * unit, high * unit) if unit > 0 else (high * unit, low * unit)


def newcombe_interval(both: int, gained: int, lost: int, neither: int) -> Ends:
    """The interval of a difference of paired rates, by Newcombe's method 10. Neither scipy nor
    statsmodels has an interval of paired rates.

    The ends of the two Wilson intervals are joined by the correlation phi of the pairs, which is
    continuity-corrected if positive. With p the second rate and q the first:

        low  = p - q - sqrt((p - l_p)^2 - 2 phi (p - l_p) (u_q - q) + (u_q - q)^2)
        high = p - q + sqrt((u_p - p)^2 - 2 phi (u_p - p) (q - l_q) + (q - l_q)^2)

    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650.

    Args:
        both: Questions that both got right.
        gained: Questions that only the second got right.
        lost: Questions that only the first got right.
        neither: Questions that both got wrong.
    Returns:
        The lower and the upper end of the interval of second - first.
    """
    second, first, count = both + gained, both + lost, both + gained + lost + neither
    product = float(both * neither - gained * lost)
    if product > 0:
        product = max(product - count / 2, 0.0)
    margins = math.sqrt(second * (count - second) * first * (count - first))
    phi = product / margins if margins else 0.0

    def join(a: float, b: float) -> float:
        return math.sqrt(max(a**2 - 2 * phi * a * b + b**2, 0.0))

    p, q = second / count, first / count
    (low_p, high_p), (low_q, high_q) = rate_interval(second, count), rate_interval(first, count)
    low, high = p - q - join(p - low_p, high_q - q), p - q + join(high_p - p, q - low_q)
    return max(low, -1.0), min(high, 1.0)  # rounding may exceed these


def mcnemar_p(gained: int, lost: int) -> float:
    """The exact p of McNemar's test (scipy's binomial test): if two runs are equally good, a
    question that only one of them got right is equally likely to be the first run's or the
    second's.

    Args:
        gained: Questions that only the second run got right.
        lost: Questions that only the first run got right.
    Returns:
        The two-sided p; 1 if the runs got the same questions right.
    """
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


@dataclass(frozen=True)
class Difference:
    """A metric of two runs on the same questions, or of two recipes with the same seeds.

    Args:
        first: Mean of the first.
        second: Mean of the second.
        low: Lower end of the interval of second - first.
        high: Upper end of it.
        p: Exact p, for rates (`mcnemar_p`); None for other means.
        gained: Pairs in which the second is higher.
        lost: Pairs in which the first is higher.
        pairs: Number of pairs behind the interval.
        over: What a pair is: a question or a seed.
        first_ends: The interval of the first mean.
        second_ends: The interval of the second mean.
    """

    first: float
    second: float
    low: float
    high: float
    p: float | None
    gained: int
    lost: int
    pairs: int
    over: Literal["questions", "seeds"]
    first_ends: Ends | None = None
    second_ends: Ends | None = None

    @property
    def change(self) -> float:
        """second - first."""
        return self.second - self.first

    @property
    def verdict(self) -> Literal["better", "worse", "level", "undecided"]:
        """The verdict on the second. Undecided if all seeds differ by the same amount, which does
        not show how seeds vary."""
        if self.over == "seeds" and self.low == self.high:
            return "undecided"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "level"


def paired_difference(
    first: Sequence[float], second: Sequence[float], unit: float | None = 1.0
) -> Difference:
    """The difference of a metric between two runs, paired by question. If every value is 0 or
    `unit`, it is a difference of rates: `newcombe_interval` and `mcnemar_p`. Other means use
    Student's t over the differences per question.

    Args:
        first: Values of the first run, one per question, at least one.
        second: Values of the second run, of the same questions in the same order.
        unit: See `mean_interval`.
    Raises:
        ValueError: If there are no values, one is not finite, or the runs have different numbers of
            them.
    """
    pairs, gained, lost = _pair(first, second)
    p = None
    if unit is None or not _are_successes(np.array([first, second], float), unit):
        mean = float(pairs.mean())
        low, high = student_interval(pairs.tolist()) or (mean, mean)
    else:
        apart = (gained, lost) if unit > 0 else (lost, gained)
        both = int((np.abs([first, second]) >= _SAME).all(0).sum())
        rates = newcombe_interval(both, *apart, len(pairs) - both - gained - lost)
        low, high = sorted(end * unit for end in rates)
        p = mcnemar_p(gained, lost)
    means = float(np.mean(first)), float(np.mean(second))
    ends = mean_interval(first, unit), mean_interval(second, unit)
    return Difference(*means, low, high, p, gained, lost, len(pairs), "questions", *ends)


def difference_over_seeds(
    first: Sequence[float], second: Sequence[float], level: float = 0.95
) -> Difference:
    """The difference of a metric between two recipes that were trained with the same seeds, by
    `student_interval`. It is valid for these questions, and for seeds that were not tried. A
    bootstrap of five seeds covers .84 where this covers .95.

    Args:
        first: The first recipe's mean over the questions, for each of S >= 2 seeds.
        second: The second recipe's, for the same seeds in the same order.
        level: How often such an interval includes the true difference.
    Raises:
        ValueError: If there is only one seed, or the recipes have different numbers of seeds.
    """
    pairs, gained, lost = _pair(first, second)
    ends = student_interval(pairs.tolist(), level)
    if ends is None:
        raise ValueError("one seed says nothing about others. Pair two seeds or more.")
    means = float(np.mean(first)), float(np.mean(second))
    of_each = student_interval(first, level), student_interval(second, level)
    return Difference(*means, *ends, None, gained, lost, len(pairs), "seeds", *of_each)


def difference_by_seed(
    first: Mapping[int, float], second: Mapping[int, float], level: float = 0.95
) -> Difference | None:
    """`difference_over_seeds` of the seeds that two recipes share; None if fewer than two.

    Args:
        first: The first recipe's mean over the questions, by seed.
        second: The second recipe's.
        level: As in `difference_over_seeds`.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        return None
    return difference_over_seeds(
        [first[seed] for seed in common], [second[seed] for seed in common], level
    )


def _pair(first: Sequence[float], second: Sequence[float]) -> tuple[Array, int, int]:
    """The differences, and the numbers of those above and below 0."""
    if not len(first) or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values. Give one of each per pair.")
    pairs = np.asarray(second, float) - np.asarray(first, float)
    if not np.isfinite(pairs).all():
        raise ValueError(f"{len(pairs)} differences, not all finite. Give finite values.")
    return pairs, int((pairs > _SAME).sum()), int((pairs < -_SAME).sum())


def all_or_nothing(values: Sequence[float]) -> float | None:
    """The one value that a reward paid whenever it was not 0; None if it paid several. 1 if it
    never paid."""
    paid = [value for value in values if abs(value) >= _SAME] or [1.0]
    return paid[0] if max(paid) - min(paid) < _SAME else None


def _are_successes(values: Array, unit: float) -> bool:
    return bool(((np.abs(values) < _SAME) | (np.abs(values - unit) < _SAME)).all())
