"""`turnrl bench`: measure turnrl on this machine, beside what else one could use.

Whatever is compared is run in fresh processes that take turns (A B A B ...); the first iterations
of each are not counted. Printed are medians, and ratios of medians with the least and the greatest
ratio of two neighbouring blocks, then the machine, the versions, and how busy it was. What each
means, and what it does not, says docs/explanation/performance.md.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnrl import RecipeError
from turnrl_bench.gpu.parts import DEFAULT, MINUTES, PARTS

_COUNTS = {
    "threads": "of torch",
    "blocks": "processes of each side",
    "prompts": "questions of an iteration",
    "group_size": "trajectories of each question",
    "prompt_tokens": "tokens of a prompt",
    "tokens": "sampled tokens of a trajectory",
    "steps": "iterations of each process that count",
    "trl_rows": "trajectories of a micro-batch of TRL's",
}
"""Numbers that measurements take as options, and what they are."""


def add_bench_command(commands: Any) -> None:
    """Add `bench` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast turnrl is on this machine",
        description=__doc__,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)

    def number(one: Any, option: str, default: Any, what: str, **more: Any) -> None:
        values = default if isinstance(default, list) else [default]
        shown = f"{what} (default: {' '.join(map(str, values))})"
        settings = {"type": _count, "metavar": "N", **more}
        one.add_argument(option, default=default, help=shown, **settings)

    def kind(name: str, text: str, **counts: int) -> Any:
        one = kinds.add_parser(name, help=text, description=f"Measures {text}.")
        one.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
        one.add_argument(
            "--markdown", action="store_true", help="print the tables as those of a page"
        )
        for option, default in counts.items():
            number(one, f"--{option.replace('_', '-')}", default, _COUNTS[option])
        one.set_defaults(run=_run)
        return one

    wide = {"prompts": 8, "group_size": 8, "prompt_tokens": 281, "tokens": 72}
    text = "a training step beside TRL's GRPOTrainer"
    one = kind("trl", text, threads=1, blocks=3, **wide, steps=2, trl_rows=16)
    one.add_argument(
        "--tool-ms", type=_time, metavar="MS", help="measure too with a tool that takes so long"
    )
    text = "tokens sampled in a second, beside a vLLM server"
    narrow = {"prompts": 16, "group_size": 8, "prompt_tokens": 195, "tokens": 60}
    one = kind("engine", text, threads=2, blocks=3, **narrow, steps=4)
    one.add_argument(
        "--url", help="of a server that serves the Atlas starter; without one Slots is alone"
    )
    text = "learning with prompts computed once, beside rows padded (8 GB, some minutes)"
    kind("learn", text, threads=1, blocks=3, **wide, steps=3)
    text = "what lockstep costs while tools take their time"
    one = kind("tools", text, threads=1, blocks=2, prompts=16, group_size=16, steps=2)
    several = {"type": _time, "nargs": "+", "metavar": "MS"}
    number(one, "--tool-ms", [0, 50, 500], "of a call", **several)
    one = kind("scale", "what a trajectory costs among many", threads=1, blocks=2, group_size=16)
    number(one, "--trajectories", [64, 256, 1024, 4096], "of a collection", nargs="+")
    one.add_argument("--kv-memory", default="64MB", metavar="SIZE", help="of Slots (default: 64MB)")
    one = kind("gpu", "a 7B policy, 4-bit with an adapter, on a GPU", threads=8)
    one.add_argument(
        "--tiny", action="store_true", help="a small shape, on whatever device there is"
    )
    one.add_argument(
        "--minutes",
        type=_minutes,
        default=MINUTES,
        help=f"that all parts may take (default: {MINUTES:g})",
    )
    one.add_argument(
        "--parts",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=list(DEFAULT),
        metavar="NAME,...",
        help=f"of {', '.join(PARTS)} (default: all but train)",
    )
    one.add_argument(
        "--resume", action="store_true", help="leave out what the JSON file has already"
    )
    one.set_defaults(json=Path("bench-gpu.json"))


def _within(
    kind: Callable[[str], float], least: float, most: float, what: str
) -> Callable[[str], float]:
    """Reads a number between two others."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return read


_count = _within(int, 1, sys.maxsize, "number of 1 or more")
_time = _within(float, 0, 60_000, "time between 0 and 60000 milliseconds")
_minutes = _within(float, 0.01, 1440, "number of minutes up to 1440")


def _run(args: argparse.Namespace) -> int:
    _check_file(args)
    # imported here, because other commands need none of it
    report = pkgutil.resolve_name(f"turnrl_bench.measurements:{args.kind}")(args)
    print(report.show(args.markdown), flush=True)
    if args.json is not None and args.kind != "gpu":  # which writes it all along
        report.save(args.json)
    return int(report.code)


def _check_file(args: argparse.Namespace) -> None:
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise RecipeError(f"--json is {str(args.json)!r}, in a folder that is not there. Make it.")
    if args.json is not None and args.json.is_dir():
        raise RecipeError(f"--json is {str(args.json)!r}, a folder. Name a file in it.")
