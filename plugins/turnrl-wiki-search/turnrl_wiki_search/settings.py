"""Settings of a search index, one class for each backend: plain values, without any secret.

`open` makes the index from its settings. Its libraries are imported only then.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final
from urllib.parse import parse_qsl, urlsplit

from turnrl import QuestionSource, RecipeError
from turnrl.plugin.errors import at_least, check_address
from turnrl_wiki_search.credentials import check_reference, is_secret_name

if TYPE_CHECKING:
    from turnrl_wiki_search.index import SearchIndex

RETRIES = 5
"""Attempts after a first failure, before a server counts as unreachable."""
_LONGEST_PAUSE_S = 60.0
_MARGIN_S = 60.0


class IndexSettings(ABC):
    """Settings of a search index: `Embedded`, `Elasticsearch` or `Retriever`.

    Attributes:
        cache_name: The name by which a cache of results knows the index.
        longest_search_s: The longest time that a search may take; None for the tool's own default.
    """

    longest_search_s: float | None = None

    @property
    @abstractmethod
    def cache_name(self) -> str: ...

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

    @property
    def cache_name(self) -> str:
        return self.folder

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
        at_least(0.001, owner, self, "timeout_s", optional=False)
        at_least(0, owner, self, "wait_s", optional=False)
        if self.version is not None and not self.version.strip():
            raise RecipeError(
                f"{owner}version is empty. Give the passages a name, such as wiki-18."
            )


@final
@dataclass(frozen=True)
class Elasticsearch(_OnServer):
    """An index on an Elasticsearch server, built by turnrl or not, and ranked by BM25.

    Secrets are read from the environment when the index is opened: TURNRL_ES_API_KEY, or
    TURNRL_ES_PASSWORD with TURNRL_ES_USERNAME. A recipe that names them itself writes `${NAME}`,
    after an environment variable, because recipes are saved with every run.

    Args:
        name: Name of the index.
        url: Address of the server, or several of one cluster with commas; by default the
            environment's TURNRL_ES_URL, or http://localhost:9200.
        api_key: `${NAME}` of the API key.
        username: User for basic authentication; by default TURNRL_ES_USERNAME, or elastic.
        password: `${NAME}` of the user's password.
        ca_certs: File with the certificates to trust; by default TURNRL_ES_CA_CERTS.
        fields: The text fields of an index that turnrl did not build: `{text: body, title:
            headline}`. The title may be left out.
        version: A name of your choice for the passages of an index that turnrl did not build. A
            cache needs it. Choose another name when they change.
        timeout_s: Seconds that one request may take.
        wait_s: Seconds that the run waits for an unreachable server before it stops.
    Raises:
        RecipeError: If a secret is written out, or a value makes no sense.
    """

    references: ClassVar = ("api_key", "password")

    name: str
    url: str | None = None
    api_key: str | None = None
    username: str | None = None
    password: str | None = None
    ca_certs: str | None = None
    fields: dict[str, str] | None = None
    version: str | None = None
    timeout_s: float = 10.0
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        check_reference("Elasticsearch.api_key", self.api_key)
        check_reference("Elasticsearch.password", self.password)
        if self.api_key is not None and self.password is not None:
            raise RecipeError(
                "Elasticsearch.api_key and password are two ways to sign in. Leave one of them out."
            )
        for url in (self.url or "").split(",") if self.url is not None else ():
            check_url("Elasticsearch.url", url)
        if self.fields is not None:
            _check_fields(self.fields)
        if self.version is not None and self.fields is None:
            raise RecipeError(
                "Elasticsearch.version would have no effect, because an index that turnrl built "
                "has one. Leave it out, or set fields to search an index that turnrl did not build."
            )
        self._check()

    @property
    def cache_name(self) -> str:
        fields = [f"{part} in {name}" for part, name in sorted((self.fields or {}).items())]
        return ", ".join(
            [self.name, *([f"version {self.version}"] if self.version else ()), *fields]
        )

    def open(self) -> SearchIndex:
        from turnrl_wiki_search.elastic import ElasticIndex

        return ElasticIndex(self)


@final
@dataclass(frozen=True)
class Retriever(_OnServer):
    """The index behind a server with the `/retrieve` of Search-R1, whatever it ranks by.

    Args:
        url: The address, up to and including `/retrieve`, such as http://localhost:8000/retrieve. A
            secret in it is written `${NAME}`, after an environment variable.
        api_key: `${NAME}` of the key, which is sent as a bearer token; by default
            TURNRL_RETRIEVE_API_KEY is used, if set.
        ca_certs: File with the certificates to trust; by default TURNRL_RETRIEVE_CA_CERTS.
        version: A name of your choice for the passages and the way they are searched. A cache needs
            it, and servers of one version share the cached results. Choose another name when either
            changes.
        timeout_s: Seconds that one request may take.
        wait_s: Seconds that the run waits for an unreachable server before it stops.
    Raises:
        RecipeError: If a secret is written out, or a value makes no sense.
    """

    references: ClassVar = ("url", "api_key")

    url: str
    api_key: str | None = None
    ca_certs: str | None = None
    version: str | None = None
    timeout_s: float = 60.0
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        check_reference("Retriever.api_key", self.api_key)
        self._check()
        # variables of the query may be secrets, which only the connection fills in
        address, mark, query = self.url.partition("?")
        object.__setattr__(self, "url", f"{os.path.expandvars(address)}{mark}{query}")

    @property
    def cache_name(self) -> str:
        return self.url if self.version is None else f"{self.url}, version {self.version}"

    def open(self) -> SearchIndex:
        from turnrl_wiki_search.retrieve import RetrieveIndex

        return RetrieveIndex(self)


def index_at(text: str, build_from: str | QuestionSource | None = None) -> IndexSettings:
    """The settings of an index that a text names: the address of a server's `/retrieve`, or else
    the folder of an embedded index, in which `~` and environment variables are filled in."""
    if re.match(r"https?://", text):
        if build_from is not None:
            raise RecipeError(
                f"WikiSearch.build_from builds an embedded index, and the server at {text!r} has "
                "its own. Leave build_from out."
            )
        return Retriever(text)
    return Embedded(os.path.expandvars(Path(text).expanduser()), build_from)


def check_url(name: str, url: str, example: str = "http://localhost:9200") -> None:
    """Raise if a text is not an address, or holds a password or a key.

    Raises:
        RecipeError: Naming the setting; a password or a key is not shown.
    """
    advice = "Name the environment variable of a password in 'password', as '${NAME}'."
    check_address(name, url, example, advice, query=True)
    for parameter, value in parse_qsl(urlsplit(url).query):
        if is_secret_name(parameter):
            check_reference(f"{name}?{parameter}", value)


def _check_fields(fields: object) -> None:
    names = fields if isinstance(fields, Mapping) else {}
    odd = not names or not {"text"} <= {*names} <= {"text", "title"}
    if odd or not all(isinstance(n, str) and n.strip() and "*" not in n for n in names.values()):
        raise RecipeError(
            f"Elasticsearch.fields is {fields!r}. It names the field 'text', and perhaps 'title': "
            "write it as {text: body, title: headline}."
        )
