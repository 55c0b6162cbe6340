"""What engines that sample with servers have in common. `VLLM` and `SGLang` are made of it.

engine    ServerEngine, the engine of any kind of server, and its sessions
api       ServerAPI, how servers of one kind are asked
pool      several servers as one: assigns sessions, and moves them when a server is lost
server    sends requests to one server, and reads its answers
weights   publishes versions of the weights to the servers
trial     refuses servers with another base or log-probabilities that differ
together  the folder of several processes that learn with the same servers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnrl_servers.api import RELOAD_S as RELOAD_S
    from turnrl_servers.api import Answer as Answer
    from turnrl_servers.api import Fields as Fields
    from turnrl_servers.api import Sampled as Sampled
    from turnrl_servers.api import Served as Served
    from turnrl_servers.api import ServerAPI as ServerAPI
    from turnrl_servers.engine import ServerEngine as ServerEngine
    from turnrl_servers.pool import Pool as Pool
    from turnrl_servers.server import SHORT_S as SHORT_S
    from turnrl_servers.server import Refused as Refused
    from turnrl_servers.server import Server as Server
    from turnrl_servers.weights import has_adapter as has_adapter
    from turnrl_servers.weights import write as write

_FILES = {
    "RELOAD_S": "api",
    "Answer": "api",
    "Fields": "api",
    "Sampled": "api",
    "Served": "api",
    "ServerAPI": "api",
    "ServerEngine": "engine",
    "Pool": "pool",
    "SHORT_S": "server",
    "Refused": "server",
    "Server": "server",
    "has_adapter": "weights",
    "write": "weights",
}
"""Public names, and the files that define them: a command that needs none imports none."""


def __getattr__(name: str) -> object:
    if name in _FILES:
        return getattr(import_module(f"turnrl_servers.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
