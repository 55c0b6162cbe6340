"""Passage search for agents: the tool `WikiSearch` and the command `turnrl index`.

    index       what a search index is: its description, its hits, one way to ask it
    sources     where passages come from, how articles are split, how reading resumes
    embedded    an index in a folder (tantivy), no server
    elastic     an index on an Elasticsearch server: access, faults, search, building
    progress    how far a build has come
    cache       answers kept on disk, for repeated epochs and for replay without a server
    tool        `WikiSearch`, which the policy calls
    command     `turnrl index build | info | search`

Importing this package loads none of the libraries behind it; each is imported when it is first
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from turnrl import Tool, hookimpl
from turnrl_wiki_search.command import add_index_command
from turnrl_wiki_search.tool import WikiSearch

__all__ = ["WikiSearch"]


@hookimpl
def turnrl_tools() -> Iterable[type[Tool]]:
    """The search tool."""
    return [WikiSearch]


@hookimpl
def turnrl_commands() -> Iterable[Callable[[Any], None]]:
    """`turnrl index`."""
    return [add_index_command]
