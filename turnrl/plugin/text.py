"""Text functions that rewards, metrics and rollouts share: phrases, neutralising, visible text,
and lines for people to read, which are wrapped and coloured on a terminal.

Phrases are normalised as in SQuAD's evaluation script (Rajpurkar et al. 2016, arXiv 1606.05250):
lower case, no punctuation, no articles, single spaces. Unlike in that script, a text that becomes
empty matches nothing, so neither an empty answer nor a gold answer such as "The" matches by
accident.
"""

import contextlib
import functools
import os
import re
import string
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TextIO

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_COMMAND = re.compile(r"'turnrl [^'\n]*'")
_CODE = re.compile("\x1b\\[[0-9;]*m")
_NARROWEST, _USUAL = 40, 80
Style = Literal["alarm", "bad", "good", "call", "dim", "strong"]
"""The role of a text, for `paint`."""
_STYLES: Mapping[Style, str] = {
    "alarm": "1;33",
    "bad": "31",
    "good": "32",
    "call": "36",
    "dim": "2",
    "strong": "1",
}
"""Codes of a terminal, by the role of a text."""


def normalize_answer(text: str) -> str:
    """`text` in lower case without punctuation, articles and extra white space.

    Letters with marks are composed first, because the two ways to write "ã" look the same.
    """
    text = unicodedata.normalize("NFC", text).lower()
    return " ".join(_ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split())


_UNSEEN = re.compile(
    "[\\u115f\\u1160\\u17b4\\u17b5\\u2800\\u3164\\uffa0]"  # letters and a symbol without any ink
)


def is_blank(text: str) -> bool:
    """True if people see nothing of a text: it has only white space, control characters, marks and
    letters without ink."""
    return not _visible_kinds(text)


def has_content(text: str) -> bool:
    """True if a text has a letter, a digit or a symbol that people can see, and not only white
    space, punctuation and marks."""
    return bool(_visible_kinds(text) - {"P"})


def _visible_kinds(text: str) -> set[str]:
    """The kinds of characters that people see in a text: Letters, Numbers, Symbols, Punctuation."""
    return {unicodedata.category(c)[0] for c in text if not _UNSEEN.match(c)} & {*"LNSP"}


def find_contained_answer(text: str, answers: Iterable[str]) -> str | None:
    """The longest accepted answer whose words occur in `text`, whole and in order, or None. So
    "art" does not occur in "Bonaparte".

    Returns:
        The answer in its normalised form.
    """
    haystack = f" {normalize_answer(text)} "
    standing = [a for a in map(normalize_answer, answers) if a and f" {a} " in haystack]
    return max(standing, key=len, default=None)


def neutralize(text: str, tags: Iterable[str], control_tokens: Sequence[str]) -> str:
    """Make markup that could act on the conversation inert, and keep it readable.

    The angle brackets of a named tag become ‹ and ›, so that a retrieved page can neither close
    `<result>` nor open `<answer>`. The outer characters of a chat control token become ‹ and › too.

    Args:
        text: The text of a tool or of data.
        tags: Tag names that mean something to the segmenter.
        control_tokens: The tokenizer's special tokens, such as `<|im_end|>`.
    """
    if tokens := tuple(filter(None, control_tokens)):
        text = _longest_of(tokens).sub(lambda token: f"‹{token[0][1:-1]}›", text)
    names = "|".join(re.escape(tag) for tag in tags)
    if names:
        # each space may match in only one way, otherwise a long run of spaces takes quadratic time
        tag = rf"\s*(?:/\s*)?(?:{names})\b"
        text = re.sub(rf"<({tag}[^<>]*)>", r"‹\1›", text, flags=re.IGNORECASE)
        # the segmenter's text that follows could close an open tag
        text = re.sub(rf"<(?={tag})", "‹", text, flags=re.IGNORECASE)
    return text


@functools.lru_cache(16)
def _longest_of(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of the words that stands at a place. Words that begin alike
    share their beginning, so thousands of words are searched as fast as a few."""

    def any_of(words: Sequence[str]) -> str:
        if len(words) == 1:
            return re.escape(words[0])
        rests: dict[str, list[str]] = {}
        for word in words:
            rests.setdefault(word[:1], []).append(word[1:])
        ends = rests.pop("", None)
        branches = "|".join(re.escape(first) + any_of(rest) for first, rest in rests.items())
        return f"(?:{branches}){'?' if ends else ''}"

    return re.compile(any_of([*dict.fromkeys(words)]))


def format_labelled(label: str, text: str) -> str:
    """A text of one or more lines after its label, in its own column."""
    return f"{label:11}" + text.replace("\n", "\n" + " " * 11)


def format_count(number: int, noun: str) -> str:
    """A number and its noun, such as `1 run` or `1,024 runs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_gigabytes(size: float) -> str:
    """`5.63`, `47.1`: three digits, in units of 10^9 bytes."""
    return f"{size / 1e9:.2f}" if size < 9.995e9 else f"{size / 1e9:.1f}"


def make_visible(text: str) -> str:
    r"""`text` for people to read, with escapes such as `\x1b` or `\u202e` for characters that act
    on a terminal or cannot be seen.

    These are control characters other than the line break and the tab, marks of direction,
    characters without width, and halves of surrogate pairs. All text of a policy, a tool, a server
    or a data set goes through this before it is printed.
    """
    text = redact_secrets(text)
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


_secrets: dict[str, str] = {}
"""Values that no printed line shows, each with what stands in its place."""


def register_secret(value: str, name: str) -> None:
    """Show `${NAME}` from now on wherever a line for people to read would show a value."""
    _secrets[value] = "${" + name + "}"


def redact_secrets(text: str) -> str:
    """`text` with the name of a variable in place of each secret value."""
    for value in sorted(_secrets, key=len, reverse=True):
        text = text.replace(value, _secrets[value])
    return text


def say(
    text: str, file: TextIO | None = None, indent: str = "  ", style: Style | None = None
) -> None:
    """Print a text for people to read, wrapped at words if it goes to a terminal.

    In a pipe or a log file its lines stay whole, for `grep`.

    Args:
        text: The text.
        file: Where to print; None for the standard output.
        indent: Indent of continued lines; see `wrap_text`.
        style: The role of the text; see `paint`.
    """
    stream = file or sys.stdout
    shown = wrap_text(redact_secrets(text), terminal_columns(stream), indent)
    print(paint(shown, style, stream) if style else shown, file=stream, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print a text on standard error with `say`, once per process."""
    say(text, sys.stderr)


def paint(text: str, style: Style, file: TextIO | None = None) -> str:
    """A text in the colour of its role, if it goes to a terminal that shows colours.

    Nothing is coloured if `NO_COLOR` is set, or if the terminal is `dumb`.

    Args:
        text: The text, which must not act on a terminal (`make_visible`).
        style: alarm, bad, good, call, dim or strong.
        file: Where it goes; None for the standard output.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not text or plain or not (file or sys.stdout).isatty():
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def terminal_columns(stream: TextIO) -> int | None:
    """The width of the terminal that a stream writes to. None if it writes to a file or a pipe."""
    if not stream.isatty():
        return None
    with contextlib.suppress(ValueError):
        return int(os.environ.get("COLUMNS", ""))
    with contextlib.suppress(OSError, ValueError):  # a user's own stream may have no number
        return os.get_terminal_size(stream.fileno()).columns
    return _USUAL


def wrap_text(text: str, columns: int | None, indent: str = "  ") -> str:
    """Wrap the lines of `text` that are too long, at words. Shorter lines stay as they are.

    A word that is longer than a line, such as a path, stays whole, and so does a command in quotes,
    `'turnrl ...'`, so that it can be pasted.

    Args:
        text: The text.
        columns: The most characters of a line, at least 40; None wraps nothing.
        indent: Indent of continued lines, after the spaces that the line begins with.
    """
    if columns is None:
        return text
    import textwrap  # `import turnrl` stays light

    def wrap(line: str) -> str:
        if len(_CODE.sub("", line)) <= width:
            return line
        begin = line[: min(len(line) - len(line.lstrip(" ")), width // 2)]
        line = begin + line.lstrip(" ")
        whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line)
        lines = textwrap.wrap(
            whole,
            width,
            subsequent_indent=begin + indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            expand_tabs=False,
        )
        return "\n".join(lines).replace("\0", " ")

    width = max(columns, _NARROWEST)
    return "\n".join(map(wrap, text.split("\n")))
