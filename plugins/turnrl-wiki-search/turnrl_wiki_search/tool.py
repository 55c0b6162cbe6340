"""`WikiSearch`: the search tool that the policy calls."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final, get_args

from turnrl import (
    QuestionSource,
    RecipeError,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    at_least,
    one_of,
)
from turnrl_wiki_search.cache import AnswerCache, CachedIndex
from turnrl_wiki_search.elastic import ElasticIndex
from turnrl_wiki_search.index import Backend, Hit, SearchIndex, build_command, clean_query, remark
from turnrl_wiki_search.progress import Progress
from turnrl_wiki_search.retrieve import RetrieveIndex
from turnrl_wiki_search.server import SearchServer
from turnrl_wiki_search.sources import Corpus, open_pages, sample_of, source_name

_BETWEEN = "\n\n"
_CHARACTERS_PER_TOKEN = 4
_DESCRIPTION = "Searches an encyclopedia and returns the passages that best match a query."
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)")


def _located(index: str) -> str:
    """An index with the values of the variables in it, except for those after the host of an
    address: they may be secrets, which only the connection resolves."""
    if index.startswith("~/"):
        index = str(Path(index).expanduser())
    host = re.match(r"https?://[^/?#]*", index)
    end = host.end() if host else len(index)
    return os.path.expandvars(index[:end]) + index[end:]


@final
class WikiSearch(Tool):
    """Searches passages and shows the best ones to the policy, each under its title.

    The index is embedded, in a folder that any number of processes can read; on an Elasticsearch
    server, built by turnrl or not (`fields`), and ranked by words, by vectors or by both
    (`ranking`); or behind a server with the `/retrieve` of Search-R1. Nothing in a query is an
    operator. An empty query is the policy's mistake; a query without matches is not.

    While a server is unreachable, calls and the run wait. When the server comes back, calls are
    answered as if nothing had happened. If it stays away for `wait_s`, the run stops. The policy
    never reads a server's error.

    Args:
        index: Folder of an embedded index, name of an index on Elasticsearch, or address of a
            server's `/retrieve`, such as http://localhost:8000/retrieve.
        backend: embedded, elasticsearch, or retrieve.
        build_from: Source from which a missing embedded index is built before the run: any source
            that `turnrl index build --source` takes, or `class_path` and `init_args`.
        top_k: The most passages per query. The paper shows 1.
        max_result_tokens: The most tokens of a result; passages beyond it are dropped. If the first
            passage alone is longer, it is cut at a sentence end. A tool does not know the policy's
            tokenizer, so a token is taken to be 4 characters.
        cache: File that caches search results, so that no query is sent twice. Runs may share it.
        cache_mb: The most megabytes (10^6 bytes) of results in the cache.
        offline: Use the cache only. This replays a run with its server off.
        name: The name by which the policy calls the search. Two searches in one recipe need two
            names.
        description: The sentence that the prompt shows to the policy; null for a sentence about an
            encyclopedia.
        server: Settings of a server and its searches: any argument of `SearchServer` (`api_key`,
            `ranking`, ...), by its own name.
    """

    parameters: Mapping[str, object] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }
    references = ("api_key", "password", "cloud_id", "index")

    def __init__(
        self,
        index: str,
        backend: Backend = "embedded",
        build_from: str | QuestionSource | None = None,
        top_k: int = 3,
        max_result_tokens: int = 600,
        cache: str | None = None,
        cache_mb: int = 1000,
        offline: bool = False,
        name: str = "search",
        description: str | None = None,
        **server: Any,
    ) -> None:
        index = _located(index)
        self.name = name
        self.description = _DESCRIPTION if description is None else description
        self._check_words()
        self.top_k = top_k
        self.max_result_tokens = max_result_tokens
        self.cache_mb = cache_mb
        limits = ("top_k", "max_result_tokens", "cache_mb")
        at_least(1, "WikiSearch.", self, *limits, whole=True, optional=False)
        if offline and cache is None:
            raise RecipeError(
                "WikiSearch: offline needs a cache to answer from. Set 'cache' to its file."
            )
        self._source = build_from
        self.build_from = None if build_from is None else source_name(build_from)
        self._server = SearchServer(**server)
        self.backend: Backend = backend
        one_of(get_args(Backend), "WikiSearch.", self, "backend")
        self._server.refuse_others(backend)
        if backend == "embedded" and index.startswith(("http://", "https://")):
            raise RecipeError(
                f"WikiSearch.index is {index!r}, the address of a server. Add 'backend: retrieve'."
            )
        if backend != "embedded":
            self.timeout_s = self._server.longest_answer_s(backend)
        if self.build_from is not None and backend == "elasticsearch":
            raise RecipeError(
                "WikiSearch: build_from builds only embedded indexes. Build the one on the "
                f"server with {build_command(backend, index, self.build_from)!r}, and leave "
                "build_from out."
            )
        if self.build_from is not None and backend == "retrieve":
            raise RecipeError(
                "WikiSearch: build_from builds only embedded indexes, and the server at 'index' "
                "has its own. Leave build_from out."
            )
        self.index = index
        self._cache = cache
        self._offline = offline
        self._open: SearchIndex | None = None
        self._lock = threading.Lock()

    def _check_words(self) -> None:
        """Refuse a name and a description that no prompt could show."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w-]+", self.name):
            raise RecipeError(
                f"WikiSearch.name is {self.name!r}. Take a word of letters, digits, '_' and '-', "
                "by which the policy calls the search."
            )
        if not isinstance(self.description, str) or not self.description.strip():
            raise RecipeError(
                f"WikiSearch.description is {self.description!r}. Say in one sentence what the "
                "search finds, or leave it out."
            )

    def check(self) -> None:
        """Check that the index answers, and build it first if `build_from` is set.

        Raises:
            ToolError: Naming the fault and the next step.
        """
        if self._source is not None and not self._offline:
            self._build(self._source)
        self._opened().info()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[WikiSearch]:
        """This search without its cache. If a run would first build the index, the rehearsal
        searches a temporary index of a few passages of the source, or of a made-up passage if the
        source would have to be downloaded or the search is offline."""
        rehearsed = copy.copy(self)
        rehearsed._open, rehearsed._lock, rehearsed._cache = None, threading.Lock(), None
        if not self._offline and (self._source is None or Path(self.index).exists()):
            yield rehearsed
            return
        if self._offline:
            self.check()
        from turnrl_wiki_search import embedded  # loads tantivy

        with tempfile.TemporaryDirectory() as folder:
            sample = sample_of(None if self._offline else self._source)
            rehearsed.backend, rehearsed.index = "embedded", str(Path(folder, "index"))
            rehearsed._source = None
            embedded.build(rehearsed.index, Corpus(sample))
            yield rehearsed

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Search for all calls at once; see `Tool.run`."""
        queries = [clean_query(str(call.arguments["query"])) for call in calls]
        wanted = [query for query in dict.fromkeys(queries) if query]
        answers: dict[str, list[Hit]] = {}
        if wanted:
            answers = dict(zip(wanted, self._opened().search(wanted, self.top_k), strict=True))
        return [
            self._result(answers[query]) if query else ToolResult("The query is empty.", ok=False)
            for query in queries
        ]

    def _opened(self) -> SearchIndex:
        """The index, opened on first use, so that a recipe can be read without it."""
        with self._lock:
            if self._open is None:
                open_it = partial(open_index, self.backend, self.index, self._server)
                if self._cache is None:
                    self._open = open_it()
                else:
                    cache = AnswerCache(self._cache, self.cache_mb * 1_000_000)
                    name = self._server.known_as(self.index)
                    self._open = CachedIndex(open_it, cache, self.backend, name, self._offline)
            return self._open

    def _build(self, source: str | QuestionSource) -> None:
        from turnrl_wiki_search import embedded  # loads tantivy

        path, name = Path(self.index), source_name(source)
        if not path.exists():
            remark(f"building the search index {self.index!r} from {name}")
            corpus = Corpus(open_pages(source))
            progress = Progress(corpus.source.fraction)
            try:
                embedded.build(path, corpus, existing="keep", on_progress=progress)
            except KeyboardInterrupt:
                remark(f"the search index {self.index!r} is unfinished; the next run resumes it")
                raise
            finally:
                progress.end()
        used = embedded.read_info(path).source
        if used != name:
            raise ToolError(
                f"the search index in {self.index!r} was built from {used!r}, but build_from is "
                f"{name!r}. Choose another folder, or rebuild it: "
                f"{build_command('embedded', self.index, name)} --overwrite"
            )
        if changed := embedded.changed_since(path, source):
            raise ToolError(
                f"the search index in {self.index!r} is older than {changed!r}, from which it was "
                f"built. Rebuild it: {build_command('embedded', self.index, name)} --overwrite"
            )

    def _result(self, hits: Sequence[Hit]) -> ToolResult:
        """The passages that fit, in order of score."""
        left, end = self.max_result_tokens, 0
        shown: list[str] = []
        starts: list[int] = []
        for hit in hits:
            # no rank numbers: "2" in front of a passage would count as a retrieved answer "2"
            block = f"{hit.passage.title}\n{hit.passage.text}".strip()
            tokens = estimate_tokens(block)
            if shown and tokens > left:
                break
            starts.append(end + len(f"{hit.passage.title}\n".lstrip()))
            shown.append(cut_to_tokens(block, left))
            end += len(block) + len(_BETWEEN)
            left -= tokens
        hits = hits[: len(shown)]
        metadata = {
            "passage_ids": [h.passage.id for h in hits],
            "passage_starts": starts,
            "scores": [h.score for h in hits],
        }
        # not "no results": that would contain the answer "no"
        return ToolResult(_BETWEEN.join(shown) or "Nothing found.", metadata=metadata)


def open_index(
    backend: Backend, index: str, server: SearchServer, of_run: bool = True
) -> SearchIndex:
    """Open an index. An embedded one ignores `server`.

    Args:
        backend: Its backend.
        index: Its folder, name or address.
        server: Its server.
        of_run: True if a run searches; then messages explain how to resume or replay it.
    """
    if backend == "elasticsearch":
        return ElasticIndex(server, index, of_run)
    if backend == "retrieve":
        return RetrieveIndex(server, index, of_run)
    from turnrl_wiki_search.embedded import EmbeddedIndex  # loads tantivy

    return EmbeddedIndex(index)


def estimate_tokens(text: str) -> int:
    """A rough estimate of the number of tokens in `text`, on the high side for English."""
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def cut_to_tokens(text: str, tokens: int) -> str:
    """Cut `text` to a token budget, at a sentence end if that keeps at least half of the budget."""
    end = tokens * _CHARACTERS_PER_TOKEN
    if len(text) <= end:
        return text
    ends = [m.end() for m in _SENTENCE_END.finditer(text, 0, end + 1)]
    if ends and ends[-1] >= end / 2:
        return text[: ends[-1]]
    space = max(text.rfind(" ", 0, end + 1), text.rfind("\n", 0, end + 1))
    return text[: space if space > 0 else end].rstrip()
