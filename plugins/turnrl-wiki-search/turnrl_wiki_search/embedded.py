"""An index in a folder, searched in-process by tantivy, without a server.

    FOLDER/turnrl-index.json   the description (`IndexInfo`)
    FOLDER/tantivy/            one indexed field, title and text together; frequencies, no positions
    FOLDER.building/           an unfinished build
    FOLDER.lock                held while building, so that concurrent workers build once

A build writes to a temporary name and renames the folder at the end. So a folder under its own name
is complete, and any number of processes can read it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import filelock
import tantivy

from turnrl import QuestionSource, ToolError
from turnrl.types import Passage
from turnrl_wiki_search.index import Analyzer, Hit, IndexInfo, SearchIndex, parse_info, print_remark
from turnrl_wiki_search.sources import Corpus, digests_of, source_files

METADATA = "turnrl-index.json"
_ONE_SEGMENT = 50_000
_HEAP_BYTES = 256_000_000

Existing = Literal["refuse", "keep", "replace"]


class EmbeddedIndex(SearchIndex):
    """An index in a folder.

    Args:
        folder: The folder that `build` made.
    Raises:
        ToolError: Naming the folder, its contents, and the command that builds the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._info = read_info(folder)
        try:
            self._index = tantivy.Index.open(str(Path(folder) / "tantivy"))
        except ValueError as error:
            raise ToolError(
                f"the index in {str(folder)!r} cannot be opened by tantivy {_tantivy_version()} "
                f"({error}). Build it again: "
                f"{build_command(str(folder), self._info.source)} --overwrite"
            ) from error
        self._analyzer, self._lock = _analyzer(self._info.analyzer or "english"), threading.Lock()
        self._schema = self._index.schema
        self._searcher = self._index.searcher()

    def info(self) -> IndexInfo:
        return self._info

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with self._lock:  # tantivy's analyzer refuses concurrent calls
            terms = [dict.fromkeys(self._analyzer.analyze(query)) for query in queries]
        if len(queries) == 1:
            return [self._search(terms[0], k)]
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="turnrl-search") as pool:
            return [*pool.map(lambda words: self._search(words, k), terms)]

    def _search(self, terms: Iterable[str], k: int) -> list[Hit]:
        # terms are looked up one by one, never parsed: `title:foo AND (` is at most five words
        clauses = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "body", term, "freq"))
            for term in terms
        ]
        if not clauses:
            return []
        # counting would visit matches that cannot reach the top, which is 4 times slower
        result = self._searcher.search(tantivy.Query.boolean_query(clauses), k, count=False)
        return [Hit(_passage(self._searcher.doc(address)), score) for score, address in result.hits]


def read_info(folder: str | os.PathLike[str]) -> IndexInfo:
    """The description of the index in a folder, without opening it.

    Raises:
        ToolError: If there is no index, or it is of another format.
    """
    path = Path(folder)
    command = build_command(str(folder))
    try:
        data = json.loads((path / METADATA).read_text(encoding="utf-8"))
        source = str(data.get("source", "SOURCE"))
        return parse_info(data, str(folder), build_command(str(folder), source))
    except (FileNotFoundError, NotADirectoryError):
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "nothing"
        raise ToolError(
            f"no search index in {str(folder)!r} (found: {found}). Build it with '{command}', or "
            "choose another folder."
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ToolError(
            f"{METADATA} in {str(folder)!r} cannot be read ({type(error).__name__}: {error}). "
            f"Build the index again: '{command} --overwrite'."
        ) from error


def build_command(folder: str, source: str = "SOURCE") -> str:
    """The command that builds an index, for messages."""
    return shlex.join(["turnrl", "index", "build", "--index", folder, "--source", source])


def find_changed_file(folder: str | os.PathLike[str], source: str | QuestionSource) -> str | None:
    """A file of the source that has changed since the index in a folder was built; None if none
    has, or if the index does not know its files."""
    built = json.loads((Path(folder) / METADATA).read_text(encoding="utf-8")).get("files")
    if not built or not (now := digests_of(source_files(source))):
        return None
    # 0.19 and before wrote the size and the time of a file too
    built = {name: state[-1] if isinstance(state, list) else state for name, state in built.items()}
    changed = (name for name in sorted({*built, *now}) if built.get(name) != now.get(name))
    return next(changed, None)


def build(
    folder: str | os.PathLike[str],
    corpus: Corpus,
    analyzer: Analyzer = "english",
    existing: Existing = "refuse",
) -> IndexInfo:
    """Build an index in a folder. An interrupted build leaves no index, and begins again.

    Args:
        folder: The folder to make.
        corpus: The passages.
        analyzer: How text becomes terms.
        existing: What to do with an existing folder.
    Returns:
        The description of the index.
    Raises:
        ToolError: If the folder exists and `existing` is `refuse`, or the index lacks passages.
    """
    path = Path(folder)
    with _lock(path):
        if path.exists() and existing == "keep":
            return read_info(path)
        if path.exists() and existing == "refuse":
            raise ToolError(
                f"{str(folder)!r} exists already. Add --overwrite to rebuild it, or choose "
                "another folder."
            )
        work, old = _beside(path, ".building"), _beside(path, ".old")
        files = digests_of(corpus.files)
        _fill(work, corpus, analyzer)
        info = IndexInfo(
            backend="embedded",
            index=str(folder),
            version=f"embedded-{corpus.digest}-{analyzer}",
            source=corpus.name,
            splitter=str(corpus.splitter),
            analyzer=analyzer,
            passages=corpus.count,
            built=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        text = json.dumps({**asdict(info), "files": files}, ensure_ascii=False, indent=1)
        (work / METADATA).write_text(text, encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        work.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        return info


def _fill(work: Path, corpus: Corpus, analyzer: Analyzer) -> None:
    """Write the passages of a corpus into a new index.

    Raises:
        ToolError: If the index lacks some of them afterwards.
    """
    shutil.rmtree(work, ignore_errors=True)
    (work / "tantivy").mkdir(parents=True)
    index = tantivy.Index(_schema(), path=str(work / "tantivy"))
    index.register_tokenizer("turnrl", _analyzer(analyzer))
    passages = corpus.passages()
    first = [*islice(passages, _ONE_SEGMENT)]
    # one thread keeps a small index in order in one segment, so ties break the same everywhere
    threads = 1 if len(first) < _ONE_SEGMENT else min(os.cpu_count() or 1, 8)
    writer = index.writer(_HEAP_BYTES, threads)
    for passage in chain(first, passages):
        body = f"{passage.title}\n{passage.text}"
        writer.add_document(tantivy.Document(id=passage.id.encode(), body=body))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    held = index.searcher().num_docs
    if held != corpus.count:
        raise ToolError(
            f"{corpus.count:,} passages were read from {corpus.name!r}, and the new index holds "
            f"{held:,}. Build it again, and check the disk if this happens twice."
        )


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
        print_remark(f"waiting for another process that is building {str(path)!r}")
        return lock.acquire()


def _beside(path: Path, ending: str) -> Path:
    absolute = path.absolute()
    return absolute.with_name(absolute.name + ending)
