"""How often intervals hold the true mean: cases drawn many times over. `python tests/intervals.py`
prints the table of docs/howto/evaluate.md, and every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from turnrl.runs.statistics import difference, interval, rate

SIZES = (20, 64, 250)
RUNS = 20_000
_Z = 1.959964
_AT_ONCE = 500  # samples that fit into a cache


@dataclass(frozen=True)
class Case:
    """Values that questions may have.

    Args:
        kind: Its row in the table.
        name: Which of the kind.
        draw: From a generator, runs and n to an array (runs, n).
        mean: The true mean.
        possible: The range of a value (of the values that differ); None where it is not known.
        rarest: Chance of the rarest value; 0 where values are continuous.
    """

    kind: str
    name: str
    draw: Callable[[np.random.Generator, int, int], np.ndarray]
    mean: float
    possible: tuple[float, float] | None = (0, 1)
    rarest: float = 0.0


def _few(kind, values, *likely):
    possible = (0, 1) if kind == DIFFERENCES else (min(values), max(values))
    for weights in likely:
        p = np.array(weights) / sum(weights)

        def draw(rng, runs, n, p=p):
            return rng.choice(values, (runs, n), p=p)

        yield Case(kind, f"{values} {weights}", draw, float(p @ values), possible, min(p))


def _beta(a, b):
    return Case("continuous", f"beta({a}, {b})", lambda r, *of: r.beta(a, b, of), a / (a + b))


def _attempts(a, b, attempts):
    def draw(rng, *of):
        return rng.binomial(attempts, rng.beta(a, b, of)) / attempts

    return Case(ATTEMPTS, f"{attempts} at beta({a}, {b})", draw, a / (a + b))


def _rare(share, common, mean, rare, name):
    def draw(rng, *of):
        return np.where(rng.random(of) < share, rare, common(rng, of))

    return Case("continuous", name, draw, share * rare + (1 - share) * mean, (0, 1), share)


def _gains(attempts, a, b, gain):
    def draw(rng, *of):
        p = rng.beta(a, b, of)
        second = rng.binomial(attempts, p + gain * (1 - p))
        return (second - rng.binomial(attempts, p)) / attempts

    name = f"{attempts} attempts at beta({a}, {b}), gain {gain}"
    return Case(DIFFERENCES, name, draw, gain * b / (a + b))


def _totals(redrawn):
    values, p = np.array([0, 0.4, 0.6, 1.1, 2.6]), (0.05, 0.1, 0.15, 0.2, 0.5)

    def draw(rng, *of):
        first, second = rng.choice(values, (2, *of), p=p)
        return np.where(rng.random(of) < redrawn, second - first, 0.0)

    return Case(DIFFERENCES, f"totals, {redrawn} drawn again", draw, 0.0, (0, 2.6))


ATTEMPTS = "means of 4 or 8 attempts"
UNKNOWN = "continuous, range not known"
DIFFERENCES = "differences of two runs"


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _few(
        "2 values", (0, 1), *((1 - p, p) for p in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 0.98))
    )
    thirds = ((1, 1, 1), (1, 2, 7), (8, 1, 1), (18, 1, 1), (48, 1, 1), (2, 49, 49), (9, 2, 9))
    yield from _few("3 values", (0, 0.5, 1), *thirds, (1, 18, 1), (1, 48, 1), (1, 4, 45))
    yield from _few("3 values", (0, 0.2, 1), (10, 9, 1), (10, 85, 5), (5, 44, 1))
    fifths = ((1, 1, 1, 1, 1), (6, 1, 1, 1, 1), (1, 1, 1, 1, 6), (46, 1, 1, 1, 1), (1, 2, 10, 6, 1))
    yield from _few("5 values", (0, 0.25, 0.5, 0.75, 1), *fifths)
    yield from _few("5 values", (0, 0.4, 0.6, 1.1, 2.6), (1, 3, 4, 4, 8), (1, 2, 3, 4, 90))
    yield from map(_beta, (1, 2, 20, 0.5, 0.5), (1, 8, 20, 0.5, 2))
    yield _rare(0.7, lambda r, of: r.random(of), 0.5, 0.0, "0 or uniform")
    yield _rare(0.95, lambda r, of: r.random(of), 0.5, 0.0, "0, rarely uniform")
    for share in (0.05, 0.02):
        yield _rare(share, lambda r, of: r.uniform(0.7, 1, of), 0.85, 0.0, f"0 at {share}")
    yield _rare(0.02, lambda r, of: r.uniform(0, 0.3, of), 0.15, 1.0, "1 at 0.02")
    yield from map(_attempts, (0.5, 1, 9, 2, 0.2), (0.5, 9, 1, 2, 3.8), (4, 8, 8, 8, 4))
    yield Case(UNKNOWN, "normal", lambda r, *of: r.standard_normal(of), 0.0, None)
    yield Case(UNKNOWN, "exponential", lambda r, *of: r.exponential(1, of), 1.0, None)
    lognormal = float(np.exp(0.125))
    yield Case(UNKNOWN, "log-normal", lambda r, *of: r.lognormal(0, 0.5, of), lognormal, None)
    tables = ((2, 96, 2), (5, 90, 5), (10, 80, 10), (10, 70, 20), (1, 95, 4), (1, 98, 1))
    yield from _few(DIFFERENCES, (-0.5, 0, 0.5), *tables, (3, 4, 3))
    yield from _few(DIFFERENCES, (-0.2, 0, 0.8), (10, 85, 5), (10, 88, 2))
    yield from _few(DIFFERENCES, (0, 0.2, 0.8), (97, 2, 1))
    yield from map(_totals, (0.03, 0.1, 0.3, 1))
    yield from map(_gains, (4, 8, 8), (1, 1, 0.3), (1, 1, 0.05), (0.1, 0.1, 0.3))
    yield Case(DIFFERENCES, "normal", lambda r, *of: r.normal(0.05, 0.03, of), 0.05)


def ends(case: Case, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the intervals of many samples (runs, n) begin and end: the equations of
    `turnrl.runs.statistics` for all at once, and its functions on the first of them."""
    runs, n = drawn.shape
    student = stats.t.ppf(0.975, n - 1) ** 2 * n / (n - 1)
    kinds = (np.diff(np.sort(drawn, 1), axis=1) > 1e-6).sum(1)
    squared = _Z**2 + (student - _Z**2) * kinds / (n - 1)
    least, most = drawn.min(1), drawn.max(1)
    if case.kind == DIFFERENCES:
        few = ((np.abs(drawn) > 1e-6).sum(1) < 10) | (kinds == 0)
        most = np.where(few, np.ptp(case.possible), np.abs(drawn).max(1))
        least = -most
    elif case.possible is not None:
        squared, (least, most) = np.full(runs, _Z**2), (np.full(runs, v) for v in case.possible)
    low, high = -_upper(-drawn, -least, squared), _upper(drawn, most, squared)
    if case.kind != DIFFERENCES and case.possible is not None:
        at = ((drawn == least[0]) | (drawn == most[0])).all(1)
        rates = np.array([rate(k, n) for k in range(n + 1)])[(drawn == most[0]).sum(1)[at]]
        low[at], high[at] = least[0] + rates.T * (most[0] - least[0])
    for i in range(20):
        values = [*map(float, drawn[i])]
        if case.kind == DIFFERENCES:
            first = [max(0.0, -v) for v in values]
            second = [max(0.0, v) for v in values]
            if len({0.0, *first, *second}) < 3:
                continue  # a rate, which has Newcombe's interval
            compared = difference(first, second, possible=case.possible)
            own = compared.low, compared.high
        else:
            own = interval(values, case.possible)
        assert np.allclose(own, (low[i], high[i]), atol=1e-5), (case, i, own, low[i], high[i])
    return low, high


def _upper(drawn: np.ndarray, most: np.ndarray, squared: np.ndarray) -> np.ndarray:
    """t by bisection: the arithmetic mean of t - x over the harmonic is 1 + z^2 / n."""
    if len(drawn) > _AT_ONCE:
        blocks = range(0, len(drawn), _AT_ONCE)
        parts = [[of[i : i + _AT_ONCE] for of in (drawn, most, squared)] for i in blocks]
        return np.concatenate([_upper(*part) for part in parts])
    n, top, mean = drawn.shape[1], drawn.max(1), drawn.mean(1)
    below = top[:, None] - drawn
    size = np.where(top > mean, top - mean, 1)
    few, many = np.full(len(drawn), -20.0), np.full(len(drawn), 20.0)
    for _ in range(40):
        middle = (few + many) / 2
        beyond = size * np.exp(middle)
        ratio = (beyond + top - mean) * (1 / (beyond[:, None] + below)).mean(1)
        far = ratio < 1 + squared / n
        few, many = np.where(far, few, middle), np.where(far, middle, many)
    t = np.where(top > mean, top + size * np.exp(few), top)
    return (n * mean + squared * np.maximum(t, most)) / (n + squared)


def measure(case: Case, n: int, runs: int = RUNS) -> tuple[float, float]:
    """How often the interval holds the mean, and its average length over Student's."""
    rng = np.random.default_rng(n)
    drawn = case.draw(rng, runs, n).astype(float)
    low, high = ends(case, drawn)
    half = stats.t.ppf(0.975, n - 1) * drawn.std(1, ddof=1) / n**0.5
    covered = (low - 1e-9 <= case.mean) & (case.mean <= high + 1e-9)
    return float(covered.mean()), float((high - low).mean() / (2 * half).mean())


def rows(measured: dict[tuple[Case, int], tuple[float, float]]) -> Iterator[str]:
    """The rows of the table: the average over the cases of a kind, and the least."""
    kinds = dict.fromkeys(case.kind for case, _ in measured)
    for kind in [*kinds, "all"]:
        cells = []
        for n in SIZES:
            covered = [c for (case, size), (c, _) in measured.items() if size == n]
            if kind != "all":
                covered = [
                    c for (case, m), (c, _) in measured.items() if (case.kind, m) == (kind, n)
                ]
            cells.append(f"{np.mean(covered):.3f} ({min(covered):.3f})")
        yield f"| {kind} | {' | '.join(cells)} |"


if __name__ == "__main__":
    measured = {(case, n): measure(case, n) for n in SIZES for case in cases()}
    for (case, n), (covered, length) in measured.items():
        rare = " rare" if case.rarest * n < 3 else ""
        print(f"{n:4} {case.kind:28} {case.name:46} {covered:.3f} {length:5.2f}{rare}")
    print(*rows(measured), sep="\n")
