"""Text functions that rewards, metrics and rollouts share: phrases, neutralising, visible text.

Phrases are normalised as in SQuAD's evaluation script (Rajpurkar et al. 2016, arXiv 1606.05250):
lower case, no punctuation, no articles, single spaces. Unlike there, a text that becomes empty
matches nothing, so neither an empty answer nor a gold answer such as "The" matches by accident.
"""

import re
import string
import unicodedata
from collections.abc import Iterable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """`text` in lower case without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def contained_answer(text: str, answers: Iterable[str]) -> str | None:
    """The longest accepted answer whose words stand in `text`, whole and in order, or None.

    Whole words: "art" does not stand in "Bonaparte".

    Returns:
        The answer in its normalised form.
    """
    haystack = f" {normalize_answer(text)} "
    standing = [a for a in map(normalize_answer, answers) if a and f" {a} " in haystack]
    return max(standing, key=len, default=None)


def neutralise(text: str, tags: Iterable[str], control_tokens: Sequence[str]) -> str:
    """Make markup in `text` inert that could act on the conversation, and keep it readable.

    The angle brackets of a named tag become ‹ and ›, so that a retrieved page can neither close
    `<result>` nor open `<answer>`; a chat control token loses its outer characters in the same way.

    Args:
        text: The text of a tool or of data.
        tags: Tag names that mean something to the segmenter.
        control_tokens: The tokenizer's special tokens, such as `<|im_end|>`.
    """
    for token in sorted(control_tokens, key=len, reverse=True):
        if token and token in text:
            text = text.replace(token, f"‹{token[1:-1]}›" if len(token) > 2 else "‹›")
    names = "|".join(re.escape(tag) for tag in tags)
    if names:
        # each space can match in one way only, or a long run of them takes quadratic time
        tag = rf"\s*(?:/\s*)?(?:{names})\b"
        text = re.sub(rf"<({tag}[^<>]*)>", r"‹\1›", text, flags=re.IGNORECASE)
        # the segmenter's text after it could close an open tag
        text = re.sub(rf"<(?={tag})", "‹", text, flags=re.IGNORECASE)
    return text


def labelled(label: str, text: str) -> str:
    """A text of one or several lines behind its label, in a column of its own."""
    return f"{label:11}" + text.replace("\n", "\n" + " " * 11)


def visible(text: str) -> str:
    r"""`text` for people to read, with escapes such as `\x1b` or `\u202e` for characters that act
    on a terminal or cannot be seen.

    These are control characters other than the line break and the tab, marks of direction,
    characters without width, and halves of surrogate pairs. All text of a policy, a tool, a server
    or a data set goes through this before it is printed.
    """
    if text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() or one in "\n\t" or unicodedata.category(one) == "Zs"
        else one.encode("unicode_escape").decode()
        for one in text
    )
