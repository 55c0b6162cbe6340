"""`Slots`: the engine that samples in the process that learns.

engine     Slots, its sessions, and the loop that computes pass after pass
scheduler  which turns are sampled, and in which pages
pages      the memory of keys and values, and what lies in it
attention  attention over pages, on any device
kernel     the same by a GPU's own kernel
decode     passes that only sample, recorded as CUDA graphs
merged     an adapter and its base as dense weights
sampling   one token of each turn
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from turnrl import Engine, hookimpl

if TYPE_CHECKING:
    from turnrl_slots.engine import Slots as Slots


@hookimpl
def turnrl_engines() -> Iterable[type[Engine]]:
    """The engine of this package."""
    from turnrl_slots.engine import Slots  # needs torch, which listing plugins does not

    return [Slots]


def __getattr__(name: str) -> Any:
    if name == "Slots":
        from turnrl_slots.engine import Slots

        return Slots
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
