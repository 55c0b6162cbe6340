"""A player that drives an attempt. It is other people's code, and may raise, hang or never end."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from turnrl.agent.agent_loop import AgentLoop
from turnrl.agent.attempt import REFUSALS, Attempt
from turnrl.agent.chat import ChatFormat
from turnrl.agent.running import first_error
from turnrl.plugin.errors import PluginError, blaming, describe_value
from turnrl.types import AttemptOver, Player, ToolSpec, Trajectory

_logger = logging.getLogger(__name__)
_LEAVE_S = 5.0
"""Time that a cancelled player has to end."""


@final
@dataclass(frozen=True)
class PlayerLoop(AgentLoop):
    """A player, with the tools that its attempts may call.

    Args:
        plugin: The player.
        specs: The tools of the recipe.
    """

    plugin: Player
    specs: tuple[ToolSpec, ...]

    kind: ClassVar[Literal["player"]] = "player"
    branches: ClassVar[bool] = False

    def check(self, chat: ChatFormat) -> None:
        """See `AgentLoop.check`."""
        what = f"{self.name}.check on {str(self.specs)[:200]!r}"
        with blaming(PluginError, what, "Fix it, and try turnrl.testing.check_player on it."):
            self.plugin.check(self.specs)
        if misfit := self.find_misfit(
            chat.open_thought([{"role": "user", "content": "?"}]), "a prompt"
        ):
            _logger.warning(misfit)

    async def advance(self, attempt: Attempt) -> None:
        """See `AgentLoop.advance`. The attempt is played to its end."""
        await run_player(self.plugin, attempt)

    def text_before_turns(self, trajectory: Trajectory, chat: ChatFormat) -> Sequence[str]:
        """See `AgentLoop.text_before_turns`. A player sends messages of its own."""
        return chat.text_before_turns(trajectory)


async def run_player(player: Player, attempt: Attempt) -> None:
    """Have a player play an attempt to its end.

    Raises:
        PluginError: If the player raises, or breaks its contract.
        TurnRLError: A fault of the world or of the player, even if the player caught it.
    """
    what = f"{type(player).__name__}.play on question {attempt.asked.id!r}"
    answer: str | None = None
    try:
        with blaming(PluginError, what, "Fix the player."):
            play = player.play(attempt)
            if not inspect.iscoroutine(play):
                fix = "Write `async def play(self, attempt):`."
                raise PluginError(f"{what} gave no coroutine. {fix}")
            answer = await _run_play(play, attempt, what)
    except Exception:
        if attempt.fault is None:
            raise
    if attempt.fault is not None:
        raise attempt.fault
    if attempt.sampling:
        raise PluginError(f"{what} ended while a reply was sampled. Await the reply.")
    if not attempt.turns:
        raise PluginError(f"{what} asked for no reply. Await attempt.reply at least once.")
    if not isinstance(answer, str | None):
        raise PluginError(f"{what} returned {describe_value(answer)}. Return a text, or None.")
    attempt.end("player" if answer is None else "answer", answer)


async def _run_play(
    play: Coroutine[object, object, str | None], attempt: Attempt, what: str
) -> str | None:
    """Run `play` in a task of its own, and return its result once its calls have ended too."""
    task = asyncio.ensure_future(play)
    stuck = asyncio.ensure_future(attempt.stuck.wait())
    try:
        await asyncio.wait([task, stuck], return_when=asyncio.FIRST_COMPLETED)
        await attempt.wait_for_calls()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):  # a player that goes on even so is abandoned
            await asyncio.wait([task], timeout=0.1 if stuck.done() else _LEAVE_S)
        stuck.cancel()
        if not task.done():
            _never_delete(task)
    if not task.done():
        raise PluginError(
            f"{what} went on after {REFUSALS} refused actions: the attempt was over, and it "
            "caught the turnrl.AttemptOver that ends it. Write `except Exception:` in place of a "
            "bare `except:`."
        )
    if task.cancelled():
        raise PluginError(f"{what} was cancelled by a task of its own. Fix the player.")
    try:
        return task.result()
    except AttemptOver:
        return None
    except BaseExceptionGroup as group:  # from tasks that the player began
        others = group.split(AttemptOver)[1]
        if others is None:
            return None
        raise first_error(others) from None


def _never_delete(task: asyncio.Future[Any]) -> None:
    """Keep the task of a player that does not stop, even while Python shuts down. Python ends a
    coroutine before it deletes it, and this one catches even that: without an event loop it would
    keep asking for ever, and the program would never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
