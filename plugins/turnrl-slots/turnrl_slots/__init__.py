"""`Slots`: the engine that samples in the process that learns.

settings      Slots, the settings: no torch
engine        the engine, its sessions, and the loop that computes pass after pass
passes        the forward passes, and the weights that they are computed with
limits        refuses models that pages do not hold, and memory sizes
trial         trials at the start: pages against the model itself, the largest passes
kernel_trial  finds out whether a GPU's kernels compute the right result here
scheduler     chooses the turns that are sampled, and their pages
pages         the memory of keys and values, and its contents
memory        the bytes that keys and values may take
attention     attention over pages, on any device
kernel        attention over pages by a GPU's own kernels
triton_pages  a kernel that reads pages in place
decode        passes that only sample, recorded as CUDA graphs
dense         an adapter beside its base as dense weights
stops         finds stop strings as tokens are sampled
sampling      draws one token for each turn
sizes         sizes that decide the memory of sampling
transfer      copies numbers between host and device
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_slots.engine import SlotsEngine as SlotsEngine
    from turnrl_slots.settings import Slots as Slots

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_engines() -> list[str]:
    """The engine of this package."""
    return ["turnrl_slots.settings:Slots"]
