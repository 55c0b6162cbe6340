"""Ctrl-C and SIGTERM: both stop a program in the same way."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Within it SIGTERM stops a program as Ctrl-C does, by a `KeyboardInterrupt`.

    What is raised in a finaliser, say, or in the callback of a weak reference, is lost: so it is
    raised again, until a moment comes when it is being dealt with.

    Yields:
        The signals that came.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def take(number: int) -> None:
        before[number] = signal.signal(number, stop)

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM and isinstance(sys.exception(), KeyboardInterrupt):
            return
        if not came:
            take(signal.SIGALRM)
        came.append(number)
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        # after this time a signal that nobody heard is raised once more
        signal.setitimer(signal.ITIMER_REAL, 1.0 if frame is None else 0.05)
        if frame is None:
            raise KeyboardInterrupt

    tell = sys.unraisablehook

    def lost(what: Any) -> None:
        if came and isinstance(what.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            tell(what)

    heard = threading.current_thread() is threading.main_thread()
    if heard:
        sys.unraisablehook = lost
        take(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            take(signal.SIGINT)
    try:
        yield came
    finally:
        if heard:
            sys.unraisablehook = tell
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
