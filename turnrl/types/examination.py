"""The contract of the checks that examine a run before it begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from turnrl.plugin.hooks import contract, load_classes
from turnrl.types.engine import RunContext

if TYPE_CHECKING:
    import torch
    from lightning import LightningDataModule, LightningModule

Status = Literal["pass", "warn", "fail"]
"""The verdict of a `Finding`: a `fail` stops a run, and a `warn` is printed."""


@dataclass(frozen=True)
class Finding:
    """One line of `turnrl doctor`.

    Args:
        status: `fail` if a run would stop, `warn` if it would be slower or worse than it could be.
        name: The thing that was examined: `GPU`, `index`.
        text: What the check saw, in one line.
        advice: The next step for the user; empty for `pass`.
    """

    status: Status
    name: str
    text: str
    advice: str = ""


@runtime_checkable
class AsksQuestions(Protocol):
    """Data whose iterations have a known size. Not every data module that a run takes has one."""

    questions_per_iteration: int


@dataclass
class Start:
    """A run that is about to begin, before any weights are loaded.

    Args:
        device: Where the weights will go.
        module: The recipe's module; None if only the machine is examined.
        data: The recipe's data; None if there is none at hand.
        folder: Where the run will write; None if it will write nothing.
        processes: Number of processes that learn together.
        iterations: The most iterations that the run takes; None, or -1, for no limit.
        learns: False if the policy only acts, as in an evaluation.
        questions: Questions per iteration, over all processes; by default those of `data`, or 16.
        gpu_memory: The memory to plan for, a size or `auto`; None for no plan. See `MTGRPO`.
        recorded: Trajectories recorded per iteration; None for all of them.
        divided: True if the processes share one policy.
    """

    device: torch.device
    module: LightningModule | None = None
    data: LightningDataModule | None = None
    folder: Path | None = None
    processes: int = 1
    iterations: int | None = None
    learns: bool = True
    questions: int = 0
    gpu_memory: str | None = "auto"
    recorded: int | None = 64
    divided: bool = False

    def __post_init__(self) -> None:
        if not self.questions:
            data = self.data
            self.questions = data.questions_per_iteration if isinstance(data, AsksQuestions) else 16

    @property
    def surroundings(self) -> RunContext:
        """The place where the run's engine works."""
        return RunContext(self.folder, self.processes, self.divided)

    def settle(self) -> list[Check]:
        """Let all installed checks fill in the settings that a recipe leaves open.

        Returns:
            The checks.
        Raises:
            RecipeError: From a check that can find no value that would work.
        """
        checks: list[Check] = [check() for check in load_classes("turnrl_checks").values()]
        for check in checks:
            check.settle(self)
        return checks

    def examine(self) -> Iterator[Finding]:
        """Settle what a recipe leaves open, then yield the findings of all quick checks that are
        installed.

        Raises:
            RecipeError: From a check that can find no value that would work.
        """
        for check in self.settle():
            if check.quick:
                yield from check.run(self)


@contract("turnrl_checks")
class Check(ABC):
    """Something that `turnrl doctor` examines. `turnrl fit` runs the quick ones before it starts.

    Attributes:
        quick: True if it takes well under a second, so that every start can afford it.
    """

    quick: bool = True

    def settle(self, start: Start) -> None:  # noqa: B027 - optional: most checks only look
        """Fill in settings that the recipe leaves open (null). Called before any check is run; if a
        policy acts without learning, only this is called.

        Raises:
            RecipeError: If no value would work.
        """

    @abstractmethod
    def run(self, start: Start) -> Iterable[Finding]:
        """Examine the machine, and the recipe's parts where there are any."""
