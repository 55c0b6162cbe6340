"""Talking to an agent: what it prints, and what a user gets wrong."""

from __future__ import annotations

import io
import re

import pytest

from turnrl import Reading, ToolResult, Turn
from turnrl.cli import main


def play(capsys, *arguments):
    """What the command prints."""
    assert main(["play", *arguments]) == 0
    return capsys.readouterr().out


def test_a_question_is_answered_turn_by_turn(recipe, capsys):
    printed = play(capsys, "recipe.yaml", "Number 7?", "--answer", "seven")
    assert printed.count("-- turn 1\n") == 1
    assert printed.startswith("question   Number 7?\n-- turn 1\n")
    assert "checked" not in printed  # a check of the scheme is not a turn
    assert re.search(r"answer     .*, (right|wrong); ended by (answer|turns|length)\n$", printed)


def test_a_pipe_gives_a_question_a_line(recipe, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Number 1?\n\nNumber 2?\n"))
    printed = play(capsys, "recipe.yaml")
    assert re.findall("^question   (.*)$", printed, re.MULTILINE) == ["Number 1?", "Number 2?"]
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe.yaml", "--answer", "x"], "Give the QUESTION too"),
        (["recipe.yaml", "Why?", "--samples", "0"], "samples is 0"),
        (["recipe.yaml", "Why?", "--temperature", "-1"], "temperature is -1"),
        (["nothing.yaml", "Why?"], "nothing.yaml"),
    ],
)
def test_a_mistake_is_answered_with_the_next_step(recipe, capsys, arguments, message):
    assert main(["play", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_every_line_of_a_result_is_indented():
    page = ToolResult("One.\n\nTwo.")
    assert str(Turn("one", results=(page,))) == "one\n   result: One.\n\n   Two."


def test_nothing_in_a_question_or_an_attempt_acts_on_the_terminal(recipe, capsys, monkeypatch):
    monkeypatch.setattr(
        "worlds.Letters.read", lambda *_: Reading(answer="\x9bx", format_error="\x07")
    )
    words = ["recipe.yaml", "Number\x1b[2J 7\u202e?", "--answer", "x\x07", "--samples", "2"]
    printed = play(capsys, *words)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed)
    assert r"question   Number\x1b[2J 7\u202e?" in printed
    assert r"form: \x07" in printed
