"""Small corpora, searches and the `index` command, for tests of both kinds of index."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from turnrl import ToolCall, ToolResult, TurnRLError
from turnrl_wiki_search import WikiSearch
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


def ask(tool: WikiSearch, *queries: str) -> list[ToolResult]:
    return list(tool.run([ToolCall("search", {"query": query}) for query in queries]))


def found(tool: WikiSearch, query: str) -> list[str]:
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
