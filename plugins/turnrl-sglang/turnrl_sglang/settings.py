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

    A server must be able to read the folder that this process writes the weights to.

    Args:
        url: Address of a server, such as http://localhost:30000, or several addresses. They must
            serve the base that training begins from.
        api_key_env: Environment variable with the servers' key; no key is sent if this is null or
            the variable is not set.
        folder: Where weights are written for the servers. Null is a folder for temporary files of
            this machine, or the run's folder if several processes learn together.
        keeps: Versions of an adapter that the servers have at a time. Set `--max-loaded-loras` and
            `--max-loras-per-batch` of a server to one more.
        patience_s: Seconds to wait for a server that is away, before the run stops. Trajectories
            that it was sampling begin again.
        timeout_s: Seconds that one turn may take.
        max_logprob_gap: Largest mean difference between the servers' log-probabilities and the
            learner's in a trial, in nats. Each server is compared with each version before it
            samples turns with it.
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
        from turnrl_servers import Running, ServerEngine  # these import torch
        from turnrl_sglang.server import SGLangServer

        supply = Running(SGLangServer, self)
        return ServerEngine(self, SGLangServer, supply)
