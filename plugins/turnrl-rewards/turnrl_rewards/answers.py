"""Rules that compare answers, besides SQuAD's phrases: `data.answers` of a recipe.

Number      numbers, within a tolerance
Choice      the letter of an option
Math        expressions, compared by the package `math-verify`
Compared    your own function
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast
from unicodedata import category, normalize

from turnrl import AnswerRule, Question, RecipeError
from turnrl.plugin.errors import PluginError, check_at_least
from turnrl.plugin.hooks import import_object
from turnrl.types import Phrase

if TYPE_CHECKING:
    from fractions import Fraction

# patterns are strings, compiled on first use, because every command imports this module


class _Kind(AnswerRule):
    """A rule that recognises accepted answers of its kind.

    Attributes:
        pattern: Matches an accepted answer of this kind.
        as_phrases: The kind, and the effect of comparing such answers as phrases, for messages.
    """

    pattern: ClassVar[str]
    as_phrases: ClassVar[str]

    @classmethod
    def advice(cls, questions: Sequence[Question]) -> str | None:
        """Advice to set this rule if most questions have answers of its kind, and no rule."""
        phrases = [q.answers for q in questions if q.answers and isinstance(q.rule, Phrase)]
        kind = re.compile(cls.pattern, re.DOTALL)
        count = sum(all(kind.fullmatch(a.strip()) for a in answers) for answers in phrases)
        if 2 * count <= len(questions):
            return None
        return (
            f"{count} of {len(questions)} accepted answers are {cls.as_phrases}. Set data.answers "
            f"to {cls.__name__.lower()}, or to phrase if you want that."
        )


# no rule is final, because jsonargparse accepts no `class_path` for a final class
@dataclass(frozen=True)
class Number(_Kind):
    r"""Numbers: |given - accepted| <= max(tolerance, relative x |accepted|), computed exactly.

    An answer is the one number of its text, whatever words stand around it: `$1,000`, `-5`,
    `1000 apples`, `1.5e3`, `\frac{1}{2}`, `50%` (which is 50). Of `5 + 3 = 8` it is the right side.
    A text has no number if it has two different ones, an operator, a root or a power beside them
    (`2^5`), letters that follow a number (`2x`), or a word that denies, bounds or scales it (`not
    5`, `at least 5`, `max 5`, `5 million`). For powers, roots and mixed numbers take `Math`.

    Args:
        tolerance: The largest difference between two equal numbers.
        relative: The same, as a share of the accepted number.
    """

    tolerance: float = 0.0
    relative: float = 0.0

    seeks: ClassVar[bool] = True
    unreadable: ClassVar[str] = "an answer that is not a number"
    # unsigned whole numbers, such as years, compare correctly as phrases
    pattern: ClassVar[str] = r"[-+\N{MINUS SIGN}]?[$€£]?[0-9][0-9.,]*(?:\s?/\s?[0-9]+)?\s?%?"
    as_phrases: ClassVar[str] = (
        "numbers, but are compared as phrases, so 1.5 equals 15 and -5 equals 5"
    )

    def __post_init__(self) -> None:
        check_at_least(0, "Number.", self, "tolerance", "relative", optional=False)
        for name, value in vars(self).items():
            if value == float("inf"):
                raise RecipeError(f"Number.{name} is {value}; it must be finite")

    def read(self, text: str) -> Fraction | None:
        from turnrl_rewards.numbers import read_number

        return read_number(text)

    def same(self, given: str, accepted: str) -> bool:
        return self._near(self.read(given), self.read(accepted))

    def occurs_in(self, text: str, accepted: str) -> bool:
        wanted = self.read(accepted)
        return any(self._near(number, wanted) for number in _numbers_in(text))

    def _near(self, given: Fraction | None, accepted: Fraction | None) -> bool:
        if given is None or accepted is None:
            return False
        from fractions import Fraction

        if not self.tolerance and not self.relative:
            return given == accepted
        share = Fraction(str(self.relative)) * abs(accepted)
        return abs(given - accepted) <= max(Fraction(str(self.tolerance)), share)


@functools.lru_cache(maxsize=16)
def _numbers_in(text: str) -> frozenset[Fraction]:
    """The numbers of a text that is searched for several answers, by several rewards."""
    from turnrl_rewards.numbers import find_numbers

    return frozenset(find_numbers(text))


_LEAD = r"(?i)\A(?:[a-z' ,]{0,60}\b(?:answer|option|choice|choose|pick|say|is)\b[\s:=]*)?"
_OPTION = (
    r"(?s)[(\[]?([A-Za-z]|[0-9]{1,2})(?:[)\]][.:!]?|[.:!](?=\s|\Z)|\s[-–—](?=\s)|\s(?=\()|\Z)(.*)"
)
_DENIED = (
    r"(?i)\b(?:not|no|never|neither|nor|rather|instead|unlike|wrong|incorrect|false)\b|n['’]t\b"
)


@dataclass(frozen=True)
class Choice(_Kind):
    """The letter of an option, or its number: `B`, `b`, `(B)`, `B.`, `B) Paris`, `B (Paris)`,
    `Answer: B` and `The correct answer is B` are the same.

    The first option counts, and its text may follow. The text alone does not count, and neither
    does an article (`A dog`). A text that denies something (`not B`, `B, because A is wrong`) names
    none.
    """

    unreadable: ClassVar[str] = "an answer that is not the letter of an option"
    pattern: ClassVar[str] = r"\(?[A-Za-z][.)]?"
    as_phrases: ClassVar[str] = (
        "single letters, but are compared as phrases, which drop the letter A as an article"
    )

    def read(self, text: str) -> str | None:
        bare = re.sub(r"\\boxed\b|\\text\b|[*_{}$`\"']", " ", normalize("NFKC", text))
        lines = "\n".join(" ".join(line.split()) for line in bare.splitlines()).strip()
        match = re.fullmatch(_OPTION, re.sub(_LEAD, "", lines, count=1))
        if match is None or re.search(_DENIED, lines):
            return None
        return match[1].upper()


@dataclass(frozen=True)
class Math(_Kind):
    r"""Expressions, compared by the package `math-verify`: `\frac{1}{2}`, `0.5` and `$1/2$` are the
    same, and so are `(x+1)^2` and `x^2+2x+1`.

    Texts of more than 2,000 characters, and those that take the package longer than 0.2 s of CPU
    time, such as 9^{9^{9^9}}, match nothing but themselves. A process of its own compares them.

    Raises:
        RecipeError: If the package is not installed.
    """

    pattern: ClassVar[str] = r".*(?:\\[A-Za-z]|\$.+\$|\^).*"
    as_phrases: ClassVar[str] = (
        "mathematics, but are compared as phrases, without any sign or bracket"
    )

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RecipeError(
                "data.answers is math, which needs the package 'math-verify'. Run \"pip install "
                "'.[math]'\" in your clone of turnrl."
            )

    def read(self, text: str) -> str | None:
        # brackets are the empty set, and "..." is nothing
        says = any(c.isalnum() or c in "()[]{}" or (c > "~" and category(c) == "Sm") for c in text)
        return text.strip() if says else None

    def same(self, given: str, accepted: str) -> bool:
        if self.read(given) is None or self.read(accepted) is None:
            return False
        if given.strip() == accepted.strip():
            return True
        from turnrl_rewards.expressions import same_expression

        return same_expression(given, accepted)


@dataclass(frozen=True)
class Compared(AnswerRule):
    """Answers compared by your own function.

    Args:
        function: Returns True if the policy's answer (first) equals an accepted answer (second).
        name: The function's name in messages.
    """

    function: Callable[[str, str], bool]
    name: str = "function"

    goes_by: ClassVar[str] = "the path of a function of two texts, such as my_package.same"

    def read(self, text: str) -> str | None:
        return text.strip() or None

    def same(self, given: str, accepted: str) -> bool:
        if not given.strip():
            return False
        try:
            verdict: object = self.function(given, accepted)
        except (Exception, SystemExit) as error:  # the function may do anything
            raise PluginError(
                f"data.answers {self.name} on {given!r} and {accepted!r} raised "
                f"{type(error).__name__}: {error}. It must compare any two texts."
            ) from error
        if type(verdict).__name__ not in ("bool", "bool_"):  # the latter is NumPy's
            raise PluginError(
                f"data.answers {self.name} on {given!r} and {accepted!r} returned {verdict!r}. It "
                "must return True or False."
            )
        return bool(verdict)

    @classmethod
    def named(cls, given: object) -> AnswerRule | None:
        """The rule for a function, or for the path of a rule or a function.

        Raises:
            RecipeError: If there is nothing at the path, or no function of two texts.
        """
        if isinstance(given, str) and "." not in given:
            return None
        function = import_object("data.answers", cast("str | Callable[..., bool]", given))
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        try:
            if inspect.isclass(function):
                if issubclass(function, AnswerRule):
                    return function()
                raise TypeError("it is not a function")
            with contextlib.suppress(ValueError):  # functions in C may have no signature
                inspect.signature(function).bind("", "")
        except TypeError as error:
            raise RecipeError(
                f"the answer rule {name!r} ({function!r}) cannot be used: {error}. Give a "
                "rule, its name, or a function of two texts, the given and the accepted answer."
            ) from error
        return cls(function, name)
