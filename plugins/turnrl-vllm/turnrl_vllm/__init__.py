"""`VLLM`: the engine that samples with vLLM, in a process and an environment of its own.

engine   VLLM; what it shares with other engines behind servers is `turnrl_servers`
server   how vLLM's server is asked
supply   a server that the run starts, lets sleep and ends
started  its process
keeper   the process that keeps it, and ends it with the run
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from turnrl import Engine, hookimpl, lazy_names

if TYPE_CHECKING:
    from turnrl_vllm.engine import VLLM as VLLM

__getattr__, __all__ = lazy_names(__name__, __file__)


@hookimpl
def turnrl_engines() -> Iterable[type[Engine]]:
    """The engine of this package."""
    from turnrl_vllm.engine import VLLM

    return [VLLM]
