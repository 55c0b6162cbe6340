"""The parts of the benchmark in the order of what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnrl import RecipeError

MINUTES = 9.0
"""All parts together, unless `--minutes` says otherwise."""

HUNG = "hung.txt"
"""The file where a process that ends because a part hangs leaves the place."""


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: As in `--parts` and in the JSON file.
        function: `module:function`, which takes a `Bench` and `Cases`.
        least_s: With fewer seconds left on a GPU it is skipped.
        most_s: The seconds after which no case begins, in `PARTS` for all in nine minutes; the
            driver scales them to the time that there is.
    """

    name: str
    function: str
    least_s: float
    most_s: float


PARTS = {
    name: Part(name, f"turnrl_bench.gpu.{module}:measure", least_s, most_s)
    for name, module, least_s, most_s in (
        ("machine", "machine", 3, 20),
        ("loading", "loading", 30, 120),
        ("decoding", "decoding", 20, 130),
        ("learning", "learning", 10, 60),
        ("profile", "profiling", 10, 45),
        ("iteration", "iteration", 40, 120),
        ("trl", "generating", 15, 70),
        ("train", "training", 60, 240),
    )
}
DEFAULT = tuple(name for name in PARTS if name != "train")
"""All but `train`: three runs of a smaller model, on request."""


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts of these names, in their own order.

    Raises:
        RecipeError: Naming one that there is not.
    """
    if odd := [name for name in names if name not in PARTS]:
        raise RecipeError(f"--parts has {odd[0]!r}. There are: {', '.join(PARTS)}.")
    return [part for name, part in PARTS.items() if name in names]
