"""`WikiSearch`: the search tool that the policy calls."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from turnrl import QuestionSource, RecipeError, Tool, ToolCall, ToolError, ToolResult
from turnrl.plugin.errors import check_at_least
from turnrl.types import Passage
from turnrl_wiki_search.cache import CachedIndex
from turnrl_wiki_search.index import Hit, IndexInfo, SearchIndex, clean_query, print_remark
from turnrl_wiki_search.settings import Embedded, IndexSettings, parse_index
from turnrl_wiki_search.sources import open_corpus, source_name

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

    def __init__(
        self,
        index: str | IndexSettings,
        build_from: str | QuestionSource | None = None,
        top_k: int = 3,
        max_result_tokens: int = 600,
        cache: str | None = None,
        name: str = "search",
        description: str | None = None,
    ) -> None:
        if isinstance(index, str):
            index = parse_index(index, build_from)
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
        self.top_k = top_k
        self.max_result_tokens = max_result_tokens
        check_at_least(
            1, "WikiSearch.", self, "top_k", "max_result_tokens", whole=True, optional=False
        )
        if index.longest_search_s is not None:
            self.timeout_s = index.longest_search_s
        self.cache = cache
        self._lock = threading.Lock()
        self._open: tuple[int, SearchIndex] | None = None
        """The process that opened the index, and the index."""

    def check(self) -> None:
        """Check that the index answers, and build it first if `build_from` is set.

        Raises:
            ToolError: Naming the fault and the next step.
        """
        if isinstance(self.index, Embedded):
            build_if_missing(self.index)
        self._open_index().info()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[WikiSearch]:
        """This search without its cache. If a run would first build the index, a made-up passage
        answers every query."""
        rehearsed = copy.copy(self)
        rehearsed._open, rehearsed._lock, rehearsed.cache = None, threading.Lock(), None
        index = self.index
        if isinstance(index, Embedded) and index.build_from is not None:
            rehearsed.index = replace(index, build_from=None)
            if not Path(index.folder).exists():
                open_corpus(index.build_from)
                rehearsed._open = os.getpid(), _MadeUp()
        yield rehearsed

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Search for all calls at once; see `Tool.run`."""
        queries = [clean_query(str(call.arguments["query"])) for call in calls]
        wanted = [query for query in dict.fromkeys(queries) if query]
        answers: dict[str, list[Hit]] = {}
        if wanted:
            answers = dict(zip(wanted, self._open_index().search(wanted, self.top_k), strict=True))
        return [
            self._result(answers[query]) if query else ToolResult("The query is empty.", ok=False)
            for query in queries
        ]

    def _open_index(self) -> SearchIndex:
        """The index, opened on first use, so that a recipe can be read without it. A fork opens its
        own: on its parent's connections it would read answers to the parent's requests."""
        with self._lock:
            if self._open is None or self._open[0] != os.getpid():
                index = self.index.open()
                if self.cache is not None:
                    index = CachedIndex(index, self.cache)
                self._open = os.getpid(), index
            return self._open[1]

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


class _MadeUp(SearchIndex):
    """An index whose only passage answers every query."""

    def info(self) -> IndexInfo:
        return IndexInfo("made up", "a passage", None)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        passage = Passage("1", "Utrecht", "Utrecht is a city in the Netherlands.")
        return [[Hit(passage, 1.0)] for _ in queries]


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
        print_remark(f"building the search index {index.folder!r} from {name}")
        embedded.build(path, open_corpus(index.build_from), existing="keep")
    used = embedded.read_info(path).source
    rebuild = f"{embedded.build_command(index.folder, name)} --overwrite"
    if used != name:
        raise ToolError(
            f"the search index in {index.folder!r} was built from {used!r}, but build_from is "
            f"{name!r}. Choose another folder, or rebuild it: {rebuild}"
        )
    if changed := embedded.find_changed_file(path, index.build_from):
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
