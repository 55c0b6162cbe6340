"""A corridor of doors: a world in which each of K turns is paid for what it did, and at once."""

from __future__ import annotations

import random
from typing import Literal, get_args

from turnrl import ToolResult

Way = Literal["left", "down", "right", "up"]
SIGNS: dict[str, Way] = {
    sign: way
    for way, signs in zip(
        get_args(Way), ("sun moon", "star tree", "fish bird", "ship bell"), strict=True
    )
    for sign in signs.split()
}
"""The right way at each sign."""


class Doors:
    """A corridor of K doors. A sign at each says which way is right, in one of eight words whose
    meaning the policy has to find out. For `Environment`.

    The right way pays 1/K at once. Right or wrong, the next door follows, and after the last the
    attempt ends. So every attempt has K paid turns of equal value that do not depend on each other.
    `get_reward` pays 1 if all were right.

    Args:
        doors: K.
    """

    def __init__(self, doors: int = 4) -> None:
        self.doors = doors

    def reset(self, seed: int) -> str:
        """New signs, and the first of them."""
        self.signs = random.Random(seed).choices([*SIGNS], k=self.doors)
        self.right: list[bool] = []
        return f"door {self.signs[0]}"

    def step(self, action: Way) -> ToolResult:
        """Go one way: left, down, right or up."""
        self.right.append(SIGNS[self.signs[len(self.right)]] == action)
        done = len(self.right) == self.doors
        seen = "the end" if done else f"door {self.signs[len(self.right)]}"
        return ToolResult(seen, reward=self.right[-1] / self.doors, done=done)

    def get_reward(self) -> float:
        """1 if every way was right, else 0."""
        return float(all(self.right) and len(self.right) == self.doors)
