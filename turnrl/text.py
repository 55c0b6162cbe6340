"""Rules about text that rewards, metrics and rollouts share: phrases and neutralising; and sizes as
recipes give them.

Phrases are normalised as SQuAD does it (Rajpurkar et al. 2016, arXiv 1606.05250, evaluation
script): lower case, no punctuation, no articles, single spaces. Unlike there, a text of which that
leaves nothing matches nothing, so neither an empty answer nor a gold answer such as "The" can be
hit by accident.
"""

import re
import string
from collections.abc import Iterable, Sequence

from turnrl.errors import RecipeError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
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
    """`text` with markup that could act on the conversation made inert, and still readable.

    The angle brackets of a named tag become ‹ and ›, so that a retrieved page can neither close
    `<result>` nor open `<answer>`; a chat control token loses its outer characters in the same way.

    Args:
        text: What a tool returned.
        tags: Tag names that mean something to the segmenter.
        control_tokens: The tokenizer's special tokens, such as `<|im_end|>`.
    """
    for token in sorted(control_tokens, key=len, reverse=True):
        if token and token in text:
            text = text.replace(token, f"‹{token[1:-1]}›" if len(token) > 2 else "‹›")
    names = "|".join(re.escape(tag) for tag in tags)
    if names:
        # one way to match each space, else a long run of them takes quadratic time
        tag = rf"\s*(?:/\s*)?(?:{names})\b"
        text = re.sub(rf"<({tag}[^<>]*)>", r"‹\1›", text, flags=re.IGNORECASE)
        # a tag left open could be closed by what the segmenter writes after it
        text = re.sub(rf"<(?={tag})", "‹", text, flags=re.IGNORECASE)
    return text


def parse_bytes(text: str, setting: str, instead: str = "") -> int:
    """Bytes of `4GB`, `512MiB` and the like.

    Args:
        text: The size.
        setting: Where it is given, for the message.
        instead: What else may stand there, such as "'auto', or ".
    Raises:
        RecipeError: If it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", str(text), re.IGNORECASE)
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        raise RecipeError(
            f"{setting} is {text!r}; give {instead}a size with its unit, such as '24GB' or "
            "'512MiB' (KB to TB, KiB to TiB)"
        )
    return size
