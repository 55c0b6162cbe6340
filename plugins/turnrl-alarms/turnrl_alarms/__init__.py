"""Alarms: a line when a run goes wrong, with the iteration in which it began.

rules       the rules, a function of rows of metrics
watch       the callback that says them while a run goes on, and can stop it

Importing this package loads neither torch nor Lightning.
"""

from collections.abc import Iterable
from typing import Any

from turnrl import hookimpl
from turnrl_alarms.rules import Alarm, alarms

__all__ = ["Alarm", "Alarms", "alarms", "turnrl_callbacks"]


def __getattr__(name: str) -> Any:
    if name != "Alarms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnrl_alarms.watch import Alarms

    return Alarms


@hookimpl
def turnrl_callbacks() -> Iterable[type[Any]]:
    """The callback that raises the alarms of a run."""
    from turnrl_alarms.watch import Alarms

    return [Alarms]
