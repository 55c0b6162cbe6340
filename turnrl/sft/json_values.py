"""Values that a JSON Schema allows, such as the arguments of a tool."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeGuard, TypeVar, final

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

T = TypeVar("T")
Schema = Mapping[str, Any]

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
"""Below this depth only required properties are filled in, because a schema may contain itself."""


@final
class SchemaValues:
    """Makes values that fit a JSON Schema of an object: the likeliest ones, or random ones.

    Args:
        schema: The schema, with the definitions that its `$ref` name.
        text: Gives a text wherever any text will do.
        rng: Source of random choices. With None, a value is the same each time: an example or a
            default if the schema has one.
    """

    def __init__(
        self, schema: Schema, text: Callable[[], str], rng: random.Random | None = None
    ) -> None:
        self._validator, self._text, self._rng = Draft202012Validator(schema), text, rng
        self._root = {"type": "object", **schema}
        root = DRAFT202012.create_resource(schema)
        self._refs = Registry[object]().resolver_with_root(root)

    def mapping(self, whole: bool | None) -> dict[str, object] | None:
        """A mapping that fits; None if there seems to be none.

        Args:
            whole: True to fill in all properties, False for the required ones only. None fills in
                all properties of an object that requires none.
        """
        with contextlib.suppress(Exception):  # from a schema that nobody foresaw
            for value in self._values(self._root, whole, 0):
                if isinstance(value, dict) and self._validator.is_valid(value):
                    return value
        return None

    def _values(self, schema: object, whole: bool | None, depth: int) -> Iterator[object]:
        """Values that a part of the schema, `depth` levels down, may allow."""
        if not isinstance(schema, Mapping):  # `true` allows anything
            yield self._text()
            return
        if self._rng is None:
            yield from schema.get("examples", ())
            yield from (schema[key] for key in ("default",) if key in schema)
        yield from (schema[key] for key in ("const",) if key in schema)
        yield from self._shuffle(schema.get("enum", ()))
        if depth > 2 * _DEEPEST:
            return
        if "$ref" in schema:
            yield from self._values(self._refs.lookup(schema["$ref"]).contents, whole, depth + 1)
        for key in ("anyOf", "oneOf"):
            for part in self._shuffle(filter(_is_restricting, schema.get(key, ()))):
                yield from self._values({**_without_key(schema, key), **part}, whole, depth + 1)
        kinds = schema.get("type", _guess_type(schema))
        for kind in [kinds] if isinstance(kinds, str) else self._shuffle(kinds):
            yield from self._of_kind(kind, schema, whole, depth)

    def _shuffle(self, options: Iterable[T]) -> Iterator[T]:
        """The options, in random order if there is a source of random choices."""
        listed = [*options]
        if self._rng is None or not listed:
            yield from listed
        else:  # most callers take only the first
            yield self._rng.choice(listed)
            yield from self._rng.sample(listed, len(listed))

    def _of_kind(
        self, kind: str, schema: Schema, whole: bool | None, depth: int
    ) -> Iterator[object]:
        # drawn for each kind, so that the documented figures of a warm-up can be reproduced
        tails = self._rng is not None and self._rng.random() >= 0.5
        if kind == "object":
            yield self._object(schema, whole, depth)
        elif kind == "array":
            yield self._array(schema, whole, depth)
        elif kind == "string":
            if (form := schema.get("format")) in _FORMATS:
                yield _FORMATS[form]
            yield from (_fit_length(text, schema) for text in (self._text(), "a", "A", "1"))
        elif kind in ("integer", "number"):
            if self._rng is not None:
                yield _draw_number(schema, kind, self._rng)
            yield from _numbers(schema)
        else:
            yield from {"boolean": (not tails, tails)}.get(kind, (None,))

    def _object(self, schema: Schema, whole: bool | None, depth: int) -> dict[str, object]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        fill = not required if whole is None else whole
        names = dict.fromkeys([*properties, *required] if fill and depth < _DEEPEST else required)
        return {
            name: value
            for name in names
            for value in self._distinct_values(properties.get(name, True), whole, depth)
        }

    def _array(self, schema: Schema, whole: bool | None, depth: int) -> list[object]:
        wanted = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1)))
        items = schema.get("items", True)
        draws = (self._distinct_values(items, whole, depth) for _ in range(wanted))
        return [value for values in draws for value in values]

    def _distinct_values(self, schema: object, whole: bool | None, depth: int) -> Iterator[object]:
        """One value that a part of the schema allows, or none."""
        validator = self._validator.evolve(schema=schema)
        yield from islice(filter(validator.is_valid, self._values(schema, whole, depth + 1)), 1)


def _fit_length(text: str, schema: Schema) -> str:
    """A text, repeated or cut to a length that a schema allows."""
    while 0 < len(text) < schema.get("minLength", 0):
        text += f" {text}"
    return text[: schema.get("maxLength")]


def _draw_number(schema: Schema, kind: str, rng: random.Random) -> float:
    """A number between the bounds of a schema; one of ten if a bound is missing."""
    minimum = schema.get("minimum", schema.get("exclusiveMinimum"))
    maximum = schema.get("maximum", schema.get("exclusiveMaximum"))
    if minimum is None:
        minimum = 0 if maximum is None or maximum >= 0 else maximum - 9
    maximum = max(minimum, minimum + 9 if maximum is None else maximum)
    if kind == "integer":
        low, high = math.ceil(minimum), math.floor(maximum)
        return rng.randint(min(low, high), high)
    return rng.uniform(minimum, maximum)


def _numbers(schema: Schema) -> Iterator[float]:
    """Likely numbers: 1, 0, and those at the bounds of a schema."""
    yield from (1, 0)
    for end in (schema[name] for name in _ENDS if name in schema):
        yield from (math.floor(end) + 1, math.floor(end) - 1, end)


def _guess_type(schema: Schema) -> str:
    """The type that a schema without `type` means, judged by its other keywords."""
    if {"properties", "required"} & schema.keys():
        return "object"
    if "items" in schema:
        return "array"
    return "number" if {*_ENDS} & schema.keys() else "string"


def _without_key(schema: Schema, key: str) -> dict[str, object]:
    return {name: value for name, value in schema.items() if name != key}


def _is_restricting(schema: object) -> TypeGuard[Schema]:
    """False for `true`, which allows anything, and `false`, which allows nothing."""
    return isinstance(schema, Mapping)
