"""Further objectives, beside the framework's `ClippedSurrogate`.

    cispo   CISPO: clipped importance weights, under which every token keeps its gradient
    sapo    SAPO: a soft gate in place of the clip

The classes need torch, so they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_objectives.cispo import CISPO as CISPO
    from turnrl_objectives.sapo import SAPO as SAPO

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_objectives() -> list[str]:
    """The objectives of this package."""
    return ["turnrl_objectives.cispo:CISPO", "turnrl_objectives.sapo:SAPO"]
