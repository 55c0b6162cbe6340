"""Promises of a contract, and the error that says which is broken."""

import contextlib
from collections.abc import Iterator

from turnrl.errors import TurnRLError

_BETWEEN = {"turnrl", "asyncio", "concurrent", "contextlib", "threading"}
"""Packages whose frames lie between a check and the code that it calls."""


class Breach(AssertionError):
    """A broken promise, as opposed to a failed assertion in the plugin's own code."""


def require(condition: object, message: str) -> None:
    """Raise a `Breach` unless the condition holds."""
    __tracebackhide__ = True  # to pytest: the message says it all
    # not `assert`, which `python -O` leaves out and pytest rewrites in test modules only
    if not condition:
        raise Breach(message)


@contextlib.contextmanager
def on(what: str) -> Iterator[None]:
    """Tell any failure inside, of the plugin's own code or of a promise, as a sentence.

    Args:
        what: The beginning of the sentence: whose method, with which example.
    """
    __tracebackhide__ = True
    try:
        yield
    except (Exception, SystemExit) as error:
        raised = "" if isinstance(error, Breach) else f"raised {type(error).__name__}: "
        raise Breach(f"{what} {raised}{error}") from origin(error)


def origin(error: BaseException) -> BaseException | None:
    """The error that the plugin's own code raised, with only the frames of that code; None if it
    raised nothing, or an error of turnrl's, whose message says all."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frames = frames.tb_next
    if frames is None or isinstance(error, Breach | TurnRLError):
        return None
    return error.with_traceback(frames)
