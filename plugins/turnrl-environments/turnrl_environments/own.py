"""An attempt whose environment is an object of this process, and can be copied."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from turnrl import ToolError
from turnrl.agent.mistakes import find_mistake
from turnrl.plugin.errors import TrajectoryLost, summarize_error
from turnrl.types import ForkableToolSession
from turnrl_environments.world import Episode, W, World

T = TypeVar("T")


def close(environment: object) -> object:
    """Close an environment, if it has a `close`: many hold nothing that needs closing."""
    leave = getattr(environment, "close", None)
    return leave() if callable(leave) else None


class OwnEpisode(Episode[W], ForkableToolSession):
    """An episode whose environment is an object of this process.

    Attributes:
        environment: The object; None until it is made.
    """

    environment: Any = None

    def leave(self) -> object:
        """Close the environment, if it can be closed."""
        return close(self.environment)

    async def take(self, verb: str, function: Callable[[], T | Awaitable[T]], code: object) -> T:
        """Run code as `do`, for a call of the policy.

        Args:
            verb: The operation, for messages.
            function: The code.
            code: The class of the environment.
        Raises:
            PolicyMistake: If the arguments provoke an exception; else as `do`.
        """
        try:
            return await self.do(verb, function)
        except TrajectoryLost as lost:
            cause = lost.__cause__ or lost
            mistake = find_mistake(cause, code)
            if mistake is None:
                raise
            raise mistake from cause

    async def fork(self) -> Self:
        """A new episode with a copy of the environment, in the same state.

        Raises:
            TrajectoryLost: If copying the environment takes too long.
            ToolError: If it cannot be copied.
        """
        branch = copy.copy(self)
        branch.environment, branch._work = None, None

        def copied() -> None:
            branch.environment = _copy_environment(self.world, self.environment)

        try:
            await self.do("copy", copied)
        except BaseException:
            self.lost, branch._work = True, self._work
            await branch._leave_quietly()
            raise
        return branch


def _copy_environment(world: World, environment: T) -> T:
    """A copy of an environment, for a branch of its attempt.

    Raises:
        ToolError: If it cannot be copied.
    """
    try:
        return copy.deepcopy(environment)
    except Exception as error:
        raise ToolError(
            f"{world} cannot be copied for a branch ({summarize_error(error)}). Give its class a "
            "__deepcopy__, or take an estimator without probes."
        ) from error
