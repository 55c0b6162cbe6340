"""The record of a run: every trajectory as a row of Parquet, and some as text to read.

record      the columns and their version; files to rows, figures with intervals, text
statistics  95 % intervals: of a figure, and of two runs on the same questions
runs        a run's folder: its settings, metrics and record, and in words what is missing
recording   from scored groups to rows and into files, by a callback of every run
loggers     advantages by turn and transcripts, for loggers that can show them

The hook loads neither torch nor Arrow: `turnrl_record.record` is `turnrl.record`.
"""

from collections.abc import Iterable
from typing import Any

from turnrl import hookimpl


@hookimpl
def turnrl_callbacks() -> Iterable[type[Any]]:
    """Callbacks that keep the record of a run and show some of it to loggers."""
    from turnrl_record.loggers import ToLoggers
    from turnrl_record.recording import Recorder

    return [Recorder, ToLoggers]
