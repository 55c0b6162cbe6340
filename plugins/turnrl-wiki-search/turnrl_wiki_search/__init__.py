"""Passage search for agents: the tool `WikiSearch` and the command `turnrl index`.

    tool         `WikiSearch`, which the policy calls
    settings     settings of an index, one class for each backend
    index        a search index: its description, its hits, and the interface of all backends
    embedded     an index in a folder (tantivy), without a server
    elastic      an index on an Elasticsearch server
    retrieve     an index behind a server that speaks Search-R1's `/retrieve`
    cache        search results on disk, for repeated epochs and other runs
    sources      corpora: the passages of files, installed data sets and the hub
    splitting    articles cut into passages
    command      `turnrl index build | info | search`

Importing this package loads none of their libraries. Each is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_wiki_search.settings import Elasticsearch as Elasticsearch
    from turnrl_wiki_search.settings import Embedded as Embedded
    from turnrl_wiki_search.settings import Retriever as Retriever
    from turnrl_wiki_search.tool import WikiSearch as WikiSearch

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_tools() -> list[str]:
    """The search tool."""
    return ["turnrl_wiki_search.tool:WikiSearch"]


@hookimpl
def turnrl_commands() -> list[str]:
    """`turnrl index`."""
    return ["turnrl_wiki_search.command:add_index_command"]
