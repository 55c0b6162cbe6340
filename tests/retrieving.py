"""A server with Search-R1's `/retrieve` over an embedded index, in a process of its own.

Run as a program, it serves the index in the folder that is its argument. Beside `/retrieve` it has
an address for each way in which a server may answer wrongly. `POST /behave` makes `/retrieve` act
like one of these addresses for a number of requests, and `GET /requests` tells what was asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = "a-key-of-the-retriever"
PAGE = "<html><body>It works!</body></html>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index = None
    requests: list[dict] = []
    behaviour: list[str] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, json.dumps(self.requests))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/behave":
            self.behaviour[:] = body
            return self._send(200, "{}")
        sent = {"authorization": self.headers.get("Authorization"), "path": self.path}
        self.requests.append({**body, **sent})
        name = self.path.partition("?")[0].strip("/")
        if name == "retrieve" and self.behaviour:
            name = self.behaviour.pop(0)
        return self._answer(name, body)

    def _answer(self, name, body):
        if name.startswith("status"):
            return self._send(int(name[6:]), '{"detail": "out of order"}')
        if name == "secret":
            return self._send(400, f"I cannot read {self.headers['Authorization']}")
        if name == "busy":
            return self._send(429, "", {"Retry-After": "1"})
        if name == "moved":
            return self._send(307, "", {"Location": "/retrieve"})
        if name == "page":
            return self._send(200, PAGE)
        text = json.dumps(self._result(name, body))
        if name == "cut":
            return self._send(200, text[: len(text) // 2], {"Content-Length": str(len(text))})
        if name == "drip":
            self._head(200, {"Content-Length": str(len(text))})
            for character in text:
                self.wfile.write(character.encode())
                time.sleep(0.1)
            return None
        return self._send(200, text)

    def _result(self, name, body):
        results = self.index.search(body["queries"], body["topk"] if name != "many" else 3)
        result = [[self._hit(name, hit) for hit in hits] for hits in results]
        odd = {
            "list": lambda: result,
            "other": lambda: {"results": result},
            "null": lambda: {"result": None},
            "first": lambda: {"result": result[:1]},
            "flat": lambda: {"result": [hit for hits in result for hit in hits]},
            "text": lambda: {"result": ["nothing" for _ in result]},
            "strings": lambda: {"result": [["a text"] for _ in result]},
            "nothing": lambda: {"result": [[None] for _ in result]},
        }
        return odd.get(name, lambda: {"result": result})()

    @staticmethod
    def _hit(name, hit):
        document = {"id": hit.passage.id, "contents": f'"{hit.passage.title}"\n{hit.passage.text}'}
        odd = {
            "untitled": {"document": {"contents": hit.passage.text}, "score": hit.score},
            "fields": {"document": {"title": hit.passage.title, "text": hit.passage.text}},
            "unscored": {"document": document},
            "bare": document,
            "empty": {"document": {}, "score": 1.0},
            "document": {"document": "a text", "score": 1.0},
            "number": {"document": {"contents": 7}, "score": 1.0},
            "score": {"document": document, "score": "high"},
            "nan": {"document": document, "score": float("nan")},
            "numbered": {"document": {**document, "id": 7}, "score": 2},
            "surrogate": {"document": {**document, "contents": '"A"\nhalf \ud800'}, "score": 2},
        }
        return odd.get(name, {"document": document, "score": hit.score})

    def _head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status, text, headers=None):
        data = text.encode()
        self._head(status, {"Content-Length": str(len(data)), **(headers or {})})
        self.wfile.write(data)
        if headers and "Content-Length" in headers:
            self.close_connection = True


class Retriever:
    """The server, as tests handle it: `start` returns once it answers."""

    def __init__(self, index: Path, port: int) -> None:
        self.index, self._port = index, port
        self._process: subprocess.Popen | None = None
        self.url = f"http://127.0.0.1:{port}/retrieve"

    def start(self) -> None:
        command = [sys.executable, __file__, str(self.index), str(self._port)]
        self._process = subprocess.Popen(command)
        late = time.monotonic() + 60
        while True:
            try:
                self.requests()
            except OSError:
                assert time.monotonic() < late, "the server does not answer"
                assert self._process.poll() is None, "the server ended"
                time.sleep(0.05)
            else:
                return

    def at(self, way: str) -> str:
        """The address of a way to answer."""
        return self.url.replace("/retrieve", f"/{way}")

    def behave(self, *ways: str) -> None:
        """Answer the next requests in these ways."""
        data = json.dumps(ways).encode()
        urllib.request.urlopen(self.at("behave"), data).close()

    def requests(self) -> list[dict]:
        with urllib.request.urlopen(self.at("requests"), timeout=5) as answer:
            return json.loads(answer.read())

    def paths(self) -> list[str]:
        """The addresses that were asked, from the path on."""
        return [request["path"] for request in self.requests()]

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def crash(self, away_s: float = 0.0) -> None:
        """Kill it, and start it again."""
        self.kill()
        time.sleep(away_s)
        self.start()


@contextmanager
def retriever_of(index: Path, port: int) -> Iterator[Retriever]:
    server = Retriever(index, port)
    server.start()
    try:
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.kill()


if __name__ == "__main__":
    from turnrl_wiki_search.embedded import EmbeddedIndex

    _Handler.index = EmbeddedIndex(sys.argv[1])
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler).serve_forever()
