"""95 % intervals of figures: of one run over its questions, and of two runs over the same
questions.

    interval          a figure of one run: for rates Wilson's, drawn out where it is too narrow
                      (`rate`); the score interval for other means
    difference        two runs on the same questions: Newcombe's for rates, the score interval of
                      the differences for other means
    over_seeds        several seeds of two recipes: Student's t over the differences per seed
    by_seed           `over_seeds` of the seeds in common
    interval_over_seeds   several seeds of one recipe: Student's t

The unit is the question. If a question was asked several times, average its attempts first: they
share the question, and the spread of the averages already contains the noise of sampling
(Miller, arXiv 2411.00640).

Coverage, exact for rates and for three values, and simulated for the rest by
`tests/test_statistics.py` and `tests/intervals.py`, from 20 questions on:

    rates         .928 or more for any rate, .95 to .96 on average over the rates. With 20
                  questions it is above .97 for 7 % of the rates whose rarer answer is expected
                  three times or more
    Newcombe      .947 or more; .95 to .957 at a rate of .5 from 250 questions on
    score         .94 to .97 on average over 64 distributions, .93 or more for each. The page "Score
                  a policy" has a table
    differences   .94 or more, and up to 1 where few questions differ
    Student's t   .95 for 5, 8 and 10 seeds

If one of three values is expected less than once among the questions, the score interval may cover
the mean only .87 to .93 of the time: if that value turns up by chance, it pulls the interval
towards itself. If moreover the range is unknown, it covers .75 to .90, because samples without the
value do not show that it is possible, and .6 or less if that value is also far from the others. No
interval of the values alone can know better: a reward needs `bounds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = float | Array

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_SAME = 1e-6  # rewards are sums of float32, so smaller differences are rounding
_DIFFER = 10  # questions that have to differ before they show how large a difference can be


def wilson(successes: Numbers, count: Numbers) -> tuple[Array, Array]:
    """Wilson's score interval of a rate: all p with |k/n - p| <= z sqrt(p (1 - p) / n).

    Source: Wilson, JASA 22 (1927) 209-212.

    Args:
        successes: k, a number or an array.
        count: n, at least 1.
    Returns:
        The lower and the upper end of the interval.
    """
    rate = np.asarray(successes) / count
    middle = rate + _Z**2 / (2 * count)
    half = _Z * np.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    # rounding must not put an end beyond the rate itself, or beyond 0 and 1
    low, high = (middle - half) / scale, (middle + half) / scale
    return np.clip(low, 0, rate), np.clip(high, rate, 1)


def rate(successes: int, count: int) -> tuple[float, float]:
    """The interval of a rate: Wilson's (`wilson`), extended at an end where k or more successes (or
    k or fewer) would still have a chance above 5 %.

    Wilson's alone covers a rate p as seldom as .84 if n p is about 0.2, because the interval of one
    success in n begins above p. Brown, Cai and DasGupta, Statistical Science 16 (2001) 101-133,
    correct the intervals of k = 1, 2 and 3 with the Poisson distribution. Here the binomial
    distribution corrects those of any k.

    Args:
        successes: k.
        count: n, at least 1.
    """
    from scipy import stats

    low, high = map(float, wilson(successes, count))
    failures = count - successes
    if successes:
        low = min(low, float(stats.beta.ppf(0.05, successes, failures + 1)))
    if failures:
        high = max(high, float(stats.beta.ppf(0.95, successes + 1, failures)))
    return low, high


def newcombe(
    both: Numbers, gained: Numbers, lost: Numbers, neither: Numbers
) -> tuple[Array, Array]:
    """The interval of a difference of paired rates, by Newcombe's method 10.

    The ends of the two Wilson intervals are joined by the correlation phi of the pairs, which is
    continuity-corrected if positive. With p the second rate and q the first:

        low  = p - q - sqrt((p - l_p)^2 - 2 phi (p - l_p) (u_q - q) + (u_q - q)^2)
        high = p - q + sqrt((u_p - p)^2 - 2 phi (u_p - p) (q - l_q) + (q - l_q)^2)

    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650.

    Args:
        both: Questions that both got right, a number or an array.
        gained: Questions that only the second got right.
        lost: Questions that only the first got right.
        neither: Questions that both got wrong.
    Returns:
        The lower and the upper end of the interval of second - first.
    """
    second, first, count = both + gained, both + lost, both + gained + lost + neither
    product = np.asarray(both * neither - gained * lost, float)
    corrected = np.where(product > 0, np.maximum(product - count / 2, 0), product)
    margins = np.sqrt(second * (count - second) * 1.0 * first * (count - first))
    phi = corrected / np.where(margins > 0, margins, 1)

    def joined(a: Array, b: Array) -> Array:
        return np.sqrt(np.maximum(a**2 - 2 * phi * a * b + b**2, 0))

    (low_p, high_p), (low_q, high_q) = wilson(second, count), wilson(first, count)
    p, q = second / count, first / count
    low, high = p - q - joined(p - low_p, high_q - q), p - q + joined(high_p - p, q - low_q)
    return np.maximum(low, -1), np.minimum(high, 1)  # rounding may exceed these


def mcnemar(gained: int, lost: int) -> float:
    """The exact p of McNemar's test: if two runs are equally good, a question that only one of them
    got right is equally likely to be the first run's or the second's.

    Source: McNemar, Psychometrika 12 (1947) 153-157, with the binomial distribution.

    Args:
        gained: Questions that only the second run got right.
        lost: Questions that only the first run got right.
    Returns:
        The two-sided p; 1 if the runs got the same questions right.
    """
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def interval(
    values: Sequence[float], possible: tuple[float, float] | None = None
) -> tuple[float, float]:
    """The 95 % interval of a mean over questions. It lies within what is possible.

    If every value is at one end of the range or the other, this is the interval of a rate (`rate`).
    All other means get the score interval (`_score`), which generalises Wilson's to more than two
    distinct values.

    If the range is unknown, 0 and a single other value count as its ends: for example, a reward of
    weight 0.4 that is all or nothing. (If all values are 0, the other end is 1.) With more distinct
    values, the range is that of the values, and the interval is wider the more of them there are,
    up to Student's quantile in place of the normal one if no two values are the same.

    Args:
        values: One per question, at least one.
        possible: The least and the most that a value can be; None if unknown. Values beyond this
            range extend it.
    Raises:
        ValueError: If there is no value, or one is not finite.
    """
    # sorted, so that the order in which processes scored them changes no digit
    seen = np.sort(np.asarray(values, float))
    if not len(seen) or not np.isfinite(seen).all():
        raise ValueError(f"an interval of {len(seen)} values, not all finite. Give at least one.")
    if (ends := _range(seen, possible)) is None:
        return _score(seen, float(seen[0]), float(seen[-1]), _squared(seen))
    bottom, top = ends
    if not _all_or_nothing(seen, ends):
        return _score(seen, bottom, top, _Z**2)
    low, high = rate(int((top - seen < _SAME).sum()), len(seen))
    return bottom + low * (top - bottom), min(bottom + high * (top - bottom), top)


@dataclass(frozen=True)
class Difference:
    """A figure of two runs on the same questions.

    Args:
        first: Mean of the first run.
        second: Mean of the second run.
        low: Lower end of the 95 % interval of second - first.
        high: Upper end of it.
        p: Exact p, for rates (`mcnemar`); None for other means.
        gained: Pairs in which the second run is higher.
        lost: Pairs in which the first run is higher.
        pairs: Number of pairs behind the interval.
        over: What a pair is: a question or a seed.
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

    @property
    def change(self) -> float:
        """second - first."""
        return self.second - self.first


def difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    possible: tuple[float, float] | None = None,
) -> Difference:
    """The difference of a figure between two runs, paired by question.

    Rates use `newcombe` and `mcnemar`. Other means use the score interval (`_score`) of the
    differences per question. Often most questions do not differ. If fewer than 10 do, they do not
    show how much others could differ, so another may differ by the whole range R of the values,
    either way. From 10 on, another may differ by as much as the largest difference, either way.

    Args:
        first: Values of the first run, one per question, at least one.
        second: Values of the second run, of the same questions in the same order.
        possible: The least and the most that a value can be; if None, the range of 0 and the values
            of both runs.
    Raises:
        ValueError: If there are no values, one is not finite, or the runs have different numbers of
            them.
    """
    pairs, counts = _paired(first, second)
    every, p = np.array([first, second], float), None
    ends = _range(every, possible)
    if ends is not None and _all_or_nothing(every, ends):
        both = int((ends[1] - every < _SAME).all(0).sum())
        rates = newcombe(both, *counts, len(pairs) - both - sum(counts))
        low, high = (float(end) * (ends[1] - ends[0]) for end in rates)
        p = mcnemar(*counts)
    else:
        few = sum(counts) < _DIFFER or np.ptp(pairs) < _SAME
        span = np.ptp([*(possible or (0.0,)), *first, *second])
        reach = float(span if few else np.abs(pairs).max())
        low, high = _score(np.sort(pairs), -reach, reach, _squared(pairs))
    means = float(np.mean(first)), float(np.mean(second))
    gained, lost = counts
    return Difference(
        *means, low, high, p=p, gained=gained, lost=lost, pairs=len(pairs), over="questions"
    )


def over_seeds(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Difference:
    """The difference of a figure between two recipes that were trained with the same seeds.

        low, high = mean(d) -+ t((1 + level) / 2, S - 1) sd(d) / sqrt(S),   d = second - first

    It is valid for these questions, and for seeds that were not tried. Source: Student, Biometrika
    6 (1908) 1-25. A bootstrap of five seeds covers .84 where this covers .95.

    Args:
        first: The first recipe's mean over the questions, for each of S >= 2 seeds.
        second: The second recipe's, for the same seeds in the same order.
        level: How often such an interval includes the true difference.
    Returns:
        The difference. Its interval has no width if all seeds differ by the same amount, because
        then they do not show how they vary.
    Raises:
        ValueError: If there is only one seed, or the recipes have different numbers of seeds.
    """
    from scipy import stats

    pairs, counts = _paired(first, second)
    if len(pairs) < 2:
        raise ValueError("one seed says nothing about others. Pair two seeds or more.")
    spread = pairs.std(ddof=1) if np.ptp(pairs) >= _SAME else 0.0  # otherwise only rounding
    half = stats.t.ppf((1 + level) / 2, len(pairs) - 1) * spread / np.sqrt(len(pairs))
    low, high = float(pairs.mean() - half), float(pairs.mean() + half)
    means = float(np.mean(first)), float(np.mean(second))
    gained, lost = counts
    return Difference(
        *means, low, high, p=None, gained=gained, lost=lost, pairs=len(pairs), over="seeds"
    )


def by_seed(
    first: Mapping[int, float], second: Mapping[int, float], level: float = 0.95
) -> Difference | None:
    """`over_seeds` of the seeds that two recipes have in common; None if they share fewer than two.

    Args:
        first: The first recipe's mean over the questions, by seed.
        second: The second recipe's.
        level: As in `over_seeds`.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        return None
    return over_seeds([first[seed] for seed in common], [second[seed] for seed in common], level)


def interval_over_seeds(values: Sequence[float], share: bool = False) -> tuple[float, float]:
    """The 95 % interval of a figure's mean over seeds, by Student's t.

    Args:
        values: The mean over the questions, for each of S >= 2 seeds.
        share: True if the figure lies between 0 and 1; the interval is then cut there.
    Raises:
        ValueError: If there is one seed.
    """
    over = over_seeds([0.0] * len(values), values)
    return (max(over.low, 0.0), min(over.high, 1.0)) if share else (over.low, over.high)


def _paired(first: Sequence[float], second: Sequence[float]) -> tuple[Array, tuple[int, int]]:
    """The differences, and the numbers of those above and below 0."""
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values. Give one of each per pair.")
    pairs = np.asarray(second, float) - np.asarray(first, float)
    if not np.isfinite(pairs).all():
        raise ValueError(f"{len(pairs)} differences, not all finite. Give finite values.")
    return pairs, (int((pairs > _SAME).sum()), int((pairs < -_SAME).sum()))


def _range(values: Array, possible: tuple[float, float] | None) -> tuple[float, float] | None:
    """The least and the most that a value can be. If that is unknown, 0 and a single other value
    are taken as the range; None if there are more values."""
    if possible is None and _kinds(np.append(values, 0.0)) > 2:
        return None
    low, high = possible or (0.0, 0.0 if np.abs(values).max() >= _SAME else 1.0)
    return min(low, float(values.min())), max(high, float(values.max()))


def _all_or_nothing(values: Array, ends: tuple[float, float]) -> bool:
    """True if each value is at one end of the range or the other."""
    low, high = ends
    apart = high - low >= _SAME
    return apart and bool(((values - low < _SAME) | (high - values < _SAME)).all())


def _kinds(values: Array) -> int:
    """The number of values that differ by more than rounding."""
    return 1 + int((np.diff(np.sort(values)) >= _SAME).sum())


def _squared(values: Array) -> float:
    """The squared quantile for values of unknown range: the normal distribution's if all values are
    the same, t(.975, n - 1)^2 n / (n - 1) if they all differ. In between it grows linearly with the
    number of distinct values, which is our own choice and has no source."""
    from scipy import stats

    freedom, further_kinds = len(values) - 1, _kinds(values) - 1
    if not further_kinds:
        return _Z**2
    student = float(stats.t.ppf(0.975, freedom)) ** 2 * (freedom + 1) / freedom
    return _Z**2 + (student - _Z**2) * further_kinds / freedom


def _score(values: Array, bottom: float, top: float, squared: float) -> tuple[float, float]:
    """The score interval of a mean: all mu with n (m - mu)^2 / v(mu) <= z^2.

    m is the mean of the n values x. v(mu) is the variance of the distribution with mean mu, on the
    values and on the two ends of their range, under which the values are likeliest. For two values
    v(mu) is mu (1 - mu), and the interval is Wilson's. The distribution is that of empirical
    likelihood: an x has the weight 1 / (n (1 + lambda (x - mu))), and an end that was never seen
    may have weight too. With these weights the statistic is n (A / H - 1), where A and H are the
    arithmetic and the harmonic mean of the gaps t - x, and t > max(x) stands for lambda. So

        high = (n m + z^2 max(t, top)) / (n + z^2),   A / H = 1 + z^2 / n at t

    It is as if z^2 more values lay at t, or at the end of the range. `low` mirrors it.

    Sources: the score test, Rao, Proc. Cambridge Phil. Soc. 44 (1948) 50-57; the weights, Owen,
    Biometrika 75 (1988) 237-249; the unseen end, Honda and Takemura, COLT 2010, 67-79.

    Args:
        values: (n,), sorted.
        bottom: The least that a value can be, no more than the least value.
        top: The most that a value can be, no less than the greatest value.
        squared: z^2.
    """
    mean = float(values.mean())
    high = _upper(values, top, squared)
    low = -_upper(-values[::-1], -bottom, squared)
    # rounding must not put an end beyond the range, or beyond the mean
    return max(min(low, mean), bottom), min(max(high, mean), top)


def _upper(values: Array, top: float, squared: float) -> float:
    """The upper end of `_score`."""
    from scipy import optimize

    count, mean, greatest = len(values), float(values.mean()), float(values[-1])
    below = greatest - values

    def excess(beyond: float) -> float:
        """A / H - 1 - z^2 / n at t = greatest + beyond, which falls as t rises."""
        return float((beyond + below.mean()) * (1 / (beyond + below)).mean()) - 1 - squared / count

    reach = top - greatest
    if below[0] >= _SAME and (reach <= 0 or excess(reach) > 0):
        # A / H - 1 is at least (mean gap / beyond + 1) / n - 1, and at most variance / beyond^2
        first, last = below.mean() / (count + squared), below.std() * (count / squared) ** 0.5
        reach = optimize.brentq(excess, first, last, xtol=1e-14 * below[0], rtol=1e-14)
    return (count * mean + squared * (greatest + reach)) / (count + squared)
