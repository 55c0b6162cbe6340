"""Promises of a contract, and the error that says which is broken."""

import contextlib
from collections.abc import Iterator


class Breach(AssertionError):
    """A broken promise, told apart from an assertion of the plugin's own."""


def require(condition: object, message: str) -> None:
    """Raise a `Breach` unless the condition holds."""
    # not `assert`, which `python -O` leaves out and pytest rewrites in test modules only
    if not condition:
        raise Breach(message)


@contextlib.contextmanager
def on(what: str) -> Iterator[None]:
    """Tell any failure inside, of the plugin's own code or of a promise, as a sentence.

    Args:
        what: The beginning of the sentence: whose method, with which example.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raised = "" if isinstance(error, Breach) else f"raised {type(error).__name__}: "
        raise Breach(f"{what} {raised}{error}") from error
