"""Comparison of answers to a question: one rule for rewards, curves, checkpoints and reports.

    Phrase      words, compared as SQuAD compares them; the default
    Number      numbers, within a tolerance
    Choice      the letter of an option
    Math        expressions, compared by the package `math-verify`
    Compared    a function of one's own

A question carries its rule (`Question.rule`), and `exact_match` asks it, so whoever compares
answers does it in the same way. A recipe sets the rule of a question set in `data.answers`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from turnrl.errors import PluginError, RecipeError, at_least, blaming, did_you_mean
from turnrl.text import contained_answer, normalize_answer

if TYPE_CHECKING:
    from fractions import Fraction

# patterns are texts, compiled when they are first used: `import turnrl` stays cheap


class AnswerRule(ABC):
    """Says which answers are the same. Extend it, or give `data.answers` a function of two texts.

    Attributes:
        seeks: Whether an accepted answer can be looked for in the results of tools (`stands_in`).
            Without it nothing is paid for finding one.
        unreadable: An accepted answer of which `read` makes nothing, in words, for messages.
    """

    seeks: ClassVar[bool] = False
    unreadable: ClassVar[str] = "an empty answer"

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


# none of them is final: to jsonargparse a final class has no `class_path`
@dataclass(frozen=True)
class Phrase(AnswerRule):
    """Words, compared after SQuAD's normalisation (Rajpurkar et al. 2016, arXiv 1606.05250): lower
    case, no punctuation, no articles, single spaces. An answer of which that leaves nothing is
    never right.

    It takes a point and a minus for punctuation: 1.5 is 15 to it. Numbers have `Number`.
    """

    seeks: ClassVar[bool] = True
    unreadable: ClassVar[str] = "an answer of articles and punctuation"

    def read(self, text: str) -> str | None:
        return normalize_answer(text) or None

    def stands_in(self, text: str, accepted: str) -> bool:
        return contained_answer(text, [accepted]) is not None


_MINUS = "(?i)[\N{MINUS SIGN}\N{EN DASH}]|\\b(?:minus|negative)\\s+(?=[$.0-9])"
_DIGITS = r"(?:[0-9]{1,3}(?:[,\u00a0\u202f\u2009][0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = (
    # no part of a word, a date, a time, a version, a root, a power or a function's argument
    r"(?i)(?<![\w√^])(?<![0-9][.,:/])(?<![^\W\d][-+])(?<!\w[({])(?<!\w[({][-+])"
    r"(?P<sign>[-+]?)(?:[$€£¥₹]\s?)?(?P<inner>-?)"
    rf"(?P<number>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:(?:e|\s?(?:[x×*·]|\\times)\s?10\s?\^\s?\{?)(?P<power>[-+]?[0-9]+)\}?)?"
    rf"(?:\s?/\s?(?P<below>{_DIGITS}))?"
    r"(?![\w^]|[.:,][0-9]|\s?/\s?[0-9]|\s?(?:hundred|thousand|[mb]illion|trillion|dozen))"
)
_LONGEST = 300
"""Characters of a number, and its exponent, beyond which it is none: exact arithmetic with a
number such as 1e999999999 would take for ever."""


def _numbers(text: str) -> Iterator[Fraction | None]:
    """The numbers that stand in a text; None for one that cannot be computed with."""
    from fractions import Fraction

    plain = re.sub(_MINUS, "-", text).replace(r"\boxed{", " ")
    for found in re.finditer(_NUMBER, plain):
        number, below = (re.sub(r"[^0-9.]", "", found[k] or "1") for k in ("number", "below"))
        power = found["power"] or "0"
        long = max(len(number), len(below), len(power)) > _LONGEST
        if long or abs(int(power)) > _LONGEST or not int(below):
            yield None
        else:
            sign = -1 if "-" in (found["sign"], found["inner"]) else 1
            yield sign * Fraction(number) * Fraction(10) ** int(power) / int(below)


@dataclass(frozen=True)
class Number(AnswerRule):
    """Numbers: |given - accepted| <= max(tolerance, relative x |accepted|), computed exactly.

    An answer is a number if one number stands in it, whatever words stand around it: `$1,000`,
    `1000 dollars`, `-5`, `1.5e3`, `1/2`, `50%` (which is 50). Two different numbers are a list of
    candidates, and no answer. Digits that letters stick to (`2x`, `B52`), dates, times, number
    words, NaN and infinity are no numbers.

    Args:
        tolerance: How far apart two numbers may be that are the same.
        relative: The same as a share of the accepted one.
    """

    tolerance: float = 0.0
    relative: float = 0.0

    seeks: ClassVar[bool] = True
    unreadable: ClassVar[str] = "an answer that is no number"

    def __post_init__(self) -> None:
        at_least(0, "Number.", self, "tolerance", "relative")
        if max(self.tolerance, self.relative) == float("inf"):
            raise RecipeError("Number.tolerance and relative must be finite: all would be the same")

    def read(self, text: str) -> Fraction | None:
        found = set(_numbers(text))
        return found.pop() if len(found) == 1 else None

    def same(self, given: str, accepted: str) -> bool:
        return self._near(self.read(given), self.read(accepted))

    def stands_in(self, text: str, accepted: str) -> bool:
        wanted = self.read(accepted)
        return any(self._near(number, wanted) for number in _numbers(text))

    def _near(self, given: Fraction | None, accepted: Fraction | None) -> bool:
        if given is None or accepted is None:
            return False
        from fractions import Fraction

        share = Fraction(str(self.relative)) * abs(accepted)
        return abs(given - accepted) <= max(Fraction(str(self.tolerance)), share)


_LEAD = (
    r"(?i)(?:(?:so|therefore|thus|hence),?\s+)?(?:the\s+|my\s+)?"
    r"(?:(?:correct|right|best|final)\s+)*(?:answer|option|choice)\b\s*(?:is\b\s*|[:=]\s*)*"
    r"(?:option\s+|choice\s+)?"
)
_OPTION = r"([A-Za-z]|[0-9]{1,2})(?:\s*[)\]]|\s*[.:](?=\s|$)|\s+[-–—](?=\s)|\s*$)(.*)"
_KINDS = ("[A-Z]", "[a-z]", "[0-9]{1,2}")
"""Ways to name options; a text names all of them in one."""


@dataclass(frozen=True)
class Choice(AnswerRule):
    """The letter of an option, or its number: `B`, `b`, `(B)`, `B.`, `B) Paris`, `Answer: B` and
    `The correct answer is B` are the same.

    The option's text alone is no letter. Neither is an article (`A dog`), nor a text that names
    several options (`A or B`, `A) Paris B) Rome`).
    """

    unreadable: ClassVar[str] = "an answer that is no option's letter"

    def read(self, text: str) -> str | None:
        said = " ".join(re.sub(r"\\boxed\b|\\text\b|[*_{}$`\"']", " ", text).split())
        said = said[lead.end() :] if (lead := re.match(_LEAD, said)) else said
        found = re.fullmatch(_OPTION, said.lstrip("([ "))
        if found is None:
            return None
        kind = next(kind for kind in _KINDS if re.fullmatch(kind, found[1]))
        others = re.findall(rf"(?:^|\s)\(?({kind})\)", found[2])
        return found[1].upper() if {*others} <= {found[1]} else None


@dataclass(frozen=True)
class Math(AnswerRule):
    r"""Expressions, compared by the package `math-verify`: `\frac{1}{2}`, `0.5` and `$1/2$` are the
    same, and so are `(x+1)^2` and `x^2+2x+1`.

    One comparison may take 5 s, after which it is no match; outside of a program's main thread the
    package keeps no time.

    Raises:
        RecipeError: If the package is not installed.
    """

    def __post_init__(self) -> None:
        import importlib.util

        if importlib.util.find_spec("math_verify") is None:
            raise RecipeError(
                "the answers are compared as expressions by the package 'math-verify', which is "
                "not installed. Install it: pip install 'turnrl[math]'."
            )

    def read(self, text: str) -> str | None:
        return text.strip() or None

    def same(self, given: str, accepted: str) -> bool:
        if not given.strip() or not accepted.strip():
            return False
        return given.strip() == accepted.strip() or _same_expression(given, accepted)


@functools.lru_cache(maxsize=4096)
def _same_expression(given: str, accepted: str) -> bool:
    import math_verify  # takes a second, and few need it

    limit = 5 if threading.current_thread() is threading.main_thread() else None

    def parse(text: str) -> list[object]:
        # what is not marked as mathematics is searched for a number alone, so an answer that is
        # nothing but an expression is marked
        marked = re.search(r"\$|\\[(\[]|\\boxed", text)
        words = re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", text)
        both = [text] if marked or words else [f"${text}$", text]
        return next((p for t in both if (p := math_verify.parse(t, parsing_timeout=limit))), [])

    found = math_verify.verify(parse(accepted), parse(given), timeout_seconds=limit)
    return bool(found)


@dataclass(frozen=True)
class Compared(AnswerRule):
    """A function of one's own decides.

    Args:
        function: Given the policy's answer and an accepted one, says whether they are the same.
        name: What it is called in messages.
    """

    function: Callable[[str, str], bool]
    name: str = "function"

    def read(self, text: str) -> str | None:
        return text.strip() or None

    def same(self, given: str, accepted: str) -> bool:
        if not given.strip():
            return False
        what = f"data.answers {self.name} on {given!r} and {accepted!r}"
        with blaming(PluginError, what, "It must compare any two texts."):
            found: object = self.function(given, accepted)
        if type(found).__name__ not in ("bool", "bool_"):  # NumPy's has either name
            raise PluginError(f"{what} returned {found!r}. It must return True or False.")
        return bool(found)


_RULES: dict[str, type[AnswerRule]] = {
    "phrase": Phrase,
    "number": Number,
    "choice": Choice,
    "math": Math,
}


def answer_rule(named: AnswerRule | Callable[[str, str], bool] | str) -> AnswerRule:
    """The rule that `data.answers` gives.

    Args:
        named: A rule; a function of the given and an accepted answer; or `phrase`, `number`,
            `choice`, `math`, or the path of a rule or a function, such as `my_package.same`.
    Raises:
        RecipeError: If there is none of that name.
    """
    if isinstance(named, AnswerRule):
        return named
    if not isinstance(named, str):
        return _compared(named, getattr(named, "__name__", type(named).__name__))
    if named.lower() in _RULES:
        return _RULES[named.lower()]()
    module, _, attribute = named.rpartition(".")
    some = f"There are {', '.join(_RULES)}; or give the path of a function of two texts, such as "
    some += "my_package.same."
    if not module:
        near = did_you_mean(named, _RULES)
        raise RecipeError(f"data.answers is {named!r}, which is no rule.{near} {some}")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made = found() if inspect.isclass(found) and issubclass(found, AnswerRule) else found
    except Exception as error:  # a module may do anything
        cause = str(error) or type(error).__name__
        what = f"data.answers names {named!r}, which cannot be taken: {cause}"
        raise RecipeError(f"{what}. {some}") from error
    return made if isinstance(made, AnswerRule) else _compared(made, named)


def _compared(function: object, name: str) -> Compared:
    """The rule that a function is.

    Raises:
        RecipeError: If it is none, or does not take two texts.
    """
    try:
        if inspect.isclass(function) or not callable(function):
            raise TypeError("it is no function")
        with contextlib.suppress(ValueError):  # one of C, say, that does not tell
            inspect.signature(function).bind("", "")
    except TypeError as error:
        what = f"data.answers is {name!r} ({function!r}), which cannot be taken: {error}"
        step = "Give a rule, its name, or a function of two texts, the given and the accepted one."
        raise RecipeError(f"{what}. {step}") from error
    return Compared(function, name)


class Answered(Protocol):
    """Part of a `Question` that concerns its answers."""

    @property
    def text(self) -> str:
        """The question."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Accepted answers."""

    @property
    def rule(self) -> AnswerRule:
        """The rule that compares them."""


class Told(Protocol):
    """Part of a `ToolResult` that concerns its content."""

    @property
    def content(self) -> str:
        """The text that the policy read."""

    @property
    def ok(self) -> bool:
        """True if the call succeeded."""


def _rule(question: Answered, function: str) -> AnswerRule:
    """A question's rule; what is given in its place is told."""
    rule = getattr(question, "rule", None)
    if not isinstance(rule, AnswerRule):
        raise PluginError(
            f"{function} takes the question, which knows how its answers compare, and was given "
            f"{question!r}. Call {function}(text, trajectory.question)."
        )
    return rule


def exact_match(answer: str | None, question: Answered) -> bool:
    """True if an answer is one that the question accepts, by the question's rule.

    Args:
        answer: The policy's; None if it gave none, which is no match.
        question: The question that was answered.
    """
    rule = _rule(question, "exact_match")
    return answer is not None and any(rule.same(answer, one) for one in question.answers)


def contains_answer(text: str, question: Answered) -> bool:
    """True if an answer that the question accepts stands in a text, by the question's rule."""
    rule = _rule(question, "contains_answer")
    return rule.seeks and any(rule.stands_in(text, accepted) for accepted in question.answers)


def usable_answers(question: Answered) -> tuple[str, ...]:
    """The accepted answers that the question's rule can read."""
    rule = _rule(question, "usable_answers")
    return tuple(accepted for accepted in question.answers if rule.read(accepted) is not None)


def says_nothing(answer: str | None, question: Answered) -> bool:
    """True if an answer is none, or so empty that neither the question's rule nor SQuAD's
    normalisation leaves anything of it."""
    rule = _rule(question, "says_nothing")
    return answer is None or (rule.read(answer) is None and not normalize_answer(answer))


_VERDICTS = {"yes", "no", "true", "false"}


def can_be_found(question: Answered) -> bool:
    """True if an accepted answer in a text says anything of that text.

    It does not where an accepted answer is yes, no, true or false, which stand in many texts, or
    stands in the question itself ("Which is older, Radio City or Ashoka?"), where any search brings
    it. By rules that seek no answers in texts (`Choice`, `Math`, a function) nothing can be found.
    """
    rule = _rule(question, "can_be_found")
    if not rule.seeks or not question.answers:
        return False
    return not any(
        normalize_answer(accepted) in _VERDICTS or rule.stands_in(question.text, accepted)
        for accepted in question.answers
    )


def answer_in_results(results: Iterable[Told], question: Answered) -> bool:
    """True if an accepted answer was found: it stands in a successful result, and it `can_be_found`
    at all.

    Args:
        results: Of a turn, or of a trajectory.
        question: The question that was asked.
    """
    texts = [result.content for result in results if result.ok]
    return (
        bool(texts) and can_be_found(question) and any(contains_answer(t, question) for t in texts)
    )
