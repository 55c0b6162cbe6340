"""Capacity: the number of attempts that a sampler and tools with a capacity can serve at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnrl.plugin.errors import RecipeError
from turnrl.types import Sampler, Toolset


class Shares(NamedTuple):
    """How many parties share the places.

    Args:
        collections: Number of collections that may be under way at a time.
        processes: Number of processes that share the places of tools.
    """

    collections: int = 1
    processes: int = 1


ALONE = Shares()
"""One collection in one process."""


@dataclass(frozen=True)
class Capacity:
    """Counts the attempts that fit, each with the branches of its probes.

    Args:
        toolsets: The tools.
        max_turns: The most turns of an attempt.
    """

    toolsets: Sequence[Toolset]
    max_turns: int

    def max_in_progress(self, sampler: Sampler, probes: int, shares: Shares = ALONE) -> int | None:
        """Number of attempts that may be under way at a time; None for any number.

        Args:
            sampler: The sampler; its capacity may grow later.
            probes: Continuations from the beginning of each turn.
            shares: The collections and processes that share the places.
        Raises:
            RecipeError: If a tool has no place for a single attempt.
        """
        limits = [self.tool_capacity(probes, shares)[0]]
        if sampler.capacity is not None:  # a sampler can exceed it, so at least one attempt fits
            own = sampler.capacity // shares.collections
            limits.append(max(own // self._sessions(probes), 1))
        return min((limit for limit in limits if limit is not None), default=None)

    def tool_capacity(
        self, probes: int, shares: Shares = ALONE
    ) -> tuple[int | None, Toolset | None]:
        """Number of attempts that the tools of a process can serve at a time, and the tool that
        serves the fewest; both None if no tool has a limit. See `max_in_progress` for
        the arguments.

        Raises:
            RecipeError: If a tool has no place for a single attempt.
        """
        fewest: int | None = None
        tightest: Toolset | None = None
        collections, processes = shares
        needed = processes * collections * self._sessions(probes)
        for toolset in self.toolsets:
            if toolset.capacity is None:
                continue
            if toolset.capacity < needed:
                raise RecipeError(
                    f"{toolset} has capacity = {toolset.capacity}, and the least that this run "
                    f"needs at a time is {needed} ({processes} x {collections} x "
                    f"{self._sessions(probes)}): processes (trainer.devices), times collections "
                    "(1 + model.max_staleness), times sessions of an attempt (1 + the estimator's "
                    "probes in each turn). Raise the capacity, or lower one of these."
                )
            places = toolset.capacity // needed
            if fewest is None or places < fewest:
                fewest, tightest = places, toolset
        return fewest, tightest

    def _sessions(self, probes: int) -> int:
        """The most sessions of an attempt with its probes: it has taken all its turns, and every
        branch is still alive."""
        return 1 + probes * self.max_turns
