"""95 % intervals of figures: of one run over its questions, and of two runs that were asked the
same ones.

    interval          a figure of one run: Wilson's for rates, a bootstrap for other means
    difference        two runs on the same questions: Newcombe's for rates, a bootstrap for others
    over_seeds        several seeds of two recipes: Student's t over the differences per seed
    mean_over_seeds   several seeds of one recipe: Student's t

The unit is the question. If a question was asked several times, average its attempts first: they
share the question, and the spread of the averages already contains the noise of sampling
(Miller, arXiv 2411.00640).

Coverage, exact for rates and simulated for the rest by `tests/test_statistics.py`:

    Wilson        .978 at a rate of .02 or .98 and 30 questions, .94 to .965 from 250 questions on
    Newcombe      .95 to .957 at a rate of .5 from 250 questions on, .95 to 1.0 at .02 and .98
    bootstrap     .95 at 256 questions if many of them differ. It is too narrow if few do: .89
                  where 3 % of 256 questions differ, so read the list of questions as well
    turns         .98 to 1.0 at 30 and 100 questions where 1 or 2 % of them take three turns and
                  the others two, .985 at 256, .96 to .976 at 1,000: many samples have no third
                  turn, and then the rule of three holds the mean (see `interval`)
    Student's t   .95 for 5, 8 and 10 seeds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_DIGITS = 6
_SAME = 10.0**-_DIGITS  # rewards are sums of float32, so smaller differences are rounding
_DRAWN = 4_000_000  # numbers that the bootstrap holds at once


def wilson(successes: Any, count: Any) -> tuple[Any, Any]:
    """Wilson's score interval of a rate: all p with |k/n - p| <= z sqrt(p (1 - p) / n).

    Source: Wilson, JASA 22 (1927) 209-212.

    Args:
        successes: k, a number or an array.
        count: n, at least 1.
    Returns:
        Where the interval begins, and where it ends.
    """
    rate = np.asarray(successes) / count
    middle = rate + _Z**2 / (2 * count)
    half = _Z * np.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    # rounding must not put an end beyond the rate itself at 0 and at 1
    return np.minimum((middle - half) / scale, rate), np.maximum((middle + half) / scale, rate)


def newcombe(both: Any, gained: Any, lost: Any, neither: Any) -> tuple[Any, Any]:
    """The interval of a difference of paired rates, by Newcombe's method 10.

    The ends of the two Wilson intervals are joined by the correlation phi of the pairs, which is
    continuity-corrected where it is positive. With p the second rate, q the first:

        low  = p - q - sqrt((p - l_p)^2 - 2 phi (p - l_p) (u_q - q) + (u_q - q)^2)
        high = p - q + sqrt((u_p - p)^2 - 2 phi (u_p - p) (q - l_q) + (q - l_q)^2)

    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650.

    Args:
        both: Questions that both got right, a number or an array.
        gained: Questions that only the second got right.
        lost: Questions that only the first got right.
        neither: Questions that both got wrong.
    Returns:
        Where the interval of second - first begins, and where it ends.
    """
    second, first, count = both + gained, both + lost, both + gained + lost + neither
    product = np.asarray(both * neither - gained * lost, float)
    corrected = np.where(product > 0, np.maximum(product - count / 2, 0), product)
    margins = np.sqrt(second * (count - second) * 1.0 * first * (count - first))
    phi = corrected / np.where(margins > 0, margins, 1)

    def joined(one: Any, other: Any) -> Any:
        return np.sqrt(np.maximum(one**2 - 2 * phi * one * other + other**2, 0))

    (low_p, high_p), (low_q, high_q) = wilson(second, count), wilson(first, count)
    p, q = second / count, first / count
    low, high = p - q - joined(p - low_p, high_q - q), p - q + joined(high_p - p, q - low_q)
    return np.maximum(low, -1), np.minimum(high, 1)  # which rounding may step over


def mcnemar(gained: int, lost: int) -> float:
    """The exact p of McNemar's test: two runs are equally good if a question that only one of them
    got right is as likely to be the one's as the other's.

    Source: McNemar, Psychometrika 12 (1947) 153-157, by the binomial distribution.

    Args:
        gained: Questions that only the second run got right.
        lost: Questions that only the first run got right.
    Returns:
        The two-sided p; 1 if the runs got the same questions right.
    """
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean over questions: Wilson's for a rate, the bootstrap's (BCa) for
    anything else.

    A figure that is 0 or one other value is a rate too, times this value: a reward of weight 0.4
    that is all or nothing. If all values are the same c, and neither 0 nor 1, nothing is left to
    draw from: 250 trajectories of two turns do not exclude one of three. Then the interval is
    c -+ (1 - .05^(1/n)) |c|, the rule of three as in `difference`.

    Args:
        values: One per question, at least one.
    """
    rounded = _rounded(values)
    unit = _unit(rounded)
    if unit is None:
        mean = float(np.mean(values))
        return _bootstrap(values, mean - abs(mean), mean + abs(mean))
    low, high = wilson(rounded.count(unit), len(values))
    ends = sorted((float(low) * unit, float(high) * unit))
    return ends[0], ends[1]


@dataclass(frozen=True)
class Difference:
    """A figure of two runs on the same questions.

    Args:
        first: Mean of the first run.
        second: Mean of the second run.
        low: Where the 95 % interval of second - first begins.
        high: Where it ends.
        p: Exact p, for rates (`mcnemar`); None for other means.
        gained: Pairs in which the second run is higher.
        lost: Pairs in which the first run is higher.
        pairs: How many pairs the interval rests on.
        over: Whether a pair is a question or a seed.
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


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of a figure between two runs, paired by question.

    Rates have `newcombe` and `mcnemar`, other means the bootstrap of the differences per question.
    If all questions differ by the same d, nothing is left to draw from. Then the rule of three
    gives the interval: with 95 % confidence, at most p = 1 - .05^(1/n) of questions, about 3/n,
    would differ otherwise, and by between -R and R, the range of the values:

        low, high = d - p (R + d), d + p (R - d)

    Args:
        first: Values of the first run, one per question, at least one.
        second: Values of the second run, of the same questions in the same order.
    Raises:
        ValueError: If there is none, or they are not equally many.
    """
    pairs, counts = _paired(first, second)
    rounded = _rounded(first), _rounded(second)
    unit = _unit([*rounded[0], *rounded[1]])
    p = None
    if unit is not None:
        both = sum(a == b == unit for a, b in zip(*rounded, strict=True))
        gained, lost = counts if unit > 0 else counts[::-1]
        ends = newcombe(both, gained, lost, len(pairs) - both - gained - lost)
        (low, high), p = sorted(float(end) * unit for end in ends), mcnemar(gained, lost)
    else:
        reach = float(np.ptp([0.0, *first, *second]))
        low, high = _bootstrap(pairs, -reach, reach)
    means = float(np.mean(first)), float(np.mean(second))
    return Difference(*means, low, high, p, *counts, len(pairs), "questions")


def over_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of a figure between two recipes that were trained with the same seeds.

        low, high = mean(d) -+ t(.975, S - 1) sd(d) / sqrt(S),   d = second - first, per seed

    It holds for these questions, and for seeds that were not tried. Source: Student, Biometrika 6
    (1908) 1-25. A bootstrap of five seeds covers .84 where this covers .95.

    Args:
        first: The first recipe's mean over the questions, of each of S >= 2 seeds.
        second: The second's, of the same seeds in the same order.
    Returns:
        Without width if all seeds differ by the same: then they do not tell how they vary.
    Raises:
        ValueError: If there is one seed, or they are not equally many.
    """
    from scipy import stats

    pairs, counts = _paired(first, second)
    if len(pairs) < 2:
        raise ValueError("one seed says nothing about others. Pair two seeds or more.")
    spread = pairs.std(ddof=1) if np.ptp(pairs) >= _SAME else 0.0  # else it is rounding
    half = stats.t.ppf(0.975, len(pairs) - 1) * spread / np.sqrt(len(pairs))
    low, high = float(pairs.mean() - half), float(pairs.mean() + half)
    means = float(np.mean(first)), float(np.mean(second))
    return Difference(*means, low, high, None, *counts, len(pairs), "seeds")


def mean_over_seeds(values: Sequence[float], share: bool = False) -> Difference:
    """The mean of a figure over seeds, as `over_seeds` its difference from 0.

    Args:
        values: The mean over the questions, of each of S >= 2 seeds.
        share: True if the figure is between 0 and 1, where the interval then ends too.
    Raises:
        ValueError: If there is one seed.
    """
    over = over_seeds([0.0] * len(values), values)
    return replace(over, low=max(over.low, 0.0), high=min(over.high, 1.0)) if share else over


def _paired(first: Sequence[float], second: Sequence[float]) -> tuple[Any, tuple[int, int]]:
    """The differences, and how many of them are above and below 0."""
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values. Give one of each per pair.")
    pairs = np.asarray(second, float) - np.asarray(first, float)
    return pairs, (int((pairs > _SAME).sum()), int((pairs < -_SAME).sum()))


def _rounded(values: Sequence[float]) -> list[float]:
    """Values without the digits that are rounding: 0.1 + 0.2 and 0.3 are one value."""
    return [float(value) for value in np.round(np.asarray(values, float), _DIGITS)]


def _unit(values: Sequence[float]) -> float | None:
    """The one value that a rate has beside 0, 1 if it is alone; None of anything that is no
    rate."""
    known = {*values}
    others = known - {0.0}
    if len(others) > 1 or (len(known) == 1 and known - {0.0, 1.0}):
        return None
    return others.pop() if others else 1.0


def _bootstrap(values: Any, least: float, most: float) -> tuple[float, float]:
    """The bias-corrected and accelerated bootstrap of a mean (Efron, JASA 82 (1987) 171-185), with
    the same draws every time. Values that are all equal have no distribution to draw from, and get
    the rule of three.

    Args:
        values: At least one.
        least: The least that another value could be, where these are all equal.
        most: The most.
    """
    from scipy import stats

    # sorted, so that the order in which processes scored them changes no digit
    drawn = np.sort(np.asarray(values, float))
    if np.ptp(drawn) < _SAME:
        mean, others = float(drawn.mean()), float(1 - 0.05 ** (1 / len(drawn)))
        return mean - others * (mean - least), mean + others * (most - mean)
    batch = max(1, _DRAWN // len(drawn))
    found = stats.bootstrap(
        [drawn], lambda v, axis: v.mean(axis), method="BCa", rng=0, batch=batch
    ).confidence_interval
    return float(found.low), float(found.high)
