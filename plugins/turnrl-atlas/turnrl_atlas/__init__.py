"""Atlas, an embedded world: real places, a page on each, questions, and a policy to start from.

    Atlas      the questions and the pages (world.py, where the facts come from too)
    STARTER    folder of the starter policy; warmup.py says how it got its habits

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from turnrl import QuestionSource, hookimpl
from turnrl_atlas.world import Atlas, Place, ask, page, places, query

__all__ = ["STARTER", "Atlas", "Place", "ask", "page", "places", "query"]

STARTER = Path(__file__).parent / "starter"
"""The starter policy, as `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer` read it."""


@hookimpl
def turnrl_datasets() -> Iterable[type[QuestionSource]]:
    """The data set of this package."""
    return [Atlas]
