"""The parts of the benchmark, the most telling first, and the sizes that they measure. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnrl_bench.task import TINY, Shape
from turnrl_doctor import work

MINUTES = 9.0
"""Time for all parts together; the default of `--minutes`."""

RANK, PASSES = 16, 2


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: The name in `--parts` and in the JSON file.
        function: `module:function`, which takes a `Bench` and `Cases`.
        least_s: With fewer seconds left on a GPU, the part is skipped.
        most_s: Seconds after which no case begins; the driver scales them to the time it has.
    """

    name: str
    function: str
    least_s: float
    most_s: float


PARTS = {
    name: Part(name, f"turnrl_bench.gpu.{function}", least_s, most_s)
    for name, function, least_s, most_s in (
        ("machine", "machine:measure", 3, 20),
        ("loading", "machine:load", 30, 120),
        ("decoding", "decoding:measure", 45, 160),
        ("learning", "learning:measure", 35, 80),
        ("iteration", "iteration:measure", 40, 120),
    )
}

SEVEN_B = work.Decoder(
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


@dataclass(frozen=True)
class Setting:
    """The sizes of one benchmark, whole or tiny.

    Args:
        network: The policy's dimensions.
        shape: Shape of the iteration.
        rows: Trajectories sampled at once: the default, and the recipe's.
        turns: Average number of tokens sampled in a turn, if decoding alone is measured.
        minibatch_tokens: Tokens of a minibatch.
        copied: Bytes of the large copy.
        multiplied: Rows of the large product.
    """

    network: work.Decoder
    shape: Shape
    rows: tuple[int, int]
    turns: tuple[int, int]
    minibatch_tokens: int
    copied: int
    multiplied: int


WHOLE = Setting(
    network=SEVEN_B,
    shape=Shape(8, 16, 600, (150, 200), 500),
    rows=(128, 336),
    turns=(48, 64),
    minibatch_tokens=8192,
    copied=2**32,
    multiplied=8192,
)
SMALL = Setting(
    network=replace(TINY, layers=2, tied=False),
    shape=Shape(2, 2, 160, (40, 8), 16),
    rows=(4, 6),
    turns=(3, 3),
    minibatch_tokens=512,
    copied=2**20,
    multiplied=256,
)
