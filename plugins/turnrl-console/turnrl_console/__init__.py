"""The console of a run: what it is doing, a row of figures per iteration, and how it ended.

lines      what is printed in place of Lightning's default bar
health     the warning that a run learns nothing
resumed    the figures that a run began with, and what a run that goes on changed
"""

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import hookimpl


@hookimpl
def turnrl_callbacks() -> Iterable[Callable[..., Any]]:
    """What prints, and what it has to know."""
    from turnrl_console.health import LearnsNothing
    from turnrl_console.lines import iteration_lines
    from turnrl_console.resumed import FirstFigures

    return [LearnsNothing, FirstFigures, iteration_lines]
