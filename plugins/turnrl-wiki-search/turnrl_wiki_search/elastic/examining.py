"""What an index must have for the way in which it is searched, examined before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
"""Documents that are read to see whether an index returns their text."""


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
    made, own = len(vectors["probe"]), len(encoder.probe)
    differs = (
        f"vectors of {own} dimensions, and the index has {made}"
        if own != made
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
        ToolError: Naming the index, the field, and the fields of that type that there are.
    """
    wanted = [*fields.values()]
    response = call(access, lambda: client.field_caps(index=name, fields=wanted), retries)
    there: Mapping[str, Mapping[str, Any]] = response["fields"]
    for part, field in fields.items():
        kinds, right = there.get(field, {}), _TYPES[part]
        if [*kinds] == [right] and kinds[right]["searchable"]:
            continue
        every = call(access, lambda: client.field_caps(index=name, fields="*"), retries)["fields"]
        others = sorted(one for one, caps in every.items() if caps.get(right, {}).get("searchable"))
        shown = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
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
    """Raise if an index that turnrl did not build does not return the text that it is searched by.

    Raises:
        ToolError: Naming the index and the field.
    """
    fields: list[Mapping[str, object]] = [{"field": text}]
    response = call(
        access,
        lambda: client.search(
            index=name, query=has_field(text), size=_SAMPLE, source=False, fields=fields
        ),
        retries,
    )
    refuse_hidden(response["hits"]["hits"], text)


def dimensions(
    client: Elasticsearch, access: Access, name: str, field: str, encoder: Encoder, retries: int
) -> bool:
    """Check the vectors of an index that turnrl did not build.

    Returns:
        Whether the length of a query's vector has no meaning, so that it can be made 1.
    Raises:
        ToolError: If the encoder's vectors cannot be compared with them.
    """
    response = call(
        access, lambda: client.indices.get_field_mapping(index=name, fields=field), retries
    )
    mappings = [
        kind for index in response.values() for found in index["mappings"].values()
        for kind in found["mapping"].values()
    ]  # fmt: skip
    own = len(encoder.probe)
    for mapping in mappings:
        made, element = mapping.get("dims", own), mapping.get("element_type", "float")
        if made != own:
            raise ToolError(
                f"the field {field!r} of index {name!r} at {access.label} has vectors of {made} "
                f"dimensions, and the encoder {encoder.name!r} gives {own}. Set encoder to the one "
                "that made them."
            )
        if element in ("byte", "bit"):
            raise ToolError(
                f"the field {field!r} of index {name!r} at {access.label} has vectors of "
                f"{element}s, and encoders give decimal numbers. Name another field as "
                "fields.vector, or set ranking to 'bm25'."
            )
    return all(one.get("similarity", "cosine") in ("cosine", "dot_product") for one in mappings)
