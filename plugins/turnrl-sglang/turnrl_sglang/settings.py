"""The settings of `SGLang`, which samples with SGLang servers that run already. Nothing here loads
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from turnrl import RecipeError
from turnrl_servers.settings import ServerSettings

if TYPE_CHECKING:
    from turnrl_servers import ServerEngine


@final
@dataclass(frozen=True)
class SGLang(ServerSettings):
    """Samples with SGLang servers, which you start.

    `ServerSettings` explains the settings that it shares with other engines.

    Args:
        keeps: Versions of an adapter that the servers have at a time. Set `--max-loaded-loras` and
            `--max-loras-per-batch` of a server to one more.
    Raises:
        RecipeError: If no `url` is given, or an option makes no sense.
    """

    api_key_env: str | None = "SGLANG_API_KEY"

    def __post_init__(self) -> None:
        if not self.url:
            raise RecipeError(
                "model.engine.url is missing: SGLang samples with servers that run already. Start "
                "one, and set url to its address, such as http://localhost:30000."
            )
        super().__post_init__()

    def build(self) -> ServerEngine:
        """See `EngineSettings.build`."""
        from turnrl_servers import GivenServers, ServerEngine  # these import torch
        from turnrl_sglang.server import SGLangServer

        supply = GivenServers(SGLangServer, self)
        return ServerEngine(self, SGLangServer, supply)
