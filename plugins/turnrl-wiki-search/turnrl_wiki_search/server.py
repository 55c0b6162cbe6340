"""Settings of a search server and its searches, without any secret in them.

Secrets are read from the environment when a connection is made, and are struck out of every message
and log line.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

import docstring_parser

from turnrl import RecipeError, at_least, check_address, did_you_mean, one_of
from turnrl.servers import LONGEST_PAUSE_S, strike
from turnrl_wiki_search.index import Ranking

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TIMEOUT_S = {"elasticsearch": 10.0, "retrieve": 60.0}
OF_RETRIEVE = ("api_key", "ca_certs", "version", "timeout_s", "retries", "wait_s")
"""The settings that a server with `/retrieve` has."""
RESUME = (
    "; then resume the run from its last checkpoint with --ckpt_path, or raise 'wait_s' to wait "
    "longer"
)
REPLAY = " With 'cache' and 'offline: true' a finished run replays without a server."
"""Next steps for a run whose server is away; a command needs neither."""
_BEFORE: dict[str, object] = {"timeout_s": 10.0}
"""Defaults of earlier versions, which saved recipes of their runs contain."""
_MARGIN_S = 60.0
_ENCODING_S = 240.0
"""Additional seconds that a search by vectors may take."""
_PARTS = ("text", "title", "vector")
_SECRET_WORDS = (
    "key",
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "auth",
    "sig",
    "signature",
    "pwd",
    "authorization",
    "jwt",
    "bearer",
    "credential",
    "credentials",
)
"""A parameter of an address with a word in its name that ends with one of these holds a secret."""


@dataclass(frozen=True)
class SearchServer:
    """Settings of a search server and its searches, as a recipe holds them, without any secret.

    A secret is written `${NAME}`, after its environment variable. A literal secret is refused, so
    that none is ever saved with a run.

    Args:
        url: Address of Elasticsearch, or several of one cluster; by default the environment's
            TURNRL_ES_URL, or http://localhost:9200.
        api_key: `${NAME}` of the API key; by default TURNRL_ES_API_KEY, or TURNRL_RETRIEVE_API_KEY
            for `retrieve`, is used, if set.
        username: User of Elasticsearch for basic authentication; by default the environment's
            TURNRL_ES_USERNAME, or elastic.
        password: `${NAME}` of the user's password; by default TURNRL_ES_PASSWORD is used, if set.
        cloud_id: `${NAME}` of the id of an Elastic Cloud deployment, in place of an address; by
            default TURNRL_ES_CLOUD_ID is used, if set and no url is given.
        ca_certs: File with the certificates to trust; by default the environment's
            TURNRL_ES_CA_CERTS, or TURNRL_RETRIEVE_CA_CERTS for `retrieve`.
        version: A name of your choice for the passages of an index that turnrl did not build, and
            for the way they are searched. A cache needs it. `/retrieve` servers of one version
            share the cached answers. Choose another name when either changes.
        fields: The fields of an Elasticsearch index that turnrl did not build: `{text: body, title:
            headline, vector: embedding}`. The title may be left out. The vector is for rankings
            that search by it.
        ranking: bm25; knn, by the similarity of vectors; or hybrid, which joins both by reciprocal
            rank fusion.
        encoder: Turns a query into a vector, for knn and hybrid: the name or the folder of a
            sentence-transformers model, or a function, `my_module.encode`, which takes a list of
            texts and returns an array (texts, dimensions).
        query_prefix: Put in front of each query before it is encoded, such as "query: ".
        timeout_s: Seconds that one request may take; by default 10, and 60 for `retrieve`.
        retries: Attempts after a first failure, before the server counts as unreachable.
        wait_s: Seconds that the run waits for an unreachable server before it stops.
    Raises:
        RecipeError: If a secret is written out, options exclude each other, or a number makes no
            sense.
    """

    url: str | list[str] | None = None
    api_key: str | None = None
    username: str | None = None
    password: str | None = None
    cloud_id: str | None = None
    ca_certs: str | None = None
    version: str | None = None
    fields: dict[str, str] | None = None
    ranking: Ranking = "bm25"
    encoder: str | None = None
    query_prefix: str = ""
    timeout_s: float | None = None
    retries: int = 5
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        for name, value in self._secrets.items():
            if value is not None and not _REFERENCE.fullmatch(value):
                raise RecipeError(
                    f"{name} must name an environment variable, as '${{NAME}}' (in quotes on a "
                    "command line). Its value is not shown, because it may be the secret itself. "
                    "Recipes are saved with every run."
                )
        if self.url is not None and self.cloud_id is not None:
            raise RecipeError("url and cloud_id both name a server. Leave one of them out.")
        if self.api_key is not None and self.password is not None:
            raise RecipeError(
                "api_key and password are two ways to sign in. Leave one of them out."
            )
        if self.version is not None and not self.version.strip():
            raise RecipeError("version is empty. Give the passages a name, such as wiki-18.")
        self._check_ranking()
        at_least(0.001, "", self, "timeout_s")
        at_least(0, "", self, "wait_s")
        at_least(0, "", self, "retries", whole=True)
        for url in [self.url] if isinstance(self.url, str) else self.url or []:
            check_url(url, "url")

    def _check_ranking(self) -> None:
        one_of(get_args(Ranking), "", self, "ranking")
        if self.fields is not None:
            _check_fields(self.fields)
        has_vector = self.fields is not None and "vector" in self.fields
        if self.ranking == "bm25":
            of_vectors = {"encoder": self.encoder, "query_prefix": self.query_prefix}
            unused = [name for name, value in of_vectors.items() if value]
            unused += ["fields.vector"] if has_vector else []
            if unused:
                raise RecipeError(
                    f"{', '.join(unused)} would have no effect, because the ranking is 'bm25'. Set "
                    "ranking to 'knn' or 'hybrid', or leave it out."
                )
            return
        if not self.encoder:
            raise RecipeError(
                f"the ranking {self.ranking!r} needs an encoder for the queries. Set encoder to "
                "the name or folder of a sentence-transformers model, or to a function, as "
                "my_module.encode."
            )
        if self.fields is not None and not has_vector:
            raise RecipeError(
                f"the ranking {self.ranking!r} needs the field that holds the vectors. Add it to "
                "fields, as vector: NAME."
            )

    @property
    def _secrets(self) -> dict[str, str | None]:
        return {"api_key": self.api_key, "password": self.password, "cloud_id": self.cloud_id}

    def request_s(self, backend: str) -> float:
        """Seconds that one request to a server of this backend may take."""
        return _TIMEOUT_S[backend] if self.timeout_s is None else self.timeout_s

    def longest_answer_s(self, backend: str) -> float:
        """The longest time that a search may take: all attempts, the wait, and a margin."""
        attempts = (self.retries + 2) * (self.request_s(backend) + LONGEST_PAUSE_S)
        encoding = 0.0 if self.ranking == "bm25" else _ENCODING_S
        return attempts + self.wait_s + encoding + _MARGIN_S

    def known_as(self, index: str) -> str:
        """The name by which a cache knows an index that is searched with these settings."""
        return ", ".join((index, *self.searched_by()))

    def searched_by(self) -> list[str]:
        """The settings, other than the index, that decide the results of a search."""
        settings = [] if self.version is None else [f"version {self.version}"]
        if self.fields is not None:
            settings += [f"{part} in {self.fields[part]}" for part in _PARTS if part in self.fields]
        if self.ranking != "bm25":
            settings.append(f"{self.ranking} by {self.encoder}")
        return [*settings, f"after {self.query_prefix!r}"] if self.query_prefix else settings

    def refuse_others(self, backend: str) -> None:
        """Raise if a setting is set that this backend does not have.

        Raises:
            RecipeError: Naming the settings.
        """
        if backend == "elasticsearch":
            if self.version is not None and self.fields is None:
                raise RecipeError(
                    "WikiSearch: version would have no effect, because an index that turnrl built "
                    "has one. Leave it out, or set fields to search an index that turnrl did not "
                    "build."
                )
            return
        if backend == "embedded" and self.ranking != "bm25":
            raise RecipeError(
                f"WikiSearch: ranking is {self.ranking!r}, and an embedded index ranks by 'bm25' "
                "alone. Build an index on Elasticsearch with 'turnrl index build --backend "
                "elasticsearch --encoder ...', and set backend to 'elasticsearch'; or leave "
                "ranking and encoder out."
            )
        settings = OF_RETRIEVE if backend == "retrieve" else ()
        unused = [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in settings
            and vars(self)[field.name]
            not in (field.default, _BEFORE.get(field.name, field.default))
        ]
        if unused and backend == "retrieve":
            raise RecipeError(
                f"WikiSearch: {', '.join(unused)} would have no effect, because the backend is "
                "'retrieve', whose address is 'index'. Leave it out, or set backend to "
                "'elasticsearch'."
            )
        if unused:
            raise RecipeError(
                f"WikiSearch: {', '.join(unused)} would have no effect, because an embedded "
                "index has no server. Leave it out, or set backend to 'elasticsearch' or "
                "'retrieve'."
            )

    def secret(self, name: str, prefix: str) -> tuple[str | None, str]:
        """A secret, and the variable that holds it.

        Args:
            name: The setting.
            prefix: Prefix of the variable that is read if the setting is not given.
        Raises:
            RecipeError: If the setting names a variable that is not set.
        """
        reference = self._secrets[name]
        variable = reference[2:-1] if reference else f"{prefix}{name.upper()}"
        value = os.environ.get(variable)
        if reference and not value:
            raise RecipeError(
                f"{name} names the environment variable {variable}, which is not set. Set it."
            )
        return value or None, variable

    def certificates(self, prefix: str, label: str, https: bool) -> str | None:
        """The file with the certificates to trust; None for the machine's own.

        Args:
            prefix: Prefix of the variable that is read if the setting is not given.
            label: The server, for messages.
            https: True if the server's address is https.
        Raises:
            RecipeError: If there is no such file, or the setting would have no effect.
        """
        file = self.ca_certs or os.environ.get(f"{prefix}CA_CERTS")
        if file and not os.path.isfile(file):  # noqa: PTH113
            raise RecipeError(f"no file {file!r} with certificates to trust. Correct ca_certs.")
        if self.ca_certs and not https:
            raise RecipeError(
                f"ca_certs is {file!r}, but {label} is not https. Leave it out, or use https."
            )
        return file if file and https else None


def explained() -> dict[str, str]:
    """The description of each argument in the docstring of `SearchServer`."""
    params = docstring_parser.parse(SearchServer.__doc__ or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _check_fields(fields: object) -> None:
    """Raise if the setting `fields` is not a mapping of its parts to names of fields."""
    example = "Write it as {text: body, title: headline}."
    if not isinstance(fields, Mapping):
        raise RecipeError(f"fields is {fields!r}, which is not a mapping. {example}")
    for part, name in fields.items():
        if part not in _PARTS:
            near = did_you_mean(str(part), _PARTS)
            raise RecipeError(
                f"fields has the part {part!r}.{near} It takes 'text', 'title' and 'vector', each "
                f"with the name of a field of the index. {example}"
            )
        if not isinstance(name, str) or not name.strip() or "*" in name:
            raise RecipeError(
                f"fields.{part} is {name!r}, which is not the name of a field. {example}"
            )
    if "text" not in fields:
        raise RecipeError(f"fields has no 'text', the field with the passages. {example}")


def check_url(url: str, name: str, example: str = "http://localhost:9200") -> None:
    """Raise if a text is not an address, or holds a password or a key.

    Raises:
        RecipeError: Naming the setting; a password or a key is not shown.
    """
    advice = "Name the variable that holds the password in 'password', as '${NAME}'."
    check_address(name, url, example, advice, query=True)
    for parameter, value in parse_qsl(urlsplit(url).query):
        words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", parameter).lower())
        secret = any(word.endswith(_SECRET_WORDS) for word in words)
        if secret and not _REFERENCE.fullmatch(value):
            raise RecipeError(
                f"{name} holds the secret {parameter!r}, which is not shown. Name an environment "
                f"variable in its place, as '?{parameter}=${{NAME}}'. Recipes are saved with "
                "every run."
            )


def resolved(address: str) -> tuple[str, list[str]]:
    """An address with the values of the environment variables that it names, and these values.

    Raises:
        RecipeError: If a variable is not set.
    """
    secrets: list[str] = []

    def value(reference: re.Match[str]) -> str:
        secret = os.environ.get(reference[1])
        if not secret:
            raise RecipeError(
                f"the address {address} names the environment variable {reference[1]}, which is "
                "not set. Set it."
            )
        secrets.extend({secret, quote(secret, safe=""), quote_plus(secret)})
        return quote(secret, safe="")

    return _REFERENCE.sub(value, address), secrets


_struck_out: set[str] = set()
"""The secrets of every connection of this process."""


def hide_from_logs(secrets: Iterable[str], loggers: Iterable[str]) -> None:
    """Strike secrets out of all later lines of these loggers."""
    _struck_out.update(secrets)
    for name in loggers:
        logging.getLogger(name).addFilter(_strike_line)


def _strike_line(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    struck = strike(message, _struck_out)
    if struck != message or record.exc_info:
        record.msg, record.args, record.exc_info, record.exc_text = struck, (), None, None
    return True
