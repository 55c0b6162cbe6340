"""Compare turnrl on a CPU with TRL, and learning with plainer learning from the same work:

    python plugins/turnrl-bench/compare.py trl|learn

The sides run in fresh processes that take turns, A B A B, so if the machine slows down, both sides
slow down. Each process is a block. A figure is the median of all repetitions in all blocks. A ratio
is one side's median over the other's, with the least and the greatest ratio of two neighbouring
blocks. docs/explanation/performance.md explains each comparison. Set OMP_NUM_THREADS for more than
one thread.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import auto_cli

from bench_task import (
    Shape,
    Watch,
    make,
    make_module,
    print_machine,
    print_table,
    silence,
    train,
)
from trl_step import by_trl, by_turnrl, check_equal
from turnrl import Policy, RecipeError

Figures = dict[str, list[float]]
"""The figures of a block by name, each with a value for every repetition."""

# ------------------------------------------------------------------------------ blocks, figures


def fresh(function: Callable[[], Any]) -> Any:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare) as process:
        return process.submit(function).result()


def _prepare() -> None:
    silence()
    sys.stdout = sys.stderr


def alternate(blocks: int, sides: Mapping[str, Callable[[], Figures]], case: str = "") -> None:
    """Run the blocks of each side in turns. Print a row for each figure, with the ratio of
    the two sides."""
    blocks_of: dict[str, list[Figures]] = {name: [] for name in sides}
    for n, name in itertools.product(range(blocks), sides):
        print(f"  block {n + 1} of {blocks}: {name} ...", file=sys.stderr, flush=True)
        blocks_of[name].append(fresh(sides[name]))
    rows = []
    for name in next(iter(blocks_of.values()))[0]:
        by_side = [[block[name] for block in side] for side in blocks_of.values()]
        middles = [median(itertools.chain(*figures)) for figures in by_side]
        cells = [name, *(f"{value:,.2f}" for value in middles)]
        ratios = [median(a) / median(b) for a, b in zip(*by_side, strict=True)]
        cells.append(f"{middles[0] / middles[1]:.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        rows.append(tuple(cells))
    print()
    print_table((case, *sides, "/".join(sides)), rows)


# ------------------------------------------------------------------------ trl: a training step


def trl(blocks: int = 3, steps: int = 2, prompts: int = 8, rows: int = 16) -> None:
    """Compare training steps with TRL's `GRPOTrainer`, once both are known to do equal work.

    Args:
        blocks: Processes of each side.
        steps: Steps of a block that count, after one that does not.
        prompts: Questions of a step, with eight trajectories each.
        rows: Trajectories of a TRL micro-batch; must divide the number of all trajectories.
    """
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed. Install it with: pip install '.[bench]'")
    # TRL recognises a model's family by comparing the template with its own copy
    template = importlib.import_module("trl.chat_template_utils").qwen2_5_chat_template
    with TemporaryDirectory() as folder:
        make(Path(folder), Shape(prompts), template)
        sides = {"TRL": partial(by_trl, folder, rows), "turnrl": partial(by_turnrl, folder)}
        check_equal(*(fresh(partial(side, steps=0)) for side in sides.values()))
        for case, passes, ms in (
            ("one update", 1, 0),
            ("two passes", 2, 0),
            ("50 ms tool", 1, 50),
        ):
            timed = {
                name: partial(side, steps=steps, passes=passes, tool_ms=ms)
                for name, side in sides.items()
            }
            alternate(blocks, timed, case)


# ----------------------------------------------------------------------------- learn: learning


def learned(folder: str, steps: int, **policy: Any) -> Figures:
    """Seconds of steps without rollouts, after one that is not counted."""
    watch, module = Watch(), make_module(folder, Policy(folder, **policy), None)
    train(module, [watch], folder, 1 + steps)
    return {"learning, s": [seconds["learning"] for seconds in watch.times[1:]]}


def learn(blocks: int = 3, steps: int = 3, prompts: int = 8) -> None:
    """Compare learning with prompts computed once and with rows padded.

    Args:
        blocks: Processes of each side.
        steps: Steps of a block that count, after one that does not.
        prompts: Questions of a step, with eight trajectories each.
    """
    with TemporaryDirectory() as folder:
        make(Path(folder), Shape(prompts))
        sides = {"rows padded": False, "prompts once": True}
        timed = {
            name: partial(learned, folder, steps, share_prefixes=once)
            for name, once in sides.items()
        }
        alternate(blocks, timed)


def main() -> None:
    """Make the comparison that the command line names, and print the machine."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = os.getloadavg()[0]
    try:
        auto_cli([trl, learn], as_positional=False)
    except RecipeError as error:
        sys.exit(str(error))
    print_machine(("trl",))
    print(f"Load average {before:.1f} -> {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
