"""The check that plans a GPU's memory. The plan itself is loaded only where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from turnrl import MTGRPO, Check, Finding, RecipeError
from turnrl.plugin.text import format_gigabytes
from turnrl.types import Start

if TYPE_CHECKING:
    from turnrl_doctor.plan import CostedChoice


class MemoryPlan(Check):
    """The memory of a GPU, planned before weights are loaded."""

    def __init__(self) -> None:
        self._plan: CostedChoice | None = None
        self._why = "the run has no GPU"

    def settle(self, start: Start) -> None:
        """Choose the settings that the recipe leaves open, and print the plan. A policy that only
        acts gets the choices of a run on this card; on a CPU, or if no run fits, it gets none. A
        module is planned once.

        Raises:
            RecipeError: If a run would learn, and nothing fits the card.
        """
        module = start.module
        if not isinstance(module, MTGRPO) or module.memory.planned:
            self._why = "made before"
            return
        size, device = start.gpu_memory, start.device.type
        # a policy that acts on a CPU may have trained elsewhere: pages for a GPU may not fit here
        acts_on_cpu = device == "cpu" and not start.learns
        if acts_on_cpu or size is None or (size == "auto" and device != "cuda"):
            return
        from turnrl_doctor.planning import plan_run

        try:
            self._plan = plan_run(start, module)
        except LookupError as error:
            self._why = str(error)
        except RecipeError:
            if start.learns:
                raise

    def run(self, start: Start) -> Iterable[Finding]:
        """The phase that needs most, or the reason why there is no plan."""
        if start.module is None:
            return
        if (plan := self._plan) is None:
            yield Finding("pass", "memory plan", f"none: {self._why}")
        elif not plan.work.sampled and plan.work.beside is None:
            text = "the plan does not know what the engine takes while it samples"
            yield Finding("warn", "memory plan", text, "Leave room for it: lower model.gpu_memory.")
        else:
            usable = f"{format_gigabytes(plan.most)} of {format_gigabytes(plan.card.bytes)} GB"
            yield Finding("pass", "memory plan", f"{plan.worst} needs most, {usable}")
