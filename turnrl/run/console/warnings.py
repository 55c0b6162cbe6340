"""Warnings of a run: lines that Python's logging prints, wrapped on a terminal like all lines."""

import logging
import sys

from turnrl.text import fitted, terminal_columns


class Fitted(logging.Formatter):
    """The message alone, wrapped at words if standard error is a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return fitted(super().format(record), terminal_columns(sys.stderr))


def fit_warnings() -> None:
    """Wrap the log lines of turnrl and Lightning to the terminal. For commands, not for the
    library: a program that imports turnrl formats its own logs."""
    lightning = (logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric"))
    for handler in (logging.lastResort, *(h for log in lightning for h in log.handlers)):
        if handler is not None and handler.formatter is None:
            handler.setFormatter(Fitted())
