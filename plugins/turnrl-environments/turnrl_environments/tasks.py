"""Tasks for environments: questions that are numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from turnrl import DataError, Question, QuestionSource
from turnrl.plugin.errors import check_at_least

_FIRST = {"train": 0, "val": 1_000_000_000}


@final
class Seeds(QuestionSource):
    """Tasks without a data file: a question for each seed, with which an environment begins.
    `train` and `val` share no seed, whatever the counts.

    Args:
        count: Seeds to train on: 0, 1, 2, ...
        val_count: Seeds to evaluate with, from 1,000,000,000 on.
        text: The text that the policy reads above the first observation, in every task.
    """

    needs_answers = False

    def __init__(
        self, count: int = 1000, val_count: int = 100, text: str = "Here is what you see."
    ) -> None:
        self.count, self.val_count, self.text = count, val_count, text
        check_at_least(1, "Seeds.", self, "count", "val_count", whole=True, optional=False)
        if max(count, val_count) > _FIRST["val"]:
            raise DataError(f"Seeds has at most {_FIRST['val']:,} seeds a split. Take fewer.")
        if not text.strip():
            raise DataError("Seeds.text is empty. Say what the policy is to do.")

    def questions(self, split: str) -> Iterable[Question]:
        if split not in _FIRST:
            raise DataError(
                f"Seeds has no split {split!r}; it has train and val. Set data.train_split and "
                "data.val_split to one of them, or leave them out."
            )
        first, count = _FIRST[split], self.count if split == "train" else self.val_count
        seeds = range(first, first + count)
        return [Question(f"seed {n}", self.text, metadata={"seed": n}) for n in seeds]
