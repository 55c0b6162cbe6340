"""Token engines: what turns token ids into more token ids.

An engine opens a session per trajectory. A session remembers everything appended and sampled so
far, so the history is never rendered or tokenised twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Sampling:
    """How to sample one turn.

    Args:
        max_tokens: The most tokens to sample; at least 1.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        seed: Random stream of this turn. The same seed and history give the same tokens, whatever
            else is in the batch.
        stop: Strings that end the turn when the sampled text contains one.
        end_ids: Token ids that end the turn.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What was sampled in one turn.

    Args:
        token_ids: Sampled ids, an end-of-turn token included.
        logprobs: Log-probability of each under the distribution it was drawn from.
        reason: An end token (`end`), a stop string (`stop`), or `max_tokens` (`length`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Literal["end", "stop", "length"]


class Session(Protocol):
    """One trajectory's history inside an engine."""

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append `new_ids` after everything so far, then sample."""

    def fork(self) -> Session:
        """A new session that shares everything so far: a group at its prompt,
        a branch at a turn."""

    def close(self) -> None:
        """Free what the session holds. Closing twice is harmless."""


class RolloutEngine(Protocol):
    """Opens sessions. Sessions of one engine may generate concurrently, from one event loop."""

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session whose history is the prompt; forks share the work of reading it."""

    async def drain(self) -> None:
        """Wait until nothing is being sampled; turns that were cancelled may still be under way."""
