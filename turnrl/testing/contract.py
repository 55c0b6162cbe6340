"""Promises of a contract, and the error about a broken one."""

import contextlib
from collections.abc import Iterator

from turnrl.plugin.errors import TurnRLError

_BETWEEN = {"turnrl", "asyncio", "concurrent", "contextlib", "threading"}
"""Packages whose frames lie between a check and the code that it calls."""


class Breach(AssertionError):
    """A broken promise, as opposed to a failed assertion in the plugin's own code."""


def require(condition: object, message: str) -> None:
    """Raise a `Breach` unless the condition holds."""
    __tracebackhide__ = True  # for pytest: the message is enough
    # not `assert`, which `python -O` removes and pytest rewrites only in test modules
    if not condition:
        raise Breach(message)


@contextlib.contextmanager
def on(subject: str) -> Iterator[None]:
    """A block whose failures, in the plugin's own code or of a promise, are raised as a sentence.

    Args:
        subject: The beginning of the sentence: the method and the example.
    """
    __tracebackhide__ = True
    try:
        yield
    except (Exception, SystemExit) as error:
        raised = "" if isinstance(error, Breach) else f"raised {type(error).__name__}: "
        raise Breach(f"{subject} {raised}{error}") from origin(error)


def origin(error: BaseException) -> BaseException | None:
    """The error that the plugin's own code raised, with only the frames of that code; None if it
    raised nothing, or one of turnrl's errors, whose message is enough."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frames = frames.tb_next
    if frames is None or isinstance(error, Breach | TurnRLError):
        return None
    return error.with_traceback(frames)
