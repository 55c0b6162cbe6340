"""`ServerAPI`: how servers of one kind are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnrl import Completion, Sampling
from turnrl_vllm.server import Refused, Server

Fields = dict[str, object]
"""Fields of a request's JSON."""
Answer = Any
"""A server's answer, parsed from JSON."""


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Args:
        version: The version of its software.
        windows: For each base by name, its context length in tokens; None if the server gives none.
    """

    version: str
    windows: dict[str, int | None]


class ServerAPI(ABC):
    """The HTTP API of one kind of server.

    Attributes:
        name: The server's software, for messages.
        sampling: Path of a request for a turn.
        length_option: The option that sets its context length.
        logprobs_hint: How to start it so that its log-probabilities heed the temperature.
    """

    name: str
    sampling: str
    length_option: str
    logprobs_hint: str

    # ------------------------------------------------------------- before weights load

    @abstractmethod
    def describe(self, server: Server) -> Served:
        """Ask a server for its version and its bases.

        Raises:
            Refused, LookupError, TypeError: If it is no server of this kind.
            Unavailable: If it does not answer.
        """

    @abstractmethod
    def tokenize(self, server: Server, text: str) -> list[int]:
        """The tokens that a server reads in a text, without special tokens at its ends.

        Raises:
            Refused, LookupError, TypeError: If it does not tokenize.
            Unavailable: If it does not answer.
        """

    @abstractmethod
    def offer_adapter(self, server: Server, name: str, folder: str, rank: int) -> Refused | None:
        """Offer an adapter without weights. Returns the server's refusal if it could not take one
        with weights either.

        Raises:
            Unavailable: If it does not answer.
        """

    # ----------------------------------------------------------------------- turns

    @abstractmethod
    def turn(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """A request for a turn after a history, without its weights.

        Raises:
            NotImplementedError: If the server cannot sample in this way.
        """

    @abstractmethod
    def completion(self, answer: Answer, sampling: Sampling, version: int) -> Completion:
        """The turn in an answer to `turn`.

        Args:
            answer: The answer.
            sampling: As in the request.
            version: The version of the weights that sampled it.
        Raises:
            Unavailable: If the server aborted it.
            EngineError: If the answer has no tokens and log-probabilities.
        """

    @abstractmethod
    def next_token(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """A request for one token after each of several histories."""

    @abstractmethod
    def next_tokens(self, answer: Answer) -> list[tuple[int, float]]:
        """The token and its log-probability after each history, in an answer to `next_token`.

        Raises:
            EngineError: If the answer has none.
        """

    # --------------------------------------------------------------------- weights

    @abstractmethod
    def with_adapter(self, name: str) -> Fields:
        """Fields of a request that is sampled with an adapter."""

    @abstractmethod
    def with_base(self, base: str, salt: str | None) -> Fields:
        """Fields of a request that is sampled with the base.

        Args:
            base: The base's name.
            salt: Keeps this request's cached prefixes apart from those with other salts.
        """

    @abstractmethod
    async def load_adapter(self, server: Server, name: str, folder: Path) -> None:
        """Have a server load an adapter; one that it has already is no error.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """

    @abstractmethod
    def drop_adapter(self, server: Server, name: str) -> None:
        """Have a server drop an adapter. Blocks.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """

    @abstractmethod
    def lacks_adapter(self, error: Refused) -> bool:
        """True if a server refused a turn because it does not have the adapter."""

    @abstractmethod
    async def reload(self, server: Server, folder: Path) -> None:
        """Have a server load all weights from a folder in place of its own.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """

    @abstractmethod
    def next_step(self, error: Refused, folder: Path) -> str:
        """What the user can do about a server that does not take weights from a folder."""
