"""`turnrl bench`: measure turnrl on this machine.

The results of each part go to the JSON file as soon as it ends. docs/explanation/performance.md
explains the figures.
"""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnrl_bench.gpu.parts import MINUTES, PARTS, Part


def add_bench_command(commands: Any) -> None:
    """Add `bench` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "bench", help="measure how fast turnrl is on this machine", description=__doc__
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    text = "a 7B policy, 4-bit with an adapter, on a GPU"
    gpu = kinds.add_parser("gpu", help=text, description=f"Measures {text}.")

    def option(name: str, default: object, text: str, **settings: object) -> None:
        shown = f"{text} (default: {default})"
        gpu.add_argument(name, default=default, help=shown, **settings)

    option("--json", Path("bench-gpu.json"), "the file for the results", type=Path, metavar="FILE")
    option("--threads", 8, "torch threads", type=_positive(int), metavar="N")
    option("--minutes", MINUTES, "time for all parts together", type=_positive(float))
    gpu.add_argument(
        "--parts",
        type=parts_named,
        default=list(PARTS.values()),
        metavar="NAME,...",
        help=f"any of {', '.join(PARTS)} (default: all)",
    )
    gpu.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    gpu.add_argument("--tiny", action="store_true", help="a small shape, on any device")
    gpu.add_argument("--resume", action="store_true", help="skip what the JSON file already has")
    gpu.set_defaults(run=_run)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A reader of numbers above 0 and up to 1440, the minutes of a day."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= 1440:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1440")
        return value

    return read


def parts_named(text: str) -> list[Part]:
    """The parts of these names, in the order in which they run.

    Args:
        text: Names, separated by commas.
    Raises:
        argparse.ArgumentTypeError: If a name is that of no part.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(
            f"there is no part {unknown[0]!r}. Choose from: {', '.join(PARTS)}."
        )
    return [part for name, part in PARTS.items() if name in names]


def _run(args: argparse.Namespace) -> int:
    # imported here, because other commands do not need it
    return int(pkgutil.resolve_name("turnrl_bench.gpu.driver:bench")(args))
