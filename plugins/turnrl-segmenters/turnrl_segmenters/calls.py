"""One `<tool_call>`: the call in it, and its exact fault.

Near-JSON is rewritten as JSON and then read by `turnrl.read_call` like any other call, so mending
accepts nothing that `read_call` refuses. `ast.literal_eval` is no alternative: Python's compiler
can exhaust the stack on a policy's text.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from turnrl import ToolCall, read_call

_KEYS = ("arguments", "args", "parameters")

# A double-quoted string, a single-quoted string, a comma before a bracket, one of Python's words.
# The closing quote is optional, so that one pass finds every string.
_SLIP = re.compile(
    r"""("(?:[^"\\]|\\.)*"?)|'((?:[^'\\]|\\.)*)'?|(,)(?=\s*[\]}])|\b(True|False|None)\b""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}


def call_text(call: ToolCall, key: str) -> str:
    """A call as JSON that holds no tag.

    Args:
        call: The call.
        key: Key of its arguments.
    """
    content = {"name": call.name, key: dict(call.arguments)}
    return json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")


def read_tool_call(body: str, fault: str | None, lenient: bool) -> ToolCall:
    """The call in a block.

    Args:
        body: The content of the block.
        fault: The fault of the block, if any.
        lenient: If a malformed call has a clear meaning, return it with its faults in `mended`;
            otherwise they become its `error`.
    """
    call = read_call(body, _KEYS[:1])
    if call.error is None and fault is None:
        return call
    mended, slips = _mend(body)
    if mended is None:
        return ToolCall("", error=fault or _reason(body, str(call.error)))
    faults = "; ".join([fault, *slips] if fault else slips)
    return replace(mended, mended=faults) if lenient else ToolCall("", error=faults)


def _mend(body: str) -> tuple[ToolCall | None, list[str]]:
    """The call that a malformed block clearly means, and its faults; None if it is not clear."""
    text, slips = body.strip(), dict[str, None]()
    if "name" not in text or not text.endswith(("}", "```")):  # most bodies stop here, unparsed
        return None, []
    if len(text) > 6 and text.startswith("```") and text.endswith("```"):
        text = re.sub(r"\A\w*", "", text[3:-3])
        slips["code fences around the JSON"] = None

    def put(slip: re.Match[str]) -> str:
        double, single, comma, word = slip.groups()
        if double is not None:
            return double
        if comma:
            slips["a trailing comma"] = None
            return ""
        if word:
            slips["True, False or None, where JSON has true, false or null"] = None
            return _WORDS[word]
        slips["single quotes, where JSON has double ones"] = None
        return f'"{re.sub(_ESCAPE, _requoted, single)}"'

    text = _SLIP.sub(put, text)
    quoted = "the arguments are JSON in a string, not an object"
    for candidate, unquoted in ((text, []), (_unquoted(text), [quoted])):
        for key in _KEYS:
            call = read_call(candidate, (key,))
            if call.error is None:
                named = [] if key == _KEYS[0] else [f'"{key}", which must be called "{_KEYS[0]}"']
                return call, [*slips, *named, *unquoted]
    return None, []


_ESCAPE = re.compile(r'\\(.)|"', re.DOTALL)


def _requoted(piece: re.Match[str]) -> str:
    """Rewrite an escape or quote of a single-quoted text for double quotes."""
    return {'"': r"\"", r"\'": "'"}.get(piece[0], piece[0])


def _unquoted(text: str) -> str:
    """The object, with arguments that are JSON in a string unquoted; empty for anything else."""
    try:
        # pairs, because a dictionary would drop duplicate keys
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(pairs, tuple):
        return ""
    spelt = (
        f"{json.dumps(k)}: {v if k != 'name' and isinstance(v, str) else json.dumps(v)}"
        for k, v in pairs
    )
    return f"{{{', '.join(spelt)}}}"


def _reason(body: str, error: str) -> str:
    """The fault of a call, more exact than the "bad JSON" of `read_call`."""
    if not error.startswith("bad JSON"):
        return error
    body = body.strip()
    try:
        value, end = json.JSONDecoder().raw_decode(body)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        return error
    except UnicodeEncodeError:
        return "bad JSON: half a surrogate pair is not text"
    except (ValueError, RecursionError):
        return "bad JSON: a number is too long"
    rest = body[end:].lstrip(", \n")
    if rest.startswith("{"):
        return "more than one call in a tool_call"
    if rest:
        return "text after the JSON of the call"
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return "bad JSON: NaN, Infinity, or a number too large for any"
    return "bad JSON: a key stands twice in an object"
