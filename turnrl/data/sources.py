"""Sources: the questions of a data set, whoever brings it; see `load_questions`."""

import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

from turnrl.answers import usable_answers
from turnrl.errors import DataError, did_you_mean
from turnrl.plugins import contributed, find_class, installed
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import AnswerRule, Question

_logger = logging.getLogger(__name__)

NAMED_BY: ContextVar[tuple[str, ...]] = ContextVar("NAMED_BY", default=("data.train", "data.val"))
"""The settings or options that may have named a data set, for messages."""

Role = Literal["train", "val"]
Source: TypeAlias = str | QuestionSource | Sequence[Question] | Any
"""A name as a recipe has it, an opened source, the questions themselves, or rows that an installed
package makes questions of."""


@dataclass(frozen=True)
class Fields:
    """Where the rows of a file or hub data set keep what turnrl needs.

    A dotted path such as `answer.aliases` reaches into nested fields.

    Args:
        id: Field of the question's id; null numbers the rows, and so does `id` if no row has it.
        question: Field of the question's text.
        answers: Field, or fields, of accepted answers: a text, a list, or a list in a text.
        answer_pattern: Regular expression that finds the answer within such a text: its first
            group, or all of it. GSM8K's answers end with `#### 42`, which is `'#### (.*)'`; in YAML
            it needs the quotes. By default the whole text is the answer.
    Raises:
        DataError: If the pattern is no regular expression.
    """

    id: str | None = "id"
    question: str = "question"
    answers: str | list[str] = "answers"
    answer_pattern: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except (re.error, TypeError) as error:
            what = f"data.fields.answer_pattern {self.answer_pattern!r} is no regular expression"
            raise DataError(f"{what}: {error}. Fix it; '#### (.*)' is one.") from error


class SourceOpener(Protocol):
    """Opens data sets by a name that is no class's, a file say, or what they are in memory.

    Attributes:
        names: Names it is sure to know, offered where another was meant.
        takes: What it takes, for messages: `a file (.jsonl, ...)`.
    """

    names: Sequence[str]
    takes: str

    def __call__(
        self, name: Any, fields: Fields | None, config: str | None
    ) -> QuestionSource | None:
        """The data set of a name, or None if the name is not of its kind.

        Args:
            name: As the recipe has it; or, from Python, an object that is neither a source nor a
                list of questions, a `datasets.Dataset` say.
            fields: Where rows keep what is needed, if the recipe says.
            config: A configuration of the data set, if the recipe names one.
        Raises:
            DataError: If the name is of its kind and there is no such data set.
        """


class GivenQuestions(QuestionSource):
    """Questions that are there already: one split without a name."""

    default_splits = {"train": "", "val": ""}

    def __init__(self, questions: Sequence[Question]) -> None:
        self._given = questions

    def questions(self, split: str) -> Iterable[Question]:
        if split:
            raise DataError(f"a list of questions has no splits; leave out the split {split!r}")
        return self._given


def load_questions(
    source: Source,
    split: str | None = None,
    fields: Fields | None = None,
    config: str | None = None,
    role: Role = "val",
    rule: AnswerRule | None = None,
    name: str = "",
) -> list[Question]:
    """All usable questions of a source, in its own order.

    Answers that the rule cannot read are dropped, and so are questions without any answer left and
    repetitions; a warning counts them with the reasons. Questions that share an id get suffixes,
    `7` and `7#2`, and a warning says how many do.

    Args:
        source: What `open_source` takes.
        split: The split to load; by default the one that the source has for `role`. A file is one
            split.
        fields: Where rows keep what is needed, for files and the hub.
        config: The configuration on the hub.
        role: What the questions are for, where `split` is not given.
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
        what = f"{name!r} has no split to train on, only {opened.default_splits['val']!r}"
        advice = "Set data.train to another source, or data.train_split to what it has."
        raise DataError(f"{what}. {advice}")
    return _usable(opened.questions(chosen), f"{name} ({chosen})" if chosen else name, rule)


def open_source(
    name: Source, fields: Fields | None = None, config: str | None = None
) -> QuestionSource:
    """The data set that a recipe names.

    Args:
        name: An opened source, questions, a data set in memory that an installed package opens, or
            a name: in this order, the class of an installed package; whatever an installed package
            opens (a file; `triviaqa` and its like; the name of a data set on the hub,
            `owner/name`); the dotted path of any `QuestionSource`.
        fields: Where rows keep what is needed.
        config: A configuration of the data set.
    Raises:
        DataError: If there is none of that name.
    """
    if isinstance(name, QuestionSource):
        return name
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if isinstance(name, type):
        call = f"{name.__name__}(...)"
        raise DataError(f"the class {name.__name__} is no data set. Pass an instance: {call}.")
    several: Any = name if isinstance(name, Sequence) and not isinstance(name, str) else [name]
    if all(isinstance(one, Question) for one in several):
        return GivenQuestions(several)
    classes = installed("turnrl_datasets")
    ours = isinstance(name, str) and name in classes
    openers: list[SourceOpener] = [] if ours else contributed("turnrl_openers")
    for opener in openers:
        if source := opener(name, fields, config):
            return source
    if not isinstance(name, str):
        can = "Give a path, questions, rows as mappings, a datasets.Dataset, or a name"
        raise DataError(f"a {type(name).__name__} is no data set: {name!r:.60}. {can}.")
    if name not in classes and ("." not in name or "/" in name):
        known = [*classes, *(n for opener in openers for n in opener.names)]
        there = f"{', '.join(known)}. Or name {' or '.join(opener.takes for opener in openers)}"
        raise DataError(f"no data set {name!r}.{did_you_mean(name, known)} Known names: {there}.")
    try:
        cls = find_class(name, classes, QuestionSource)
    except LookupError as error:
        raise DataError(f"{' or '.join(NAMED_BY.get())} names {name!r}, {error}") from error
    return cls()  # type: ignore[no-any-return]


def _usable(questions: Iterable[Question], where: str, rule: AnswerRule | None) -> list[Question]:
    """Questions with a text and an answer that can be compared, each once, with their own ids."""
    kept: list[Question] = []
    seen: dict[str, list[str]] = {}
    names: set[str] = set()
    left_out = Counter[str]()
    for question in questions:
        if rule is not None:
            question = replace(question, rule=rule)
        answers = tuple(dict.fromkeys(usable_answers(question)))
        texts = seen.setdefault(question.id, [])
        if not question.text:
            left_out["without a question"] += 1
        elif not question.answers:
            left_out["without an answer"] += 1
        elif not answers:
            left_out[f"with {question.rule.unreadable}"] += 1
        elif question.text in texts:
            left_out["repeated"] += 1
        else:
            texts.append(question.text)
            numbers = itertools.count(len(texts))
            free = (question.id if n == 1 else f"{question.id}#{n}" for n in numbers)
            names.add(name := next(name for name in free if name not in names))
            kept.append(replace(question, id=name, answers=answers))
    total = len(kept) + left_out.total()
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not kept:
        why_none, step = "it is empty", "Name another source."
        if total:
            why_none = f"none of its {total} rows can be used ({why})"
            step = "Check data.fields and data.answers, or name another source."
        raise DataError(f"{where} has no usable question: {why_none}. {step}")
    if shared := [name for name, texts in seen.items() if len(texts) > 1]:
        count = sum(len(seen[name]) for name in shared)
        warning = (
            "%s: %d questions share an id with another, such as %r; ids with numbers (%r) are made "
        )
        warning += "of them. Give each question an id of its own, or see data.fields.id."
        _logger.warning(warning, where, count, shared[0], f"{shared[0]}#2")
    if left_out:
        left = total - len(kept)
        _logger.warning("%s: left out %d of %d rows (%s)", where, left, total, why)
    return kept
