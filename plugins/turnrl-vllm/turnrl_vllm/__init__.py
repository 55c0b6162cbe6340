"""`VLLM`: the engine that samples with vLLM, in a process and an environment of its own; and
`ServerEngine` with `ServerAPI`, for engines that sample with other servers.

engine       VLLM
served       ServerEngine, the engine of any kind of server, and its sessions
api          ServerAPI, how servers of one kind are asked
vllm_api     the API of vLLM's server
pool         several servers as one: assigns sessions, and moves them when a server is lost
server       sends requests to one server, and reads its answers
weights      publishes versions of the weights to the servers
trial        refuses servers with another base or log-probabilities that differ
started      a server that the run starts itself
keeper       the process that keeps it, and ends it with the run
together     the folder of several processes that learn with the same servers
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from turnrl import Engine, hookimpl

if TYPE_CHECKING:
    from turnrl_vllm.api import Answer as Answer
    from turnrl_vllm.api import Fields as Fields
    from turnrl_vllm.api import Served as Served
    from turnrl_vllm.api import ServerAPI as ServerAPI
    from turnrl_vllm.engine import VLLM as VLLM
    from turnrl_vllm.served import ServerEngine as ServerEngine
    from turnrl_vllm.server import SHORT_S as SHORT_S
    from turnrl_vllm.server import Refused as Refused
    from turnrl_vllm.server import Server as Server

_PLACES = {
    "VLLM": "engine",
    "ServerEngine": "served",
    "Answer": "api",
    "Fields": "api",
    "Served": "api",
    "ServerAPI": "api",
    "SHORT_S": "server",
    "Refused": "server",
    "Server": "server",
}
"""Public names, and the files that define them."""


@hookimpl
def turnrl_engines() -> Iterable[type[Engine]]:
    """The engine of this package."""
    from turnrl_vllm.engine import VLLM

    return [VLLM]


def __getattr__(name: str) -> object:
    if name in _PLACES:
        return getattr(import_module(f"turnrl_vllm.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
