"""`read_call`: the reading of a JSON call that segmenters share."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnrl import ToolCall, read_call

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4
)


@given(st.text(min_size=1), st.dictionaries(st.text(), values), st.sampled_from([None, 2]))
def test_a_call_written_as_json_is_read_back(name, arguments, indent):
    text = json.dumps({"arguments": arguments, "name": name}, indent=indent)
    assert read_call(text) == ToolCall(name, arguments)


def test_arguments_are_read_only_from_an_accepted_key():
    assert read_call('{"name": "a", "args": {"b": 1}}') == ToolCall("a", {"b": 1})
    assert read_call('{"name": "a", "input": {}}', ("input",)) == ToolCall("a", {})
    for text, error in (
        ('{"name": "a", "args": {}}', 'the call must have "name" and "input"'),
        (
            '{"name": "a", "input": {}, "args": {}}',
            'the call has "args" beside "name" and "input"; leave it out',
        ),
    ):
        assert read_call(text, ("input",)) == ToolCall("", error=error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "a", "arguments": {}', "bad JSON at character 29"),
        ('{"name": "a", "arguments": {"b": 1, "b": 2}}', "bad JSON"),
        (r'{"name": "a", "arguments": {"b": "\ud800"}}', "bad JSON"),
        ('{"name": "a", "arguments": {"b": "\ud800"}}', "bad JSON"),
        ('{"name": "a", "arguments": {"b": -Infinity}}', "bad JSON"),
        ('{"name": "a", "arguments": {"b": 1e999}}', "bad JSON"),
        ("[" * 100_000, "the call is nested too deeply"),
        ('{"name": "a", "arguments": {"b": %s}}' % ("[" * 99 + "]" * 99), "the call is nested too"),
        ("7", "the call must be a JSON object"),
        ('{"name": "a"}', 'the call must have "name" and "arguments"'),
        ('{"arguments": {}, "id": 1}', 'the call must have "name" and "arguments"'),
        (
            '{"id": 1, "name": "a", "arguments": {}}',
            'the call has "id" beside "name" and "arguments"; leave it out',
        ),
        (
            '{"name": "a", "args": {}, "arguments": {}}',
            'the call has "args" beside "name" and "arguments"; leave it out',
        ),
        ('{"name": ["a"], "arguments": {}}', '"name" must be a tool name'),
        ('{"name": "a", "args": []}', '"arguments" must be an object'),
    ],
)
def test_a_call_that_cannot_be_read_has_no_name_and_says_why(text, error):
    call = read_call(text)
    assert (call.name, call.arguments) == ("", {})
    assert (call.error or "").startswith(error)


def test_brackets_count_as_far_as_they_are_nested():
    arguments = {"code": "[{" * 500, "flat": [[i] for i in range(500)]}
    arguments["deep"] = json.loads("[" * 98 + "]" * 98)
    text = json.dumps({"name": "a", "arguments": arguments})
    assert read_call(text) == ToolCall("a", arguments)


pieces = st.sampled_from([*'{}[]",:', '"name": "a"', '"args": {', "\\ud800", "NaN", "1e999"])


@given(st.lists(pieces | st.text(max_size=3)).map("".join))
def test_any_text_can_be_read_and_the_resulting_call_serialized(text):
    call = read_call(text)
    assert bool(call.name) == (call.error is None)
    json.dumps({call.name: dict(call.arguments)}, ensure_ascii=False).encode()
