"""Curves of questions other than the validation's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import lightning as L

from turnrl.plugin.errors import DataError, RecipeError
from turnrl.rewards.scoring import compute_curves, tally_curves
from turnrl.training.questions import QuestionData
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question
from turnrl.types.streams import ALSO
from turnrl.watch.trainer import announce

_TAKEN = ("train", "val", "rollout", "reward")


class AlsoScore(L.Callback):
    """Score other questions at each validation of a training run, under a separate name.

    For example, `name: famous` logs `famous/exact_match`, `famous/tool_execution`,
    `famous/answer_in_results` and `famous/format` beside those of `val`.

    Args:
        name: The name of the curves.
        source: Source of the questions, as `data.val` takes it, but without `data.fields` and
            `data.config`. Their answers compare by `data.answers`. Null for the source of
            `data.val` itself: if it has no such split, the run prints that and continues without
            it.
        split: Split of the source; by default its own validation split.
        limit: Score a fixed choice of at most this many questions; null for all, but never more
            than `data.val_limit` from the source of `data.val`.
        batch_size: Questions that are scored together.
    """

    def __init__(
        self,
        name: str,
        source: QuestionSource | str | list[Question] | None = None,
        split: str | None = None,
        limit: int | None = 256,
        batch_size: int = 256,
    ) -> None:
        if name in _TAKEN or not re.fullmatch(r"\w+", name):
            raise RecipeError(
                f"AlsoScore.name is {name!r}. Take a word of letters, digits and underscores other "
                f"than {', '.join(_TAKEN)}."
            )
        if source is None and split is None:
            raise RecipeError(
                "AlsoScore has no source and no split, and would score data.val again. Set one."
            )
        self.name = name
        self.source = source
        self.split = split
        self.limit = limit
        self.batch_size = batch_size
        self._data: QuestionData | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the questions, so that a mistake in them shows at once."""
        if stage != "fit":
            return
        source, split = self.source, self.split
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if source is None:
            try:
                source, split = data.eval_questions(split), None
            except DataError as error:
                announce(trainer, f"no {self.name}/exact_match: {error}")
                return
        self._data = QuestionData(
            val=source,
            val_split=split,
            val_limit=self.limit,
            val_batch_size=self.batch_size,
            answers=data.rule if isinstance(data, QuestionData) else None,
        )
        self._data.setup("validate")
        self._data.trainer = trainer  # only now, or it would announce the reading again

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Leave out questions that are too long to ask, and check the others."""
        if self._data is not None:
            pl_module.collector.check_data(self._data)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Score the questions with greedy trajectories. Each process scores its share."""
        if self._data is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scored: list[Mapping[str, float | None]] = []
        for number, batch in enumerate(self._data.val_dataloader()):
            key = (ALSO, pl_module.seed, number, trainer.global_rank)
            if batch:  # processes have equally many batches, some of them empty
                attempts = pl_module.collector.explore(batch, None, key)
                scored += [compute_curves(t) for group in attempts.trajectories for t in group]
        tallies = tally_curves(scored)
        pl_module.metrics.log({f"{self.name}/{name}": tally for name, tally in tallies.items()})
