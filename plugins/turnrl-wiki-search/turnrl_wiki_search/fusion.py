"""Joins two rankings by rank, because their scores have different units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T", bound=tuple[str, ...])

CONSTANT = 60
"""Chosen by Cormack, Clarke and Büttcher (SIGIR 2009) in a pilot. With a larger constant, lower
ranks count for more."""

_DIGITS = 12
"""Sums that are equal as fractions may differ after this many decimals; others differ earlier."""


def fuse(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, float]]:
    """Reciprocal rank fusion: the score of d is the sum of 1 / (60 + rank of d) over the rankings
    that hold d, with ranks from 1.

    Args:
        first: Keys, best first, each once. It decides between keys with the same score: a better
            rank here comes first. Keys that are not in it are sorted.
        second: The same.
    Returns:
        Every key with its score, best first.
    """
    scores: dict[T, float] = {}
    for ranking in (first, second):
        for rank, key in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + 1 / (CONSTANT + rank)
    places = {key: place for place, key in enumerate(first)}

    def order(item: tuple[T, float]) -> tuple[float, int, T]:
        key, score = item
        return -round(score, _DIGITS), places.get(key, len(first)), key

    return sorted(scores.items(), key=order)
