"""An index on an Elasticsearch server, in six modules; each uses those above it.

    access      addresses and secrets, in the form that the client takes
    faults      the meaning of errors, and retries
    asking      the searches for a query under each ranking, and the passages in their hits
    examining   checks the fields and vectors that a ranking needs
    search      searches an index
    building    builds an index, or resumes an interrupted build

An outage never becomes an answer. Only the official client talks to the server; it is imported when
a connection is made.
"""

from turnrl_wiki_search.elastic.building import build
from turnrl_wiki_search.elastic.search import ElasticIndex
from turnrl_wiki_search.server import SearchServer

__all__ = ["ElasticIndex", "SearchServer", "build"]
