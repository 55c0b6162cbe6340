"""No text of 20 kB that a policy or a tool can write takes long to read or to make safe."""

from __future__ import annotations

import json

import pytest

from hostile import MOST_S, cpu_s, too_slow
from rollouts import Look
from turnrl import ToolCall, read_call
from turnrl.agent.toolbox import Toolbox
from turnrl.plugin.text import find_contained_answer, make_visible, neutralize, normalize_answer
from turnrl_segmenters import Action, ReAct, SearchR1, TwoTurn

SEGMENTERS = {
    "ReAct": ReAct(),
    "ReAct, thought opened": ReAct(think="opened"),
    "SearchR1": SearchR1(),
    "TwoTurn": TwoTurn(),
    "Action": Action(),
    "Action, the whole text": Action(form="text"),
}
FRAMES = [
    ("", ""),
    ("<think>", "</think><answer>a</answer>"),
    ("<think>a</think><tool_call>", "</tool_call>"),
    ('<think>a</think><tool_call>{"name": "look", "arguments": {"query": "', '"}}</tool_call>'),
    ("<tool_call>{'name': 'look', 'arguments': {'query': '", "'}}</tool_call>"),
    ("<answer>", "</answer>"),
    ("<think>a</think><search>", "</search>"),
    ("<reasoning>a</reasoning><tool>", "</tool>"),
    ("<action>", "</action>"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEGMENTERS)
def test_a_segmenter_reads_any_turn_in_time(name):
    for before, after in FRAMES:
        read = SEGMENTERS[name].read
        assert too_slow(lambda text: read(text, 0, False), before, after) == {}, (before, after)  # noqa: B023


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ('{"name": "look", "arguments": {"query": "', '"}}')]
)
def test_a_call_is_read_in_time(before, after):
    assert too_slow(read_call, before, after) == {}


class Queries(Look):
    """Takes several queries."""

    parameters = {
        "type": "object",
        "properties": {
            "queries": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
        },
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"queries": [1] * 9_000}, "1 is not valid under any"),
        ({"queries": [{}] * 6_000}, "{} is not valid under any"),
        ({"queries": json.loads("[" * 90 + "]" * 90)}, "[["),
        ({str(i): 1 for i in range(2_000)}, None),
    ],
    ids=["numbers", "objects", "nested", "keys"],
)
def test_a_call_of_thousands_of_values_is_checked_in_time(arguments, why):
    tool = Toolbox([Queries()], str, 1).tools["look"]
    problem = tool.find_problem(ToolCall("look", arguments))
    assert problem is None if why is None else problem.startswith(f"bad arguments: {why}")
    assert cpu_s(lambda: tool.find_problem(ToolCall("look", arguments))) <= MOST_S


TAGS = ("think", "tool_call", "tool_response", "answer", "tools", "tool")
CONTROL = ["<s>", "</s>", "[gMASK]", *(f"<|reserved_{i}|>" for i in range(6000))]
WORK = {
    "neutralize": lambda text: neutralize(text, TAGS, CONTROL),
    "normalize_answer": normalize_answer,
    "contained_answer": lambda text: find_contained_answer(text, ["a", "Paris", text]),
    "visible": make_visible,
}


@pytest.mark.parametrize("work", WORK)
def test_a_text_is_made_safe_to_read_in_time(work):
    assert too_slow(WORK[work]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [64, 512, 4096])
def test_a_chat_format_makes_any_result_safe_in_time(chat, limit):
    assert too_slow(lambda text: chat.sanitize(text, TAGS, limit)) == {}


@pytest.mark.slow
def test_a_chat_format_tokenises_any_text_in_time(chat):
    end = chat.end_ids[-1]
    assert too_slow(lambda text: chat.decode_turn(chat.encode_turn(text, ("</none>",)))) == {}
    assert (
        too_slow(lambda text: chat.encode_observation([{"role": "user", "content": text}], end))
        == {}
    )
