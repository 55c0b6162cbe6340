"""The fenced blocks of the documentation, with the marks that say how they are run.

Comments above a block, which no reader sees, mark what is special about it:

    <!-- island.py -->              saved under this name; a block without a mark runs as it stands
    <!-- in model.rollout -->       YAML that stands in this section of a recipe
    <!-- slow -->                   runs among the slow tests; with words, only the lines with them
    <!-- without: WORDS -->         lines with these words are left out
    <!-- this -> that -->           a smaller size, which is typed in place of the one shown
    <!-- run first: COMMAND -->     what the page takes for granted
    <!-- printed -->                what was printed before; `at full size` without numbers
    <!-- tested by test_x -->       another file runs it
    <!-- not run: REASON -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^((?:<!--[^\n]*-->\n)*)```([^\n ]*)[^\n]*\n(.*?)^```$", re.M | re.S)
INSTALLS = "python3 -m venv .venv && .venv/bin/pip install . && "


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the marks above it."""

    language: str
    text: str
    marks: tuple[str, ...]

    def mark(self, begins: str) -> str | None:
        """The rest of the first mark that begins like this, or None."""
        found = (m.removeprefix(begins).strip() for m in self.marks if m.startswith(begins))
        return next(found, None)

    @property
    def file(self) -> str | None:
        return next((m for m in self.marks if re.fullmatch(r"\w+\.(py|yaml)", m)), None)

    @property
    def runs(self) -> bool:
        skipped = (self.mark("not run") or self.mark("tested by")) is not None
        return self.language in ("bash", "sh", "python", "yaml") and not skipped

    @property
    def small(self) -> str:
        """The text, with the small sizes of its marks."""
        text = self.text
        for mark in self.marks:
            shown, arrow, typed = mark.partition(" -> ")
            assert not arrow or shown in text, mark
            text = text.replace(shown, typed) if arrow else text
        return text

    def commands(self, slow: bool) -> Iterator[str]:
        """Its lines, or those that do not take long."""
        without, slow_words = (self.mark("without:") or "").split(", "), self.mark("slow")
        for line in re.findall(r"(?:.*\\\n)*.+\n?", self.small):
            words = slow_words.split() if slow_words else []
            too_slow = slow_words is not None and (not words or has_word(line, words))
            if not has_word(line, without) and (slow or not too_slow):
                yield line.replace(INSTALLS, "").replace(".venv/bin/", "").strip()


def has_word(line: str, words: list[str]) -> bool:
    return any(re.search(word, line.strip()) for word in words if word)


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(language, body, tuple(re.split(r"; | -->\n(?:<!-- )?", marks[5:])) if marks else ())
        for marks, language, body in FENCE.findall(text)
    ]


def example(page: str, name: str) -> str:
    """The block that a page marks with `<!-- NAME example -->`."""
    (block,) = (block for block in blocks(page) if f"{name} example" in block.marks)
    return block.text
