"""An index on an Elasticsearch server, in four rooms; each uses those above it.

    access      how to reach a server: addresses, secrets, the client
    faults      what an error means, retries, and waiting out an outage
    search      asking an index
    building    making one, or taking up an interrupted build

Two rules hold throughout. What an outage produced never leaves these rooms as an answer. And the
official client does the talking; it is imported only when a connection is made.
"""

from turnrl_wiki_search.elastic.access import Server
from turnrl_wiki_search.elastic.building import build
from turnrl_wiki_search.elastic.search import ElasticIndex

__all__ = ["ElasticIndex", "Server", "build"]
