"""`turnrl bench`: how fast turnrl is, and how much memory it takes, beside what else one could use.

    command       the command line
    measurements  which processes take turns in each, and what their report says
    measure       fresh processes that take turns, medians, tables
    worker        such a process
    task          questions, a small model, and the tokens that everybody samples
    forced        Forced, an engine that is told what to sample
    ours          the iterations of turnrl on a task
    trl           the iterations of TRL's `GRPOTrainer` on the same task
    equal         whether both did equal work
    world         quickstart's world: engines, tools that take their time, many trajectories
    gpu           a policy of seven billion parameters

`Forced` is public: whoever wants to time or replay something with given tokens can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import hookimpl
from turnrl_bench.command import add_bench_command
from turnrl_bench.forced import Forced as Forced


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """`turnrl bench`."""
    return [add_bench_command]
