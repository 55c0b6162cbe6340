"""An index behind a server that speaks Search-R1's `/retrieve`.

The request is `{"queries": [...], "topk": 3, "return_scores": true}`, and the answer `{"result":
[[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 1.5}]]}`, with one list for
each query. While the server is away the run waits. An answer of another shape ends the run, and the
policy never reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from turnrl import ToolError
from turnrl.plugin.errors import is_finite
from turnrl.plugin.patience import (
    Patience,
    Unavailable,
    is_loopback,
    raise_if_unavailable,
    short_reason,
)
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex
from turnrl_wiki_search.settings import RETRIES, Retriever
from turnrl_wiki_search.sources import make_passage, title_and_text

if TYPE_CHECKING:
    import httpx2

_BATCH = 512
"""The most queries in a request, as many as Search-R1's own server encodes at a time."""
_LONGEST_ANSWER_BYTES = 256_000_000
_KEY = "TURNRL_RETRIEVE_API_KEY"
_PROBES = ("the capital of France", "the longest river of the world")
"""Sent before a run. A server that takes one query at a time would answer both with one list."""


class RetrieveIndex(SearchIndex):
    """An index behind a server's `/retrieve`. It connects on the first `info` or `search`.

    Only one request is under way at a time, because a dense index on a GPU may not bear more.

    Args:
        settings: The server.
    Raises:
        ToolError: If the environment has a key that no header can hold.
    """

    def __init__(self, settings: Retriever) -> None:
        self._settings, self._url = settings, settings.url
        self._key = os.environ.get(_KEY) or None
        if not re.fullmatch(r"[!-~]*", self._key or ""):  # the client's error would show it
            raise ToolError(
                f"the API key in {_KEY} for {self._url} has a space or another character that no "
                "key has. Correct it."
            )
        self._certificates = ssl.create_default_context()  # those of SSL_CERT_FILE, if it is set
        self._free = threading.Semaphore()
        self._quick = Patience(self._url, 0.0, self._away_error, min(RETRIES, 2))
        self._patience = Patience(
            self._url, settings.wait_s, self._away_error, RETRIES, setting="wait_s"
        )

    def info(self) -> IndexInfo:
        """A short description. The server is asked, but the run does not wait for it."""
        self._quick.ask(partial(self._ask, _PROBES, 2))
        version = self._settings.version and f"retrieve-{self._settings.version}"
        return IndexInfo("retrieve", self._url, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), _BATCH):
            batch = queries[start : start + _BATCH]
            request = self._patience.request()
            with self._free:
                hits += request.ask(partial(self._ask, batch, k))
        return hits

    def _away_error(self, problem: str) -> ToolError:
        return ToolError(
            f"the search server {self._url} {problem} Start it, or correct Retriever.url. A run "
            "resumes from its last checkpoint with --ckpt_path, and waits longer with a higher "
            "'wait_s'."
        )

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Send one request.

        Raises:
            Unavailable: If the same request may be answered later.
            ToolError: If the server refuses, or answers in another shape.
        """
        import httpx2

        body = {"queries": [*queries], "topk": k, "return_scores": True}
        try:
            with self._connect() as client, client.stream("POST", self._url, json=body) as response:
                data = self._read(response)
        except httpx2.TimeoutException:
            raise self._late_error() from None
        except httpx2.RequestError as error:
            raise self._broken_error(error) from None
        if not response.is_success:
            raise self._refusal(response, data)
        return self._hits(data, len(queries), k)

    def _connect(self) -> httpx2.Client:
        import httpx2

        return httpx2.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=self._settings.timeout_s,
            verify=self._certificates,
            trust_env=not is_loopback(self._url),
        )

    def _read(self, response: httpx2.Response) -> bytes:
        """The body, read within the time limit of a request: every part may come in time although
        the whole never ends."""
        deadline_s, data = time.monotonic() + self._settings.timeout_s, bytearray()
        for part in response.iter_bytes():
            data += part
            if time.monotonic() > deadline_s:
                raise self._late_error()
            if len(data) > _LONGEST_ANSWER_BYTES:
                raise self._odd_error(f"more than {_LONGEST_ANSWER_BYTES:,} bytes")
        return bytes(data)

    def _late_error(self) -> Unavailable:
        return Unavailable(f"no whole answer within timeout_s = {self._settings.timeout_s:g}")

    def _broken_error(self, error: Exception) -> Exception:
        cause = self._line(error)
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            return ToolError(
                f"the certificate of {self._url} is not trusted ({cause}). Set the "
                "variable SSL_CERT_FILE to the file with the certificate that signed it."
            )
        return Unavailable(cause)

    def _refusal(self, response: httpx2.Response, data: bytes) -> Exception:
        """The meaning of an unsuccessful response.

        Raises:
            Unavailable: If the same request may succeed later.
        """
        status = response.status_code
        text = self._line(data or response.headers.get("location", ""))
        reason = f"status {status}: {text or 'without a word'}"
        raise_if_unavailable(status, reason, response.headers)
        if status in (401, 403):
            return ToolError(
                f"{self._url} refused a search ({reason}). Set the environment variable {_KEY} to "
                "its key, which is sent as 'Authorization: Bearer KEY'."
            )
        return ToolError(
            f"{self._url} refused a search ({reason}). Correct Retriever.url, up to and including "
            "/retrieve. The server must take 'queries', 'topk' and 'return_scores', as Search-R1's "
            "does; see what it printed."
        )

    def _hits(self, data: bytes, wanted: int, k: int) -> list[list[Hit]]:
        try:
            lists = json.loads(data)["result"]
            if len(lists) != wanted or not all(isinstance(items, list) for items in lists):
                raise ValueError(f"{len(lists)} lists of passages for {wanted} queries")
            hits = [[_hit(item) for item in items[:k]] for items in lists]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._odd_error(f"'{self._line(data)[:80]}' ({self._line(error)})") from None
        # an empty passage shows nothing
        return [[h for h in row if h.passage.title or h.passage.text.strip()] for row in hits]

    def _odd_error(self, answer: str) -> ToolError:
        return ToolError(
            f"{self._url} answered a search with {answer}. It must answer with "
            '{"result": [[{"document": {"id", "contents"}, "score"}]]}, one list for each query, '
            "as Search-R1's server does. Correct Retriever.url, or the server."
        )

    def _line(self, text: object) -> str:
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return short_reason(shown, (self._key,))


def _hit(item: Mapping[str, object]) -> Hit:
    """A passage of an answer.

    Raises:
        ValueError: If it is of another shape; `LookupError`, `TypeError` or `AttributeError` too.
    """
    # a server that searches the web has no scores to return, and may not wrap its documents
    document, score = item.get("document", item), item.get("score")
    if score is not None and (isinstance(score, bool) or not is_finite(score)):
        raise ValueError(f"the score {score!r} is not a number")
    if not isinstance(document, Mapping):
        raise TypeError(f"the document {document!r} is not an object")
    contents = document.get("contents")
    title, text = title_and_text(document)
    if isinstance(contents, str) and document.get("text") is None and "\n" not in contents:
        title, text = "", contents  # no title above it
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise ValueError("a document without 'contents'")
    identity = document.get("id")
    if identity is None:
        content = f"{title}\n{text}".encode("utf-8", "replace")
        identity = hashlib.blake2b(content, digest_size=8).hexdigest()
    return Hit(make_passage(identity, title, text), score)  # type: ignore[arg-type]
