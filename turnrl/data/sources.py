"""Sources: the questions of a data set, from any package; see `load_questions`."""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

from turnrl.data.fields import Fields
from turnrl.data.files import FILE_KINDS
from turnrl.data.known import PRESETS, open_known
from turnrl.plugin.errors import DataError, suggest_name
from turnrl.plugin.hooks import find_class, load_class, load_classes
from turnrl.rewards.answers import usable_answers
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import AnswerRule, Question

_logger = logging.getLogger(__name__)

Role = Literal["train", "val"]
Source: TypeAlias = str | QuestionSource | Sequence[Question] | Any
"""A name in a recipe, an opened source, a list of questions, or rows that a package turns into
questions."""


class GivenQuestions(QuestionSource):
    """A list of questions, which is one split without a name."""

    default_splits = {"train": "", "val": ""}

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions

    def questions(self, split: str) -> Iterable[Question]:
        if split:
            raise DataError(f"a list of questions has no splits; leave out the split {split!r}")
        return self._questions


def load_questions(
    source: Source,
    split: str | None = None,
    fields: Fields | None = None,
    config: str | None = None,
    role: Role = "val",
    rule: AnswerRule | None = None,
    name: str = "",
) -> list[Question]:
    """Load all usable questions of a source, in its own order.

    Answers that the rule cannot read are dropped. So are questions without any answer left, and
    repeated questions; a warning counts them by reason. Questions that share an id get suffixes,
    `7` and `7#2`, and a warning counts them.

    Args:
        source: As `open_source` takes it.
        split: The split to load; by default the source's own for `role`. A file is one split.
        fields: The fields of id, question and answers in the rows of files and the hub.
        config: The configuration on the hub.
        role: Chooses the split, if `split` is None.
        rule: How answers compare; None leaves it to the questions themselves.
        name: The source's name in messages.
    Raises:
        DataError: If the source or split does not exist, lacks a field, or has no usable question.
    """
    opened = open_source(source, fields, config)
    text = isinstance(source, str | os.PathLike)
    name = name or (str(source) if text else type(opened).__name__)
    chosen = opened.default_splits[role] if split is None else split
    if chosen is None:
        raise DataError(
            f"{name!r} has no split to train on, only {opened.default_splits['val']!r}. "
            "Set data.train to another source, or data.train_split to what it has."
        )
    where = f"{name} ({chosen})" if chosen else name
    usable = _drop_unusable(opened.questions(chosen), where, rule, opened.needs_answers)
    if fields is not None and "fields" not in opened.uses:
        raise DataError(f"{where} takes no fields here: they would have no effect. Leave them out.")
    return usable


def open_source(
    name: Source, fields: Fields | None = None, config: str | None = None
) -> QuestionSource:
    """Open the data set that a recipe names.

    Args:
        name: An opened source, questions, a data set of `datasets`, rows, a function, or
            a name. A name is tried in this order: the class of an installed package; a file, a
            known name such as `triviaqa`, a data set on the hub, `owner/name`; the dotted path of a
            function or of any `QuestionSource`.
        fields: The fields of id, question and answers in the rows.
        config: A configuration of the data set.
    Raises:
        DataError: If there is no such data set.
    """
    if isinstance(name, QuestionSource):
        return name
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    several: Any = name if isinstance(name, Sequence) and not isinstance(name, str) else [name]
    if all(isinstance(item, Question) for item in several):
        return GivenQuestions(several)
    if isinstance(name, str) and (own := load_class("turnrl_datasets", name)):
        return cast(QuestionSource, own())
    if source := open_known(name, fields, config):
        return source
    if not isinstance(name, str):
        raise DataError(
            f"a {type(name).__name__} is not a data set: {name!r:.60}. Give a path, an instance of "
            "a source, questions, rows as mappings, a datasets.Dataset, or a name."
        )
    classes = load_classes("turnrl_datasets")
    if "." not in name or "/" in name:
        listed = [*classes, *PRESETS]
        raise DataError(
            f"no data set {name!r}.{suggest_name(name, listed)} Known names: {', '.join(listed)}. "
            f"Or name a file ({', '.join(FILE_KINDS)}), a folder of save_to_disk, or a data set on "
            "the hub, 'owner/name'."
        )
    try:
        cls = find_class(name, classes, QuestionSource)
    except LookupError as error:
        raise DataError(f"the source of questions is {name!r}, {error}") from error
    return cls()  # type: ignore[no-any-return]


def _drop_unusable(
    questions: Iterable[Question], where: str, rule: AnswerRule | None, needs_answers: bool
) -> list[Question]:
    """The questions that have a text and, if needed, an answer that can be compared. Repeated ones
    are left out, and each gets a unique id."""
    kept: list[Question] = []
    seen: dict[str, list[str]] = {}
    taken: set[str] = set()
    left_out = Counter[str]()
    for question in questions:
        if rule is not None:
            question = replace(question, rule=rule)
        answers = tuple(dict.fromkeys(usable_answers(question)))
        texts = seen.setdefault(question.id, [])
        if not question.text:
            left_out["without a question"] += 1
        elif not question.answers and needs_answers:
            left_out["without an answer"] += 1
        elif question.answers and not answers:
            left_out[f"with {question.rule.unreadable}"] += 1
        elif question.text in texts:
            left_out["repeated"] += 1
        else:
            texts.append(question.text)
            numbers = itertools.count(len(texts))
            free = (question.id if n == 1 else f"{question.id}#{n}" for n in numbers)
            taken.add(name := next(name for name in free if name not in taken))
            kept.append(replace(question, id=name, answers=answers or question.answers))
    total = len(kept) + left_out.total()
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not kept:
        if not total:
            raise DataError(f"{where} has no usable question: it is empty. Name another source.")
        raise DataError(
            f"{where} has no usable question: none of its {total} rows can be used ({why}). "
            "Check data.fields and data.answers, or name another source."
        )
    if shared := [name for name, texts in seen.items() if len(texts) > 1]:
        count = sum(len(seen[name]) for name in shared)
        _logger.warning(
            f"{where}: {count} questions share an id with another, such as {shared[0]!r}; ids with "
            f"numbers ('{shared[0]}#2') replace them. Give each question its own id."
        )
    if left_out:
        _logger.warning(f"{where}: left out {left_out.total()} of {total} rows ({why})")
    return kept
