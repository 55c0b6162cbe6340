"""`turnrl bench`: measure turnrl on this machine.

Each part's results go to the JSON file as soon as the part ends. docs/explanation/performance.md
explains the figures.
"""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnrl_bench.gpu.parts import DEFAULT, MINUTES, PARTS


def add_bench_command(commands: Any) -> None:
    """Add `bench` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "bench", help="measure how fast turnrl is on this machine", description=__doc__
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    text = "a 7B policy, 4-bit with an adapter, on a GPU"
    gpu = kinds.add_parser("gpu", help=text, description=f"Measures {text}.")
    gpu.add_argument(
        "--json",
        type=Path,
        default=Path("bench-gpu.json"),
        metavar="FILE",
        help="the file for the results (default: bench-gpu.json)",
    )
    gpu.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    gpu.add_argument(
        "--threads",
        type=_positive(int),
        default=8,
        metavar="N",
        help="torch threads (default: 8)",
    )
    gpu.add_argument("--tiny", action="store_true", help="a small shape, on any device")
    gpu.add_argument(
        "--minutes",
        type=_positive(float),
        default=MINUTES,
        help=f"time for all parts together (default: {MINUTES:g})",
    )
    gpu.add_argument(
        "--parts",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=list(DEFAULT),
        metavar="NAME,...",
        help=f"any of {', '.join(PARTS)} (default: all but train)",
    )
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
            raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 1440")
        return value

    return read


def _run(args: argparse.Namespace) -> int:
    # looked up here, because the other commands need none of it
    return int(pkgutil.resolve_name("turnrl_bench.gpu.driver:bench")(args))
