"""The segmenter `TwoTurn`: a thought with a call or an answer, then a thought with the answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnrl import Question, Tool, ToolCall, ToolResult
from turnrl.testing import check_segmenter
from turnrl_segmenters.two_turn import TwoTurn

CALL = '<tool>{"name": "search", "args": {"query": "Utrecht"}}</tool>'
THOUGHT = "<reasoning>think</reasoning>"
QUESTION = Question("q1", "What is the time zone of Utrecht?", ("Europe/Amsterdam",))
segmenter = TwoTurn()


class Search(Tool):
    name = "search"
    description = "Search an encyclopaedia."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    }

    def run(self, calls):
        return [ToolResult("nothing") for _ in calls]


@pytest.mark.parametrize("key", ["args", "arguments"])
def test_a_call_is_read_under_either_name_of_its_arguments(key):
    text = f'{THOUGHT}\n<tool>\n{{"name": "search", "{key}": {{"query": "Utrecht"}}}}\n</tool>\n'
    reading = segmenter.read(text, 0, False)
    assert reading.calls == (ToolCall("search", {"query": "Utrecht"}),)
    assert (reading.answer, reading.format_error) == (None, None)


@pytest.mark.parametrize("turn", [0, 1])
def test_an_answer_is_read_in_either_turn(turn):
    reading = segmenter.read(f"{THOUGHT} <answer> Europe/Amsterdam\n</answer>", turn, False)
    assert reading.answer == "Europe/Amsterdam"
    assert (reading.calls, reading.format_error) == ((), None)


def test_a_call_in_the_last_turn_is_a_format_error():
    reading = segmenter.read(THOUGHT + CALL, 1, False)
    assert (reading.calls, reading.answer) == ((), None)
    assert reading.format_error == "the last turn must give an answer"


@pytest.mark.parametrize(("text", "error"), [
    (CALL, "no reasoning"),
    ("<reasoning>  </reasoning>" + CALL, "the reasoning is empty"),
    (THOUGHT + THOUGHT + CALL, "misplaced tags"),
    ("<reasoning>think" + CALL, "misplaced tags"),
    ("think</reasoning>" + CALL, "no reasoning"),
    (THOUGHT + "<tool>" + CALL, "misplaced tags"),
    ("well, " + THOUGHT + CALL, "text outside the tags"),
    (THOUGHT + "then" + CALL, "text outside the tags"),
    (THOUGHT + CALL + "so", "text after the tool"),
    (THOUGHT + CALL + CALL, "text after the tool"),
    (THOUGHT + CALL + "<answer>Paris</answer>", "text after the tool"),
    (THOUGHT + "<result>Europe/Amsterdam</result>" + CALL, "results are not yours to write"),
    (THOUGHT + CALL + "<result>Europe", "results are not yours to write"),
    (THOUGHT + "<error>" + CALL, "results are not yours to write"),
])  # fmt: skip
def test_a_call_in_bad_form_is_still_used(text, error):
    reading = segmenter.read(text, 0, False)
    assert reading.calls == (ToolCall("search", {"query": "Utrecht"}),)
    assert reading.answer is None
    assert reading.format_error == error


@pytest.mark.parametrize(("text", "error"), [
    ("", "no tool call or answer"),
    ("Europe/Amsterdam", "no tool call or answer"),
    (THOUGHT, "no tool call or answer"),
    (THOUGHT + "Europe/Amsterdam</answer>", "no tool call or answer"),
    (THOUGHT + "<answer>Europe/Amst", "answer is not closed"),
    (THOUGHT + "<answer> \n</answer>", "the answer is empty"),
    (THOUGHT + "<answer>a<reasoning>b</reasoning></answer>", "tags inside answer"),
    ("<Answer>Europe/Amsterdam</Answer>", "no tool call or answer"),
])  # fmt: skip
def test_a_turn_that_cannot_be_used_has_neither_answer_nor_call(text, error):
    reading = segmenter.read(text, 0, False)
    assert (reading.calls, reading.answer, reading.format_error) == ((), None, error)


@pytest.mark.parametrize(("body", "error"), [
    ("", "bad JSON at character 0"),
    ('{"name": "search", "args": {"query": "Utrecht"}', "bad JSON at character 47"),
    ('{"name": "search"}', 'the call must have "name" and "args"'),
    ('{"name": "search", "args": {}, "n": 1}',
     'the call has "n" beside "name" and "args"; leave it out'),
    ('{"name": "search", "args": {}, "arguments": {}}',
     'the call has "arguments" beside "name" and "args"; leave it out'),
    ('{"name": 7, "args": {}}', '"name" must be a tool name'),
    ('{"name": "search", "args": "Utrecht"}', '"args" must be an object'),
    ('{"name": "search", "args": {"query": "<answer>"}}', "tags inside tool"),
])  # fmt: skip
def test_an_unreadable_call_is_attempted_and_says_why(body, error):
    reading = segmenter.read(f"{THOUGHT}<tool>{body}</tool>", 0, False)
    (call,) = reading.calls
    assert call.name == ""
    assert call.error
    assert reading.format_error == error


def test_a_call_cut_short_is_attempted_and_not_run():
    (call,) = segmenter.read(THOUGHT + '<tool>{"name": "search", "args": {}}', 0, True).calls
    assert (call.name, call.arguments) == ("", {})
    assert call.error == "tags inside tool, or it is not closed"


@given(st.integers(0, 200))
def test_a_turn_cut_short_reads_as_far_as_it_was_closed(length):
    text = f"{THOUGHT}<answer>Europe/Amsterdam</answer>"
    reading = segmenter.read(text[:length], 1, True)
    assert reading.answer == ("Europe/Amsterdam" if length >= len(text) else None)
    assert bool(reading.format_error) == (length < len(text))


pieces = st.one_of(
    st.sampled_from([f"<{slash}{tag}>" for slash in ("", "/") for tag in TwoTurn.tags]),
    st.sampled_from(
        [CALL, THOUGHT, '{"name": "search", "args": {', "}}", "[", '"', "\\ud800", "\n"]
    ),
    st.text(),
)


@given(st.lists(pieces).map("".join), st.integers(0, 1))
def test_any_text_can_be_read_and_replied_to(text, turn):
    reading = segmenter.read(text, turn, False)
    assert reading.calls == () or (turn == 0 and reading.answer is None)
    assert reading.answer is None or reading.answer.strip()
    assert (reading.calls or reading.answer) or reading.format_error
    for call in reading.calls:
        json.dumps(dict(call.arguments), ensure_ascii=False).encode()
        assert (call.error is None) == bool(call.name)
    assert seen(reading, [ToolResult("x") for _ in reading.calls])


@given(st.text(), st.text())
def test_any_thought_and_any_query_make_a_well_formed_turn(thought, query):
    call = json.dumps({"name": "search", "args": {"query": query}})
    if any(f"<{s}{tag}>" in thought + call for tag in TwoTurn.tags for s in ("", "/")):
        return
    reading = segmenter.read(f"<reasoning>x{thought}</reasoning><tool>{call}</tool>", 0, False)
    assert reading.format_error is None
    assert reading.calls == (ToolCall("search", {"query": query}),)


def seen(reading, results):
    """What the policy reads: one message of the user."""
    (message,) = segmenter.observe(reading, results)
    assert message["role"] == "user"
    return message["content"]


def test_results_errors_and_format_errors_are_shown_in_their_tags():
    reading = segmenter.read(THOUGHT + CALL, 0, False)
    assert seen(reading, [ToolResult("a page")]) == "<result>a page</result>"
    assert seen(reading, [ToolResult("bad query", ok=False)]) == "<error>bad query</error>"
    both = [ToolResult("one"), ToolResult("two", ok=False)]
    assert seen(reading, both) == "<result>one</result>\n<error>two</error>"
    silent = segmenter.read(THOUGHT, 0, False)
    assert seen(silent, []) == "<error>no tool call or answer</error>"


def test_the_default_prompt_shows_each_tool_with_an_example_that_reads_as_a_call():
    system, user = segmenter.prompt(QUESTION, [Search()])
    assert user == {"role": "user", "content": QUESTION.text}
    assert "search: Search an encyclopaedia." in system["content"]
    assert json.dumps(Search.parameters) in system["content"]
    example = system["content"].split("Example: ")[1]
    assert segmenter.read(THOUGHT + example, 0, False).calls == (
        ToolCall("search", {"query": "..."}),
    )


def test_the_example_of_a_tool_has_arguments_that_the_tool_accepts():
    class Count(Search):
        name = "count"
        parameters = {
            "type": "object",
            "properties": {"from": {"type": "integer", "minimum": 5}},
            "required": ["from"],
        }

    system, _ = segmenter.prompt(QUESTION, [Count()])
    assert 'Example: <tool>{"name": "count", "args": {"from": 6}}</tool>' in system["content"]


def test_the_instructions_of_a_recipe_are_the_system_message_word_for_word():
    system, _ = TwoTurn("Use {tools} & <tool>").prompt(QUESTION, [Search()])
    assert system == {"role": "system", "content": "Use {tools} & <tool>"}


def test_empty_instructions_leave_the_question_alone():
    messages = TwoTurn("").prompt(QUESTION, [Search()])
    assert messages == [{"role": "user", "content": QUESTION.text}]


def test_two_turn_keeps_to_the_contract():
    check_segmenter(TwoTurn())
    check_segmenter(TwoTurn(instructions=""))
