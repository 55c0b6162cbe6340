"""The segmenter `Action`: what a turn says becomes a call of the environment's tool."""

from __future__ import annotations

import re
import shlex

import pytest

from pages import ROOT
from turnrl import Question, RecipeError, ToolResult, ToolSpec
from turnrl.cli import main
from turnrl.runs import record
from turnrl.testing import check_segmenter
from turnrl_segmenters import Action


def step(schema, required=("action",), **others):
    parameters = {"type": "object", "properties": {"action": schema, **others}}
    return ToolSpec("step", "Take one step.", {**parameters, "required": list(required)})


WAYS = step({"type": "string", "enum": ["left", "Right"]})
QUESTION = Question("q", "Reach G.")


def reads(text, tools=(WAYS,), turn=0, cut=False, **settings):
    """The action's call, if there is one, and the format error."""
    segmenter = Action(**settings)
    segmenter.check(tools)
    segmenter.prompt(QUESTION, tools)
    reading = segmenter.read(text, turn, cut)
    assert reading.answer is None
    assert all(call.name == "step" for call in reading.calls)
    return [dict(call.arguments) for call in reading.calls], reading.format_error


@pytest.mark.parametrize("form", ["tag", "text"])
@pytest.mark.parametrize("turns", [1, 8])
def test_action_keeps_the_contract_of_a_segmenter(form, turns):
    check_segmenter(Action(turns, form), 300)
    check_segmenter(Action(turns, form, instructions=""), 100)
    check_segmenter(Action(turns, form, think="opened"), 300)


@pytest.mark.parametrize(
    ("text", "action", "error"),
    [
        ("I go. <action> left </action>", "left", None),
        ("<action>LEFT</action>", "left", None),
        ("<action>right</action>\n", "Right", None),
        ("<action>fly</action>", "fly", None),  # the tool refuses it
        ("<action>left</action> and then?", "left", "text after the action"),
        ("<action>left<action>right</action>", "Right", "action is opened more than once"),
        ("<action>left</action><action>right</action>", "left", "text after the action"),
        ("<action>left", None, "action is not closed"),
        ("left</action>", None, "action is closed and was not opened"),
        ("<action> </action>", None, "the action is empty"),
        ("left", None, "no action"),
    ],
)
def test_the_first_closed_tag_is_the_action(text, action, error):
    calls = [] if action is None else [{"action": action}]
    assert reads(text) == (calls, error)


def test_a_turn_in_text_form_is_the_action_as_a_whole():
    assert reads(" left\n", form="text") == ([{"action": "left"}], None)
    assert reads("I go left", form="text") == ([{"action": "I go left"}], None)
    assert reads(" \n", form="text") == ([], "no action")


@pytest.mark.parametrize(("form", "act"), [("tag", "<action>left</action>"), ("text", "left")])
def test_an_action_follows_the_thought_that_the_template_opened(form, act):
    right = "<action>right</action>"
    settings = {"form": form, "think": "opened"}
    assert reads(f"{right}? No.</think>\n{act}", **settings) == ([{"action": "left"}], None)
    assert reads(right, **settings) == ([], "the thought is not closed")
    assert "close your thought with </think>" in Action(**settings).explain((WAYS,))


@pytest.mark.parametrize("form", ["tag", "text"])
def test_the_action_of_a_turn_that_was_cut_is_not_taken(form):
    calls, error = reads("<action>left</action>", form=form, cut=True)
    assert (calls, error) == ([], "the turn was too long, so its action was not taken")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "2", 2),
        ("integer", "two", "two"),
        ("integer", "[" * 100_000, "[" * 100_000),
        ("number", "-0.5", -0.5),
        ("number", "NaN", "NaN"),
        ("number", "1e999", "1e999"),
        ("boolean", "true", True),
        ("string", "2", "2"),
    ],
)
def test_an_action_is_of_the_type_that_the_tool_takes(kind, text, value):
    assert reads(text, (step({"type": kind}),), form="text") == ([{"action": value}], None)


def test_actions_that_differ_only_in_case_are_read_as_written():
    keys = (step({"type": "string", "enum": ["h", "H", "left"]}),)
    for text, taken in [("h", "h"), ("H", "H"), ("LEFT", "left")]:
        assert reads(text, keys, form="text") == ([{"action": taken}], None)


def test_the_parameter_that_the_recipe_names_is_the_action():
    tool = step({"type": "string"}, (), times={"type": "integer"})
    assert reads("3", (tool,), form="text", argument="times") == ([{"times": 3}], None)


@pytest.mark.parametrize(
    ("settings", "tools", "message"),
    [
        ({"tool": "move"}, (WAYS,), "Action.tool is 'move', and there is no such tool; there is s"),
        ({}, (), "there is no such tool; there is none. Set tool of the segmenter Action"),
        ({}, (step({}, ()),), "the tool 'step' takes action, of which it requires none; Action"),
        (
            {},
            (step({}, ("action", "force"), force={}),),
            "takes action, force, of which it requires action, force; Action gives it one value",
        ),
        ({"argument": "way"}, (WAYS,), "Set argument of the segmenter Action to the parameter"),
        ({"argument": "force"}, (step({}, force={}),), "of which it requires action; Action gives"),
    ],
)
def test_a_tool_that_one_value_cannot_call_is_refused(settings, tools, message):
    with pytest.raises(RecipeError, match=message):
        Action(**settings).check(tools)


def test_a_form_that_does_not_exist_is_refused():
    with pytest.raises(RecipeError, match=r"Action.form is 'json'; choose one of tag, text"):
        Action(form="json")


def test_the_prompt_shows_the_form_and_tool_and_observations_show_errors():
    segmenter = Action(3)
    system, user = segmenter.prompt(QUESTION, [WAYS])
    assert "in at most 3 turns" in system["content"]
    assert "<action>...</action>" in system["content"]
    assert "Take one step." in system["content"]
    assert user == {"role": "user", "content": "Reach G."}
    assert len(Action(instructions="").prompt(QUESTION, [WAYS])) == 1
    taken = segmenter.read("<action>left</action>", 0, False)
    nothing = segmenter.read("left", 0, False)
    for reading, results, shown in (
        (taken, [ToolResult("a wall")], "a wall"),
        (taken, [ToolResult("not now", ok=False)], "Error: not now."),
        (nothing, [], "Error: no action."),
    ):
        assert segmenter.observe(reading, results) == [{"role": "user", "content": shown}]


@pytest.mark.parametrize(("name", "most"), [("library", 20), ("guess", 15)])
def test_a_custom_environment_takes_few_lines(name, most):
    page = (ROOT / "docs" / "howto" / "environments.md").read_text()
    parts = re.findall(rf"<!-- {name}\.\w+ -->\n```\w+\n(.*?)```", page, re.DOTALL)
    lines = [line for part in parts for line in part.splitlines() if line.strip()]
    assert len(parts) == 2
    assert len(lines) <= most


@pytest.mark.slow
def test_the_lake_of_the_page_runs_and_warns_that_nothing_ends(tmp_path, monkeypatch, caplog):
    page = (ROOT / "docs" / "howto" / "environments.md").read_text()
    (recipe,) = re.findall("<!-- lake.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert len(recipe.splitlines()) <= 15
    (command,) = re.findall("^turnrl (fit quickstart lake.yaml --data.*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lake.yaml").write_text(recipe)
    assert main(shlex.split(command)) == 0
    (shown,) = re.findall("```text\n(no attempt.*?)```", page, re.DOTALL)
    known = re.split(r"of \d+, .*? took no step", " ".join(shown.split()))
    (warning,) = [r.getMessage() for r in caplog.records if "no attempt" in r.getMessage()]
    assert re.split(r"of \d+, .*? took no step", warning) == known
    assert "of 8, " in warning
    for row in record.read("runs/lake/version_0/record"):
        figures = {figure["name"]: figure["values"] for figure in row["figures"]}
        assert figures == {"steps": [0.0], "earned": [0.0], "ended": [0.0], "truncated": [0.0]}
        assert row["outcome"] == 0
        assert row["exact_match"] is None
