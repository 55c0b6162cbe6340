"""Small corpora, searches and the `index` command, for tests of both kinds of index."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from nodes import PASSWORD, free_port
from runs import TIMINGS
from turnrl import ToolCall, ToolResult
from turnrl.cli import main
from turnrl.plugin.errors import TurnRLError
from turnrl_wiki_search import Elasticsearch, WikiSearch
from turnrl_wiki_search.command import add_index_command
from turnrl_wiki_search.embedded import EmbeddedIndex
from turnrl_wiki_search.sources import Corpus, open_corpus

_TEXTS = {
    "Utrecht": "Utrecht is a city in the Netherlands. It has a dom tower.",
    "Paris": "Paris is the capital of France. The tower is by Eiffel.",
    "Café": "A café serves coffee, and the cities of Europe have many.",
}
API_KEY = "VuaCfGcBCdbkQm-e5aOx:ui2lp2axTNmsyakw9tvNnw"
QUICK = {"timeout_s": 2.0, "wait_s": 30.0}
"""Settings with which faults of a server cost little time; see also `retry_once`."""
ROWS = [{"id": str(n), "title": k, "text": v} for n, (k, v) in enumerate(_TEXTS.items(), 1)]


def write_rows(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def corpus_of(path: Path) -> Corpus:
    return open_corpus(str(path))


def retry_once(patch: pytest.MonkeyPatch) -> None:
    """Let a server count as away after its second failure."""
    for module in ("elastic.search", "retrieve"):
        patch.setattr(f"turnrl_wiki_search.{module}.RETRIES", 1)


def search_tool(name: str, url: str, top_k=3, cache=None, **server) -> WikiSearch:
    """A tool that searches an index of an Elasticsearch server."""
    return WikiSearch(Elasticsearch(name, url, **{**QUICK, **server}), top_k=top_k, cache=cache)


def ask(tool: WikiSearch, *queries: str) -> list[ToolResult]:
    return list(tool.run([ToolCall("search", {"query": query}) for query in queries]))


def ids_found(tool: WikiSearch, query: str) -> list[str]:
    """Ids of the passages that answer a query."""
    return ask(tool, query)[0].metadata["passage_ids"]


def index_command(*words: object) -> int:
    """Run `turnrl index` as the command line does, errors included."""
    parser = argparse.ArgumentParser()
    add_index_command(parser.add_subparsers())
    args = parser.parse_args(["index", *map(str, words)])
    try:
        return args.run(args) or 0
    except TurnRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code


ROOT = Path(__file__).parent.parent
ITERATIONS = 5


def environment_of(node):
    """What the environment of a command needs to search a locked node."""
    return {
        "TURNRL_ES_URL": node.url,
        "TURNRL_ES_PASSWORD": PASSWORD,
        "TURNRL_ES_CA_CERTS": node.certificate,
    }


class Listener(io.StringIO):
    """Keeps what is printed, and acts once, in a thread of its own, when an iteration has ended."""

    def __init__(self, action):
        super().__init__()
        self.action = threading.Thread(target=action) if action else None

    def write(self, text):
        if self.action and "iteration   2/" in text and not self.action.ident:
            self.action.start()
        return super().write(text)


def turnrl(folder, arguments, during=None, **environment):
    """Run a command in `folder`; `during` happens beside it, from the second iteration on.

    Returns:
        The exit code, standard output, and standard error.
    """
    out, err = Listener(during), io.StringIO()
    logged = logging.StreamHandler(err)  # in a process of its own these lines are on stderr too
    logging.getLogger().addHandler(logged)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(folder)
            retry_once(patch)
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main(arguments)
    finally:
        logging.getLogger().removeHandler(logged)
        if out.action and out.action.ident:
            out.action.join()
    return code, out.getvalue(), err.getvalue()


def on_server(cls, /, **settings):
    """An index on a server, as a recipe has it."""
    return {"class_path": cls, "init_args": settings}


def train(folder, index, during=None, cache=None, **environment):
    """Train for a few iterations in `folder`.

    Args:
        folder: Where the run is.
        index: The index, as a recipe has it.
        during: Called in the middle of it.
        cache: The cache of the search.
        environment: Variables.
    Returns:
        The exit code, and standard error.
    """
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    search = {"index": index, "top_k": 1, "cache": cache}
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": search}]
    recipe["model"] |= {"group_size": 4, "steps_per_pass": 1}
    recipe["record"] = {"transcripts": 100}
    recipe["data"] |= {"questions_per_iteration": 2, "val_limit": 8}
    recipe["trainer"] |= {"max_epochs": ITERATIONS, "check_val_every_n_epoch": ITERATIONS}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = turnrl(folder, ["fit", "recipe.yaml"], during, **environment)
    (folder / "output.log").write_text(out + err)
    return code, err


def metrics(folder):
    """The rows of a run's metrics, without what the clock says."""
    text = (folder / "runs" / "recipe" / "version_0" / "metrics.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


KEY = "a-key-of-the-retriever"
PAGE = "<html><body>It works!</body></html>"


class _Handler(BaseHTTPRequestHandler):
    owner: RetrieveServer

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.strip("/")
        if name == "retrieve" and self.owner.behaviour:
            name = self.owner.behaviour.pop(0)
        while name == "hang" and self.owner.hangs:
            time.sleep(0.05)
        self.owner.requests.append({**body, "authorization": self.headers.get("Authorization")})
        self._answer(name, body)

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
        results = self.owner.index.search(body["queries"], body["topk"] if name != "many" else 3)
        result = [[self._hit(name, hit) for hit in hits] for hits in results]
        odd = {
            "list": lambda: result,
            "other": lambda: {"results": result},
            "first": lambda: {"result": result[:1]},
            "text": lambda: {"result": ["nothing" for _ in result]},
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


class RetrieveServer:
    """A server of `/retrieve` in a thread.

    Attributes:
        behaviour: The ways in which the next requests are answered.
        requests: Those so far, with the key that each was sent with.
        hangs: While true, requests that `hang` get no answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, EmbeddedIndex(folder)
        self.behaviour: list[str] = []
        self.requests: list[dict] = []
        self.hangs = False
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/retrieve"

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.handle_error = lambda *_: None  # clients hang up
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def at(self, way: str) -> str:
        """The address of a way to answer."""
        return self.url.replace("/retrieve", f"/{way}")


@contextmanager
def retrieve_server(folder: Path) -> Iterator[RetrieveServer]:
    """A server of the index in a folder."""
    server = RetrieveServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
