"""The questions of each iteration and evaluation. An iteration's questions are a pure function of
(seed, iteration); an evaluation asks the same questions for every seed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import random
import warnings
from collections import UserList
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout
from turnrl.data.fields import Fields
from turnrl.data.sources import Role, Source, load_questions, open_source
from turnrl.plugin.errors import DataError, RecipeError, check_at_least, check_instance
from turnrl.plugin.hooks import collect_components
from turnrl.training.loader import IterationData
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import AnswerRule, Question, answer_rule
from turnrl.watch.trainer import announce

_logger = logging.getLogger(__name__)

_SELECTION_SEED = 2505_11821
"""Fixed, so that a limit means the same questions in every run and under every seed."""


@functools.lru_cache(maxsize=4)
def _shuffle(size: int, seed: int | str) -> tuple[int, ...]:
    """The first `size` numbers in a fixed order."""
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


@contextlib.contextmanager
def _naming(setting: str) -> Iterator[None]:
    """A block that reads questions. What is wrong with their source begins with the setting."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{setting}: {error}") from error


def _limit_questions(questions: list[Question], limit: int | None) -> list[Question]:
    """A fixed choice of `limit` questions, in order. A greater limit only adds questions."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i] for i in sorted(_shuffle(len(questions), _SELECTION_SEED)[:limit])]


@final
class QuestionData(IterationData):
    """The questions to train on and to evaluate with.

    A source is a local .jsonl, .json, .parquet or .csv file; a folder that a
    `datasets.Dataset` was saved to; a preset (triviaqa, nq_open, hotpotqa, 2wikimultihopqa,
    musique, popqa, bamboogle, gsm8k); the data set of an installed package, by its class, with
    `init_args` if it has settings; the name of a data set on the Hugging Face hub, owner/name; or
    the questions themselves; or a function that returns or yields rows or questions, by its dotted
    path, such as `my_module.questions`. From Python it may also be a `datasets.Dataset`, a
    `DatasetDict`, or rows as a list of mappings.

    Columns that `fields` does not name become `question.metadata`, for tools and rewards: texts,
    numbers, lists and mappings, as the row has them. Null is left out, and so are the pages and
    paragraphs of the presets.

    Args:
        train: Source of the questions to train on.
        val: Source of the questions to evaluate with; none by default.
        train_split: Split of `train`; the source's own by default.
        val_split: Split of `val`; the source's own by default.
        fields: The fields of id, question and answers in the rows of files and hub data sets.
        config: Configuration of hub data sets.
        answers: How answers compare, everywhere: `phrase`, SQuAD's rule; `number`; `choice`, the
            letter of an option; `math`, expressions; or the path of a function of the given and an
            accepted answer. With settings: `{class_path: Number, init_args: {tolerance: 0.01}}`.
            Null leaves it to the question set, whose default is `phrase`.
        questions_per_iteration: Questions that one policy iteration asks, over all processes.
        train_limit: Train on a fixed choice of at most this many questions.
        val_limit: Evaluate with a fixed choice of at most this many questions, for every seed.
        val_batch_size: Number of questions that are evaluated together.
        seed: Seed of the order of the training questions.
    """

    def __init__(
        self,
        train: QuestionSource | str | list[Question] | Callable[..., Any] | None = None,
        val: QuestionSource | str | list[Question] | Callable[..., Any] | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        fields: Fields | None = None,
        config: str | None = None,
        answers: AnswerRule | Callable[[str, str], bool] | str | None = None,
        questions_per_iteration: int = 16,
        train_limit: int | None = None,
        val_limit: int | None = 500,
        val_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, source, split in (("train", train, train_split), ("val", val, val_split)):
            if split is not None and source is None:
                raise RecipeError(f"data.{name}_split is {split!r}, but data.{name} is not set.")
        self.sources: dict[Role, Source | None] = {"train": train, "val": val}
        self.splits: dict[Role, str | None] = {"train": train_split, "val": val_split}
        if fields is not None:
            check_instance(Fields, "fields", fields)
        self.fields = fields
        self.config = config
        self.rule = None if answers is None else answer_rule(answers)
        self.questions_per_iteration = questions_per_iteration
        self.train_limit = train_limit
        self.val_limit = val_limit
        self.val_batch_size = val_batch_size
        counts = ("questions_per_iteration", "val_batch_size")
        check_at_least(1, "data.", self, *counts, whole=True, optional=False)
        check_at_least(1, "data.", self, "train_limit", "val_limit", whole=True)
        self.seed = seed
        self.split = "val"
        """Split that `val_dataloader` evaluates: `val`, `train`, or another of the `val` source."""
        self._opened = functools.cache(self._open)
        self._loaded = functools.cache(self._load)
        self._kept: dict[tuple[Role, str | None], list[Question]] = {}
        self._asked_by: tuple[Rollout, ChatFormat] | None = None
        self._advised = False

    def setup(self, stage: str | None = None) -> None:
        """Load the questions that a stage needs, so that a mistake in a source shows at once."""
        announce(self.trainer, "reading the questions")
        opened = [self._opened(role) for role, name in self.sources.items() if name is not None]
        self._refuse_unused(opened)
        if stage in (None, "fit"):
            self._questions("train")
        if stage != "fit" or self.sources["val"] is not None:
            self.eval_questions()
        if self.sources["train"] is not None:  # only then are `fields` about these sources alone
            self._refuse_unused(opened)  # again: only now is it known what a function returns

    def leave_out_overlong(self, rollout: Rollout, chat: ChatFormat) -> None:
        """Leave out the questions whose prompts leave no room for a turn. A warning counts them.

        Args:
            rollout: How the questions are asked.
            chat: The policy's chat format.
        Raises:
            DataError: If no question is left of a split.
        """
        self._asked_by = rollout, chat
        before, self._kept = self._kept, {}
        for role, split in before:
            self._questions(role, split)

    def loaded_questions(self) -> Iterator[list[Question]]:
        """The questions of each split that has been read: those that a run may ask."""
        for (role, _), questions in self._kept.items():
            yield _limit_questions(questions, None if role == "train" else self.val_limit)

    def _refuse_unused(self, opened: list[QuestionSource]) -> None:
        for option in ("fields", "config"):
            unused = not any(option in source.uses for source in opened)
            if getattr(self, option) is not None and unused:
                raise RecipeError(f"data.{option} is set, but no source uses it. Leave it out.")

    def iteration_questions(self, iteration: int, rank: int, world_size: int) -> list[Question]:
        """The questions that one process asks in one iteration.

        The training questions are asked in one seeded permutation after another, so each question
        is asked once before any is asked again. The processes divide an iteration's questions.

        Raises:
            RecipeError: If `questions_per_iteration` cannot be divided among the processes.
        """
        if self.questions_per_iteration % world_size:
            raise RecipeError(
                f"data.questions_per_iteration {self.questions_per_iteration} cannot be shared by "
                f"{world_size} processes. Set it to a multiple of {world_size}."
            )
        questions = self._questions("train")
        share = self.questions_per_iteration // world_size
        first = iteration * self.questions_per_iteration + rank * share
        size = len(questions)
        places = (divmod(position, size) for position in range(first, first + share))
        return [questions[self._order(number)[i]] for number, i in places]

    def passes(self, first: int) -> Iterator[Question]:
        """The training questions without end, one seeded permutation after another.

        Args:
            first: Number of the first permutation. A run begins with 0.
        """
        questions = self._questions("train")
        for number in itertools.count(first):
            yield from (questions[i] for i in self._order(number))

    def _order(self, number: int) -> tuple[int, ...]:
        """A permutation of the training questions."""
        return _shuffle(len(self._questions("train")), f"{self.seed}/{number}")

    def eval_questions(self, split: str | None = None) -> list[Question]:
        """The questions to evaluate with, the same every time: at most `val_limit`.

        Args:
            split: `val`, `train`, or another split of the `val` source; `self.split` if None.
        """
        split = split or self.split
        role: Role = "train" if split == "train" else "val"
        return _limit_questions(
            self._questions(role, None if split == role else split), self.val_limit
        )

    def val_dataloader(self) -> Iterable[list[Question]]:
        """Batches of the questions to evaluate with; none without a source.

        Each process gets every `ranks`-th question. No question is repeated, unlike with a padded
        sampler. All processes get equally many batches, because they score each batch together;
        some batches may be empty.
        """
        if self.sources["val"] is None and self.split == "val":
            # Lightning warns, in case this is a mistake
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        run = self.trainer
        rank, ranks = (run.global_rank, run.world_size) if run is not None else (0, 1)
        questions, size = self.eval_questions(), self.val_batch_size
        own, longest = questions[rank::ranks], len(questions[::ranks])
        # Lightning takes a plain list for several loaders, and warns about a torch loader's workers
        return UserList(own[i : i + size] for i in range(0, longest, size))

    def _open(self, role: Role) -> QuestionSource:
        name = self.sources[role]
        if name is None:
            raise DataError(f"data.{role} is not set. Name a file, a preset or a data set.")
        with _naming(f"data.{role}"):
            return open_source(name, self.fields, self.config)

    def _questions(self, role: Role, split: str | None = None) -> list[Question]:
        """The questions of a split; once it is known how they are asked, those with room."""
        if (role, split) not in self._kept:
            questions, fault = self._loaded(role, split), ""
            if self._asked_by is not None:
                rollout, chat = self._asked_by
                questions, fault = rollout.questions_with_room(questions, chat)
            if fault:
                line = f"data.{role}: left out {fault}. Raise max_tokens to ask them"
                if not questions:
                    raise DataError(f"{line}, or name other questions.")
                _logger.warning(f"{line}.")
            self._kept[role, split] = questions
        return self._kept[role, split]

    def _load(self, role: Role, split: str | None = None) -> list[Question]:
        chosen = split or self.splits[role]
        source = self.sources[role]
        name = str(source) if isinstance(source, str | os.PathLike) else ""
        opened = self._opened(role)
        with _naming(f"data.{role}"):
            questions = load_questions(opened, chosen, role=role, rule=self.rule, name=name)
        if self.rule is None and not self._advised:
            advice = (rule.advice(questions) for rule in collect_components("turnrl_answers"))
            if line := next(filter(None, advice), None):
                self._advised = True
                _logger.warning(line)
        return _limit_questions(questions, self.train_limit if role == "train" else None)
