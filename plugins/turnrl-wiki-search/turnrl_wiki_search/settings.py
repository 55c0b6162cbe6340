"""Settings of a search index, one class for each backend: plain values, without any secret. Secrets
are read from the environment when an index is opened.

`open` makes the index from its settings. Its libraries are imported only then.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from turnrl import QuestionSource, RecipeError
from turnrl.plugin.errors import check_address, check_at_least

if TYPE_CHECKING:
    from turnrl_wiki_search.index import SearchIndex

RETRIES = 5
"""Attempts after a first failure, before a server counts as unreachable."""
_LONGEST_PAUSE_S = 60.0
_MARGIN_S = 60.0


class IndexSettings(ABC):
    """Settings of a search index: `Embedded`, `Elasticsearch` or `Retriever`.

    Attributes:
        longest_search_s: The longest time that a search may take; None for the tool's own default.
    """

    longest_search_s: float | None = None

    @abstractmethod
    def open(self) -> SearchIndex:
        """Open the index."""


@final
@dataclass(frozen=True)
class Embedded(IndexSettings):
    """An index in a folder, which any number of processes can read. It needs no server.

    Args:
        folder: The folder.
        build_from: Source from which a run builds the index if the folder does not exist: any
            source that `turnrl index build --source` takes, or `class_path` and `init_args`.
    """

    folder: str
    build_from: str | QuestionSource | None = None

    def open(self) -> SearchIndex:
        from turnrl_wiki_search.embedded import EmbeddedIndex  # loads tantivy

        return EmbeddedIndex(self.folder)


class _OnServer(IndexSettings):
    """Settings that both kinds of servers have."""

    version: str | None
    timeout_s: float
    wait_s: float

    @property
    def longest_search_s(self) -> float:  # type: ignore[override]
        attempts = (RETRIES + 2) * (self.timeout_s + _LONGEST_PAUSE_S)
        return attempts + self.wait_s + _MARGIN_S

    def _check(self) -> None:
        owner = f"{type(self).__name__}."
        check_at_least(0.001, owner, self, "timeout_s", optional=False)
        check_at_least(0, owner, self, "wait_s", optional=False)
        if self.version is not None and not self.version.strip():
            raise RecipeError(
                f"{owner}version is empty. Give the passages a name, such as wiki-18."
            )


@final
@dataclass(frozen=True)
class Elasticsearch(_OnServer):
    """An index on an Elasticsearch server, built by turnrl or not, and ranked by BM25.

    The environment has what signs in: TURNRL_ES_API_KEY, or TURNRL_ES_PASSWORD with
    TURNRL_ES_USERNAME (elastic by default), and TURNRL_ES_CA_CERTS, a file with the certificates to
    trust.

    Args:
        name: Name of the index.
        url: Address of the server, or several of one cluster with commas; by default the
            environment's TURNRL_ES_URL, or http://localhost:9200.
        fields: The text fields of an index that turnrl did not build: `{text: body, title:
            headline}`. The title may be left out.
        version: A name of your choice for the passages of an index that turnrl did not build. A
            cache needs it. Choose another name when they change.
        timeout_s: Seconds that one request may take.
        wait_s: Seconds that the run waits for an unreachable server before it stops.
    Raises:
        RecipeError: If a value makes no sense, or the address holds a secret.
    """

    name: str
    url: str | None = None
    fields: dict[str, str] | None = None
    version: str | None = None
    timeout_s: float = 10.0
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        for url in (self.url or "").split(",") if self.url is not None else ():
            check_address("Elasticsearch.url", url, "http://localhost:9200")
        if self.fields is not None:
            _check_fields(self.fields)
        if self.version is not None and self.fields is None:
            raise RecipeError(
                "Elasticsearch.version would have no effect, because an index that turnrl built "
                "has one. Leave it out, or set fields to search an index that turnrl did not build."
            )
        self._check()

    def open(self) -> SearchIndex:
        from turnrl_wiki_search.elastic import ElasticIndex

        return ElasticIndex(self)


@final
@dataclass(frozen=True)
class Retriever(_OnServer):
    """The index behind a server with the `/retrieve` of Search-R1, whatever it ranks by.

    If the environment has TURNRL_RETRIEVE_API_KEY, it is sent as a bearer token.

    Args:
        url: The address, up to and including `/retrieve`, such as http://localhost:8000/retrieve.
        version: A name of your choice for the passages and the way they are searched. A cache needs
            it, and servers of one version share the cached results. Choose another name when either
            changes.
        timeout_s: Seconds that one request may take.
        wait_s: Seconds that the run waits for an unreachable server before it stops.
    Raises:
        RecipeError: If a value makes no sense, or the address holds a secret.
    """

    url: str
    version: str | None = None
    timeout_s: float = 60.0
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        advice = "A key comes from the environment, as TURNRL_RETRIEVE_API_KEY."
        check_address("Retriever.url", self.url, "http://localhost:8000/retrieve", advice)
        self._check()

    def open(self) -> SearchIndex:
        from turnrl_wiki_search.retrieve import RetrieveIndex

        return RetrieveIndex(self)


def parse_index(text: str, build_from: str | QuestionSource | None = None) -> IndexSettings:
    """The settings of an index that a text names: the address of a server's `/retrieve`, or else
    the folder of an embedded index, whose `~` is the home folder."""
    if re.match(r"https?://", text):
        if build_from is not None:
            raise RecipeError(
                f"WikiSearch.build_from builds an embedded index, and the server at {text!r} has "
                "its own. Leave build_from out."
            )
        return Retriever(text)
    return Embedded(str(Path(text).expanduser()), build_from)


def _check_fields(fields: object) -> None:
    names = fields if isinstance(fields, Mapping) else {}
    odd = not names or not {"text"} <= {*names} <= {"text", "title"}
    if odd or not all(isinstance(n, str) and n.strip() and "*" not in n for n in names.values()):
        raise RecipeError(
            f"Elasticsearch.fields is {fields!r}. It names the field 'text', and perhaps 'title': "
            "write it as {text: body, title: headline}."
        )
