"""Turns, and random numbers of an attempt's own, for environments that are not thread-safe.

Some environments seed `random` and `numpy.random` at `reset` and draw from them. Attempts side by
side would then draw from each other's numbers, so the attempts of a group would not even begin in
the same state.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import functools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from turnrl import ToolError

T = TypeVar("T")

_HANGS = 2.0
"""A call that takes longer than this many times its limit hangs, and nobody waits for its turn to
end."""


@final
class Turn:
    """A call's place in the line of its process. Whoever joins the line leaves it: `run` does.

    Args:
        what: What is called, for messages.
        limit_s: The most seconds that the call may take.
    Attributes:
        come: Done once it is this call's turn.
        late: Whether nobody waits for the call any more.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s, self.late = what, limit_s, False
        self.come: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.since, self.thread = 0.0, 0

    async def taken(self) -> None:
        """Join the line, and wait for the turn.

        Raises:
            ToolError: If a call before it hangs.
        """
        line = _line()
        try:
            line.join(self)
            come = asyncio.wrap_future(self.come)
            while not come.done():
                await asyncio.wait([come], timeout=line.left_s(self))
        except BaseException:
            line.leave(self)
            raise

    def taken_here(self) -> None:
        """Like `taken`, while the calling thread waits."""
        line = _line()
        try:
            line.join(self)
            while not self.come.done():
                concurrent.futures.wait([self.come], timeout=line.left_s(self))
        except BaseException:
            line.leave(self)
            raise


@final
class _Line:
    """The calls that take turns, in the order in which they came; the first has its turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: collections.deque[Turn] = collections.deque()

    def join(self, turn: Turn) -> None:
        with self._lock:
            self._turns.append(turn)
            self._go_on()

    def leave(self, turn: Turn) -> None:
        with self._lock:
            if turn in self._turns:
                self._turns.remove(turn)
            self._go_on()

    def _go_on(self) -> None:
        if self._turns and not (first := self._turns[0]).come.done():
            first.since = time.monotonic()
            first.come.set_result(None)

    def is_mine(self) -> bool:
        """True in the thread of the call that has its turn."""
        with self._lock:
            return bool(self._turns) and self._turns[0].thread == threading.get_ident()

    def left_s(self, turn: Turn) -> float:
        """Seconds until the call that has its turn counts as hanging.

        Raises:
            ToolError: If it does now.
        """
        with self._lock:
            first = self._turns[0]
        took_s = time.monotonic() - first.since
        left_s = _HANGS * first.limit_s - took_s
        if first is turn or left_s > 0:
            return max(left_s, 0.01)
        raise ToolError(
            f"{first.what} has not ended for {took_s:.3g} s, and with thread_safe: false nothing "
            f"else is called before it ends, so {turn.what} cannot begin. Find out why it hangs, "
            "or raise step_timeout_s."
        )


@functools.cache
def _line() -> _Line:
    """The line of this process."""
    return _Line()


# a forked process has none of the threads that would leave the line
os.register_at_fork(after_in_child=_line.cache_clear)


@final
class OwnRandom:
    """Random numbers of one attempt.

    Args:
        seed: What they begin with, until the environment seeds them: below 2**32.
    """

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    def copied(self) -> OwnRandom:
        """The same numbers, which go their own way from here."""
        return copy.copy(self)  # states are never changed

    def run(self, turn: Turn, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that draws from the process's numbers, and end its turn."""
        try:
            turn.thread = threading.get_ident()
            return self._run(turn, function, *arguments)
        finally:
            _line().leave(turn)

    def _run(self, turn: Turn, function: Callable[..., T], *arguments: Any) -> T:
        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            return function(*arguments)
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            if not turn.late:  # else others have drawn in the meantime, and would draw the same
                random.setstate(python)
                np.random.set_state(numpy)

    def run_here(self, what: str, limit_s: float, function: Callable[[], T]) -> T:
        """Take a turn and call a function, while the calling thread waits.

        Args:
            what: What is called, for messages.
            limit_s: The most seconds that the call may take before others complain of it.
            function: What to call.
        Raises:
            ToolError: If a call before it hangs.
        """
        if _line().is_mine():
            return function()
        turn = Turn(what, limit_s)
        turn.taken_here()
        return self.run(turn, function)
