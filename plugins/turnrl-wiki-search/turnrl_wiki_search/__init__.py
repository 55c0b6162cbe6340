"""Passage search for agents: the tool `WikiSearch` and the command `turnrl index`.

    index       a search index: its description, its hits, and the interface of all backends
    splitting   articles cut into passages
    changes     the state of a corpus's files, and the ids of its passages
    sources     corpora, read so that a build can resume
    embedded    an index in a folder (tantivy), without a server
    server      settings of a server and its searches, and its secrets
    encoding    texts as vectors, by a model or a function of the user's
    fusion      two rankings joined by their ranks
    elastic     an index on an Elasticsearch server, in six modules
    retrieve    an index behind a server that speaks Search-R1's `/retrieve`
    progress    the progress bar of a build
    cache       search results on disk, for repeated epochs and for replay without a server
    tool        `WikiSearch`, which the policy calls
    coverage    how many questions a search answers, and which have an answer in the index
    command     `turnrl index build | info | search | check`

Importing this package loads none of their libraries. Each is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from turnrl import Tool, hookimpl
from turnrl_wiki_search.command import add_index_command
from turnrl_wiki_search.tool import WikiSearch

__all__ = ["WikiSearch"]


@hookimpl
def turnrl_tools() -> Iterable[type[Tool]]:
    """The search tool."""
    return [WikiSearch]


@hookimpl
def turnrl_commands() -> Iterable[Callable[..., None]]:
    """`turnrl index`."""
    return [add_index_command]
