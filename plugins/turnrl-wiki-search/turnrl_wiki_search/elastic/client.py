"""The connection to a server: its client, its secrets, and the meaning of its errors."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from turnrl import RecipeError, ToolError
from turnrl.plugin.errors import check_address
from turnrl.plugin.patience import Patience, Unavailable, short_reason
from turnrl_wiki_search.settings import Elasticsearch

T = TypeVar("T")

RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""
_CHECKS = 2
"""Attempts of an administrative request after a first failure."""


class Connection:
    """A connection to the server of an index. It is never printed.

    Args:
        settings: The index.
        timeout_s: Seconds that one request may take; by default the settings' own.
    Raises:
        RecipeError: If an address is malformed, or there is no file with certificates.
    """

    def __init__(self, settings: Elasticsearch, timeout_s: float | None = None) -> None:
        import elasticsearch

        own = os.environ.get("TURNRL_ES_URL")
        urls = (settings.url or own or "http://localhost:9200").split(",")
        for url in urls:
            check_address("TURNRL_ES_URL", url, "http://localhost:9200")
        self.label = ", ".join(urls)
        self._secrets: list[str] = []
        options = self._sign_in()
        if (file := os.environ.get("TURNRL_ES_CA_CERTS")) and self.label.startswith("https:"):
            options["ca_certs"] = file
        try:
            self.client = elasticsearch.Elasticsearch(
                [_with_port(url) for url in urls],
                request_timeout=timeout_s or settings.timeout_s,
                max_retries=0,
                retry_on_timeout=False,
                **options,
            )
        except (ValueError, TypeError, OSError) as error:
            raise RecipeError(f"{self.label}: {self.clean(error)}") from None

    def _sign_in(self) -> dict[str, Any]:
        """The options of the client that sign in, of what the environment has."""
        self._credentials = "a request without credentials"
        if key := os.environ.get("TURNRL_ES_API_KEY"):
            self._secrets, self._credentials = [key], "the API key in TURNRL_ES_API_KEY"
            return {"api_key": key}
        if password := os.environ.get("TURNRL_ES_PASSWORD"):
            user = os.environ.get("TURNRL_ES_USERNAME") or "elastic"
            encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._secrets = [password, encoded]
            self._credentials = f"user {user!r} with the password in TURNRL_ES_PASSWORD"
            return {"basic_auth": (user, password)}
        return {}

    def close(self) -> None:
        self.client.close()

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
                "(TURNRL_ES_URL)."
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
                f"the certificate of {self.label} is not trusted ({cause}). Set "
                "TURNRL_ES_CA_CERTS to the file with the certificate that signed it."
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
