"""Runs compared on the questions that all of them answered.

pairing   evaluations of runs, paired by question or by seed; what cannot be paired, and why
command   `turnrl compare`
"""

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import hookimpl
from turnrl_compare.command import add_compare_command


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """`turnrl compare`."""
    return [add_compare_command]
