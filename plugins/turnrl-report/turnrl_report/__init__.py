"""Runs as a page to look at: curves, trajectories, and why each turn got its advantage.

page      one file of HTML with all of it
links     addresses of trajectories in it
command   `turnrl report`
"""

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import hookimpl
from turnrl_report.command import add_report_command


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """`turnrl report`."""
    return [add_report_command]


@hookimpl
def turnrl_callbacks() -> Iterable[type[Any]]:
    """A callback that draws the curves of a run."""
    from turnrl_report.curves import Curves

    return [Curves]
