"""Splitting articles into passages at the ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from turnrl import RecipeError
from turnrl.types import Passage

_SENTENCE_END = re.compile(r"""([.!?]["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9])|\n""")
_ABBREVIATIONS = frozenset(
    "Mr Mrs Ms Dr St Prof Jr Sr Gen Col Capt Lt Sgt Rev Hon Mt Ft No no vs etc c ca e.g i.e".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Splitter:
    """Cuts an article into passages of about `words` words, at the ends of sentences.

    A passage ends at the sentence end nearest to `words` words. A sentence longer than 1.5 times
    `words` is cut between words, and a last passage shorter than a third of `words` joins the
    passage before it. This is
    the field's "wiki-18" convention (100 words, each passage with its title), except that sentences
    stay whole.

    Args:
        words: Number of words in a passage, separated by white space; None leaves texts whole.
    """

    words: int | None

    @classmethod
    def parse(cls, text: str) -> Splitter:
        """Read `words=100` or `none`.

        Raises:
            RecipeError: If it is neither.
        """
        if text == "none":
            return cls(None)
        name, _, number = text.partition("=")
        if name == "words" and number.isascii() and number.isdigit() and int(number) >= 10:
            return cls(int(number))
        raise RecipeError(f"no splitter {text!r}. Use 'words=100' (10 words or more) or 'none'.")

    def __str__(self) -> str:
        return "none" if self.words is None else f"words={self.words}"

    def split(self, article: Passage) -> list[Passage]:
        """The passages of an article, each with its title; none if it has no text."""
        text = article.text.strip()
        if self.words is None:
            return [article] if text else []
        return [
            Passage(f"{article.id}-{number}", article.title, piece)
            for number, piece in enumerate(self._pieces(text, self.words))
        ]

    @staticmethod
    def _pieces(text: str, size: int) -> list[str]:
        pieces: list[list[str]] = []
        count = 0  # words of the last piece
        for sentence in _sentences(text):
            words = sentence.split()
            parts = [sentence.strip()] if words else []
            if cut := len(words) > 1.5 * size:
                parts = [" ".join(words[at : at + size]) for at in range(0, len(words), size)]
            for n, part in enumerate(parts):
                length = min(len(words) - n * size, size) if cut else len(words)
                # a passage that ends here is `size - count` words short; with this part it is
                # `count + length - size` words too long
                if (
                    not pieces
                    or (cut and not n)
                    or (count and count + length - size > size - count)
                ):
                    pieces.append([])
                    count = 0
                pieces[-1].append(part)
                count += length
        if len(pieces) > 1 and count < size / 3:
            pieces[-2:] = [[*pieces[-2], *pieces[-1]]]
        return [" ".join(piece) for piece in pieces]


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if match[1] is None:  # the end of a line
            yield text[start : match.start()]
        else:
            word = text[text.rfind(" ", start, match.start()) + 1 : match.start()].lstrip("\"'“‘([")
            # "Dr.", or an initial, alone or as in "U.S."
            if match[1] == "." and (
                word in _ABBREVIATIONS or (word[-1:].isupper() and word[-2:-1] in ("", "."))
            ):
                continue
            yield text[start : match.end(1)]
        start = match.end()
    yield text[start:]
