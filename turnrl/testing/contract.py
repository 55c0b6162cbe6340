"""Promises of a contract, and the error about a broken one."""

import contextlib
from collections.abc import Iterator


class Breach(AssertionError):
    """A broken promise, as opposed to a failed assertion in the plugin's own code."""


def require(condition: object, message: str) -> None:
    """Raise a `Breach` unless the condition holds."""
    __tracebackhide__ = True  # for pytest: the message is enough
    # not `assert`, which `python -O` removes and pytest rewrites only in test modules
    if not condition:
        raise Breach(message)


@contextlib.contextmanager
def reporting_breaches(subject: str) -> Iterator[None]:
    """A block whose failures, in the plugin's own code or of a promise, are raised as a sentence.

    Args:
        subject: The beginning of the sentence: the method and the example.
    """
    __tracebackhide__ = True
    try:
        yield
    except (Exception, SystemExit) as error:
        raised = "" if isinstance(error, Breach) else f"raised {type(error).__name__}: "
        raise Breach(f"{subject} {raised}{error}") from error
