"""The interface of a search index, shared by all backends."""

from __future__ import annotations

import sys
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnrl import ToolError
from turnrl.plugin.text import say
from turnrl.types import Passage

Analyzer = Literal["english", "standard"]

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
        backend: embedded, elasticsearch or retrieve.
        index: Folder, name on the server, or address.
        version: Digest of the passages, in order, and the analyzer. The same corpus gets the same
            version on any machine, so results cached under a version stay valid. For an index that
            turnrl did not build: the setting `version`.
        source: The corpus, as `turnrl index build --source` names it.
        splitter: How articles were split: `words=100`, or `none`.
        analyzer: `english` (stop words, stemming) or `standard`.
        passages: The number of passages.
        built: The end of the build, ISO 8601, UTC.
        format: Version of the layout.
    """

    backend: str
    index: str
    version: str | None
    source: str = "unknown"
    splitter: str = "unknown"
    analyzer: Analyzer | None = None
    passages: int | None = None
    built: str = "unknown"
    format: int = FORMAT


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


def parse_info(data: Mapping[str, object], index: str, build: str) -> IndexInfo:
    """Read the description in an index's metadata, which may have more fields.

    Args:
        data: The metadata.
        index: The folder or name that the index was opened by.
        build: The command that builds it, for messages.
    Raises:
        ToolError: If the index is of another format.
        TypeError: If the metadata lacks a field.
    """
    if data.get("format") != FORMAT:
        raise ToolError(
            f"the search index {index!r} has format {data.get('format')}, and this "
            f"turnrl-wiki-search reads format {FORMAT}. Build it again: '{build} --overwrite'."
        )
    fields = {k: v for k, v in data.items() if k in IndexInfo.__dataclass_fields__}
    return IndexInfo(**{**fields, "index": index})  # type: ignore[arg-type]


def print_remark(message: str) -> None:
    """Print a message to the user on stderr."""
    say(f"turnrl: {message}", sys.stderr)
