"""The settings that engines behind servers have in common. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass

from turnrl import RecipeError
from turnrl.engines import EngineSettings
from turnrl.plugin.errors import check_address, check_at_least
from turnrl.plugin.hooks import load_classes


@dataclass(frozen=True)
class ServerSettings(EngineSettings):
    """Settings of an engine that samples with servers. A subclass is for one kind of server.

    Args:
        url: Address of a server, such as http://localhost:8000, or several addresses. They must
            serve the base that training begins from.
        api_key_env: Environment variable with the servers' key; no key is sent if this is null or
            the variable is not set.
        folder: Where weights are written for the servers, which must be able to read them there.
            Null is a folder for temporary files of this machine, or the run's folder if several
            processes learn together.
        keeps: Versions of an adapter that the servers have at a time.
        patience_s: Seconds to wait for a server that is away, before the run stops. Trajectories
            that it was sampling begin again.
        timeout_s: Seconds that one turn may take.
        max_logprob_gap: Largest mean difference between the servers' log-probabilities and the
            learner's in a trial, in nats. Each server is compared with each version before it
            samples turns with it.
    Raises:
        RecipeError: If an option makes no sense.
    """

    url: str | list[str] | None = None
    api_key_env: str | None = None
    folder: str | None = None
    keeps: int = 2
    patience_s: float = 300.0
    timeout_s: float = 600.0
    max_logprob_gap: float = 0.15

    def __post_init__(self) -> None:
        advice = "Put a key into the environment variable that api_key_env names."
        for url in self.urls:
            check_address("model.engine.url", url, "http://localhost:8000", advice)
            if url.endswith("/v1"):
                raise RecipeError(f"model.engine.url is {url!r}; write it without /v1.")
        if self.url is not None and len({*self.urls}) != max(1, len(self.urls)):
            raise RecipeError(
                f"model.engine.url is {self.url!r}; give an address, or several different ones"
            )
        check_at_least(1, "model.engine.", self, "keeps", whole=True, optional=False)
        least = ("patience_s", "timeout_s", "max_logprob_gap")
        check_at_least(0, "model.engine.", self, *least, optional=False)

    @property
    def urls(self) -> list[str]:
        """The addresses of given servers."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    def for_rehearsal(self) -> EngineSettings:
        """See `EngineSettings.for_rehearsal`. Given servers have the run's base, so the default
        engine samples in their place."""
        default: EngineSettings = load_classes("turnrl_engines")["Slots"]()
        return default.for_rehearsal()
