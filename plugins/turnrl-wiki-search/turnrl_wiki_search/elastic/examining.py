"""Checks, before a run, that an index has the fields and vectors that its searches need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from turnrl import ToolError
from turnrl_wiki_search.elastic.access import Access
from turnrl_wiki_search.elastic.asking import has_field, refuse_hidden
from turnrl_wiki_search.elastic.faults import call
from turnrl_wiki_search.index import build_command

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

    from turnrl_wiki_search.encoding import Encoder

_TYPES = {"text": "text", "title": "text", "vector": "dense_vector"}
_SHOWN = 20
_SAMPLE = 10
"""Documents to read to see if an index returns their text."""
_WORDS = 20
"""Words of such a document that a search has to match."""


def examine_vectors(meta: Mapping[str, Any], where: str, name: str, encoder: Encoder) -> None:
    """Raise if an index of ours lacks vectors, or another encoder made them.

    Args:
        meta: Its description.
        where: The index, for messages.
        name: Its name.
        encoder: The encoder of the queries.
    Raises:
        ToolError: With the next step.
    """
    from turnrl_wiki_search.encoding import agrees, likeness

    source, vectors = str(meta["source"]), meta.get("vectors")
    command = build_command("elasticsearch", name, source, encoder.name)
    if vectors is None:
        raise ToolError(
            f"{where} has no vectors, which the rankings 'knn' and 'hybrid' need. Build it with "
            f"'{command} --overwrite', or set ranking to 'bm25'."
        )
    if agrees(encoder, vectors["probe"]):
        return
    held, wanted = len(vectors["probe"]), len(encoder.probe)
    differs = (
        f"vectors of {wanted} dimensions, and the index has {held}"
        if wanted != held
        else f"other vectors: its vector of a test sentence has a cosine similarity of "
        f"{likeness(encoder.probe, vectors['probe']):.3f} to the one in the index"
    )
    raise ToolError(
        f"{where} was built with the encoder {vectors['encoder']!r}, and the encoder "
        f"{encoder.name!r} gives {differs}. Set encoder to the one that built it, or build it "
        f"again: '{command} --overwrite'."
    )


def examine_fields(
    client: Elasticsearch, access: Access, name: str, fields: Mapping[str, str], retries: int
) -> None:
    """Raise if an index that turnrl did not build lacks a field, or has it with another type.

    Raises:
        ToolError: Naming the index, the field, and the index's fields of the right type.
    """
    wanted = [*fields.values()]
    response = call(access, lambda: client.field_caps(index=name, fields=wanted), retries)
    present: Mapping[str, Mapping[str, Any]] = response["fields"]
    for part, field in fields.items():
        kinds, right = present.get(field, {}), _TYPES[part]
        if [*kinds] == [right] and kinds[right]["searchable"]:
            continue
        caps = call(access, lambda: client.field_caps(index=name, fields="*"), retries)["fields"]
        usable = sorted(n for n, types in caps.items() if types.get(right, {}).get("searchable"))
        shown = ", ".join(usable[:_SHOWN]) + (", ..." if len(usable) > _SHOWN else "")
        if not kinds:
            fault = "is not in it"
        elif [*kinds] == [right]:
            fault = "is not indexed, so nothing can be searched for in it"
        else:
            fault = f"has the type {' and '.join(sorted(kinds))}, and {part} needs {right}"
        raise ToolError(
            f"index {name!r} at {access.label} cannot be searched by fields.{part}: the field "
            f"{field!r} {fault}. Its {right} fields are: {shown or 'none'}. Correct fields.{part}."
        )


def examine_text(client: Elasticsearch, access: Access, name: str, text: str, retries: int) -> None:
    """Raise if an index that turnrl did not build does not return the text that searches match, or
    if no search can match it.

    Raises:
        ToolError: Naming the index and the field.
    """

    def hits(query: Mapping[str, object]) -> list[dict[str, Any]]:
        shown: list[Mapping[str, object]] = [{"field": text}]
        found = call(
            access,
            lambda: client.search(
                index=name, query=query, size=_SAMPLE, source=False, fields=shown
            ),
            retries,
        )
        return cast("list[dict[str, Any]]", found["hits"]["hits"])

    where = f"index {name!r} at {access.label}"
    sample = hits(has_field(text))
    if not sample:
        if hits({"match_all": {}}):
            raise ToolError(
                f"no document of {where} has the field {text!r}, so no search can match one. "
                "Correct fields.text."
            )
        return
    refuse_hidden(sample, text)
    own = [
        {"bool": {"filter": {"ids": {"values": [hit["_id"]]}}, "must": {"match": {text: words}}}}
        for hit in sample
        if (words := " ".join(" ".join(map(str, hit["fields"].get(text, ()))).split()[:_WORDS]))
    ]
    if own and not hits({"bool": {"should": own}}):
        raise ToolError(
            f"searches in {where} do not find the words of its own documents: the analyzer of the "
            f"field {text!r} does not split a text into words. Set fields.text to a field whose "
            "analyzer does."
        )


def dimensions(
    client: Elasticsearch, access: Access, name: str, field: str, encoder: Encoder, retries: int
) -> bool:
    """Check the vectors of an index that turnrl did not build.

    Returns:
        True if the length of a query's vector has no meaning, so that it can be made 1.
    Raises:
        ToolError: If the encoder's vectors cannot be compared with the index's.
    """
    response = call(
        access, lambda: client.indices.get_field_mapping(index=name, fields=field), retries
    )
    mappings = [
        mapping for index in response.values() for field_mapping in index["mappings"].values()
        for mapping in field_mapping["mapping"].values()
    ]  # fmt: skip
    wanted = len(encoder.probe)
    for mapping in mappings:
        held, element = mapping.get("dims", wanted), mapping.get("element_type", "float")
        if held != wanted:
            raise ToolError(
                f"the field {field!r} of index {name!r} at {access.label} has vectors of {held} "
                f"dimensions, and the encoder {encoder.name!r} gives {wanted}. Set encoder to the "
                "one that made them."
            )
        if element in ("byte", "bit"):
            raise ToolError(
                f"the field {field!r} of index {name!r} at {access.label} has vectors of "
                f"{element}s, and encoders give decimal numbers. Name another field as "
                "fields.vector, or set ranking to 'bm25'."
            )
    return all(m.get("similarity", "cosine") in ("cosine", "dot_product") for m in mappings)
