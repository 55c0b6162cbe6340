"""Chat messages in one form, whoever wrote them.

A client of OpenAI's chat completions sends the same message in many forms: content as a text or as
a list of parts, fields that are null or missing, arguments of a call as a JSON text with any
spacing. `to_plain` brings them into one, so that histories can be compared and rendered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from turnrl.plugin.errors import PluginError, describe_value
from turnrl.types import Message

ROLES = ("system", "user", "assistant", "tool")
LINKS = ("tool_call_id", "name")
"""Fields that say which call a message belongs to. A template may leave them out."""
SHOWN = ("tool_calls", "reasoning_content")
"""Fields that a policy has to read, so a template may not leave them out."""
_FIELDS = ("role", "content", *SHOWN, *LINKS)


def to_plain(message: Message) -> Message:
    """A copy of a message with its content as one text, without empty fields, and with the
    arguments of its calls as mappings, as chat templates take them.

    Raises:
        PluginError: If it is no message, or has a field or a part that is not text.
    """
    fault = f"the message {message!r:.200} "
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise PluginError(
            f"{fault}has no role. A message has a role ({', '.join(ROLES)}) and a text, such as "
            '{"role": "user", "content": "Who wrote it?"}.'
        )
    if unknown := [name for name in message if name not in _FIELDS]:
        raise PluginError(f"{fault}has the field {unknown[0]!r}. It has {', '.join(_FIELDS)}.")
    given = cast("Mapping[str, Any]", message)
    new: dict[str, Any] = {"role": given["role"], "content": _text(given.get("content"), fault)}
    if not isinstance(given.get("content"), str | Sequence) and not given.get("tool_calls"):
        raise PluginError(f"{fault}has neither a text nor tool_calls. Give it a content.")
    if calls := given.get("tool_calls"):
        new["tool_calls"] = [_call(call, fault) for call in calls]
    for name in ("reasoning_content", *LINKS):
        if value := given.get(name):
            if not isinstance(value, str):
                raise PluginError(f"{fault}has {describe_value(value)} as {name}, which is a text.")
            new[name] = value
    return cast(Message, new)


def plain_text(message: Message) -> str:
    """The text of a message in that form."""
    return cast(str, message["content"])


def message_shape(message: Message) -> str:
    """All of such a message that a template's markup may depend on, which is all but its
    text, as a key: the role alone, or JSON. Beside calls it also matters whether there is a
    text."""
    rest = {name: value for name, value in message.items() if name != "content"}
    if "tool_calls" in rest and not plain_text(message):
        rest["content"] = ""
    return message["role"] if {*rest} == {"role"} else json.dumps(rest)


def fill_shape(shape: str, text: str) -> Message:
    """A message of a shape, with this text if the shape has one."""
    rest = {"role": shape} if shape in ROLES else json.loads(shape)
    return cast(Message, {"content": text, **rest})


def shape_role(shape: str) -> str:
    """The role of a shape."""
    return fill_shape(shape, "")["role"]


def iterate_texts(value: Any) -> Iterator[str]:
    """Every text in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *iterate_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_texts(item)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and mappings, with every text in them changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(k, change): map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def on_the_wire(message: Message) -> Message:
    """A `to_plain` message as a server takes it: arguments of calls are JSON texts."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _dump_arguments(call)}}
        for call in cast("list[dict[str, Any]]", message["tool_calls"])
    ]
    return cast(Message, {**message, "tool_calls": calls})


def _dump_arguments(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _text(content: object, fault: str) -> str:
    """Content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise PluginError(f"{fault}has {describe_value(content)} as its content. Give a text.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else describe_value(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise PluginError(
                f"{fault}has a part of type {kind!r}. A policy reads and writes text alone: send "
                '{"type": "text", "text": ...}.'
            )
        texts.append(text)
    return "".join(texts)


def _call(call: Any, fault: str) -> dict[str, Any]:
    """A call with its arguments as a mapping, read from JSON if they are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PluginError(
            f"{fault}has the tool call {call!r:.80}. A call is "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}.'
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # nested too deeply
            arguments = None
    if not isinstance(arguments, Mapping):
        raise PluginError(
            f"{fault}has arguments of {function['name']!r} that are no JSON object: "
            f"{function.get('arguments')!r:.80}."
        )
    known = {"function": {"name": function["name"], "arguments": dict(arguments)}}
    named = {"id": call["id"]} if call.get("id") else {}
    return {**named, "type": "function", **known}
