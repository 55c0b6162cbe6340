"""Atlas, an embedded world: real places, a page on each, questions, and a policy to start from.

    Atlas           questions that one page answers; world.py, which also has the facts
    AtlasTwoHop     questions that take two pages
    STARTER         folder of the starter policy for both

Importing this package loads no torch and no transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_atlas.world import TWO_HOP_FACTS as TWO_HOP_FACTS
    from turnrl_atlas.world import Atlas as Atlas
    from turnrl_atlas.world import AtlasTwoHop as AtlasTwoHop
    from turnrl_atlas.world import Place as Place
    from turnrl_atlas.world import load_places as load_places
    from turnrl_atlas.world import make_page as make_page
    from turnrl_atlas.world import make_query as make_query
    from turnrl_atlas.world import make_question as make_question
    from turnrl_atlas.world import make_two_hop_question as make_two_hop_question

__getattr__, __all__ = make_lazy(__name__, __file__)

STARTER = Path(__file__).parent / "starter"
"""The starter policy, as `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer` read it."""


@hookimpl
def turnrl_datasets() -> list[str]:
    """The data sets of this package."""
    return ["turnrl_atlas.world:Atlas", "turnrl_atlas.world:AtlasTwoHop"]
