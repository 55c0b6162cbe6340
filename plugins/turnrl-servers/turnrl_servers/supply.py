"""`ServerSource`: where an engine's servers come from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import final

from turnrl.engines import SampledPolicy, ServerMemory
from turnrl_servers.server import Server
from turnrl_servers.settings import ServerSettings


class ServerSource(ABC):
    """The servers of an engine, which run already or are started for it.

    Attributes:
        starts_servers: True if the run starts them.
        base: The name under which the servers serve the base; None if they serve one model.
    """

    starts_servers = False
    base: str | None

    @property
    def sleeps(self) -> bool:
        """True if the servers give back a GPU's memory while the policy learns."""
        return False

    def running_servers(self, policy: SampledPolicy) -> list[Server]:
        """The servers that run before the policy's weights load.

        Raises:
            RecipeError: If a server cannot be started.
        """
        return []

    def server_memory(self, total: int) -> ServerMemory | None:
        """Memory of the learner's GPU that servers of the run take; see `Engine.server_memory`."""
        return None

    @abstractmethod
    def start(
        self, policy: SampledPolicy, max_tokens: int, home: Path, run: Path | None
    ) -> list[Server]:
        """Start the servers, or return those that run.

        Args:
            policy: The policy, whose weights are loaded.
            max_tokens: The most tokens of a session.
            home: The folder for weights.
            run: The run's folder, if it has one.
        Raises:
            EngineError: If a server does not start.
        """

    def check_alive(self) -> None:  # noqa: B027 - servers that are given may always come back
        """Called when no server answers.

        Raises:
            EngineError: If none ever will.
        """

    def close(self) -> None:  # noqa: B027 - servers that are given stay
        """End the servers that the run has started."""


@final
@dataclass(frozen=True)
class GivenServers(ServerSource):
    """Servers that run already.

    Args:
        kind: Their kind.
        settings: Their addresses, their key, and how long to wait for them.
        base: See `ServerSource`.
    """

    kind: type[Server]
    settings: ServerSettings
    base: str | None = None

    def running_servers(self, policy: SampledPolicy) -> list[Server]:
        """See `ServerSource.running_servers`."""
        settings = self.settings
        key = os.environ.get(settings.api_key_env or "", "").strip()
        return [self.kind(url, key, settings.timeout_s) for url in settings.urls]

    def start(
        self, policy: SampledPolicy, max_tokens: int, home: Path, run: Path | None
    ) -> list[Server]:
        """See `ServerSource.start`."""
        return self.running_servers(policy)
