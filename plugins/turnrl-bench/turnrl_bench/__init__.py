"""`turnrl bench gpu`: how fast a 7B policy is on your GPU, and how much memory it takes.

    command   the command line
    gpu       the parts of the benchmark
    task      questions, a model with random weights, and the tokens to sample
    agent     the agent that works on a task, and its iterations
    steps     a training step by turnrl and by TRL
    forced    Forced, an engine that samples the tokens you give it

`compare.py`, beside this package, compares turnrl with TRL, vLLM and plainer ways to learn.
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
