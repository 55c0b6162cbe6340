"""A question, and the rule that decides which answers to it are the same. The default is
SQuAD's."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from turnrl.plugin.errors import DataError, RecipeError, check_instance, suggest_name
from turnrl.plugin.hooks import collect_components, contract
from turnrl.plugin.text import find_contained_answer, is_blank, normalize_answer


@contract("turnrl_answers")
class AnswerRule(ABC):
    """Decides whether two answers are equivalent. Extend it, or give `data.answers` a function of
    two texts.

    Attributes:
        seeks: True if an accepted answer can be looked for in the results of tools (`occurs_in`).
            Otherwise no reward pays for finding one.
        unreadable: For messages, a description of the accepted answers that `read` cannot read.
        goes_by: For messages, a description of the values of `data.answers` that mean this rule;
            if empty, the name of the class in lower case.
    """

    seeks: ClassVar[bool] = False
    unreadable: ClassVar[str] = "an empty answer"
    goes_by: ClassVar[str] = ""

    @abstractmethod
    def read(self, text: str) -> Hashable | None:
        """The answer as a value to compare; None if the text is not such an answer. Never
        raises."""

    def same(self, given: str, accepted: str) -> bool:
        """True if the given answer says the same as the accepted one."""
        read = self.read(given)
        return read is not None and read == self.read(accepted)

    def occurs_in(self, text: str, accepted: str) -> bool:
        """True if the accepted answer occurs in the text."""
        return False

    @classmethod
    def named(cls, given: object) -> AnswerRule | None:
        """The rule of this class that a value of `data.answers` means; None if it means another. By
        default a rule goes by the name of its class, in upper or lower case.

        Raises:
            RecipeError: If it means a rule of this class that cannot be made.
        """
        return cls() if str(given).lower() == cls.__name__.lower() else None

    @classmethod
    def advice(cls, questions: Sequence[Question]) -> str | None:
        """Advice to set this rule, for questions whose recipe sets no rule; None (the default) if
        nothing speaks for it."""
        return None


# not final: for jsonargparse, a final class has no `class_path`
@dataclass(frozen=True)
class Phrase(AnswerRule):
    """Words, compared after SQuAD's normalisation (Rajpurkar et al. 2016, arXiv 1606.05250): lower
    case, no punctuation, no articles, single spaces. An answer of which nothing is left is never
    right.

    A decimal point and a minus sign count as punctuation, so 1.5 reads as 15.
    """

    seeks: ClassVar[bool] = True
    unreadable: ClassVar[str] = "an answer of articles and punctuation"

    def read(self, text: str) -> str | None:
        words = normalize_answer(text)
        return None if is_blank(words) else words

    def occurs_in(self, text: str, accepted: str) -> bool:
        return find_contained_answer(text, [accepted]) is not None


def answer_rule(
    given: AnswerRule | Callable[[str, str], bool] | str, setting: str = "data.answers"
) -> AnswerRule:
    """The rule that a value of `data.answers` means.

    Args:
        given: A rule, or a value that stands for a rule of an installed package: the name of its
            class, such as `phrase`, or whatever else the class takes.
        setting: The setting or option that gives it, for messages.
    Raises:
        RecipeError: If there is no such rule.
    """
    if isinstance(given, type) and issubclass(given, AnswerRule):
        check_instance(AnswerRule, "answers", given)
    if isinstance(given, AnswerRule):
        return given
    rules: list[type[AnswerRule]] = collect_components("turnrl_answers")
    if named := next(filter(None, (rule.named(given) for rule in rules)), None):
        return named
    names = [rule.goes_by or rule.__name__.lower() for rule in rules]
    near = suggest_name(str(given), names)
    choices = f"There are {', '.join(names)}"
    raise RecipeError(f"{setting} is {given!r}, which is not a rule.{near} {choices}.")


_PHRASE = Phrase()


def _copied(columns: Mapping[str, Any]) -> dict[str, Any]:
    copies = dict(columns)
    for name, value in columns.items():
        if not isinstance(value, str | int | float | None):
            with contextlib.suppress(Exception):  # whatever a value raises that cannot be copied
                copies[name] = copy.deepcopy(value)
    return copies


class _Unknown(tuple[str, ...]):
    """No answers, because none are known."""


@dataclass(frozen=True)
class Question:
    """A question and every answer that counts as right.

    Args:
        id: Unique within its data set.
        text: The question itself.
        answers: Accepted answers, the preferred one first; a single text means a single answer.
            Leave them out if none are known: the question can still be asked, but no answer to it
            is right.
        metadata: Whatever else the data set says about it. For rows, every other column that is not
            null, mappings and lists included. The policy never sees it, and the record does not
            keep it.
        rule: How its answers compare; a name or a function stands for the rule that `answer_rule`
            makes of it.
        system: A system message of its own, placed before the segmenter's instructions; empty for
            none.
        row: The columns that are not metadata, as the data have them: those of the id, the question
            and the answers, and nulls.
        is_chat: True if the data ask it as chat messages, and not as a text.
    Raises:
        DataError: If the id, the question or the system message is not text, or if the answers
            that are given are not texts or are empty.
        RecipeError: If there is no such rule.
    """

    id: str
    text: str
    answers: tuple[str, ...] = _Unknown()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rule: AnswerRule = _PHRASE
    system: str = ""
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    is_chat: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, part in (("id", self.id), ("text", self.text), ("system", self.system)):
            if not isinstance(part, str):
                kind = f"the {type(part).__name__} {part!r:.60}"
                raise DataError(f"the {name} of question {self.id!r} is {kind}. Give a text.")
        answers: object = self.answers
        if isinstance(answers, str):
            object.__setattr__(self, "answers", (answers,))
        elif isinstance(answers, list):
            object.__setattr__(self, "answers", tuple(answers))
        texts = isinstance(self.answers, tuple) and all(isinstance(a, str) for a in self.answers)
        if not texts or (not self.answers and not isinstance(answers, _Unknown)):
            raise DataError(
                f"question {self.id!r} has the answers {answers!r}. Give a text or a tuple of "
                "texts, or leave answers out if none are known."
            )
        object.__setattr__(self, "rule", answer_rule(self.rule))

    def copied(self) -> Question:
        """A question of the same content for one attempt, whose tools and rewards may change its
        columns. Columns that cannot be copied, such as a connection, stay shared."""
        return replace(self, metadata=_copied(self.metadata), row=_copied(self.row))

    @property
    def columns(self) -> dict[str, Any]:
        """The data by column: `id`, `question`, `answers` as a list, and every other column that is
        not null by its own name, including those that `fields` names."""
        own = {name: value for name, value in self.row.items() if value is not None}
        read = {"id": self.id, "question": self.text, "answers": [*self.answers]}
        return {**own, **read, **self.metadata}
