"""Warnings of a run: lines that Python's logging prints, wrapped on a terminal as all lines are."""

import logging
import sys

from turnrl.text import fitted, terminal_columns


class Fitted(logging.Formatter):
    """The message alone, wrapped at words if standard error is a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return fitted(super().format(record), terminal_columns(sys.stderr))


def fit_warnings() -> None:
    """Have what turnrl and Lightning log keep to the terminal. For a command, not for a library: a
    program that imports turnrl formats its own logs."""
    lightning = (logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric"))
    for handler in (logging.lastResort, *(one for log in lightning for one in log.handlers)):
        if handler is not None and handler.formatter is None:
            handler.setFormatter(Fitted())
