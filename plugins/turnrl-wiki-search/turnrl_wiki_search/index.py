"""Search index, whichever library is behind it."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnrl import Passage, ToolError

Backend = Literal["embedded", "elasticsearch"]
Analyzer = Literal["english", "standard"]

FORMAT = 1
"""Version of the layout of fields and metadata; an index of another version is refused."""

MAX_QUERY_CHARACTERS = 1000
"""Length at which a query is cut: some 170 words, far below the clause limit of any server."""


@dataclass(frozen=True)
class Hit:
    """A passage that answers a query, and its BM25 score."""

    passage: Passage
    score: float


@dataclass(frozen=True)
class IndexInfo:
    """The description that an index carries with it.

    Args:
        backend: The library or server behind it.
        index: Folder, or name on the server.
        version: Digest of the passages, in order, and the analyzer: the same corpus gives the same
            version on any machine, and everything cached under a version stays true.
        source: The corpus, in the words of `turnrl index build --source`.
        splitter: How articles were split: `words=100`, or `none`.
        analyzer: `english` (stop words, stemming) or `standard`.
        passages: How many there are.
        built: When the build ended, ISO 8601, UTC.
        format: Version of the layout.
    """

    backend: Backend
    index: str
    version: str
    source: str
    splitter: str
    analyzer: Analyzer
    passages: int
    built: str
    format: int = FORMAT


class SearchIndex(ABC):
    """An open index. Safe to use from several threads at once."""

    @abstractmethod
    def info(self) -> IndexInfo:
        """Its description.

        Raises:
            ToolError: If the index is absent, of another format, or out of reach.
        """

    @abstractmethod
    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for each query, best first.

        Args:
            queries: Cleaned by `clean_query`, none empty. Their text is data: nothing in it is an
                operator.
            k: The most hits per query.
        Raises:
            ToolError: If the index cannot answer. A list that is returned holds true answers only.
        """

    def close(self) -> None:  # noqa: B027 (most indexes hold nothing that needs it)
        """Give back what the index holds open."""


def clean_query(text: str) -> str:
    """`text` as both backends take it: valid, with single spaces, not over `MAX_QUERY_CHARACTERS`.

    The policy writes JSON, in which half a surrogate pair is legal and reaches us as text that no
    index can encode.
    """
    text = " ".join(text.encode("utf-8", "replace").decode().replace("\0", " ").split())
    if len(text) <= MAX_QUERY_CHARACTERS:
        return text
    return text[: MAX_QUERY_CHARACTERS + 1].rpartition(" ")[0] or text[:MAX_QUERY_CHARACTERS]


def build_command(backend: Backend, index: str, source: str = "SOURCE") -> str:
    """The command that builds an index, for messages."""
    return (
        f"turnrl index build --backend {backend} --index {shlex.quote(index)} "
        f"--source {shlex.quote(source)}"
    )


def described(data: Mapping[str, Any], backend: Backend, index: str, where: str) -> IndexInfo:
    """The description in the metadata of an index.

    Args:
        data: The metadata; it may say more besides.
        backend: What is behind the index.
        index: Folder, or name on the server, by which it was asked for.
        where: The index, for messages.
    Raises:
        ToolError: If the index is of another format.
        TypeError: If the metadata lacks a field.
    """
    if data.get("format") != FORMAT:
        raise ToolError(
            f"{where} has format {data.get('format')}, and this turnrl-wiki-search reads format "
            f"{FORMAT}. Build it again: "
            f"'{build_command(backend, index, str(data.get('source', 'SOURCE')))} --overwrite'."
        )
    fields = IndexInfo.__dataclass_fields__
    return IndexInfo(**{**{k: v for k, v in data.items() if k in fields}, "index": index})


def say(message: str) -> None:
    """Tell the user something on stderr, at once."""
    print(f"turnrl: {message}", file=sys.stderr, flush=True)
