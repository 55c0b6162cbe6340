"""Ctrl-C and SIGTERM: both stop a program in the same way."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Within it, SIGTERM raises a `KeyboardInterrupt` as Ctrl-C does.

    Python drops an exception in a finaliser or in the callback of a weak reference. So a timer
    raises it again until the program handles it.

    Yields:
        The signals that came.
    """
    came: list[int] = []
    before: dict[int, signal._HANDLER] = {}

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
        # the signal is raised again after this time, if nothing has handled it
        signal.setitimer(signal.ITIMER_REAL, 1.0 if frame is None else 0.05)
        if frame is None:
            raise KeyboardInterrupt

    report = sys.unraisablehook

    def lost(dropped: "sys.UnraisableHookArgs") -> None:
        if came and isinstance(dropped.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            report(dropped)

    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        sys.unraisablehook = lost
        take(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            take(signal.SIGINT)
    try:
        yield came
    finally:
        if in_main:
            sys.unraisablehook = report
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
