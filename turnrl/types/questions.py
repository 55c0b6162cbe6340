"""A question, and which answers to it are the same: the rule that it carries, and SQuAD's, the
default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnrl.errors import DataError, RecipeError, did_you_mean, instance_of
from turnrl.plugins import contract, contributed
from turnrl.text import contained_answer, normalize_answer


@contract("turnrl_answers")
class AnswerRule(ABC):
    """Says which answers are the same. Extend it, or give `data.answers` a function of two texts.

    Attributes:
        seeks: Whether an accepted answer can be looked for in the results of tools (`stands_in`).
            Without it nothing is paid for finding one.
        unreadable: An accepted answer of which `read` makes nothing, in words, for messages.
        goes_by: What `data.answers` takes for it, in words, for messages; the name of the class in
            lower case if empty.
    """

    seeks: ClassVar[bool] = False
    unreadable: ClassVar[str] = "an empty answer"
    goes_by: ClassVar[str] = ""

    @abstractmethod
    def read(self, text: str) -> Hashable | None:
        """An answer as something to compare; None if it is none of the kind. Total."""

    def same(self, given: str, accepted: str) -> bool:
        """True if a given answer says what an accepted one says."""
        read = self.read(given)
        return read is not None and read == self.read(accepted)

    def stands_in(self, text: str, accepted: str) -> bool:
        """True if an accepted answer stands somewhere in a text."""
        return False

    @classmethod
    def named(cls, given: object) -> AnswerRule | None:
        """The rule that `data.answers` means; None if it means none of this class. By default a
        rule goes by the name of its class, in any case.

        Raises:
            RecipeError: If it means one that cannot be made.
        """
        return cls() if str(given).lower() == cls.__name__.lower() else None

    @classmethod
    def advice(cls, questions: Sequence[Question]) -> str | None:
        """Advice to set this rule, for questions whose recipe sets none; None (the default) if
        nothing speaks for it."""
        return None


# it is not final: to jsonargparse a final class has no `class_path`
@dataclass(frozen=True)
class Phrase(AnswerRule):
    """Words, compared after SQuAD's normalisation (Rajpurkar et al. 2016, arXiv 1606.05250): lower
    case, no punctuation, no articles, single spaces. An answer of which that leaves nothing is
    never right.

    It takes a point and a minus for punctuation: 1.5 is 15 to it.
    """

    seeks: ClassVar[bool] = True
    unreadable: ClassVar[str] = "an answer of articles and punctuation"

    def read(self, text: str) -> str | None:
        return normalize_answer(text) or None

    def stands_in(self, text: str, accepted: str) -> bool:
        return contained_answer(text, [accepted]) is not None


def answer_rule(
    given: AnswerRule | Callable[[str, str], bool] | str, setting: str = "data.answers"
) -> AnswerRule:
    """The rule that `data.answers` gives.

    Args:
        given: A rule, or what stands for one of an installed package: the name of its class, such
            as `phrase`, or whatever else the class takes.
        setting: The setting or option that gives it, for messages.
    Raises:
        RecipeError: If there is none of that name.
    """
    if isinstance(given, type) and issubclass(given, AnswerRule):
        instance_of(AnswerRule, "answers", given)
    if isinstance(given, AnswerRule):
        return given
    rules: list[type[AnswerRule]] = contributed("turnrl_answers")
    if named := next(filter(None, (rule.named(given) for rule in rules)), None):
        return named
    known = [rule.goes_by or rule.__name__.lower() for rule in rules]
    near = did_you_mean(str(given), known)
    there = f"There are {', '.join(known)}"
    raise RecipeError(f"{setting} is {given!r}, which is not a rule.{near} {there}.")


_PHRASE = Phrase()


class _Unknown(tuple[str, ...]):
    """No answers, because none are known."""


@dataclass(frozen=True)
class Question:
    """A question and every answer that counts as right.

    Args:
        id: Unique within its data set.
        text: The question itself.
        answers: Accepted answers, the preferred one first; a text is the only one. Left out where
            none are known: such a question can be asked, and no answer to it is right.
        metadata: Whatever else the data set says about it: of rows every other column that is not
            null, mappings and lists too. The policy never sees it, and the record does not keep it.
        rule: How its answers compare; a name or a function stands for what `answer_rule` makes of
            it.
        system: A system message of its own, which stands in front of the segmenter's instructions;
            empty for none.
        row: The columns that are not metadata, as the data have them: those of the id, the question
            and the answers, and nulls.
    Raises:
        DataError: If the id, the question or the system message is not text, the answers are not
            texts, or there are none in what is given.
        RecipeError: If there is no such rule.
    """

    id: str
    text: str
    answers: tuple[str, ...] = _Unknown()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rule: AnswerRule = _PHRASE
    system: str = ""
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, part in (("id", self.id), ("text", self.text), ("system", self.system)):
            if not isinstance(part, str):
                kind = f"the {type(part).__name__} {part!r:.60}"
                raise DataError(f"the {name} of question {self.id!r} is {kind}. Give a text.")
        given: object = self.answers
        if isinstance(given, str):
            object.__setattr__(self, "answers", (given,))
        elif isinstance(given, list):
            object.__setattr__(self, "answers", tuple(given))
        texts = isinstance(self.answers, tuple) and all(isinstance(a, str) for a in self.answers)
        if not texts or (not self.answers and not isinstance(given, _Unknown)):
            raise DataError(
                f"question {self.id!r} has the answers {given!r}. Give a text or a tuple of texts, "
                "or leave answers out if none are known."
            )
        object.__setattr__(self, "rule", answer_rule(self.rule))

    @property
    def columns(self) -> dict[str, Any]:
        """What the data say, by column: `id`, `question`, `answers` as a list, and every other
        column that is not null by its own name, those behind `fields` too."""
        own = {name: value for name, value in self.row.items() if value is not None}
        read = {"id": self.id, "question": self.text, "answers": [*self.answers]}
        return {**own, **read, **self.metadata}
