"""Sizes that decide how much memory sampling takes. A plan of memory imports these: no torch."""

from __future__ import annotations

PAGE = 32
"""Tokens per page. Smaller pages leave less memory empty; larger pages are gathered faster."""

PREFILL_TOKENS = 16_384
"""The most tokens read in one pass, unless the recipe or a plan sets another limit."""

ROWS = 256
"""Rows whose logits are held at once. A CPU holds all, because last digits may depend on it."""


def count_pages(tokens: int) -> int:
    """The number of pages that so many tokens take."""
    return -(-tokens // PAGE)
