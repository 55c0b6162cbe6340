"""The meaning of a server's errors: final, or `Unavailable`, after which a request is retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from turnrl import ToolError
from turnrl.servers import Patience, Unavailable
from turnrl_wiki_search.elastic.access import MAJORS, Access
from turnrl_wiki_search.server import REPLAY

T = TypeVar("T")

RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""


def translate(error: Exception, access: Access) -> Exception:
    """Translate a client error: `Unavailable` if the same request may succeed later."""
    import elastic_transport
    import elasticsearch

    cause = access.clean(_cause(error))
    if isinstance(error, elasticsearch.UnsupportedProductError):
        return ToolError(
            f"{access.label} is not an Elasticsearch server ({cause}). Correct the url."
        )
    if isinstance(error, elasticsearch.ApiError):
        status = error.meta.status
        if status in RETRIED:
            return Unavailable(f"status {status}: {cause}", error.meta.headers.get("retry-after"))
        if status == 406 or "media_type_header_exception" in cause or "media-type" in cause:
            return ToolError(
                f"{access.label} does not speak the protocol of the Elasticsearch 8 client "
                f"({cause}). turnrl works with servers of major {' and '.join(map(str, MAJORS))}; "
                "upgrade the server."
            )
        if status == 401 and not access.credentials:
            return ToolError(
                f"{access.label} does not answer without credentials (status {status}: {cause}). "
                "Set the environment variable TURNRL_ES_API_KEY, or TURNRL_ES_PASSWORD for the "
                "user in TURNRL_ES_USERNAME."
            )
        if status in (401, 403):
            refused = access.credentials or "a request without credentials"
            return ToolError(
                f"{access.label} refused {refused} (status {status}: {cause}). Correct "
                "them, or grant 'monitor' on the cluster and 'read' and 'view_index_metadata' on "
                "the index; building needs 'manage' and 'write' on it too."
            )
        return ToolError(f"{access.label} refused a request (status {status}: {cause}).")
    if isinstance(error, elastic_transport.TlsError) and "CERTIFICATE" in cause.upper():
        return ToolError(
            f"the certificate of {access.label} is not trusted ({cause}). Set ca_certs, or "
            "TURNRL_ES_CA_CERTS, to the file with the certificate that signed it."
        )
    if isinstance(error, elastic_transport.SerializationError):
        return ToolError(
            f"{access.label} sent something that is not JSON ({cause}). Correct the url."
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


def call(access: Access, request: Callable[[], T], retries: int, of_run: bool = False) -> T:
    """Send one administrative request, with a few retries; `of_run` as in `ElasticIndex`."""

    def attempt() -> T:
        try:
            return request()
        except Exception as error:
            raise translate(error, access) from None

    def away(problem: str) -> ToolError:
        return ToolError(
            f"the search server {access.label} {problem} Start it, or correct 'url' "
            f"(TURNRL_ES_URL).{REPLAY if of_run else ''}"
        )

    return Patience(access.label, 0.0, away, retries).ask(attempt)
