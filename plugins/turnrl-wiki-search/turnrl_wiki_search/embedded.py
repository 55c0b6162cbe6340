"""An index in a folder, searched in-process by tantivy: no server, no memory of its own.

    FOLDER/turnrl-index.json   the description (`IndexInfo`)
    FOLDER/tantivy/            one indexed field, title and text together; frequencies, no positions
    FOLDER.building/           an unfinished build, which the same command takes up again
    FOLDER.lock                held while building, so that workers who ask at once build once

The folder is only ever written under its temporary name and then renamed, so what stands under its
own name is whole, and any number of processes read it at once.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import filelock
import tantivy

from turnrl import Passage, ToolError, whole_file
from turnrl_wiki_search.index import (
    FORMAT,
    Analyzer,
    Hit,
    IndexInfo,
    SearchIndex,
    build_command,
    described,
    say,
)
from turnrl_wiki_search.sources import Corpus, Mark

METADATA = "turnrl-index.json"
_PROGRESS = "progress.json"
_COMMIT_EVERY = 250_000
_ONE_SEGMENT = 50_000
_HEAP_BYTES = 256_000_000


class EmbeddedIndex(SearchIndex):
    """An index in a folder.

    Args:
        folder: Where `build` put it.
    Raises:
        ToolError: Naming the folder, what was found there, and the command that builds it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._info = read_info(folder)
        try:
            self._index = tantivy.Index.open(str(Path(folder) / "tantivy"))
        except ValueError as error:
            raise ToolError(
                f"the index in {str(folder)!r} cannot be opened by tantivy {_tantivy_version()} "
                f"({error}). Build it again: "
                f"{build_command('embedded', str(folder), self._info.source)} --overwrite"
            ) from error
        self._terms = _Terms(self._info.analyzer)
        self._schema = self._index.schema
        self._searcher = self._index.searcher()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        """By process: a forked one has the pool of its parent, and not its threads."""

    def info(self) -> IndexInfo:
        return self._info

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if len(queries) == 1:
            return [self._search(queries[0], k)]
        pool = self._pools.get(os.getpid())
        if pool is None:
            pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="turnrl-search")
            pool = self._pools.setdefault(os.getpid(), pool)
        return [*pool.map(lambda query: self._search(query, k), queries)]

    def close(self) -> None:
        if (pool := self._pools.pop(os.getpid(), None)) is not None:
            pool.shutdown()

    def _search(self, query: str, k: int) -> list[Hit]:
        # terms are looked up one by one, never parsed, so `title:foo AND (` is five plain words at
        # most
        terms = dict.fromkeys(self._terms.analyzer.analyze(query))
        if not terms:
            return []
        clauses = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "body", term, "freq"))
            for term in terms
        ]
        # counting all matches would forbid skipping those that cannot reach the top: 4 times slower
        result = self._searcher.search(tantivy.Query.boolean_query(clauses), k, count=False)
        return [Hit(_passage(self._searcher.doc(address)), score) for score, address in result.hits]


class _Terms(threading.local):
    """An analyzer for each thread: tantivy's refuses a call while another thread is in one."""

    def __init__(self, name: Analyzer) -> None:
        self.analyzer = _analyzer(name)


def read_info(folder: str | os.PathLike[str]) -> IndexInfo:
    """The description of the index in a folder, without opening it.

    Raises:
        ToolError: If there is no index, or one of another format.
    """
    path = Path(folder)
    command = build_command("embedded", str(folder))
    if not path.is_dir():
        unfinished = _beside(path, ".building").is_dir()
        there = (
            "an unfinished build beside it, which that command takes up again"
            if unfinished
            else "nothing"
        )
        raise ToolError(
            f"no search index in {str(folder)!r} (found: {there}). Build it with '{command}'."
        )
    try:
        data = json.loads((path / METADATA).read_text(encoding="utf-8"))
        return described(data, "embedded", str(folder), f"the search index in {str(folder)!r}")
    except FileNotFoundError:
        names = sorted(entry.name for entry in path.iterdir())
        there = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "an empty folder"
        raise ToolError(
            f"{str(folder)!r} is not a search index: it has no {METADATA} (found: {there}). Choose "
            f"another folder, or build the index with '{command}'."
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ToolError(
            f"{METADATA} in {str(folder)!r} cannot be read ({type(error).__name__}: {error}). "
            f"Build the index again: '{command} --overwrite'."
        ) from error


def build(
    folder: str | os.PathLike[str],
    corpus: Corpus,
    analyzer: Analyzer = "english",
    existing: Literal["refuse", "keep", "replace"] = "refuse",
    on_progress: Callable[[int], None] | None = None,
) -> IndexInfo:
    """Build an index in a folder, or take up an interrupted build of the same corpus.

    An interrupted build loses at most the last 250,000 passages, and never holds one twice: what
    the folder holds is told by tantivy's own commit, and the corpus is taken up at the mark of that
    commit.

    Args:
        folder: Where the index is to stand.
        corpus: Its passages.
        analyzer: How text becomes terms.
        existing: What to do if the folder is there already.
        on_progress: Called with the number of passages read so far, some times a second.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the folder is there and `existing` is `refuse`, or the index does not hold
            what was read.
    """
    path = Path(folder)
    with _lock(path):
        if path.exists() and existing == "keep":
            return read_info(path)
        if path.exists() and existing == "refuse":
            raise ToolError(
                f"{str(folder)!r} is there already. Add --overwrite to build it anew, or choose "
                "another folder."
            )
        work = _beside(path, ".building")
        mark = _fill(work, corpus, analyzer, on_progress)
        info = IndexInfo(
            backend="embedded",
            index=str(folder),
            version=f"embedded-{mark.digest}-{analyzer}",
            source=corpus.source.name,
            splitter=str(corpus.splitter),
            analyzer=analyzer,
            passages=mark.passages,
            built=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        _write_json(work / METADATA, asdict(info))
        (work / _PROGRESS).unlink()
        old = _beside(path, ".old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        work.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        return info


def _fill(
    work: Path, corpus: Corpus, analyzer: Analyzer, on_progress: Callable[[int], None] | None
) -> Mark:
    build_of = {
        **corpus.identity,
        "analyzer": analyzer,
        "format": FORMAT,
        "tantivy": _tantivy_version(),
    }
    resumed = _resume(work, build_of)
    if resumed is None:
        shutil.rmtree(work, ignore_errors=True)
        (work / "tantivy").mkdir(parents=True)
        resumed = tantivy.Index(_schema(), path=str(work / "tantivy")), Mark()
    index, mark = resumed
    index.register_tokenizer("turnrl", _analyzer(analyzer))

    def save(*these: Mark) -> None:
        _write_json(work / _PROGRESS, {"build": build_of, "marks": [asdict(m) for m in these]})

    save(mark)
    committed = mark
    # one thread keeps a small index in one segment and in order, so that ties fall the same way
    # everywhere
    one_thread = mark.passages < _ONE_SEGMENT
    writer = index.writer(_HEAP_BYTES, 1 if one_thread else min(os.cpu_count() or 1, 8))
    for chunk, reached in corpus.chunks(committed):
        mark = reached
        for passage in chunk:
            body = f"{passage.title}\n{passage.text}"
            writer.add_document(tantivy.Document(id=passage.id.encode(), body=body))
        if on_progress:
            on_progress(mark.passages)
        grown = one_thread and mark.passages >= _ONE_SEGMENT
        if grown or mark.passages - committed.passages >= _COMMIT_EVERY:
            # both marks are on disk before the commit: whichever side of it we die on, one of them
            # is true
            save(committed, mark)
            writer.commit()
            committed = mark
        if grown:
            writer.wait_merging_threads()
            one_thread = False
            writer = index.writer(_HEAP_BYTES, min(os.cpu_count() or 1, 8))
    save(committed, mark)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    held = index.searcher().num_docs
    if held != mark.passages:
        shutil.rmtree(work, ignore_errors=True)
        raise ToolError(
            f"{mark.passages:,} passages were read from {corpus.source.name!r}, and the new index "
            f"holds {held:,}. It was thrown away; build it again, and check the disk if it happens "
            "twice."
        )
    return mark


def _resume(work: Path, build_of: dict[str, Any]) -> tuple[tantivy.Index, Mark] | None:
    """The unfinished index and the mark of its last commit, if they are of the same build."""
    try:
        state = json.loads((work / _PROGRESS).read_text(encoding="utf-8"))
        index = tantivy.Index.open(str(work / "tantivy"))
        held, same = index.searcher().num_docs, state["build"] == build_of
        marks = [Mark(**m) for m in state["marks"] if same and m["passages"] == held]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (index, marks[-1]) if marks else None


def _tantivy_version() -> str:
    return importlib.metadata.version("tantivy")


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_bytes_field("id", stored=True)
    builder.add_text_field("body", stored=True, tokenizer_name="turnrl", index_option="freq")
    return builder.build()


def _analyzer(name: Analyzer) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.remove_long(128))
    if name == "english":
        builder = builder.filter(tantivy.Filter.stopword("english"))
        builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()


def _passage(document: tantivy.Document) -> Passage:
    title, _, text = str(document.get_first("body")).partition("\n")
    return Passage(bytes(document.get_first("id") or b"").decode(), title, text)


def _lock(path: Path) -> contextlib.AbstractContextManager[object]:
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(_beside(path, ".lock"))
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waiting for another process that builds {str(path)!r}")
        return lock.acquire()


def _beside(path: Path, ending: str) -> Path:
    absolute = path.absolute()
    return absolute.with_name(absolute.name + ending)


def _write_json(path: Path, data: Any) -> None:
    with whole_file(path) as whole:
        whole.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
