"""Sizes that decide how much memory sampling takes. A plan of memory imports these: no torch."""

from __future__ import annotations

PAGE = 32
"""Tokens to a page. The smaller, the less is left empty; the larger, the faster it is gathered."""

PREFILL_TOKENS = 16_384
"""The most tokens read in one pass, if neither the recipe nor a plan says otherwise."""

ROWS = 256
"""Rows whose logits are held at once; on a CPU all, because last digits may depend on it."""

CUT_ROWS = 64
"""Rows whose distributions are cut at once; on a CPU all."""


def pages_of(tokens: int) -> int:
    """Number of pages that so many tokens take."""
    return -(-tokens // PAGE)
