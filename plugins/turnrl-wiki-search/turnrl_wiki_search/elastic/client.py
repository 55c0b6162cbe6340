"""The connection to a server: its client, its secrets, and the meaning of its errors."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from turnrl import RecipeError, ToolError
from turnrl.plugin.patience import Patience, Unavailable, short_reason
from turnrl_wiki_search.credentials import hide_from_logs, read_secret, trusted_certificates
from turnrl_wiki_search.settings import Elasticsearch, check_url

if TYPE_CHECKING:
    import elasticsearch

T = TypeVar("T")

RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""
_CHECKS = 2
"""Attempts of an administrative request after a first failure."""
_LOGGERS = (
    "elastic_transport.node",
    "elastic_transport.node_pool",
    "elastic_transport.transport",
    "elasticsearch",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)


class Connection:
    """A connection to the server of an index. It is never printed.

    Args:
        settings: The index.
        timeout_s: Seconds that one request may take; by default the settings' own.
    Raises:
        RecipeError: If a variable that holds a secret is not set, or an address is malformed.
    """

    def __init__(self, settings: Elasticsearch, timeout_s: float | None = None) -> None:
        urls = (settings.url or os.environ.get("TURNRL_ES_URL") or "http://localhost:9200").split(
            ","
        )
        for url in urls:
            check_url("Elasticsearch.url" if settings.url else "TURNRL_ES_URL", url)
        self.label = ", ".join(urls)
        self._options: dict[str, Any] = {"hosts": [_with_port(url) for url in urls]}
        self._secrets: list[str] = []
        self._credentials = self._sign_in(settings)
        https = all(url.startswith("https:") for url in urls)
        if file := trusted_certificates(settings.ca_certs, "TURNRL_ES_CA_CERTS", https):
            self._options["ca_certs"] = file
        self._options["request_timeout"] = timeout_s or settings.timeout_s
        self._clients = {os.getpid(): self._connect()}

    def _sign_in(self, settings: Elasticsearch) -> str:
        """Add the credentials to the options of the client, and describe them for messages."""
        key, variable = read_secret(settings.api_key, "TURNRL_ES_API_KEY")
        if key and settings.password is None:
            self._options["api_key"] = key
            self._secrets.append(key)
            return f"the API key in ${{{variable}}}"
        password, variable = read_secret(settings.password, "TURNRL_ES_PASSWORD")
        username = settings.username or os.environ.get("TURNRL_ES_USERNAME") or "elastic"
        if password:
            self._options["basic_auth"] = (username, password)
            encoded = base64.b64encode(f"{username}:{password}".encode()).decode()
            self._secrets += [password, encoded]
            return f"user {username!r} with the password in ${{{variable}}}"
        return "a request without credentials"

    def _connect(self) -> elasticsearch.Elasticsearch:
        import elasticsearch

        hide_from_logs(self._secrets, _LOGGERS)
        try:
            return elasticsearch.Elasticsearch(
                **self._options, max_retries=0, retry_on_timeout=False
            )
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.label}: {self.clean(error)}") from None

    @property
    def client(self) -> elasticsearch.Elasticsearch:
        """The client of this process. On its parent's connections, a fork would read answers to the
        parent's requests."""
        if (client := self._clients.get(os.getpid())) is None:
            client = self._clients.setdefault(os.getpid(), self._connect())
        return client

    def close(self) -> None:
        """Close the client of this process."""
        if (client := self._clients.pop(os.getpid(), None)) is not None:
            client.close()

    def clean(self, error: object) -> str:
        """The text of an error in one short line, without secrets."""
        return short_reason(error, self._secrets)

    def call(self, request: Callable[[], T], retries: int = _CHECKS) -> T:
        """Send an administrative request, with a few retries.

        Raises:
            ToolError: If the server does not answer, or refuses.
        """

        def attempt() -> T:
            try:
                return request()
            except Exception as error:
                raise self.translate(error) from None

        def away(problem: str) -> ToolError:
            return ToolError(
                f"the search server {self.label} {problem} Start it, or correct 'url' "
                "(TURNRL_ES_URL). With 'cache' and 'offline: true' a finished run replays without "
                "a server."
            )

        return Patience(self.label, 0.0, away, retries).ask(attempt)

    def translate(self, error: Exception) -> Exception:
        """Translate an error of the client: `Unavailable` if the same request may succeed later."""
        import elastic_transport
        import elasticsearch

        cause = self.clean(_cause(error))
        status = error.meta.status if isinstance(error, elasticsearch.ApiError) else 0
        foreign = (elasticsearch.UnsupportedProductError, elastic_transport.SerializationError)
        if isinstance(error, foreign) or status == 406 or "media-type" in cause.replace("_", "-"):
            return ToolError(
                f"{self.label} does not answer as Elasticsearch 8 and 9 do ({cause}). Correct the "
                "url, or upgrade the server."
            )
        if status in RETRIED and isinstance(error, elasticsearch.ApiError):
            return Unavailable(f"status {status}: {cause}", error.meta.headers.get("retry-after"))
        if status in (401, 403):
            return ToolError(
                f"{self.label} refused {self._credentials} (status {status}: {cause}). Set "
                "TURNRL_ES_API_KEY, or TURNRL_ES_PASSWORD for the user in TURNRL_ES_USERNAME. It "
                "needs 'read' and 'view_index_metadata' on the index; building needs 'manage' and "
                "'write' on it too."
            )
        if status:
            return ToolError(f"{self.label} refused a request (status {status}: {cause}).")
        if isinstance(error, elastic_transport.TlsError) and "CERTIFICATE" in cause.upper():
            return ToolError(
                f"the certificate of {self.label} is not trusted ({cause}). Set ca_certs, or "
                "TURNRL_ES_CA_CERTS, to the file with the certificate that signed it."
            )
        if isinstance(error, elastic_transport.TransportError):
            return Unavailable(cause)
        return error


def _cause(error: Exception) -> object:
    """The most detailed cause of a client error, which the error's own text leaves out."""
    import elastic_transport
    import elasticsearch

    if isinstance(error, elastic_transport.TransportError):
        return error.message
    if isinstance(error, elasticsearch.ApiError) and isinstance(error.body, dict):
        cause = error.body.get("error")
        if isinstance(cause, dict):
            return cause.get("reason") or cause
    return error


def _with_port(url: str) -> str:
    """`url` with a port, which the client insists on: 9200 for http, 443 for https."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 9200
    return parts._replace(netloc=f"{parts.netloc}:{port}").geturl()
