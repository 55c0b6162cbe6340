"""The settings of `VLLM`, which samples with vLLM, in a process and an environment of its own.
Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from turnrl import RecipeError
from turnrl.engines import EngineSettings
from turnrl.plugin.errors import check_at_least
from turnrl_servers.settings import ServerSettings

if TYPE_CHECKING:
    from turnrl_servers import ServerEngine, ServerSource


@final
@dataclass(frozen=True)
class VLLM(ServerSettings):
    """Samples with vLLM servers, given or started by the run.

    Give either `url` or `python`. `ServerSettings` explains the settings that it shares with other
    engines.

    Args:
        python: Interpreter of an environment with vLLM. The run starts a server with it on this
            machine, and ends it.
        arguments: More arguments of `vllm serve` for that server, such as
            `[--gpu-memory-utilization, "0.4"]`.
        base: The name under which the servers serve the base; null if they serve one model.
        api_key_env: Environment variable with the servers' key; no key is sent if this is null or
            the variable is not set. A server that the run starts gets a key of its own.
        keeps: Versions of an adapter that the servers have at a time. Set `--max-loras` of a given
            server to one more.
        start_timeout_s: Seconds that a server may take to start.
        sleeps: Whether a server that the run starts gives back its GPU's memory while the policy
            learns, and keeps its base in the machine's memory. Null: if the policy is on a GPU. A
            run that samples ahead (`max_staleness`) lets it stay awake.
    Raises:
        RecipeError: If neither or both of `url` and `python` are given, or an option makes no
            sense.
    """

    python: str | None = None
    arguments: list[str] = field(default_factory=list)
    base: str | None = None
    api_key_env: str | None = "VLLM_API_KEY"
    start_timeout_s: float = 600.0
    sleeps: bool | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            raise RecipeError(
                f"model.engine.url is {self.url!r}, and model.engine.python is {self.python!r}. "
                "Give the url of a server that runs, or the python of an environment with vLLM, "
                "and the run starts one."
            )
        needless = ("base",) if self.python else ("arguments", "sleeps")
        for name in needless:
            if value := getattr(self, name):
                other = "url" if self.python else "python"
                raise RecipeError(
                    f"model.engine.{name} is {value!r}, which goes with model.engine.{other}. "
                    "Leave it out."
                )
        check_at_least(0, "model.engine.", self, "start_timeout_s", optional=False)
        super().__post_init__()

    def build(self) -> ServerEngine:
        """See `EngineSettings.build`."""
        from turnrl_servers import GivenServers, ServerEngine  # these import torch
        from turnrl_vllm.server import VLLMServer
        from turnrl_vllm.supply import StartedServer

        supply: ServerSource
        if self.python is None:
            supply = GivenServers(VLLMServer, self, self.base)
        else:
            supply = StartedServer(self, self.python)
        return ServerEngine(self, VLLMServer, supply)

    def for_rehearsal(self) -> EngineSettings:
        """See `EngineSettings.for_rehearsal`. With `python`, a server is started with the
        rehearsal's small base."""
        if self.python is None:
            return super().for_rehearsal()
        from turnrl_vllm.supply import check_python

        check_python(self.python)
        return self
