"""An index in a folder, searched in-process by tantivy, without a server.

    FOLDER/turnrl-index.json   the description (`IndexInfo`)
    FOLDER/tantivy/            one indexed field, title and text together; frequencies, no positions
    FOLDER.building/           an unfinished build, which the same command resumes
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
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import filelock
import tantivy

from turnrl import QuestionSource, ToolError
from turnrl.runs.files import whole_file
from turnrl.types import Passage
from turnrl_wiki_search.changes import changed_file, states_of
from turnrl_wiki_search.index import (
    FORMAT,
    Analyzer,
    Hit,
    IndexInfo,
    SearchIndex,
    info_from,
    remark,
)
from turnrl_wiki_search.sources import Corpus, Mark, files_of

METADATA = "turnrl-index.json"
_PROGRESS = "progress.json"
_COMMIT_EVERY = 250_000
_ONE_SEGMENT = 50_000
_HEAP_BYTES = 256_000_000

_UNSPACED = re.compile(  # Thai, Lao, Burmese, Khmer; kana and Chinese characters
    "[\u0e01-\u0e33\u0e81-\u0eb3\u1000-\u102a\u1780-\u17b3\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)

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
        self._terms = _Terms(self._info.analyzer or "english")
        self._schema = self._index.schema
        self._searcher = self._index.searcher()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        """By process id, because a fork inherits its parent's pool, but not the threads."""

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
        # terms are looked up one by one, never parsed: `title:foo AND (` is at most five words
        terms = dict.fromkeys(self._terms.analyzer.analyze(query))
        if not terms:
            return []
        clauses = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "body", term, "freq"))
            for term in terms
        ]
        # counting would visit matches that cannot reach the top, which is 4 times slower
        result = self._searcher.search(tantivy.Query.boolean_query(clauses), k, count=False)
        return [Hit(_passage(self._searcher.doc(address)), score) for score, address in result.hits]


class _Terms(threading.local):
    """An analyzer per thread: tantivy's refuses concurrent calls."""

    def __init__(self, name: Analyzer) -> None:
        self.analyzer = _analyzer(name)


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
        return info_from(data, str(folder), build_command(str(folder), source))
    except (FileNotFoundError, NotADirectoryError):
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "nothing"
        if _beside(path, ".building").is_dir():
            found = "an unfinished build beside it, which the same command resumes"
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


def changed_since(folder: str | os.PathLike[str], source: str | QuestionSource) -> str | None:
    """A file of the source that has changed since the index in a folder was built; None if none
    has, or if the index does not know its files."""
    states = json.loads((Path(folder) / METADATA).read_text(encoding="utf-8")).get("files")
    files = files_of(source)
    return changed_file(files, states) if files and states else None


def build(
    folder: str | os.PathLike[str],
    corpus: Corpus,
    analyzer: Analyzer = "english",
    existing: Existing = "refuse",
    on_progress: Callable[[int], None] | None = None,
) -> IndexInfo:
    """Build an index in a folder, or resume an interrupted build of the same corpus.

    An interruption loses at most the last 250,000 passages and never duplicates one: tantivy's last
    commit decides which passages are in, and the corpus resumes at the mark of that commit.

    Args:
        folder: The folder to make.
        corpus: The passages.
        analyzer: How text becomes terms.
        existing: What to do with an existing folder.
        on_progress: Called a few times a second with the number of passages read so far.
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
        work = _beside(path, ".building")
        states = states_of(corpus.source.files)
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
        _write_json(work / METADATA, {**asdict(info), "files": states})
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

    def save(*marks: Mark) -> None:
        _write_json(work / _PROGRESS, {"build": build_of, "marks": [asdict(m) for m in marks]})

    save(mark)
    committed = mark
    # one thread keeps a small index in order in one segment, so ties break the same everywhere
    one_thread = mark.passages < _ONE_SEGMENT
    writer = index.writer(_HEAP_BYTES, 1 if one_thread else min(os.cpu_count() or 1, 8))
    unspaced = 0
    for chunk, mark in corpus.chunks(committed):
        for passage in chunk:
            body = f"{passage.title}\n{passage.text}"
            unspaced += _is_unspaced(body)
            writer.add_document(tantivy.Document(id=passage.id.encode(), body=body))
        if on_progress:
            on_progress(mark.passages)
        grown = one_thread and mark.passages >= _ONE_SEGMENT
        if grown or mark.passages - committed.passages >= _COMMIT_EVERY:
            # both marks are on disk before the commit: wherever a build dies, one of them is right
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
            f"holds {held:,}. It was deleted; build it again, and check the disk if this happens "
            "twice."
        )
    _tell_of_script(unspaced, mark.passages)
    return mark


def _tell_of_script(unspaced: int, passages: int) -> None:
    """Print that searches cannot find the words of some passages, if these are not a few."""
    if 100 * unspaced > passages:
        remark(
            f"{unspaced:,} of {passages:,} passages are in a script without spaces between "
            "words, such as Chinese, Japanese or Thai. A search in this index cannot find their "
            "words. Put spaces between the words of passages and queries, or use Elasticsearch, "
            "which searches for Chinese and Japanese by character."
        )


def _is_unspaced(text: str) -> bool:
    """True if most letters of a text are of scripts that put no spaces between words."""
    if text.isascii():
        return False
    return 2 * len(_UNSPACED.findall(text)) > sum(map(str.isalnum, text))


def _resume(work: Path, build_of: dict[str, object]) -> tuple[tantivy.Index, Mark] | None:
    """The unfinished index and the mark of its last commit, if they belong to the same build."""
    try:
        state = json.loads((work / _PROGRESS).read_text(encoding="utf-8"))
        index = tantivy.Index.open(str(work / "tantivy"))
        held = index.searcher().num_docs
        marks = [Mark(**m) for m in state["marks"] if m["passages"] == held]
        return (index, marks[-1]) if marks and state["build"] == build_of else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
        remark(f"waiting for another process that is building {str(path)!r}")
        return lock.acquire()


def _beside(path: Path, ending: str) -> Path:
    absolute = path.absolute()
    return absolute.with_name(absolute.name + ending)


def _write_json(path: Path, data: object) -> None:
    with whole_file(path) as new:
        new.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
