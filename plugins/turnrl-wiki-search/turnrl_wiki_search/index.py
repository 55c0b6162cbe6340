"""The interface of a search index, shared by all backends."""

from __future__ import annotations

import shlex
import sys
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnrl import Passage, ToolError, say

Backend = Literal["embedded", "elasticsearch", "retrieve"]
Analyzer = Literal["english", "standard"]
Ranking = Literal["bm25", "knn", "hybrid"]

FORMAT = 1
"""Version of the fields and metadata. Indexes of other versions are refused."""

MAX_QUERY_CHARACTERS = 1000
"""Longer queries are cut. This is about 170 words, far below any server's clause limit."""


@dataclass(frozen=True)
class Hit:
    """A passage that matches a query, with its score; None if the server gives none."""

    passage: Passage
    score: float | None


@dataclass(frozen=True)
class IndexInfo:
    """The description of an index. An index that turnrl did not build does not carry one itself.

    Args:
        backend: Its backend.
        index: Folder, name on the server, or address.
        version: Digest of the passages, in order, and the analyzer. The same corpus gets the same
            version on any machine, so results cached under a version stay valid. For an index that
            turnrl did not build: the setting `version`, and the settings of its searches.
        source: The corpus, as `turnrl index build --source` names it.
        splitter: How articles were split: `words=100`, or `none`.
        analyzer: `english` (stop words, stemming) or `standard`.
        passages: The number of passages.
        built: The end of the build, ISO 8601, UTC.
        format: Version of the layout.
        encoder: The encoder of the passages' vectors; `none` if there are no vectors.
    """

    backend: Backend
    index: str
    version: str | None
    source: str = "unknown"
    splitter: str = "unknown"
    analyzer: Analyzer | None = None
    passages: int | None = None
    built: str = "unknown"
    format: int = FORMAT
    encoder: str = "none"


class SearchIndex(ABC):
    """An open index. Safe to use from several threads at once."""

    @abstractmethod
    def info(self) -> IndexInfo:
        """Its description.

        Raises:
            ToolError: If the index is absent, of another format, or unreachable.
        """

    @abstractmethod
    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for each query, best first.

        Args:
            queries: Cleaned by `clean_query`, none empty. Nothing in their text is an operator.
            k: The most hits per query.
        Raises:
            ToolError: If the index cannot answer; partial results are never returned.
        """

    def passages(self) -> Iterator[Passage] | None:
        """Every passage once, in any order; None (the default) if the index cannot be read whole.

        Raises:
            ToolError: While reading, if the index cannot be read to its end.
        """
        return None

    def close(self) -> None:  # noqa: B027 - optional
        """Release connections and threads."""


def clean_query(text: str) -> str:
    """`text` as all backends accept it: valid, with single spaces, cut to `MAX_QUERY_CHARACTERS`.
    Letters with marks are composed, as in passages.

    The policy writes JSON, which may contain half a surrogate pair that no index can encode.
    """
    text = text.encode("utf-8", "replace").decode().replace("\0", " ")
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if len(text) <= MAX_QUERY_CHARACTERS:
        return text
    return text[: MAX_QUERY_CHARACTERS + 1].rpartition(" ")[0] or text[:MAX_QUERY_CHARACTERS]


def build_command(
    backend: Backend, index: str, source: str = "SOURCE", encoder: str | None = None
) -> str:
    """The command that builds an index, for messages."""
    words = ["turnrl", "index", "build", "--backend", backend, "--index", index, "--source", source]
    return shlex.join(words if encoder is None else [*words, "--encoder", encoder])


def described(data: Mapping[str, object], backend: Backend, index: str, where: str) -> IndexInfo:
    """Read the description in an index's metadata.

    Args:
        data: The metadata; it may have more fields.
        backend: The index's backend.
        index: The folder or name that it was opened by.
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
    fields = {k: v for k, v in data.items() if k in IndexInfo.__dataclass_fields__}
    return IndexInfo(**{**fields, "index": index})  # type: ignore[arg-type]


def remark(message: str) -> None:
    """Print a message to the user on stderr."""
    say(f"turnrl: {message}", sys.stderr)
