"""What engines that sample with servers have in common. `VLLM` and `SGLang` are made of it.

settings    ServerSettings, what engines behind servers have in common: no torch
engine      ServerEngine, the engine of any kind of server, and its sessions
supply      where its servers come from
server      Server, one server as a run knows it, and how servers of its kind are asked
connection  sends requests to one server, and reads its answers
pool        several servers as one: assigns sessions, and waits for servers that are away
weights     publishes versions of the weights to the servers
files       the files of one version, which the servers read
trial       refuses servers with another base or log-probabilities that differ
folders     where the weights are written, by one process or by several that learn together
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_servers.connection import RequestRefused as RequestRefused
    from turnrl_servers.engine import ServerEngine as ServerEngine
    from turnrl_servers.files import has_adapter as has_adapter
    from turnrl_servers.files import write as write
    from turnrl_servers.pool import Pool as Pool
    from turnrl_servers.server import RELOAD_S as RELOAD_S
    from turnrl_servers.server import Answer as Answer
    from turnrl_servers.server import Fields as Fields
    from turnrl_servers.server import Server as Server
    from turnrl_servers.server import ServerInfo as ServerInfo
    from turnrl_servers.server import ServerSample as ServerSample
    from turnrl_servers.settings import ServerSettings as ServerSettings
    from turnrl_servers.supply import GivenServers as GivenServers
    from turnrl_servers.supply import ServerSource as ServerSource

__getattr__, __all__ = make_lazy(__name__, __file__)
