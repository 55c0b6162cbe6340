"""Access to a search server, without any secret in it.

Secrets are read from the environment when a connection is made, and are struck out of every message
and log line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

import docstring_parser

from turnrl import RecipeError, at_least
from turnrl.servers import LONGEST_PAUSE_S

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TIMEOUT_S = {"elasticsearch": 10.0, "retrieve": 60.0}
OF_RETRIEVE = ("api_key", "ca_certs", "version", "timeout_s", "retries", "wait_s")
"""The settings that a server with `/retrieve` has."""
_BEFORE: dict[str, object] = {"timeout_s": 10.0}
"""Defaults of earlier versions, which the saved recipes of their runs spell out."""
_MARGIN_S = 60.0


@dataclass(frozen=True)
class Server:
    """Access to a search server, without any secret in it: this is what a recipe holds.

    Secrets are written `${NAME}`, after an environment variable. A literal secret is refused, so
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
            for how they are searched. A cache needs it, and servers of one name share its answers.
            Choose another one when either changes.
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
        at_least(0.001, "", self, "timeout_s")
        at_least(0, "", self, "wait_s")
        at_least(0, "", self, "retries", whole=True)
        for url in [self.url] if isinstance(self.url, str) else self.url or []:
            check_url(url, "url")

    @property
    def _secrets(self) -> dict[str, str | None]:
        return {"api_key": self.api_key, "password": self.password, "cloud_id": self.cloud_id}

    def request_s(self, backend: str) -> float:
        """Seconds that one request to a server of this backend may take."""
        return _TIMEOUT_S[backend] if self.timeout_s is None else self.timeout_s

    def longest_answer_s(self, backend: str) -> float:
        """The longest time that a search may take: all attempts, the wait, and a margin."""
        attempts = (self.retries + 2) * (self.request_s(backend) + LONGEST_PAUSE_S)
        return attempts + self.wait_s + _MARGIN_S

    def known_as(self, index: str) -> str:
        """The name by which a cache knows an index that is searched with these settings."""
        return index if self.version is None else f"{index}, version {self.version}"

    def refuse_others(self, backend: str) -> None:
        """Raise if a setting is given that this backend does not have.

        Raises:
            RecipeError: Naming the settings.
        """
        if backend == "elasticsearch":
            return
        own = OF_RETRIEVE if backend == "retrieve" else ()
        given = [
            field.name
            for field in fields(self)
            if field.name not in own
            and vars(self)[field.name]
            not in (field.default, _BEFORE.get(field.name, field.default))
        ]
        if given and backend == "retrieve":
            raise RecipeError(
                f"WikiSearch: {', '.join(given)} would have no effect, because the backend is "
                "'retrieve', whose address is 'index'. Leave it out, or set backend to "
                "'elasticsearch'."
            )
        if given:
            raise RecipeError(
                f"WikiSearch: {', '.join(given)} would have no effect, because an embedded "
                "index has no server. Leave it out, or set backend to 'elasticsearch' or "
                "'retrieve'."
            )

    def secret(self, name: str, prefix: str) -> tuple[str | None, str]:
        """A secret, and the variable that holds it.

        Args:
            name: The setting.
            prefix: Begins the name of the variable that is read if the setting is not given.
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
        """The file with the certificates to trust; None for those of the machine.

        Args:
            prefix: Begins the name of the variable that is read if the setting is not given.
            label: The server, for messages.
            https: Whether the server's address is https.
        Raises:
            RecipeError: If there is no such file, or the setting has no use.
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
    """The text on each argument in the docstring of `Server`."""
    params = docstring_parser.parse(Server.__doc__ or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def check_url(url: str, name: str, example: str = "http://localhost:9200") -> None:
    """Raise if a text is no address, or holds a password.

    Raises:
        RecipeError: Naming the setting; a password is not shown.
    """
    if "@" in url:
        raise RecipeError(
            f"{name} holds a user or password. Give only the address, and the password as "
            f"'${{NAME}}' in 'password'."
        )
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise RecipeError(f"{name} is {url!r}; it must look like {example}.")


def strike(text: str, secrets: Iterable[str]) -> str:
    """`text` without secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def one_line(error: object, secrets: Iterable[str]) -> str:
    """The text of an error in one short line, without secrets."""
    return strike(" ".join(str(error).split()), secrets)[:300]
