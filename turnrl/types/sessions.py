"""Descriptions of tools, and the state that a stateful tool keeps for one trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ToolFigures = Mapping[str, float | Sequence[float]]
"""By name a number, or a sequence with a number per turn."""


@dataclass(frozen=True)
class ToolSpec:
    """Description of a tool, as a segmenter or a chat template shows it to the policy.

    Args:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before they are run.
        examples: Arguments of calls that work, for `turnrl doctor` to try. The policy never sees
            them. Without examples, the doctor makes some from the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    examples: Sequence[Mapping[str, object]] = ()


class ToolSession(ABC):  # noqa: B024 - all of it is optional
    """State of one trajectory: an interpreter, a browser, an episode of an environment. Extend it,
    or extend `ForkableToolSession` if the state can be copied.

    Attributes:
        prompt: Text that the policy reads below the question, such as the first observation of an
            environment. It is neutralised like a tool's result.
        specs: Tools of this trajectory alone, beside those of its toolset, whose `run` gets their
            calls too.
    """

    prompt: str = ""
    specs: Sequence[ToolSpec] = ()

    def close(self) -> ToolFigures | Awaitable[ToolFigures | None] | None:  # noqa: B027
        """Release what the session holds. Called once, however the trajectory ends. While a run is
        being stopped, `run` may still be working on the session in its thread. May be a coroutine.

        Returns:
            Figures that the trajectory keeps in `Trajectory.figures`, for rewards and the record:
            finite numbers, or sequences with a number per turn. None for no figures.
        """


class ForkableToolSession(ToolSession, ABC):
    """State that can be copied, so that a trajectory may branch."""

    @abstractmethod
    def fork(self) -> ToolSession | Awaitable[ToolSession]:
        """A copy that goes its own way from here. May be a coroutine."""
