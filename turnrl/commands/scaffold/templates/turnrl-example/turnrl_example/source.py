"""A source: questions, and the answers that count."""

from collections.abc import Iterable
from typing import final

from turnrl import DataError, Question, QuestionSource
from turnrl_example.facts import FACTS, countries

SPLITS = ("train", "val")


@final
class ExampleQuestions(QuestionSource):
    """Capitals and continents; `val` asks about countries that `train` never mentions."""

    def questions(self, split: str) -> Iterable[Question]:
        # A list, because a generator would raise only when somebody begins to read it. The order
        # is always the order of the file; a run shuffles by its own seed.
        if split not in SPLITS:
            what = f"{type(self).__name__} has no split {split!r}; it has {', '.join(SPLITS)}"
            raise DataError(f"{what}. Set data.train_split and data.val_split to one of them.")
        return [
            Question(f"{name}-{fact}", f"What is the {fact} of {name}?", (row[fact],))
            for name, row in countries().items()
            if row["split"] == split
            for fact in FACTS
        ]
