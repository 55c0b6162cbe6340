r"""The number that a text names, by a small rule.

    5   -5   1,000   $1,000.50   50%   1.5e3   3/4   \frac{3}{4}   \boxed{5}   x = 5   5 apples

A text names a number if it has one, possibly several times, and nothing that changes what it means:
no operator, root or power, no letters that follow its digits, and none of `_WORDS`, which deny,
bound or scale a number. Of an equation the right side is read. Everything else names no number:
rather than a part of something, the rule reads nothing. No pattern looks back over a text, so the
time grows only linearly with its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

_LONGEST = 500
"""The most characters of a number, and its largest exponent: exact arithmetic with a number such as
1e999999999 would take for ever."""

_CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{HYPHEN}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        **{chr(0xFF01 + n): chr(0x21 + n) for n in range(94)},  # of full width
    }
)
_MARKUP = (
    (r"\\[dt]?frac\s?\{\s?(-?[0-9]{1,50})\s?\}\s?\{\s?([0-9]{1,50})\s?\}", r"\1/\2"),
    (r"\{,\}|\\[!,;: ]", ","),
    (r"\\(?:boxed|text|textbf|mathrm|left|right|displaystyle)(?![A-Za-z])|\\(?=[$%()\[\]])", ""),
    (r"[{}]", " "),
    (r"(?<![\w*])\*{1,2}([^*\n]{1,200})\*{1,2}(?![\w*])", r" \1 "),  # emphasis
    (r"([-+]?)[$€£¥₹](?=[-+.0-9])", r" \1"),
    (r"[$€£¥₹`]", " "),
    (r"(?i)\b(?:minus|negative)\s(?=[.0-9])", "-"),
    (r"(\A|=)\s*([-+])\s+(?=[.0-9])", r"\1\2"),
)
_NUMBER = re.compile(
    r"(?<![\w.,:])(?:(?<![\w)\]}%][-+])(?<![-+])[-+])?\.?[0-9](?:[0-9]|[.,:'’/](?=[0-9]))*+"
    r"(?:[eE][-+]?[0-9]+(?!\w))?%?"
)
_FORM = re.compile(
    r"([-+]?)((?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?)(?:e([-+]?[0-9]+))?(?:/([0-9]+))?%?",
    re.IGNORECASE,
)
_WORDS = (
    "no|not|never|excess|many|much|nor|neither|cannot|without|except|instead|wrong|incorrect|false|than|least|most"
    "|more|less|fewer|over|under|above|below|beyond|bounds?|exceed(?:s|ing)?|max|maximum|minimum"
    "|up|upwards|onwards|nearly|almost|plus|minus|times|half|thirds?|quarters?|fourths?|fifths?"
    "|double|twice|triple|squared|cubed|factorial|sqrt|root|log|ln|sin|cos|tan|hundred|thousand"
    "|million|billion|trillion|dozen|lakh|crore|pi|π|infinity|x|y|z|n|k"
)
_CHANGED = re.compile(
    rf"(?i:\b(?:{_WORDS})\b|n['’]t\b)"
    r"|[+*^×·÷<>≠-⊁⩽⩾±∓√∛∞∑∫|&\\~¬]"
    r"|[-/]\s?[\0(\[]|\0\s?/\s?(?![A-Za-z]{2})|\0[^\W\d]|\0!|[\w\0)\]]\("
    r"|[²³¹⁰-₟¼-¾⅐-⅟]"
)


def read_number(text: str) -> Fraction | None:
    """The number that a text names; None if it names none."""
    side = _simplify(text).split("=")
    if len(side) > 2 or re.search(r"[<>!~]|\\not", side[0]):
        return None
    if _CHANGED.search(_NUMBER.sub("\0", side[-1])):
        return None
    values = {_value(digits) for digits in {*_NUMBER.findall(side[-1])}}
    return values.pop() if len(values) == 1 else None


def find_numbers(text: str) -> Iterator[Fraction]:
    """All numbers of a text, whatever stands around them."""
    text = _simplify(text)
    for match in _NUMBER.finditer(text):
        if not text[match.end() : match.end() + 1].isalpha():
            value = _value(match[0])
            if value is not None:
                yield value


def _simplify(text: str) -> str:
    """The text without markup and currencies, with one kind of minus."""
    text = text.translate(_CHARACTERS)
    for pattern, by in _MARKUP:
        text = re.sub(pattern, by, text)
    return text


def _value(digits: str) -> Fraction | None:
    """The number written with these digits; None for a date, a time, a version or a flood."""
    form = _FORM.fullmatch(digits) if len(digits) <= _LONGEST else None
    if form is None or not form[2]:
        return None
    sign, size, exponent, below = form.groups()
    if int(below or 1) == 0 or len(exponent or "") > 5 or abs(int(exponent or 0)) > _LONGEST:
        return None
    value = Fraction(size.replace(",", "")) * Fraction(10) ** int(exponent or 0)
    return (-value if sign == "-" else value) / int(below or 1)
