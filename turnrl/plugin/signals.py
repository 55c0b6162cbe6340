"""Ctrl-C and SIGTERM: both stop a program in the same way. Processes that end with their first."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
"""Variables that are 0 or unset in the first process of a run, however the others are started."""

_PARENT = "TURNRL_PARENT"
"""Variable with the number of the process that starts the others of a run."""
_WATCH = "turnrl-parent"
_LOOK_S = 0.5
"""Time between two looks at the parent."""
_GRACE_S = 5.0
"""Time that a process has to end by itself once its parent is gone."""


def end_with_parent() -> None:
    """In a process that another one of its run started, Lightning's or torchrun's, end soon after
    that one is gone, however it ended. A collective call would wait for it for half an hour. Any
    other process leaves its number for those that it may start."""
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    noted = os.environ.pop(_PARENT, None)
    if os.environ.get("LOCAL_RANK", "0") == "0" and not elastic:
        os.environ[_PARENT] = str(os.getpid())
        return
    parent = os.getppid() if elastic else int(noted or os.getpid())
    watched = os.name != "posix" or _WATCH in (thread.name for thread in threading.enumerate())
    if parent != os.getpid() and not watched:
        threading.Thread(target=_watch, args=(parent,), name=_WATCH, daemon=True).start()


def _watch(parent: int) -> None:
    above = os.getppid()
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == above:
            os.kill(parent, 0)  # it may have ended before this process could look
            time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)  # the main thread may wait in a collective call, and then takes no signal
    os.kill(os.getpid(), signal.SIGKILL)


def is_first_process() -> bool:
    """True in the first process of a run, whether Lightning, torchrun or SLURM started it."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[list[int]]:
    """Inside this block, SIGTERM raises a `KeyboardInterrupt` as Ctrl-C does.

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
        # the timer raises the interrupt again if nothing has handled it by then
        signal.setitimer(signal.ITIMER_REAL, 1.0)
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
