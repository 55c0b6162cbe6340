"""`Server`: one server as a run knows it, and how servers of its kind are asked."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from turnrl import Sampling
from turnrl.engines import Completion
from turnrl.plugin.errors import EngineError
from turnrl.plugin.patience import Unavailable
from turnrl_servers.connection import Connection, RequestRefused

Fields = dict[str, object]
"""Fields of a request's JSON."""
Answer = Any
"""A server's answer, parsed from JSON."""
RELOAD_S = 600.0
"""Time limit of reloading all weights, in seconds."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server serves.

    Args:
        version: The version of its software.
        windows: For each base by name, its context length in tokens; None if the server gives none.
    """

    version: str
    windows: dict[str, int | None]


class ServerSample(NamedTuple):
    """Tokens that a server sampled.

    Args:
        tokens: The tokens' ids.
        logprobs: Their log-probabilities; NaN where the server gave none.
        why: `stop`, `length`, or the server's word for another end.
        at_end_token: True if an end token of the model's own ended them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    why: str
    at_end_token: bool = False


class Server(ABC):
    """One server. A class for each kind of server has the requests of its HTTP API, which raise
    `Unavailable` if it does not answer, and `RequestRefused` if it refuses.

    Args:
        url: Its address, without `/v1`.
        key: Sent with every request, and struck out of every message; empty for none.
        timeout_s: Seconds that one turn may take.
    Attributes:
        software: Its name, for messages.
        tried: Its versions that turnrl was tried with.
        turn_path: Path of a request for a turn.
        adapters_path: What the paths of requests to load and drop adapters begin with.
        length_option: The option that sets its context length.
        spare_tokens: Tokens of its context that it cannot give to a session.
        logprobs_hint: The option with which its log-probabilities heed the temperature.
        weights_hint: How to start it so that it takes weights while it runs.
        refusals: See `Connection`.
    """

    software: str
    tried: str
    turn_path: str
    adapters_path = ""
    length_option: str
    spare_tokens = 0
    logprobs_hint: str
    weights_hint: str
    refusals: re.Pattern[str] | None = None

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.connection = Connection(url, key, self.refusals)
        self._timeout_s = timeout_s
        self.base = ""
        """The name under which it serves the base."""
        self.salt = ""
        """Cache salt for its weights, if all weights are trained."""
        self.sessions = 0
        """Open sessions that it samples."""
        self.lost: Unavailable | None = None
        """Why it did not answer, until it has answered and been given the weights again."""

    def __str__(self) -> str:
        return self.connection.url

    @property
    def name(self) -> str:
        """The server, for messages."""
        return f"{self.software} at {self}"

    @abstractmethod
    async def describe(self) -> ServerInfo:
        """Ask it for its version and its bases. LookupError and TypeError mean that it is no server
        of this kind."""

    # ----------------------------------------------------------------------- turns

    @abstractmethod
    def turn_request(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """A request for a turn after a history, without its weights."""

    async def answer(self, request: Fields) -> Answer:
        """The answer to a `turn_request` or a `trial_request`, within the time of a turn."""
        return await self.connection.ask("POST", self.turn_path, request, self._timeout_s)

    def completion(self, answer: Answer, sampling: Sampling, version: int) -> Completion:
        """The turn in an answer to `turn_request`.

        Args:
            answer: The answer.
            sampling: As in the request.
            version: The version of the weights that sampled it.
        Raises:
            Unavailable: If it aborted the turn.
            EngineError: If the answer has no tokens and log-probabilities.
        """
        (turn,) = self._sampled(answer)
        reason: Literal["end", "stop", "length"] = "length"
        if turn.at_end_token or turn.tokens[-1] in sampling.end_ids:
            reason = "end"
        elif turn.why == "stop":
            reason = "stop"
        elif len(turn.tokens) < sampling.max_tokens:
            short = f"{len(turn.tokens)} of {sampling.max_tokens} tokens"
            raise Unavailable(f"it returned only {short}")
        return Completion(turn.tokens, turn.logprobs, reason, version)

    @abstractmethod
    def trial_request(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """A request for one token after each of several histories."""

    def trial_tokens(self, answer: Answer) -> list[tuple[int, float]]:
        """The token and its log-probability after each history, in an answer to `trial_request`.

        Raises:
            Unavailable: If it aborted the request.
            EngineError: If the answer has no tokens and log-probabilities.
        """
        return [(turn.tokens[0], turn.logprobs[0]) for turn in self._sampled(answer)]

    def _sampled(self, answer: Answer) -> Sequence[ServerSample]:
        try:
            sampled = self.parse_sampled(answer)
        except (LookupError, TypeError, ValueError):
            sampled = []
        for turn in sampled:
            if turn.why not in ("stop", "length"):
                raise Unavailable(f"it ended a turn with finish_reason {turn.why!r}")
        if not all(math.isfinite(logprob) for turn in sampled for logprob in turn.logprobs):
            raise EngineError(
                f"{self.name} gave a log-probability that is not finite. Its weights or its "
                "kernels are broken: look into its log."
            )
        if sampled and all(t.tokens and len(t.tokens) == len(t.logprobs) for t in sampled):
            return sampled
        raise EngineError(
            f"{self.name} answered without token ids and their log-probabilities. It may be too "
            f"old: turnrl was tried with {self.tried}."
        )

    @abstractmethod
    def parse_sampled(self, answer: Answer) -> Sequence[ServerSample]:
        """What was sampled after each history of a request. LookupError, TypeError and ValueError
        mean that the answer has another form."""

    # --------------------------------------------------------------------- weights

    @abstractmethod
    def with_adapter(self, name: str) -> Fields:
        """Fields of a request that is sampled with an adapter."""

    @abstractmethod
    def with_base(self, salt: str) -> Fields:
        """Fields of a request that is sampled with the base. The salt keeps its cached prefixes
        apart from those of requests with other salts."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Have it load an adapter; one that it has already is no error."""
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self.connection.ask("POST", f"{self.adapters_path}/load_lora_adapter", body)
        except RequestRefused as error:
            if not re.search("already (been )?loaded", error.problem):
                raise

    async def drop_adapter(self, name: str) -> None:
        """Have it drop an adapter. Some servers first end the turns that they sample with it."""
        path = f"{self.adapters_path}/unload_lora_adapter"
        await self.connection.ask("POST", path, {"lora_name": name}, within_s=5)

    @abstractmethod
    def lacks_adapter(self, error: RequestRefused) -> bool:
        """True if it refused a turn because it does not have the adapter."""

    @abstractmethod
    async def reload(self, folder: Path) -> None:
        """Have it load all weights from a folder in place of its own."""

    async def sleep(self) -> None:
        """Have it free its GPU's memory, and keep the base in the machine's memory. Only servers
        that a run starts sleep."""
        raise NotImplementedError(f"{self.software} does not sleep")

    async def wake(self) -> None:
        """Have it take its memory again."""
        raise NotImplementedError(f"{self.software} does not sleep")
