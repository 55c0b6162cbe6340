"""An index on an Elasticsearch server. Only the official client talks to the server, and an outage
never becomes an answer.

client    the connection, its secrets, and the meaning of the server's errors
search    searches an index that turnrl built, or one of the user's own
build     builds an index
"""

from turnrl_wiki_search.elastic.build import build
from turnrl_wiki_search.elastic.search import ElasticIndex

__all__ = ["ElasticIndex", "build"]
