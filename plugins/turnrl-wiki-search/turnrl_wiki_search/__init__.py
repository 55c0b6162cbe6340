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

from typing import TYPE_CHECKING

from turnrl import hookimpl, lazy_names

if TYPE_CHECKING:
    from turnrl_wiki_search.tool import WikiSearch as WikiSearch

__getattr__, __all__ = lazy_names(__name__, __file__)


@hookimpl
def turnrl_tools() -> list[str]:
    """The search tool."""
    return ["turnrl_wiki_search.tool:WikiSearch"]


@hookimpl
def turnrl_commands() -> list[str]:
    """`turnrl index`."""
    return ["turnrl_wiki_search.command:add_index_command"]
