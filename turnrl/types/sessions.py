"""What a stateful tool keeps for one trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence

ToolFigures = Mapping[str, float | Sequence[float]]
"""Numbers by name; or for a name a number per turn."""


class ToolSession(ABC):  # noqa: B024 - all of it is optional
    """State of one trajectory: an interpreter, a browser, an episode of an environment. Extend it,
    or extend `ForkableToolSession` if the state can be copied.

    Attributes:
        prompt: Text that the policy reads below the question, such as the first observation of an
            environment. It is neutralised like a tool's result.
    """

    prompt: str = ""

    def close(self) -> ToolFigures | Awaitable[ToolFigures | None] | None:  # noqa: B027
        """Give back what the session holds. Called once, however the trajectory ends; where a run
        is being stopped, perhaps while `run` still works on it in its thread. May be a coroutine.

        Returns:
            Figures that the trajectory keeps in `Trajectory.figures`, for rewards and the record:
            finite numbers, or a sequence with a number per turn. None for none.
        """


class ForkableToolSession(ToolSession, ABC):
    """State that can be copied, so that a trajectory may branch."""

    @abstractmethod
    def fork(self) -> ToolSession | Awaitable[ToolSession]:
        """A copy that goes its own way from here. May be a coroutine."""
