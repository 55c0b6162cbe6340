"""The settings of a warm-up, which the command and Python share. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from turnrl.plugin.errors import RecipeError, check_at_least, is_finite

if TYPE_CHECKING:
    from turnrl.sft.forced_play import Demonstrator


TRANSCRIPT = "demonstrations.txt"
"""File beside a warmed-up policy, with some of the demonstrations that it learned from."""


@final
@dataclass(frozen=True)
class WarmUp:
    """Settings of `turnrl.warm_up`, and of `turnrl warmup`, under the same names.

    Args:
        steps: Optimiser steps.
        batch_size: Demonstrated attempts per step; none is learned twice.
        lr: Peak of the learning rate; null for 5e-4 under LoRA, else 2e-4.
        by: A function of an attempt and of random numbers that returns the next turn (for the
            command, its dotted path); null for random play.
    Raises:
        RecipeError: Naming the setting that is out of range.
    """

    steps: int = 50
    batch_size: int = 16
    lr: float | None = None
    by: Demonstrator | None = None

    def __post_init__(self) -> None:
        check_at_least(1, "", self, "steps", "batch_size", whole=True, optional=False)
        check_at_least(1e-12, "", self, "lr")
        if self.lr is not None and not is_finite(self.lr):
            raise RecipeError(f"lr is {self.lr}. Give a finite rate, such as 5e-4.")

    def rate(self, adapter: bool) -> float:
        """The peak of the learning rate, for an adapter or for a whole model."""
        return self.lr if self.lr is not None else 5e-4 if adapter else 2e-4
