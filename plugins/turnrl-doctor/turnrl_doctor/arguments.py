"""Arguments to try a tool with, which its JSON Schema allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jsonschema import Draft202012Validator

from turnrl import PluginError, SchemaValues, ToolSpec

Schema = Mapping[str, object]
"""A JSON schema, or the arguments of a call: any JSON object."""


def arguments_of(spec: ToolSpec, text: str) -> Sequence[Schema]:
    """Arguments to call a tool with: its `examples`, or two that its schema allows, one with all
    properties and one with only the required properties.

    Args:
        spec: The tool.
        text: A question of the data, for properties that take any text.
    Raises:
        PluginError: If an example is not a mapping or does not fit the schema, or no fitting
            arguments are found.
    """
    validator = Draft202012Validator(spec.parameters)
    listed: object = spec.examples
    if not isinstance(listed, Sequence) or not all(isinstance(item, Mapping) for item in listed):
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
    values = SchemaValues(spec.parameters, lambda: text)
    candidates = [values.mapping(whole) for whole in (True, False)]
    allowed = [arguments for arguments in candidates if arguments is not None]
    if not allowed:
        raise PluginError(
            f"found no arguments that the parameters of tool {spec.name!r} allow. Give it "
            "examples, arguments of calls that work."
        )
    return allowed[:1] if allowed[0] == allowed[-1] else allowed
