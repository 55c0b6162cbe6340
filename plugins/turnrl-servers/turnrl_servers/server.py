"""`Server`: one server as a run knows it, and how servers of its kind are asked."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from turnrl import Completion, EngineError, Sampling
from turnrl.servers import Unavailable
from turnrl_servers.connection import SHORT_S, Connection, Refused

Fields = dict[str, object]
"""Fields of a request's JSON."""
Answer = Any
"""A server's answer, parsed from JSON."""
RELOAD_S = 600.0
"""Time limit of reloading all weights, in seconds."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
"""Seconds for which a lost server is left alone: after its first failure, and at most."""
_NO_FOLDER = re.compile("no adapter found|repo id|no such file", re.IGNORECASE)


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Args:
        version: The version of its software.
        windows: For each base by name, its context length in tokens; None if the server gives none.
        foreign_weights: The name of another run's weights that it has; empty if none are known.
    """

    version: str
    windows: dict[str, int | None]
    foreign_weights: str = ""


class Sampled(NamedTuple):
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
    """One server. A class for each kind of server has the requests of its HTTP API.

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
        logprobs_hint: How to start it so that its log-probabilities heed the temperature.
        rank_hint: What to do if an adapter's rank is too large for it.
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
    rank_hint: str
    weights_hint: str
    refusals: re.Pattern[str] | None = None

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.connection = Connection(url, key, timeout_s, self.refusals)
        self.base = ""
        """The name under which it serves the base."""
        self.has: set[str] = set()
        """Names of the adapters that it is known to have."""
        self.salt: str | None = None
        """Cache salt for the newest weights, if all weights are trained; None until the server is
        known to have them."""
        self.is_reloading = False
        """True while it loads all weights, when some servers answer no health check."""
        self.was_lost = False
        self._mending, self._losses = asyncio.Lock(), 0
        self._failures, self._rests_until = 0, 0.0

    def __str__(self) -> str:
        return self.connection.url

    @property
    def name(self) -> str:
        """The server, for messages."""
        return f"{self.software} at {self}"

    @property
    def rests(self) -> bool:
        """True while it is left alone because it was lost."""
        return time.monotonic() < self._rests_until

    def note_loss(self) -> None:
        """Note that it did not answer: leave it alone for a moment, and assume that its weights are
        gone, because it may have been restarted."""
        self._losses += 1
        self._failures += 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 8))
        self._rests_until = time.monotonic() + pause_s
        self.was_lost = True
        self.forget()

    @contextlib.asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """Inside this block nobody else gives it weights.

        Raises:
            Unavailable: If it was lost while somebody else held it. Otherwise all that wait for it
                would time out one after another.
        """
        before = self._losses
        async with self._mending:
            if self._losses != before:
                raise Unavailable("it was lost a moment ago")
            yield

    def forget(self) -> None:
        """Assume that its weights are gone. Before its next turn it gets them again, and is
        compared with the learner."""
        self.has, self.salt = set(), None

    def note_answer(self) -> bool:
        """Note that it answered. Returns True if it was lost before."""
        before, self.was_lost, self._failures = self.was_lost, False, 0
        return before

    # ------------------------------------------------------------- before weights load

    @abstractmethod
    def describe(self) -> Served:
        """Ask it for its version and its bases.

        Raises:
            Refused, LookupError, TypeError: If it is no server of this kind.
            Unavailable: If it does not answer.
        """

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The tokens that it reads in a text, without special tokens at its ends.

        Raises:
            Refused, LookupError, TypeError: If it does not tokenize.
            Unavailable: If it does not answer.
        """

    @abstractmethod
    def offer_adapter(self, name: str, folder: str, rank: int) -> Refused | None:
        """Offer it an adapter without weights. Returns its refusal if it could not take one with
        weights either.

        Raises:
            Unavailable: If it does not answer.
        """

    # ----------------------------------------------------------------------- turns

    @abstractmethod
    def turn_request(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """A request for a turn after a history, without its weights.

        Raises:
            NotImplementedError: If it cannot sample in this way.
        """

    async def answer(self, request: Fields) -> Answer:
        """The answer to a `turn_request` or a `trial_request`, within the time of a turn.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """
        return await self.connection.ask_async(self.turn_path, request)

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

    def _sampled(self, answer: Answer) -> Sequence[Sampled]:
        try:
            sampled = self.sampled(answer)
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
    def sampled(self, answer: Answer) -> Sequence[Sampled]:
        """What was sampled after each history of a request.

        Raises:
            LookupError, TypeError, ValueError: If the answer is of another form.
        """

    # --------------------------------------------------------------------- weights

    @abstractmethod
    def with_adapter(self, name: str) -> Fields:
        """Fields of a request that is sampled with an adapter."""

    @abstractmethod
    def with_base(self, salt: str | None) -> Fields:
        """Fields of a request that is sampled with the base.

        Args:
            salt: Keeps this request's cached prefixes apart from those with other salts.
        """

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Have it load an adapter; one that it has already is no error.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        path = f"{self.adapters_path}/load_lora_adapter"
        try:
            await self.connection.ask_async(path, body, SHORT_S)
        except Refused as error:
            if not re.search("already (been )?loaded", error.problem):
                raise

    def drop_adapter(self, name: str) -> None:
        """Have it drop an adapter. Blocks; some servers first end the turns that they still sample
        with it.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """
        path = f"{self.adapters_path}/unload_lora_adapter"
        self.connection.ask("POST", path, {"lora_name": name}, within_s=5)

    @abstractmethod
    def lacks_adapter(self, error: Refused) -> bool:
        """True if it refused a turn because it does not have the adapter."""

    @abstractmethod
    async def reload(self, folder: Path) -> None:
        """Have it load all weights from a folder in place of its own.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """

    def weights_of(self, answer: Answer) -> str | None:
        """The name of the folder whose weights sampled an answer, if the whole model was reloaded;
        None if it does not name it."""
        return None

    def restore(self) -> None:  # noqa: B027 - a server may have no way back
        """Have it load the weights that it was started with. Blocks.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """

    async def sleep(self) -> None:
        """Have it free its GPU's memory, and keep the base in the machine's memory. Only servers
        that a run starts sleep.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """
        raise NotImplementedError(f"{self.software} does not sleep")

    async def wake(self) -> None:
        """Have it take its memory again; it raises what `sleep` does."""
        raise NotImplementedError(f"{self.software} does not sleep")

    def next_step(self, error: Refused, folder: Path) -> str:
        """What the user can do if it does not take weights from a folder."""
        if "rank" in error.problem.lower():
            return self.rank_hint
        if self.sees_no_folder(error):
            return (
                f"It does not see the folder {str(folder)!r}. Set model.engine.folder to one that "
                "both see and may read."
            )
        if error.status in (404, 405) or "not enabled" in error.problem:
            return self.weights_hint
        return "Look into its log."

    def sees_no_folder(self, error: Refused) -> bool:
        """True if it does not see a folder: it takes the path for a name on the hub."""
        return bool(_NO_FOLDER.search(error.problem))
