"""Meaning of a server's faults, and the requests to try again.

What an outage produced is never an answer: it is `Unavailable`, which is tried again, or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnrl import ToolError
from turnrl.servers import LONGEST_PAUSE_S, Patience, Unavailable
from turnrl_wiki_search.elastic.access import MAJORS, Access, Server

RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""

_MARGIN_S = 60.0


def longest_answer_s(server: Server) -> float:
    """No search takes longer: all attempts, the wait, and a margin for its turn."""
    attempts = (server.retries + 2) * (server.timeout_s + LONGEST_PAUSE_S)
    return attempts + server.wait_s + _MARGIN_S


def translate(error: Exception, access: Access) -> Exception:
    """Translate an error of the client's: `Unavailable` if the same request may succeed later."""
    import elastic_transport
    import elasticsearch

    what = access.clean(_cause(error))
    if isinstance(error, elasticsearch.UnsupportedProductError):
        return ToolError(
            f"{access.label} answers, but not as an Elasticsearch server ({what}). Correct the url."
        )
    if isinstance(error, elasticsearch.ApiError):
        status = error.meta.status
        if status in RETRIED:
            return Unavailable(f"status {status}: {what}", error.meta.headers.get("retry-after"))
        if status == 406 or "media_type_header_exception" in what or "media-type" in what:
            return ToolError(
                f"{access.label} does not speak the protocol of the Elasticsearch 8 client "
                f"({what}). turnrl works with servers of major {' and '.join(map(str, MAJORS))}; "
                "upgrade the server."
            )
        if status in (401, 403):
            return ToolError(
                f"{access.label} refused {access.credentials} (status {status}: {what}). Correct "
                "them, or grant 'monitor' on the cluster and 'read' and 'view_index_metadata' on "
                "the index; building needs 'manage' and 'write' on it too."
            )
        return ToolError(f"{access.label} refused a request (status {status}: {what}).")
    if isinstance(error, elastic_transport.TlsError) and "CERTIFICATE" in what.upper():
        return ToolError(
            f"the certificate of {access.label} is not trusted ({what}). Set ca_certs, or "
            "TURNRL_ES_CA_CERTS, to the file with the certificate that signed it."
        )
    if isinstance(error, elastic_transport.SerializationError):
        return ToolError(
            f"{access.label} sent something that is not JSON ({what}). Correct the url."
        )
    if isinstance(error, elastic_transport.TransportError):
        return Unavailable(what)
    return error


def _cause(error: Exception) -> object:
    """Fullest cause of an error of the client's; its own text leaves the cause out."""
    import elastic_transport

    if isinstance(error, elastic_transport.TransportError):
        return error.message
    body = getattr(error, "body", None)
    told = body.get("error") if isinstance(body, dict) else None
    return (told.get("reason") or told) if isinstance(told, dict) else error


def call(access: Access, request: Callable[[], Any], retries: int) -> Any:
    """One administrative request, tried again a few times."""

    def attempt() -> Any:
        try:
            return request()
        except Exception as error:
            raise translate(error, access) from None

    def away(told: str) -> ToolError:
        return ToolError(
            f"the search server {access.label} {told} Start it, or correct 'url' (TURNRL_ES_URL). "
            "With 'cache' and 'offline: true' a finished run replays without a server."
        )

    return Patience(access.label, 0.0, away, retries).ask(attempt)
