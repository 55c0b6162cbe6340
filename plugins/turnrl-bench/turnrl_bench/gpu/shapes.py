"""The networks and iterations that are measured. Imports no torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from turnrl import RecipeError
from turnrl_bench.task import TINY, Shape
from turnrl_doctor import plan

RANK, UPDATES = 16, 2
SEVEN_B = plan.Shape(
    hidden=3584,
    inner=18_944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_size=128,
    vocab=152_064,
    tied=False,
)
"""Qwen2.5-7B."""
ONE_AND_A_HALF_B = replace(
    SEVEN_B, hidden=1536, inner=8960, heads=12, kv_heads=2, vocab=151_936, tied=True
)
"""Qwen2.5-1.5B: as many layers, and heads of the same size."""


@dataclass(frozen=True)
class Setting:
    """The sizes of one benchmark, whole or tiny.

    Args:
        network: The policy's dimensions.
        shape: Shape of the iteration.
        smaller: Dimensions of the policy in the run that is killed.
        short: Shape of its iterations.
        rows: Trajectories that are sampled at once, the default and the recipe's.
        turns: Tokens sampled in a turn when decoding alone is measured, on average.
        minibatch_tokens: Computed at once while learning.
        copied: Bytes of the large copy.
        multiplied: Rows of the large product.
        profiled: Decode steps that are profiled.
    """

    network: plan.Shape
    shape: Shape
    smaller: plan.Shape
    short: Shape
    rows: tuple[int, int]
    turns: tuple[int, int]
    minibatch_tokens: int
    copied: int
    multiplied: int
    profiled: int = 3


WHOLE = Setting(
    network=SEVEN_B,
    shape=Shape(8, 16, 600, (150, 200), 500),
    smaller=ONE_AND_A_HALF_B,
    short=Shape(4, 8, 300, (80, 60), 200),
    rows=(128, 336),
    turns=(48, 64),
    minibatch_tokens=8192,
    copied=2**32,
    multiplied=8192,
)
_TINY = replace(TINY, layers=2)
SMALL = Setting(
    network=replace(_TINY, tied=False),
    shape=Shape(2, 2, 160, (40, 8), 16),
    smaller=_TINY,
    short=Shape(2, 2, 160, (40, 8), 16),
    rows=(4, 6),
    turns=(3, 3),
    minibatch_tokens=512,
    copied=2**20,
    multiplied=256,
    profiled=1,
)


def check_disk(folder: Path, needed: int) -> None:
    """Refuse to begin a model that the disk cannot hold.

    Args:
        folder: Where it is to be written.
        needed: Bytes of it.
    Raises:
        RecipeError: Naming both numbers.
    """
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise RecipeError(
            f"the model with random weights takes {needed / 1e9:.1f} GB, and the disk of "
            f"{str(folder)!r} has {free / 1e9:.1f} GB free. Set TMPDIR to a folder with more room."
        )
