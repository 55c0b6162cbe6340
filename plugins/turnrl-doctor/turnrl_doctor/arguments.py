"""Arguments that a tool's JSON Schema allows, to try the tool with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from turnrl import PluginError, ToolSpec

Schema = Mapping[str, Any]
"""A JSON schema, or the arguments of a call: whatever JSON holds."""

_FORMATS = {
    "date": "2024-01-31",
    "time": "12:00:00Z",
    "date-time": "2024-01-31T12:00:00Z",
    "email": "somebody@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "uri": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
_ENDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DEEPEST = 3
"""Deeper than this, only required properties are filled in, because a schema may contain itself."""


def arguments_of(spec: ToolSpec, text: str) -> Sequence[Schema]:
    """Arguments to call a tool with: its `examples`, or two that its schema allows, one with all
    properties and one with the required ones alone.

    Args:
        spec: The tool.
        text: A question of the data, for properties that take any text.
    Raises:
        PluginError: If an example is not a mapping or does not fit the schema, or nothing was found
            that does.
    """
    validator = Draft202012Validator(spec.parameters)
    listed: object = spec.examples
    if not isinstance(listed, Sequence) or not all(isinstance(one, Mapping) for one in listed):
        name = next(iter(spec.parameters.get("properties", {})), "query")
        raise PluginError(
            f"tool {spec.name!r} has the examples {listed!r:.80}, which must be a list of "
            f"mappings, each with the arguments of a call. Write [{{{name!r}: ...}}]."
        )
    for example in spec.examples:
        for error in validator.iter_errors(dict(example)):
            raise PluginError(
                f"tool {spec.name!r} has the example {dict(example)!r}, which does not fit its "
                f"parameters: {error.message}. Correct its examples."
            )
    if spec.examples:
        return spec.examples
    maker = _Maker(validator, text)
    made: list[Schema] = []
    with contextlib.suppress(Exception):  # of a schema that no maker foresees
        for whole in (True, False):
            schema = {"type": "object", **spec.parameters}
            fits = (one for one in maker.values(schema, whole) if isinstance(one, dict))
            value = next((one for one in fits if validator.is_valid(one)), None)
            if value is not None and value not in made:
                made.append(value)
    if not made:
        raise PluginError(
            f"found no arguments that the parameters of tool {spec.name!r} allow. Give it "
            "examples, arguments of calls that work."
        )
    return made


class _Maker:
    """Makes values that may fit a schema, the likeliest first.

    Args:
        validator: Of the whole schema, which `$ref` looks into.
        text: Stands for any text.
    """

    def __init__(self, validator: Draft202012Validator, text: str) -> None:
        self._validator, self._text = validator, text
        root = DRAFT202012.create_resource(validator.schema)
        self._refs = Registry[Any]().resolver_with_root(root)

    def values(self, schema: object, whole: bool, depth: int = 0) -> Iterator[object]:
        """Values that a schema may allow.

        Args:
            schema: A part of the schema.
            whole: Give objects the properties too that are not required.
            depth: Levels above it.
        """
        if not isinstance(schema, Mapping):  # `true` allows anything
            yield self._text
            return
        yield from schema.get("examples", ())
        yield from (schema[key] for key in ("default", "const") if key in schema)
        yield from schema.get("enum", ())
        if depth > 2 * _DEEPEST:
            return
        if (ref := schema.get("$ref")) is not None:
            yield from self.values(self._refs.lookup(ref).contents, whole, depth + 1)
        for key in ("anyOf", "oneOf"):
            for part in filter(_says_something, schema.get(key, ())):
                yield from self.values({**_rest(schema, key), **part}, whole, depth + 1)
        if parts := schema.get("allOf"):
            yield from self.values(_merged([_rest(schema, "allOf"), *parts]), whole, depth + 1)
        kinds = schema.get("type", _likely(schema))
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            yield from self._of_kind(kind, schema, whole, depth)

    def _of_kind(self, kind: str, schema: Schema, whole: bool, depth: int) -> Iterator[object]:
        if kind == "object":
            yield self._object(schema, whole, depth)
        elif kind == "array":
            yield self._array(schema, whole, depth)
        elif kind == "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 10_000)
            texts = (_FORMATS.get(schema.get("format", "")), self._text, "a", "A", "1")
            yield from (one[:most].ljust(least, "a") for one in texts if one is not None)
        elif kind in ("integer", "number"):
            yield from _numbers(schema, kind)
        else:
            yield from {"boolean": (True, False)}.get(kind, (None,))

    def _object(self, schema: Schema, whole: bool, depth: int) -> dict[str, object]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = dict.fromkeys([*properties, *required] if whole and depth < _DEEPEST else required)
        return {
            name: value
            for name in names
            for value in self._fitting(properties.get(name, True), whole, depth, 1)
        }

    def _array(self, schema: Schema, whole: bool, depth: int) -> list[object]:
        first = [
            value
            for part in schema.get("prefixItems", ())
            for value in self._fitting(part, whole, depth, 1)
        ]
        wanted = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1))) - len(first)
        more = list(self._fitting(schema.get("items", True), whole, depth, max(wanted, 0)))
        if more and not schema.get("uniqueItems"):
            more = (more * wanted)[:wanted]
        return first + more

    def _fitting(self, schema: object, whole: bool, depth: int, count: int) -> Iterator[object]:
        """At most so many values, all different, that a part of the schema allows."""
        given: list[object] = []
        validator = self._validator.evolve(schema=schema)
        for value in self.values(schema, whole, depth + 1):
            if len(given) == count:
                return
            if value not in given and validator.is_valid(value):
                given.append(value)
                yield value


def _numbers(schema: Schema, kind: str) -> Iterator[float]:
    unit = schema.get("multipleOf", 1)
    ends = [schema[name] for name in _ENDS if name in schema]
    yield from (unit, 0)
    for end in ends:
        yield from (unit * (math.floor(end / unit) + n) for n in (1, 2, -1, -2))
        yield end
    if kind == "number" and len(ends) == 2:
        yield sum(ends) / 2


def _likely(schema: Schema) -> str:
    """The type that a schema means which names none."""
    if {"properties", "required"} & schema.keys():
        return "object"
    if {"items", "prefixItems"} & schema.keys():
        return "array"
    return "number" if {*_ENDS, "multipleOf"} & schema.keys() else "string"


def _rest(schema: Schema, key: str) -> dict[str, object]:
    return {name: value for name, value in schema.items() if name != key}


def _says_something(schema: object) -> TypeGuard[Schema]:
    """False for `true`, which allows anything, and `false`, which allows nothing."""
    return isinstance(schema, Mapping)


def _merged(parts: Sequence[object]) -> dict[str, object]:
    """One schema of several that all hold."""
    merged: dict[str, Any] = {}
    for part in filter(_says_something, parts):
        both = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged |= {**part, "properties": both, "required": required}
    return merged
