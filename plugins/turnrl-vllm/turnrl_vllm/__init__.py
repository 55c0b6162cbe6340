"""`VLLM`: the engine that samples with vLLM, in a process and an environment of its own.

settings VLLM, the settings; the engine itself is `turnrl_servers.ServerEngine`
server   how vLLM's server is asked
supply   a server that the run starts, lets sleep and ends
keeper   the process that ends it with the run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_vllm.settings import VLLM as VLLM

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_engines() -> list[str]:
    """The engine of this package."""
    return ["turnrl_vllm.settings:VLLM"]
