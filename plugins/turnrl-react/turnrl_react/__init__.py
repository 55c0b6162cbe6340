"""Agents that think and act in turns until they answer (Yao et al., arXiv 2210.03629).

`ReAct` is for models that call tools as Qwen and Hermes do, `SearchR1` for Search-R1's tags.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnrl import Segmenter, hookimpl
from turnrl_react.react import ReAct as ReAct
from turnrl_react.search_r1 import SearchR1 as SearchR1


@hookimpl
def turnrl_segmenters() -> Iterable[type[Segmenter]]:
    """The segmenters of this package."""
    return [ReAct, SearchR1]
