"""An iteration as a data loader: Lightning asks for batches, and gets an iteration's steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L

from turnrl.plugin.errors import RecipeError
from turnrl.training.learning import Step
from turnrl.training.lifecycle import PolicyModule
from turnrl.types import Question


class IterationData(L.LightningDataModule, ABC):
    """Data to train on: the questions of each iteration. `val_dataloader`, if defined, yields the
    lists of questions of an evaluation.

    Attributes:
        split: The split that an evaluation scores.
        label: Its name in metrics and in the record; the split itself if empty.
    """

    split: str = "val"
    label: str = ""

    @abstractmethod
    def iteration_questions(self, iteration: int, rank: int, world_size: int) -> Sequence[Question]:
        """The questions that one process asks in one iteration; always the same for the same
        arguments."""

    def train_dataloader(self) -> "ExperienceLoader":
        """The loader that collects each iteration's experience."""
        if self.trainer is None:
            raise RuntimeError("the loader collects with a trainer's policy: give it to a Trainer")
        return ExperienceLoader(self, self.trainer)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> object:
        """Steps move to the device; questions stay, frozen as they are."""
        if not batch or isinstance(batch[0], Question):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class ExperienceLoader:
    """One policy iteration as a data loader: collects when the first step is asked for. One batch
    is one optimiser step.

    It has a fixed length and no state. An iteration's questions and sampling depend only on
    (seed, iteration, rank), so a run resumed inside an iteration collects anew with the restored
    weights.

    Args:
        data: Gives each iteration's questions.
        trainer: The running trainer.
    Raises:
        RecipeError: If the module does not collect, or the questions or the trajectories cannot
            be divided evenly.
    """

    def __init__(self, data: IterationData, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        if not isinstance(module, PolicyModule):
            name = type(module).__name__
            raise RecipeError(f"{name} collects no experience. Give other data, or take MTGRPO.")
        if module.max_staleness and trainer.val_check_interval != 1:
            raise RecipeError(
                f"trainer.val_check_interval is {trainer.val_check_interval}: a validation inside "
                "an iteration takes a version of the weights that model.max_staleness = "
                f"{module.max_staleness} needs for what is sampled ahead. Leave it out, and set "
                "trainer.check_val_every_n_epoch, or set max_staleness to 0."
            )
        self._data = data
        self._trainer = trainer
        self._module = module
        self._steps = module.count_steps(len(data.iteration_questions(0, 0, trainer.world_size)))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Step]:
        run, iteration = self._trainer, self._trainer.current_epoch
        end = iteration + 1 + self._module.max_staleness
        if run.max_epochs is not None and run.max_epochs >= 0:
            end = min(end, max(run.max_epochs, iteration + 1))
        questions, *ahead = [
            self._data.iteration_questions(number, run.global_rank, run.world_size)
            for number in range(iteration, end)
        ]
        # a generator, so nothing is collected before a step is asked for
        yield from self._module.iterate(questions, iteration, ahead)

    def state_dict(self) -> dict[str, int]:
        """Empty, which lets Lightning resume a run inside an iteration."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing to restore."""
