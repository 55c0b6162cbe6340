"""Access to a server, and its secrets.

Secrets are read from the environment when a connection is made. Only the client holds them, and
they are struck out of every message and log line.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import docstring_parser

from turnrl import RecipeError, ToolError, at_least

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

MAJORS = (8, 9)
"""Major versions of servers that the client, of major version 8, works with."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Server:
    """Access to an Elasticsearch server, without any secret in it: this is what a recipe holds.

    Secrets are written `${NAME}`, after an environment variable. A literal secret is refused, so
    that none is ever saved with a run.

    Args:
        url: Address, or several of one cluster; by default the environment's TURNRL_ES_URL, or
            http://localhost:9200.
        api_key: `${NAME}` of the API key; by default TURNRL_ES_API_KEY is used, if set.
        username: User for basic authentication; by default the environment's TURNRL_ES_USERNAME, or
            elastic.
        password: `${NAME}` of the password; by default TURNRL_ES_PASSWORD is used, if set.
        cloud_id: `${NAME}` of the id of an Elastic Cloud deployment, in place of an address; by
            default TURNRL_ES_CLOUD_ID is used, if set and no url is given.
        ca_certs: File with the certificates to trust; by default the environment's
            TURNRL_ES_CA_CERTS.
        timeout_s: Seconds that one request may take.
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
    timeout_s: float = 10.0
    retries: int = 5
    wait_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("api_key", "password", "cloud_id"):
            value = getattr(self, name)
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
        at_least(0.001, "", self, "timeout_s")
        at_least(0, "", self, "wait_s")
        at_least(0, "", self, "retries", whole=True)
        for url in [self.url] if isinstance(self.url, str) else self.url or []:
            _check_url(url, "url")


def explained() -> dict[str, str]:
    """The text on each argument in the docstring of `Server`."""
    params = docstring_parser.parse(Server.__doc__ or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _check_url(url: str, name: str) -> None:
    parts = urlsplit(url)
    if "@" in url:
        raise RecipeError(
            f"{name} holds a user or password. Give only the address, and the password as "
            f"'${{NAME}}' in 'password'."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RecipeError(f"{name} is {url!r}; it must look like http://localhost:9200.")


@dataclass(frozen=True)
class Access:
    """A server and its secrets. It is never printed."""

    label: str
    options: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    credentials: str

    @classmethod
    def of(cls, server: Server) -> Access:
        options: dict[str, Any] = {}
        secrets: list[str] = []

        def secret(name: str) -> tuple[str | None, str]:
            """A secret, and the variable that holds it."""
            reference = getattr(server, name)
            variable = reference[2:-1] if reference else f"TURNRL_ES_{name.upper()}"
            value = os.environ.get(variable)
            if reference and not value:
                raise RecipeError(
                    f"{name} names the environment variable {variable}, which is not set. Set it."
                )
            if value:
                secrets.append(value)
            return value or None, variable

        cloud_id, variable = secret("cloud_id") if server.url is None else (None, "")
        if cloud_id:
            options["cloud_id"] = cloud_id
            label = f"the Elastic Cloud deployment in ${{{variable}}}"
            secrets += _cloud_hosts(cloud_id)
        else:
            urls = server.url or os.environ.get("TURNRL_ES_URL") or "http://localhost:9200"
            hosts = urls.split(",") if isinstance(urls, str) else list(urls)
            for url in hosts:
                _check_url(url, "url" if server.url else "TURNRL_ES_URL")
            options["hosts"] = [_with_port(url) for url in hosts]
            label = ", ".join(hosts)
        api_key, variable = secret("api_key") if server.password is None else (None, "")
        credentials = "no credentials (set TURNRL_ES_API_KEY or TURNRL_ES_PASSWORD)"
        if api_key:
            options["api_key"] = api_key
            credentials = f"the API key in ${{{variable}}}"
        else:
            password, variable = secret("password")
            username = server.username or os.environ.get("TURNRL_ES_USERNAME") or "elastic"
            if password:
                options["basic_auth"] = (username, password)
                secrets.append(base64.b64encode(f"{username}:{password}".encode()).decode())
                credentials = f"user {username!r} with the password in ${{{variable}}}"
            elif server.username:
                raise RecipeError(
                    f"username is {username!r}, but there is no password: {variable} is not set. "
                    "Set it."
                )
        ca_certs = server.ca_certs or os.environ.get("TURNRL_ES_CA_CERTS")
        if ca_certs and not os.path.isfile(ca_certs):  # noqa: PTH113
            raise RecipeError(f"no file {ca_certs!r} with certificates to trust. Correct ca_certs.")
        if ca_certs and (cloud_id or all(url.startswith("https:") for url in options["hosts"])):
            options["ca_certs"] = ca_certs
        elif server.ca_certs:
            raise RecipeError(
                f"ca_certs is {ca_certs!r}, but {label} is not https. Leave it out, or use https."
            )
        return cls(label, options, tuple(secrets), credentials)

    def connect(self, timeout_s: float) -> Elasticsearch:
        import elasticsearch

        if elasticsearch.__version__[0] != 8:
            version = ".".join(map(str, elasticsearch.__version__))
            raise ToolError(
                f"the Python client elasticsearch {version} is installed, but turnrl needs major "
                "version 8, which works with servers of major 8 and 9. Install it: pip install "
                "'elasticsearch>=8.19,<9'"
            )
        _struck_out.update(self.secrets)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_strike_line)
        try:
            return elasticsearch.Elasticsearch(
                **self.options, request_timeout=timeout_s, max_retries=0, retry_on_timeout=False
            )
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.label}: {self.clean(error)}") from None

    def clean(self, error: object) -> str:
        """The text of an error in one short line, without secrets."""
        return _strike(" ".join(str(error).split()), self.secrets)[:300]


def _cloud_hosts(cloud_id: str) -> list[str]:
    """Texts as secret as a cloud id: its encoded part, and the host names in it."""
    encoded = cloud_id.rpartition(":")[2]
    try:
        domain, *names = base64.b64decode(encoded).decode().split("$")
    except (binascii.Error, UnicodeDecodeError):
        return [encoded]
    return [encoded, *(f"{name}.{domain.partition(':')[0]}" for name in names if name)]


def _with_port(url: str) -> str:
    """`url` with a port, which the client insists on: 9200 for http, 443 for https."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 9200
    return parts._replace(netloc=f"{parts.netloc}:{port}").geturl()


def _strike(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


_struck_out: set[str] = set()
"""The secrets of every connection of this process."""


def _strike_line(record: logging.LogRecord) -> bool:
    """Strike secrets out of a log line of the client, which names hosts."""
    message = record.getMessage()
    struck = _strike(message, _struck_out)
    if struck != message or record.exc_info:
        record.msg, record.args, record.exc_info, record.exc_text = struck, (), None, None
    return True


_LOGGERS = (
    "elastic_transport.node",
    "elastic_transport.node_pool",
    "elastic_transport.transport",
    "elasticsearch",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)
