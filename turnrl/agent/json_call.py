"""`turnrl.read_call`, for all segmenters: a tool call, read from JSON that a policy wrote."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence

from turnrl.types.trajectory import ToolCall

_DEEPEST = 100
"""The most nested brackets of a call; many more would exhaust the stack of any JSON writer."""
_NO_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)


def read_call(text: str, keys: Sequence[str] = ("arguments", "args")) -> ToolCall:
    """Read a call from a JSON object with a name and arguments, for segmenters. Never raises.

    Args:
        text: The object, and nothing else.
        keys: Accepted keys for the arguments, the preferred one first.
    Returns:
        The call, in which every text can be encoded; or a call without a name, whose `error`
        describes the mistake.
    """
    depths = itertools.accumulate(1 if b in "[{" else -1 for b in _NO_BRACKET.sub("", text))
    if max(depths, default=0) > _DEEPEST:
        return ToolCall("", error="the call is nested too deeply")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
        # a lone surrogate ("\ud800") is valid JSON but not text, and 1e999 is not a finite number:
        # neither could be sent to a server
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        return ToolCall("", error=f"bad JSON at character {error.pos}")
    except (ValueError, RecursionError):
        return ToolCall("", error="bad JSON")
    if not isinstance(value, dict):
        return ToolCall("", error="the call must be a JSON object")
    key = next((key for key in keys if {*value} == {"name", key}), None)
    if key is None:
        return ToolCall("", error=_wrong_keys(value, keys))
    if not isinstance(value["name"], str) or not value["name"]:
        return ToolCall("", error='"name" must be a tool name')
    if not isinstance(value[key], dict):
        return ToolCall("", error=f'"{keys[0]}" must be an object')
    return ToolCall(value["name"], value[key])


def _wrong_keys(value: Mapping[str, object], keys: Sequence[str]) -> str:
    """The fault in the keys of a call: one is missing, or there is one more."""
    key = next((key for key in keys if key in value), keys[0])
    if "name" not in value or key not in value:
        return f'the call must have "name" and "{keys[0]}"'
    other = next(name for name in value if name not in ("name", key))
    return f'the call has "{other[:40]}" beside "name" and "{key}"; leave it out'


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("duplicate key")
    return value
