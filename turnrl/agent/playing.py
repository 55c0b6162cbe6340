"""A player that drives an attempt: other people's code, which may raise, hang or never end."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from turnrl.agent.attempt import REFUSALS, Attempt
from turnrl.agent.running import first_error
from turnrl.errors import PluginError, blaming, kind_of
from turnrl.types import AttemptOver, Player

_LEAVE_S = 5.0
"""How long a player that is cancelled may take to end."""


async def let_play(player: Player, attempt: Attempt) -> None:
    """Have a player play an attempt to its end.

    Raises:
        PluginError: If the player raises, or breaks its contract.
        TurnRLError: What the world or the player did wrong, even if the player caught it.
    """
    what = f"{type(player).__name__}.play on question {attempt.asked.id!r}"
    answer: str | None = None
    try:
        with blaming(PluginError, what, "Fix the player."):
            play = player.play(attempt)
            if not inspect.iscoroutine(play):
                fix = "Write `async def play(self, attempt):`."
                raise PluginError(f"{what} gave no coroutine. {fix}")
            answer = await _played(play, attempt, what)
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
        raise PluginError(f"{what} returned {kind_of(answer)}. Return a text, or None.")
    attempt.end("player" if answer is None else "answer", answer)


async def _played(
    play: Coroutine[object, object, str | None], attempt: Attempt, what: str
) -> str | None:
    """What `play` returns, when all that it began has ended. It runs in a task of its own, so that
    the attempt may leave a player that does not stop."""
    attempt.stuck = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(play)
    either: list[asyncio.Future[Any]] = [task, attempt.stuck]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await attempt.settled()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):  # one that goes on even so is left
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=_LEAVE_S)
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
    except BaseExceptionGroup as group:  # of tasks that it began
        others = group.split(AttemptOver)[1]
        if others is None:
            return None
        raise first_error(others) from None


def _never_delete(task: asyncio.Future[Any]) -> None:
    """Keep the task of a player that does not stop, also while Python shuts down. Python ends a
    coroutine before it deletes it, and this one catches that: without an event loop it would ask
    on for ever, and the program would never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
