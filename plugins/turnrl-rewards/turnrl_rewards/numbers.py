r"""Numbers in a text, as people and models write them.

    1,000   -5   $18   50%   1.5e3   6.02×10²³   10^{-3}   3/4   \frac{3}{4}   2 1/2   2\frac12   ½

Digits in a text are one of three things: a number; a number that cannot be read, which is None and
never a part of the number (a root, a power, a sum, a range, 2 million); or nothing, because they
are no number of their own (`B52`, `f(2)`, `x^2`, a date, a time).

The text is first brought into one notation (`_plain`). Every stretch of digits is then matched
together with its sign, fraction and power (`_NUMBER`), and may be refused because of the text
around it (`_check`). Patterns look at a bounded stretch of text, so the time grows only linearly
with the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction

_LONGEST = 500
"""The most characters of a number, and its largest exponent. Beyond them it cannot be read: exact
arithmetic with a number such as 1e999999999 would take for ever."""
_MOST = 2000
"""The most numbers of a text that are read. A text with more is a flood, and to read it all would
hold up the other attempts."""

_NEAR, _CLOSE = 32, 8
"""Characters before and after a number that show if it is part of something, and how many of them
can hold an operator."""

# ------------------------------------------------------------------------------- one notation

_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_MONEY = "$€£¥₹"
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_Steps = list[tuple[str, str | Callable[[re.Match[str]], str]]]
"""Patterns and their replacements, applied in order."""


def _joined(match: re.Match[str]) -> str:
    """Digits with commas in place of spaces."""
    return match[0].replace(" ", ",")


_SHARES = {c: Fraction(unicodedata.numeric(c)).limit_denominator(10) for c in _VULGAR}
_FONTS = "text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|normal)|[fm]box|boxed|underline|emph"
_LATEX: _Steps = [
    (r"\\\\", "\n"),
    # separators of thousands, and other thin spaces
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3}(?![0-9]))", ","),
    (r"\\(?:[,:;! ()\[\]#&]|q?quad(?![A-Za-z])|displaystyle(?![A-Za-z]))", " "),
    (r"\\(?:blacksquare|square|hfill|l?dots)(?![A-Za-z])", " "),
    (r"\\([$%])", r"\1"),
    (r"\\not\s?[=<>]", "≠"),
    (r"\\(?:left|right)(?![A-Za-z])", ""),
    (rf"\\(?:{_FONTS})\s?\{{([^{{}}]*)\}}", r" \1 "),
    (rf"\\(?:{_FONTS})(?![A-Za-z])", " "),
    (r"\\(?:approx|simeq|equiv|therefore|implies|to|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])", "="),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])", "×"),
    (r"\^\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|\\degree(?![A-Za-z])", "°"),
]
_BEYOND_ASCII: _Steps = [
    ("[！-～]", lambda match: chr(ord(match[0]) - ord("！") + ord("!"))),  # of full width
    ("[\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\uff0d]", "-"),
    ("(?<=[0-9])[\u00a0\u202f\u2009](?=[0-9]{3}(?![0-9]))", ","),
    ("[·⋅∙✕]", "×"),
    ("[∕⁄]", "/"),
    ("[→⇒⟹]", "="),
    ("[≦⩽≲≪≧⩾≳≫≯≮≰≱≢]", "≠"),  # none of them leaves a number
    ("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
]
_SPACES: _Steps = [(r"[^\S\n]+", " "), (r" ?\n[ \n]*", "\n")]
_ALWAYS: _Steps = [
    (r"&(?:[lg][te]|ne);", "≠"),
    (r"</?[A-Za-z]\w{0,20} ?/?>", " "),
    (r"[-=]{1,3}>", "="),
    (r"(?i)(?<=[0-9)}%]) minus (?=[-+.$(\\0-9])", " - "),
    (r"(?i)(?<=[0-9)}%]) (?:plus|times|over|(?:divided|multiplied) by) (?=[-+.$(\\0-9])", " × "),
    (r"(?i)\b(?:minus|negative)\s(?=[.$(\\0-9])", "-"),
    # spaces between thousands: 1 000 000, 5 000, and 12 345 if there is nothing else
    (r"(?<![\d.,:/])[0-9]{1,3}(?:(?: [0-9]{3}){2,}|(?: 000)+)(?!\d)", _joined),
    (r"\A[^\w\s]?[0-9]{1,3} [0-9]{3}(?=\D{0,3}\Z)", _joined),
]
_STARS: _Steps = [
    (r"(?m)^ ?\* ", ""),
    # emphasis: stars that touch a text on one side, and no factor on the other
    (r"(?<![\w)}\]%°*])(?!(?<=[0-9)}%] )\*+[-+.$(\\0-9])\*+(?=[^\s*])", " "),
    (r"(?<=[^\s*])\*+(?![*\w({\\$+-]|\.[0-9])", " "),
    (r"\*\*", "^"),
    (r"\*", "×"),
]


def _plain(text: str) -> str:
    """The text in one notation for signs, factors, powers, spaces and separators."""
    steps = [*_LATEX] if "\\" in text or "{" in text else []
    steps += [] if text.isascii() else _BEYOND_ASCII
    steps += [*_SPACES, *_STARS] if "*" in text else []
    for pattern, by in [*steps, *_SPACES, *_ALWAYS]:
        text = re.sub(pattern, by, text)
    return text


# -------------------------------------------------------------------------------- a number alone

_DIGITS = r"(?:(?>[0-9]+(?:[.,:'’][0-9]+)*)|(?<![\w.])\.[0-9]++)"
_PART = rf"(?:[0-9]|\{{[ ]?[-+]?[ ]?{_DIGITS}[ ]?\}})"
_NUMBER = re.compile(
    rf"""
    (?P<date> (?<![\w./]) [0-9]{{1,4}} / [0-9]{{1,2}} / [0-9]{{1,4}} (?![\w/]) )
  | (?P<sign> [-+][ ]? )? (?: [{_MONEY}][ ]? ){{0,2}} (?P<inner> [-+][ ]? )?
    (?:
        (?: (?P<number> {_DIGITS} ) [ ]? )?
        (?: \\[dtc]?frac [ ]? (?P<top> {_PART} ) [ ]? (?P<bottom> {_PART} )
              | (?P<vulgar> [{_VULGAR}] ) )
      | (?P<whole> {_DIGITS} )
        (?: [ ] (?P<over> [0-9]{{1,9}} ) / (?P<under> [0-9]{{1,9}} ) (?! [\d/] )
          | (?: e (?P<e> [-+]?[0-9]++ ) (?!\w)
              | (?P<times> [ ]? [x×] [ ]? 10 )? [ ]? \^ [ ]?
                [{{(]? [ ]? (?P<up> [-+]?[0-9]++ ) (?: [ ]? [)}}] )? )?
            (?: [ ]? / [ ]? (?P<below> {_DIGITS} ) )?
        )
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)


class _Unreadable(ValueError):
    """The digits are a number, but one that this module cannot read."""


class _NoNumber(ValueError):
    """The digits are no number of their own."""


def _decimal(digits: str) -> Fraction:
    """The number written with these digits, points and separators."""
    if len(digits) > _LONGEST:
        raise _Unreadable
    if digits.isdigit():
        return Fraction(int(digits))
    if re.fullmatch(r"[0-9]{1,3}(?:([,'’])[0-9]{3})(?:\1[0-9]{3})*(?:\.[0-9]+)?", digits):
        digits = re.sub("[,'’]", "", digits)
    if re.fullmatch(r"[0-9]*\.?[0-9]+", digits):
        return Fraction(digits)
    raise _Unreadable if re.search("[,'’]", digits) else _NoNumber  # a time, a version


def _part(digits: str) -> Fraction:
    """The numerator or denominator of a LaTeX fraction."""
    bare = digits.strip("{ }")
    sign = -1 if bare.startswith("-") else 1
    return sign * _decimal(bare.lstrip("-+ "))


def _value(match: re.Match[str]) -> Fraction:
    """The value of a match of `_NUMBER`.

    Raises:
        _Unreadable: If the number cannot be computed.
        _NoNumber: If the match is not a number.
    """
    if match["sign"] and match["inner"]:
        raise _Unreadable
    size = _size(match)
    return -size if "-" in f"{match['sign']}{match['inner']}" else size


def _size(match: re.Match[str]) -> Fraction:
    """The value of a match without its sign."""
    fraction = None
    if match["over"]:
        fraction = _ratio(_part(match["over"]), _part(match["under"]))
    elif match["vulgar"]:
        fraction = _SHARES[match["vulgar"]]
    elif match["top"]:
        fraction = _ratio(_part(match["top"]), _part(match["bottom"]))
    whole = match["whole"] or match["number"]
    if whole is None:
        assert fraction is not None
        return fraction
    number = _decimal(whole)
    if fraction is not None:  # a mixed number: 2 1/2
        if not 0 < fraction < 1 or not whole.isdigit():
            raise _Unreadable
        return number + fraction
    if match["up"] and not match["times"]:
        if number != 10:
            raise _Unreadable  # a power of something else
        number = Fraction(1)
    if power := match["e"] or match["up"]:
        if len(power) > _LONGEST or abs(int(power)) > _LONGEST:
            raise _Unreadable
        tens = 10 ** abs(int(power))
        number = number * tens if int(power) > 0 else number / tens
    return _ratio(number, _decimal(match["below"])) if match["below"] else number


def _ratio(top: Fraction, bottom: Fraction) -> Fraction:
    if not bottom:
        raise _Unreadable
    return top / bottom


# ------------------------------------------------------------------------- what stands around it

_FUNCTIONS = "sqrt|cbrt|root|logarithm|log|ln|lg|exp|sin|cos|tan|factorial|half|twice|double|triple"
_BOUNDS = "under|over|above|below|beyond|exceed|exceeds|exceeding"
_BOUNDS_OF = r"a\s(?:min|max)imum|upwards|in\sexcess|instead"
_DENIALS = "not|never|nor|neither|cannot|except|without"
_LINKS = "be|been|equal|equals|exactly|the|a|an|answer|number|value|is|just|simply|really|quite"
_ENDINGS = {
    "of",
    "as",
    "than",
    "least",
    "most",
    "to",
    *f"{_FUNCTIONS}|{_BOUNDS}|{_DENIALS}|{_LINKS}".split("|"),
}
_OPEN = r"[({\[]"
_ARGUMENT = re.compile(
    # of a command such as \sqrt, or of its index; of a function in words; of a share
    rf"\\[A-Za-z]+\s?[_^]?\s?{_OPEN}*\Z"
    rf"|(?i:(?<![A-Za-z])(?:{_FUNCTIONS})(?:_?\{{?\w{{0,9}}\}}?)[\s({{\[]*(?:of\s)?\Z)"
    r"|(?i:(?:thirds?|quarters?|fifths?|percent|%)\sof\s\Z)"
    # a bound, as in "more than"; sums and rounding lead "up to" a number itself
    rf"|(?i:\b(?:than|at\s(?:the\s)?(?:very\s)?(?:least|most)|{_BOUNDS}|(?:{_BOUNDS_OF})\sof)"
    rf"(?:\sor\sequal\sto)?\s{_OPEN}*\Z)"
    rf"|(?i:(?<!add)(?<!adds)(?<!sums)(?<!comes)(?<!rounds)(?<!rounded)(?:\A|\s)up\sto\s{_OPEN}*\Z)"
    rf"|(?i:\bas\s(?:many|much|few|little|high|low)\sas\s{_OPEN}*\Z)"
    # a denial, as in "is not 5" and "isn't equal to 5"
    rf"|(?i:(?:\b(?:{_DENIALS})|n['’]t)(?:\s(?:{_LINKS}|to))*[\s:]{{1,2}}[\"'“‘]?{_OPEN}*\Z)"
)
_PART_OF_WORD = re.compile(rf"(?:[^\W\d]|_)(?:\s?\^\s?)?{_OPEN}+\Z|[^\W\d]\s?\$?\^\s?{_OPEN}?\Z")
_OPERAND = re.compile(
    rf"[×/^÷<>≤≥≠±∓√∛∜∑∫¬]\s?{_OPEN}*\Z"  # second operand
    rf"|(?:[<>!]=|=<|=/=)\s?{_OPEN}*\Z"
    r"|∞\s?,\s?\Z"  # an interval
    rf"|[-+]\s?{_OPEN}*\Z|{_OPEN}{{4}}\Z"  # a sum in brackets, or a second sign
    rf"|[\d)}}\]%°{_VULGAR}]{_OPEN}+\Z|[)}}\]\d{_VULGAR}]\Z"  # factors side by side
    r"|[0-9)}]\s[xX]\s\Z|\d[.,:]\Z"
)
_FURTHER = re.compile(rf"\w{_OPEN}[^()\[\]{{}}]*[,;]\s?\Z")  # argument of a function
_TERM = re.compile(r"(?:(?<![\w'’])[b-zB-HJ-Z]|[0-9][A-Za-z]+)\s\Z")  # 2x -5
_MINUS_FOLLOWS = re.compile(r"(?:[=:({\[\"'“‘≈]|\b(?:is|are|was|equals))[ ]?\Z")
_GOES_ON = re.compile(
    r"\s?(?:[×^÷<>≤≥≠±√∛∜]|/(?!\s?[^\W\d]{2}))"  # an operator, but for a rate: 18/day
    r"|\s?\\[A-Za-z]"
    r"|[₀-₉]|\s?(?:[-+/]\s?)?(?:π|pi(?![\w']))"  # another base; 18 pi, 2 + pi
    r"|[.,]?\d"
    r"|\+(?!\d)|\s?(?:!=|=/=)"  # 5+ people
    r"|[-+](?:[({\[\\$.]|[A-Za-z](?![\w']))|\s[-+]\s(?:[({\[\\$.\d]|[b-zB-HJ-Z](?![\w']))"
    r"|\((?:[A-Za-z]\)|[^()]{0,24}[-+×/^])"
    r"|[kKMB](?!\w)"
    r"|(?i:\s?(?:hundred|thousand|lakh|crore|[mb]illion|(?:quad|t)rillion|[mb]n\b|dozen))"
    r"|(?i:\s?(?:squared|cubed|factorial|halves|thirds|fourths|fifths|sixths|eighths|tenths))"
    r"|\s[xyz](?!\w)"  # 18 x
    r"|\s?,\s?[-+]?(?:∞|\\infty|(?i:infinity|inf)\b)"
    r"|(?i:\s(?:or|and)\s(?:more|less|fewer|greater|higher|lower|above|below|over|under|up)\b)"
    r"|(?i:\s(?:at\s(?:(?:the\s)?(?:very\s)?(?:least|most)|(?:min|max)imum)|(?:min|max)imum|max|tops"
    r"|upwards?|onwards?|plus)\b)|\s\+\Z"
    r"|(?i:\s(?:(?:is|was|are|were)(?:\snot|\snever|n['’]t)|can(?:\s?not|['’]t)\sbe)"
    r"\s(?:the|an?|my|it|right|correct|true)\b)"
    r"|(?i:\s?\(?(?:(?:is|was)\s)?(?:wrong|incorrect|false)\b)"
    r"|(?i:\sand\s(?:a|one|two|three|1)[\s-](?:hal|third|quarter|fourth|fifth))"
)
_UNIT = re.compile(
    r"(?:[cdkm]m|km/h|mph|[km]?g|lbs?|oz|ft|in|[cdm]?l|L|hrs?|h|mins?|secs?|ms|[kMG]?Hz|k?Wh?|[kMGT]B)"
    r"(?![\w(])"
)
"""Units that people write without a space after a number: 5kg."""


def _check(before: str, match: re.Match[str], after: str) -> None:
    """Look at the text before and after a match of `_NUMBER`.

    Raises:
        _Unreadable: If the match is part of an expression.
        _NoNumber: If the match is part of a word.
    """
    if not _is_prose(before):
        close = before[-_CLOSE:]
        if before.upper() != before.lower() or "%" in before:  # letters, or their like
            if _ARGUMENT.search(before):
                raise _Unreadable
            if close.rstrip().endswith((",", ";")) and _FURTHER.search(before):
                raise _Unreadable
        if _PART_OF_WORD.search(close):
            raise _NoNumber
        if _OPERAND.search(close):
            raise _Unreadable
    stuck = before[-1:].isalnum() or before[-1:] == "_"
    if match["sign"]:
        _check_sign(before, apart=match["sign"][-1] == " ")
    elif stuck and match["inner"]:
        raise _Unreadable  # $x$ - 5
    elif stuck and match[0][0] not in _MONEY:  # US$5 is a number, and B52 is none
        raise _NoNumber
    if _GOES_ON.match(after.removeprefix("$")):
        raise _Unreadable
    if re.match(r"(?i)(?:st|nd|rd|th)\b", after):
        raise _NoNumber  # the 5th
    if (after[:1].isalpha() or after[:1] == "_") and not _UNIT.match(after):
        raise _Unreadable  # 2x


def _is_prose(before: str) -> bool:
    """True if a text ends in a plain word and a space, so that no pattern can match. Most do."""
    if not before.strip():
        return True
    word = before.rsplit(None, 1)[-1].lower()
    plain = word.isdecimal() or (word.isalpha() and len(word) > 1 and word not in _ENDINGS)
    return plain and before[-1].isspace()


def _check_sign(before: str, apart: bool) -> None:
    """Refuse a sign that may be a minus or a dash between two things, and a sign within a word.

    Args:
        before: The text before the sign.
        apart: True if a space stands between the sign and its number.
    """
    if not before.strip(" $"):
        return
    last = before[-1]
    if last.isalpha() and not apart:
        raise _NoNumber  # COVID-19
    if apart:  # a minus, and no dash, after x = and after "the answer is"
        right = _MINUS_FOLLOWS.search(before) is not None
    else:
        right = not (last.isalnum() or last in "_%°|!.") and not _TERM.search(before)
    if not right:
        raise _Unreadable


def numbers(text: str) -> Iterator[Fraction | None]:
    """The numbers in a text, in order; None for each number that cannot be read, and once for all
    those after the first `_MOST`."""
    plain = _plain(text)
    in_words = re.search("[A-Za-z]{2}", plain) is not None
    for count, match in enumerate(_NUMBER.finditer(plain)):
        if count == _MOST:
            yield None
            return
        if match["date"]:
            continue
        begin, end = match.span()
        before, after = plain[max(0, begin - _NEAR) : begin], plain[end : end + _NEAR]
        try:
            _check(before, match, after)
            if after[:1] == "!" and match[0].isdigit() and not in_words:
                raise _Unreadable  # a factorial
            yield _value(match)
        except _Unreadable:
            yield None
        except _NoNumber:
            pass
