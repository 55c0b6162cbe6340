"""An iteration as a data loader: what Lightning asks for batches is given an iteration's steps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import lightning as L

from turnrl.errors import RecipeError
from turnrl.learning import Step
from turnrl.types import Question


class IterationQuestions(Protocol):
    """Data that knows which questions an iteration asks, as `QuestionData` does."""

    def iteration_questions(self, iteration: int, rank: int, world_size: int) -> Sequence[Question]:
        """Questions that one process asks in one iteration: the same for the same arguments."""


class ExperienceLoader:
    """One policy iteration as a data loader: collects when the first step is asked for. One batch
    is one optimiser step.

    It has a fixed length and no state. What an iteration asks and how it samples are functions of
    (seed, iteration, rank), so a run resumed inside an iteration collects anew under the restored
    weights.

    Args:
        data: Gives each iteration's questions.
        trainer: The running trainer. Its module has `steps` and `iterate`, as `MTGRPO` has.
    Raises:
        RecipeError: If the module does not collect, or the questions or the trajectories cannot
            be shared out.
    """

    def __init__(self, data: IterationQuestions, trainer: L.Trainer) -> None:
        module: Any = trainer.lightning_module
        if not hasattr(module, "iterate"):
            name = type(module).__name__
            raise RecipeError(f"{name} collects no experience. Give other data, or take MTGRPO.")
        self._data = data
        self._trainer = trainer
        self._module = module
        self._steps: int = module.steps(len(data.iteration_questions(0, 0, trainer.world_size)))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Step]:
        run, iteration = self._trainer, self._trainer.current_epoch
        questions = self._data.iteration_questions(iteration, run.global_rank, run.world_size)
        yield from self._module.iterate(questions, iteration)  # lazily: Lightning tries `iter`

    def state_dict(self) -> dict[str, int]:
        """Empty: tells Lightning that a run may be resumed inside an iteration all the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing to restore."""
