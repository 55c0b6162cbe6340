"""Encoders for tests: a random vector for each word, added up, and encoders with a fault."""

import functools
import re
import zlib

import numpy as np


@functools.cache
def word(text, dimensions):
    return np.random.default_rng(zlib.crc32(text.encode())).normal(size=dimensions)


def words(texts, dimensions=64, seed=""):
    """Sums over words, so that texts with the same words are near each other."""
    vectors = np.full((len(texts), dimensions), 0.01)
    for row, text in zip(vectors, texts, strict=True):
        for word_of_text in re.findall(r"\w+", text.lower()):
            row += word(seed + word_of_text, dimensions)
    return vectors


def others(texts):
    return words(texts, seed="other")


def wide(texts):
    return words(texts, 96)


def listed(texts):
    return words(texts).tolist()


def nan(texts):
    return np.where(np.arange(64) == 3, np.nan, words(texts))


def zeros(texts):
    return np.zeros((len(texts), 64))


def zeros_for_z(texts):
    """`words`, but for texts with a word that it does not know."""
    return np.array([[0.0] * 64 if "ZZZ" in text else words([text])[0] for text in texts])


def flat(texts):
    return words(texts).ravel()


def miscounted(texts):
    return words(texts)[:1] if len(texts) > 1 else words([*texts, ""])


def strings(texts):
    return [["a"] for _ in texts]


def ragged(texts):
    return [[1.0] * (1 + n) for n, _ in enumerate([*texts, ""])]


def nothing(texts):
    return None


def raises(texts):
    raise KeyError("out of order")


def grows(texts):
    grows.width = getattr(grows, "width", 7) + 1
    return words(texts, grows.width)


ASKED: list[list[str]] = []


def noted(texts):
    """`words`, which notes what it was asked."""
    ASKED.append(list(texts))
    return words(texts)


NOT_A_FUNCTION = 7
