"""`WikiSearch`: the search tool that the policy calls."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from turnrl import QuestionSource, RecipeError, Tool, ToolCall, ToolError, ToolResult
from turnrl.plugin.errors import at_least
from turnrl_wiki_search.cache import CachedIndex
from turnrl_wiki_search.index import Hit, SearchIndex, clean_query, remark
from turnrl_wiki_search.progress import show_progress
from turnrl_wiki_search.settings import Embedded, IndexSettings, index_at
from turnrl_wiki_search.sources import Corpus, open_sample, open_source, source_name

_BETWEEN = "\n\n"
_CHARACTERS_PER_TOKEN = 4
_DESCRIPTION = "Searches an encyclopedia and returns the passages that best match a query."
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)")


@final
class WikiSearch(Tool):
    """Searches passages and shows the best ones to the policy, each under its title.

    Nothing in a query is an operator. An empty query is the policy's mistake; a query without
    matches is not.

    While a server is unreachable, calls and the run wait. When the server comes back, calls are
    answered as if nothing had happened. If it stays away for `wait_s`, the run stops. The policy
    never reads a server's error.

    Args:
        index: The index: the folder of an embedded one; the address of a server's `/retrieve`, such
            as http://localhost:8000/retrieve; or `class_path` and `init_args` of `Elasticsearch`,
            or of `Retriever` or `Embedded` with more settings.
        build_from: Source from which a missing embedded index is built before the run: any source
            that `turnrl index build --source` takes, or `class_path` and `init_args`.
        top_k: The most passages per query. The paper shows 1.
        max_result_tokens: The most tokens of a result; passages beyond it are dropped. If the first
            passage alone is longer, it is cut at a sentence end. A tool does not know the policy's
            tokenizer, so a token is taken to be 4 characters.
        cache: File that caches search results, so that no query is sent twice. Runs may share it.
        offline: Use the cache only. This replays a run with its server off.
        name: The name by which the policy calls the search. Two searches in one recipe need two
            names.
        description: The sentence that the prompt shows to the policy; null for a sentence about an
            encyclopedia.
    """

    parameters: Mapping[str, object] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }
    references = ("index",)

    def __init__(
        self,
        index: str | IndexSettings,
        build_from: str | QuestionSource | None = None,
        top_k: int = 3,
        max_result_tokens: int = 600,
        cache: str | None = None,
        offline: bool = False,
        name: str = "search",
        description: str | None = None,
    ) -> None:
        if isinstance(index, str):
            index = index_at(index, build_from)
        elif build_from is not None:
            raise RecipeError(
                "WikiSearch.build_from goes with the folder of an embedded index. Set "
                "Embedded.build_from, or leave it out: 'turnrl index build' builds an index on a "
                "server."
            )
        self.index = index
        self.name = name
        self.description = _DESCRIPTION if description is None else description
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise RecipeError(
                f"WikiSearch.name is {name!r}. Take a word of letters, digits, '_' and '-', by "
                "which the policy calls the search."
            )
        if not isinstance(self.description, str) or not self.description.strip():
            raise RecipeError(
                f"WikiSearch.description is {description!r}. Say in one sentence what the search "
                "finds, or leave it out."
            )
        self.top_k = top_k
        self.max_result_tokens = max_result_tokens
        at_least(1, "WikiSearch.", self, "top_k", "max_result_tokens", whole=True, optional=False)
        if offline and cache is None:
            raise RecipeError(
                "WikiSearch.offline needs a cache to answer from. Set WikiSearch.cache to its file."
            )
        if index.longest_search_s is not None:
            self.timeout_s = index.longest_search_s
        self.cache, self.offline = cache, offline
        self._open: SearchIndex | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check that the index answers, and build it first if `build_from` is set.

        Raises:
            ToolError: Naming the fault and the next step.
        """
        if isinstance(self.index, Embedded) and not self.offline:
            build_if_missing(self.index)
        self._opened().info()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[WikiSearch]:
        """This search without its cache. If a run would first build the index, the rehearsal
        searches a temporary index of a few passages of the source, or of a made-up passage if the
        source would have to be downloaded or the search is offline."""
        rehearsed = copy.copy(self)
        rehearsed._open, rehearsed._lock, rehearsed.cache = None, threading.Lock(), None
        index, source = self.index, None
        if isinstance(index, Embedded):
            source, index = index.build_from, replace(index, build_from=None)
            if source is not None and Path(index.folder).exists():
                source = None
        if not self.offline and source is None:
            rehearsed.index = index
            yield rehearsed
            return
        if self.offline:
            self.check()
            source = None
        from turnrl_wiki_search import embedded  # loads tantivy

        with tempfile.TemporaryDirectory() as folder:
            small = Embedded(str(Path(folder, "index")))
            embedded.build(small.folder, Corpus(open_sample(source)))
            rehearsed.index = small
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
                self._open = (
                    self.index.open()
                    if self.cache is None
                    else CachedIndex(self.index, self.cache, self.offline)
                )
            return self._open

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


def build_if_missing(index: Embedded) -> None:
    """Build an embedded index from its `build_from`, if its folder does not exist.

    Raises:
        ToolError: If the index was built from another source, or from files that have changed.
    """
    if index.build_from is None:
        return
    from turnrl_wiki_search import embedded  # loads tantivy

    path, name = Path(index.folder), source_name(index.build_from)
    if not path.exists():
        remark(f"building the search index {index.folder!r} from {name}")
        corpus = Corpus(open_source(index.build_from))
        try:
            with show_progress(corpus.source.fraction) as progress:
                embedded.build(path, corpus, existing="keep", on_progress=progress)
        except KeyboardInterrupt:
            remark(f"the search index {index.folder!r} is unfinished; the next run resumes it")
            raise
    used = embedded.read_info(path).source
    rebuild = f"{embedded.build_command(index.folder, name)} --overwrite"
    if used != name:
        raise ToolError(
            f"the search index in {index.folder!r} was built from {used!r}, but build_from is "
            f"{name!r}. Choose another folder, or rebuild it: {rebuild}"
        )
    if changed := embedded.changed_since(path, index.build_from):
        raise ToolError(
            f"the search index in {index.folder!r} is older than {changed!r}, from which it was "
            f"built. Rebuild it: {rebuild}"
        )


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
