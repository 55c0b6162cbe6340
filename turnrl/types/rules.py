"""Which answers are the same: the rule that a question carries, and SQuAD's, the default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from turnrl.errors import RecipeError, did_you_mean
from turnrl.plugins import contract, contributed
from turnrl.text import contained_answer, normalize_answer

if TYPE_CHECKING:
    from turnrl.types.trajectory import Question


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


def answer_rule(given: AnswerRule | Callable[[str, str], bool] | str) -> AnswerRule:
    """The rule that `data.answers` gives.

    Args:
        given: A rule, or what stands for one of an installed package: the name of its class, such
            as `phrase`, or whatever else the class takes.
    Raises:
        RecipeError: If there is none of that name.
    """
    if isinstance(given, AnswerRule):
        return given
    rules: list[type[AnswerRule]] = contributed("turnrl_answers")
    if named := next(filter(None, (rule.named(given) for rule in rules)), None):
        return named
    known = [rule.goes_by or rule.__name__.lower() for rule in rules]
    near = did_you_mean(str(given), known)
    there = f"There are {', '.join(known)}"
    raise RecipeError(f"data.answers is {given!r}, which is no rule.{near} {there}.")
