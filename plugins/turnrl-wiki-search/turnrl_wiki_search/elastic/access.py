"""The client of a server, and the secrets, which only the client holds."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from turnrl import RecipeError, ToolError
from turnrl.servers import short_reason
from turnrl_wiki_search.server import SearchServer, check_url, hide_from_logs

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

MAJORS = (8, 9)
"""Major versions of servers that the client, of major version 8, works with."""

_PREFIX = "TURNRL_ES_"
"""Prefix of the environment variables that are read if a setting is not given."""


@dataclass(frozen=True)
class Access:
    """A server and its secrets. It is never printed."""

    label: str
    options: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    credentials: str

    @classmethod
    def of(cls, server: SearchServer) -> Access:
        options: dict[str, Any] = {}
        secrets: list[str] = []

        def secret(name: str) -> tuple[str | None, str]:
            value, variable = server.secret(name, _PREFIX)
            if value:
                secrets.append(value)
            return value, variable

        cloud_id, variable = secret("cloud_id") if server.url is None else (None, "")
        if cloud_id:
            options["cloud_id"] = cloud_id
            label = f"the Elastic Cloud deployment in ${{{variable}}}"
            secrets += _cloud_hosts(cloud_id)
        else:
            urls = server.url or os.environ.get("TURNRL_ES_URL") or "http://localhost:9200"
            hosts = urls.split(",") if isinstance(urls, str) else list(urls)
            for url in hosts:
                check_url(url, "url" if server.url else "TURNRL_ES_URL")
            options["hosts"] = [_with_port(url) for url in hosts]
            label = ", ".join(hosts)
        api_key, variable = secret("api_key") if server.password is None else (None, "")
        credentials = ""
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
        https = bool(cloud_id) or all(url.startswith("https:") for url in options["hosts"])
        if ca_certs := server.certificates(_PREFIX, label, https):
            options["ca_certs"] = ca_certs
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
        hide_from_logs(self.secrets, _LOGGERS)
        try:
            return elasticsearch.Elasticsearch(
                **self.options, request_timeout=timeout_s, max_retries=0, retry_on_timeout=False
            )
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.label}: {self.clean(error)}") from None

    def clean(self, error: object) -> str:
        """The text of an error in one short line, without secrets."""
        return short_reason(error, self.secrets)


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


_LOGGERS = (
    "elastic_transport.node",
    "elastic_transport.node_pool",
    "elastic_transport.transport",
    "elasticsearch",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)
