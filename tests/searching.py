"""Small corpora, searches and the `index` command, for tests of both kinds of index."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turnrl import ToolCall, ToolResult, TurnRLError
from turnrl_wiki_search import Elasticsearch, WikiSearch
from turnrl_wiki_search.command import add_index_command
from turnrl_wiki_search.sources import Corpus, open_source

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"needs the SQuAD passages in {SHARED}"
)
_TEXTS = {
    "Utrecht": "Utrecht is a city in the Netherlands. It has a dom tower.",
    "Paris": "Paris is the capital of France. The tower is by Eiffel.",
    "Café": "A café serves coffee, and the cities of Europe have many.",
}
API_KEY = "VuaCfGcBCdbkQm-e5aOx:ui2lp2axTNmsyakw9tvNnw"
QUICK = {"timeout_s": 2.0, "wait_s": 30.0}
"""Settings with which faults of a server cost little time; see also `retry_once`."""
ROWS = [{"id": str(n), "title": k, "text": v} for n, (k, v) in enumerate(_TEXTS.items(), 1)]


def shared_rows() -> list[dict]:
    """The rows of all shared corpora."""
    files = [
        SHARED / name / "corpus.jsonl" for name in ("squad", "multihop/hotpotqa", "multihop/2wiki")
    ]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def write_rows(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def corpus_of(path: Path, chunk: int = 2000) -> Corpus:
    return Corpus(open_source(str(path)), chunk=chunk)


def retry_once(patch: pytest.MonkeyPatch) -> None:
    """Let a server count as away after its second failure."""
    for module in ("elastic.search", "retrieve"):
        patch.setattr(f"turnrl_wiki_search.{module}.RETRIES", 1)


def search_tool(name: str, url: str, top_k=3, cache=None, offline=False, **server) -> WikiSearch:
    """A tool that searches an index of an Elasticsearch server."""
    index = Elasticsearch(name, url, **{**QUICK, **server})
    return WikiSearch(index, top_k=top_k, cache=cache, offline=offline)


def ask(tool: WikiSearch, *queries: str) -> list[ToolResult]:
    return list(tool.run([ToolCall("search", {"query": query}) for query in queries]))


def asked_throughout(tool: WikiSearch, outage: Callable[[], None]) -> int:
    """Search from eight threads while a server is away and back, and find what was found before.

    Args:
        tool: The tool.
        outage: Takes the server away, and brings it back.
    Returns:
        How many searches there were.
    """
    words = ["Utrecht", "Paris", "coffee", "zebra"]
    calm = dict(zip(words, ask(tool, *words), strict=True))
    back = threading.Event()

    def callers(number: int) -> list[tuple[str, ToolResult]]:
        answers: list[tuple[str, ToolResult]] = []
        while not back.is_set() or len(answers) < 10:
            word = words[(number + len(answers)) % len(words)]
            answers.append((word, ask(tool, word)[0]))
        return answers

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(callers, number) for number in range(8)]
        time.sleep(0.3)
        outage()
        back.set()
        answers = [answer for call in calls for answer in call.result(timeout=90)]
    assert all(result == calm[word] for word, result in answers)
    return len(answers)


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
