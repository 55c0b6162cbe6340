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

from turnrl import Passage, ToolError, is_finite
from turnrl.servers import Patience, Unavailable, is_loopback, raise_if_away, short_reason
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex
from turnrl_wiki_search.server import (
    REPLAY,
    RESUME,
    SearchServer,
    check_url,
    hide_from_logs,
    resolved,
)
from turnrl_wiki_search.sources import passage_of, title_and_text

if TYPE_CHECKING:
    import httpx2

_PREFIX = "TURNRL_RETRIEVE_"
_BATCH = 512
"""The most queries in a request, as many as Search-R1's own server encodes at a time."""
_LONGEST_ANSWER_BYTES = 256_000_000
_LOGGERS = ("httpx2", "httpcore2.connection", "httpcore2.http11", "httpcore2.http2")
_PROBES = ("the capital of France", "the longest river of the world")
"""Sent before a run. A server that takes one query at a time would answer both with one list."""


class RetrieveIndex(SearchIndex):
    """An index behind a server's `/retrieve`. It connects on the first `info` or `search`.

    Only one request is under way at a time, because a dense index on a GPU may not bear more.

    Args:
        server: Settings of the server.
        address: Its address, up to and including `/retrieve`. A secret in it is written `${NAME}`,
            after an environment variable.
        of_run: True if a run searches; then messages explain how to resume or replay it.
    Raises:
        RecipeError: If the address is malformed, or a secret is missing.
    """

    def __init__(self, server: SearchServer, address: str, of_run: bool = True) -> None:
        self._clients: dict[int, httpx2.Client] = {}
        check_url(address, "index", "http://localhost:8000/retrieve")
        self._address, self._version, self._of_run = address, server.version, of_run
        self._target, self._secrets = resolved(address)
        self._timeout_s = server.request_s("retrieve")
        self._key, variable = server.secret("api_key", _PREFIX)
        self._variable = variable
        if self._secrets:
            hide_from_logs(self._secrets, _LOGGERS)
        https = address.startswith("https:")
        self._certificates = server.certificates(_PREFIX, address, https)
        self._lock, self._free = threading.Lock(), threading.Semaphore()
        self._quick = Patience(address, 0.0, self._absent, min(server.retries, 2))
        self._patience = Patience(
            address, server.wait_s, self._away, server.retries, setting="wait_s"
        )

    def info(self) -> IndexInfo:
        """A short description. The server is asked, but the run does not wait for it."""
        self._quick.ask(partial(self._ask, _PROBES, 2))
        version = None if self._version is None else f"retrieve-{self._version}"
        return IndexInfo("retrieve", self._address, version, encoder="unknown")

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), _BATCH):
            batch = queries[start : start + _BATCH]
            request = self._patience.request()
            with self._free:
                hits += request.ask(partial(self._ask, batch, k))
        return hits

    def close(self) -> None:
        if (client := self._clients.pop(os.getpid(), None)) is not None:
            client.close()

    def __del__(self) -> None:
        self.close()

    def _absent(self, problem: str) -> ToolError:
        return ToolError(
            f"the search server {self._address} {problem} Start it, or correct 'index'."
            f"{REPLAY if self._of_run else ''}"
        )

    def _away(self, problem: str) -> ToolError:
        return ToolError(
            f"the search server {self._address} {problem} Start it, or correct 'index'"
            f"{RESUME if self._of_run else ''}.{REPLAY if self._of_run else ''}"
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
            with self._client().stream("POST", self._target, json=body) as response:
                data = self._read(response)
        except httpx2.TimeoutException:
            raise Unavailable(f"no whole answer within timeout_s = {self._timeout_s:g}") from None
        except httpx2.RequestError as error:
            raise self._broken(error) from None
        if not response.is_success:
            raise self._refusal(response, data)
        return self._hits(data, len(queries), k)

    def _client(self) -> httpx2.Client:
        """The client of this process. On its parent's connections, a fork would read answers to the
        parent's requests."""
        import httpx2

        with self._lock:
            if (client := self._clients.get(os.getpid())) is None:
                if not re.fullmatch(r"[!-~]*", self._key or ""):  # the client's error would show it
                    raise ToolError(
                        f"{self._address} cannot be asked with the API key in "
                        f"${{{self._variable}}}: it has a space or another character that no key "
                        "has. Correct it."
                    )
                headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
                trusted = ssl.create_default_context(cafile=self._certificates)
                client = self._clients[os.getpid()] = httpx2.Client(
                    headers=headers,
                    timeout=self._timeout_s,
                    verify=trusted,
                    trust_env=not is_loopback(self._target),
                )
            return client

    def _read(self, response: httpx2.Response) -> bytes:
        """The body, read within the time limit of a request: every part may come in time although
        the whole never ends."""
        deadline_s, data = time.monotonic() + self._timeout_s, bytearray()
        for part in response.iter_bytes():
            data += part
            if time.monotonic() > deadline_s:
                raise Unavailable(f"no whole answer within timeout_s = {self._timeout_s:g}")
            if len(data) > _LONGEST_ANSWER_BYTES:
                raise self._odd(f"more than {_LONGEST_ANSWER_BYTES:,} bytes")
        return bytes(data)

    def _broken(self, error: Exception) -> Exception:
        cause = self._line(error)
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            return ToolError(
                f"the certificate of {self._address} is not trusted ({cause}). Set ca_certs, or "
                f"{_PREFIX}CA_CERTS, to the file with the certificate that signed it."
            )
        return Unavailable(cause)

    def _refusal(self, response: httpx2.Response, data: bytes) -> Exception:
        """The meaning of an unsuccessful response.

        Raises:
            Unavailable: If the same request may succeed later.
        """
        status = response.status_code
        text = self._line(data.decode("utf-8", "replace") or response.headers.get("location", ""))
        reason = f"status {status}: {text or 'without a word'}"
        raise_if_away(status, reason, response.headers)
        if status in (401, 403):
            return self._locked(reason)
        if status in (404, 405) or status < 400:
            return ToolError(
                f"{self._address} does not answer searches ({reason}). Correct 'index': it is the "
                "address up to and including /retrieve."
            )
        return ToolError(
            f"{self._address} refused a search ({reason}). It must take the fields 'queries', "
            "'topk' and 'return_scores', as Search-R1's server does; see what it printed."
        )

    def _locked(self, reason: str) -> ToolError:
        """The error of a server that wants a key, or another key."""
        address = self._address
        if self._key:
            return ToolError(
                f"{address} refused the API key in ${{{self._variable}}}, sent as 'Authorization: "
                f"Bearer KEY' ({reason}). Correct {self._variable}."
            )
        if self._secrets:
            return ToolError(
                f"{address} refused the key in its address ({reason}). Correct the environment "
                f"variable that 'index' names, or set {self._variable} if the server expects "
                "'Authorization: Bearer KEY'."
            )
        return ToolError(
            f"{address} does not answer without a key ({reason}). Set the environment variable "
            f"{self._variable}, which is sent as 'Authorization: Bearer KEY'; or name a variable "
            "in 'index', such as http://localhost:8000/retrieve?api_key=${MY_KEY}."
        )

    def _hits(self, data: bytes, wanted: int, k: int) -> list[list[Hit]]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise self._odd(f"'{self._line(data)[:80]}', which is not JSON") from None
        lists = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(lists, list):
            raise self._odd(f"'{self._line(data)[:80]}', which has no list 'result'")
        if len(lists) != wanted:
            raise self._odd(f"{len(lists)} lists of passages for {wanted} queries")
        for items in lists:
            if not isinstance(items, list):
                raise self._odd(f"'{self._line(items)[:80]}' in place of a list of passages")
        hits = ([self._hit(item) for item in items[:k]] for items in lists)
        # an empty passage shows nothing
        return [[h for h in row if h.passage.title or h.passage.text.strip()] for row in hits]

    def _hit(self, item: object) -> Hit:
        if not isinstance(item, Mapping):
            raise self._odd(f"'{self._line(item)[:80]}' in place of a passage")
        # a server that searches the web has no scores to return, and may not wrap its documents
        document, score = item.get("document", item), item.get("score")
        if not isinstance(document, Mapping):
            raise self._odd(f"'{self._line(document)[:80]}' in place of a document")
        if score is not None and (isinstance(score, bool) or not is_finite(score)):
            raise self._odd(f"the score '{self._line(score)[:80]}', which is not a number")
        return Hit(self._passage(document), score)

    def _passage(self, document: Mapping[str, object]) -> Passage:
        contents = document.get("contents")
        title, text = title_and_text(document)
        if isinstance(contents, str) and document.get("text") is None and "\n" not in contents:
            title, text = "", contents  # no title above it
        if not isinstance(text, str) or not isinstance(title, str | None):
            raise self._odd(
                f"a document without 'contents' (found: {', '.join(map(str, document)) or 'none'})"
            )
        identity = document.get("id")
        if identity is None:
            identity = hashlib.blake2b(f"{title}\n{text}".encode("utf-8", "replace"), digest_size=8)
            identity = identity.hexdigest()
        return passage_of(identity, title, text)

    def _odd(self, answer: str) -> ToolError:
        return ToolError(
            f"{self._address} answered a search with {answer}. It must answer with "
            '{"result": [[{"document": {"id", "contents"}, "score"}]]}, one list for each query, '
            "as Search-R1's server does. Correct 'index', or the server."
        )

    def _line(self, text: object) -> str:
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return short_reason(shown, (*self._secrets, self._key))
