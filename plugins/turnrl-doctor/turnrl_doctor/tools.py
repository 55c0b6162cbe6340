"""Tries tools: calls them with arguments that they allow, and judges their replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jsonschema import Draft202012Validator

from turnrl import Finding, Question, ToolCall, ToolError, ToolResult, Toolset, ToolSpec, call_tools
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import PluginError
from turnrl.sft.json_values import SchemaValues

_SHOWN = 60
"""The most characters shown of a call, and of a result."""


def judge_tools(name: str, tools: Toolset, replies: list[tuple[ToolCall, ToolResult]]) -> Finding:
    """The finding about tools that were called."""
    if not replies:
        return Finding("pass", name, "has nothing to call")
    good = [reply for reply in replies if reply[1].ok]
    call, result = (good or replies)[0]
    shown = (
        f"{call.name} {_shorten(json.dumps(dict(call.arguments), ensure_ascii=False, default=str))}"
    )
    answer, verdict = _shorten(" ".join(result.content.split())), f"{len(good)} of {len(replies)}"
    if good and not any(result.content.strip() not in ("", "None") for _, result in good):
        text = f"{verdict} calls succeed, but every result is empty, for example from {shown}"
        step = "Return text that the policy can read: it learns nothing from an empty result."
        return Finding("warn", name, text, step)
    if good:
        return Finding("pass", name, f"{verdict} calls succeed, for example {shown}: {answer}")
    text = f"no call succeeds, for example {shown}: {answer}"
    if any(spec.examples for spec in tools.specs) or result.raised:
        return Finding("warn", name, text, "Correct its examples, or the tool.")
    return Finding("pass", name, text)


def call_twice(
    tools: Toolset, question: Question, calls: list[ToolCall]
) -> list[tuple[ToolCall, ToolResult]]:
    """Each call with its reply, twice: in two sessions, so that calls come in batches, as in a run.

    Raises:
        ToolError: If the world of the tools is broken; it names a single call if one call alone
            fails.
    """
    try:
        answers = on_loop(call_tools([tools], question, [calls, calls]))
    except ToolError:
        for call in calls:
            on_loop(call_tools([tools], question, [[call]]))
        raise
    return [pair for results in answers for pair in zip(calls, results, strict=True)]


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def example_calls(toolset: Toolset, question: Question) -> list[ToolCall]:
    return [
        ToolCall(spec.name, dict(arguments))
        for spec in toolset.specs
        for arguments in example_arguments(spec, question.text)
    ]


def example_arguments(spec: ToolSpec, text: str) -> Sequence[Mapping[str, object]]:
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
