"""Talking to an agent: what it prints, and what a user gets wrong."""

from __future__ import annotations

import io
import re
import sys

import pytest

from commands import save
from turnrl import AdvantageEstimator, Reading, ToolResult, Turn, TurnLevel
from turnrl.cli import main
from turnrl.commands.play import in_colours
from turnrl.plugin.hooks import installed


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


def test_play_prints_the_credit_that_each_estimator_would_give(recipe, capsys):
    own = {"class_path": "TurnLevel", "init_args": {"turn_coef": 0.25, "scale": "none"}}
    recipe["model"]["estimator"] = own
    save(recipe)
    printed = play(
        capsys, "recipe.yaml", "Number 7?", "--answer", "seven", "--estimators", "--samples", "3"
    )
    assert printed.count("== attempt") == 3
    legend = dict(re.findall(r"^([A-Z-])  (.*)$", printed, re.MULTILINE))
    rule = TurnLevel(turn_coef=0.25, scale="none")
    # that of the run comes first, with its settings
    assert legend["A"] == f"{rule!r}, this run"
    names = {*legend.values()}
    for name, kind in installed("turnrl_estimators").items():
        other: AdvantageEstimator = kind()
        if other.probes or other.critic is not None:
            assert f"-  {name}: it needs" in printed
        else:
            assert (f"{name}, its defaults" if name == "TurnLevel" else name) in names
    heads, *lines = printed[printed.index("try  outcome  turn") :].splitlines()
    assert heads.split() == ["try", "outcome", "turn", "reward", *sorted({*legend} - {"-"})]
    assert max(map(len, (heads, *lines))) <= 80
    attempts: list[tuple[float, list[list[float]]]] = []
    for line in lines:
        cells = line.split()
        if len(cells) == len(heads.split()):  # the first turn of an attempt
            attempts.append((float(cells[1]), []))
            cells = cells[2:]
        attempts[-1][1].append([float(cell) for cell in cells[1:]])
    assert len(attempts) == 3
    # z is a difference, and gamma is 1
    mean = sum(outcome for outcome, _ in attempts) / 3
    paid = [sum(turn[0] for turn in turns) for _, turns in attempts]
    for (outcome, turns), own in zip(attempts, paid, strict=True):
        wanted = outcome - mean + 0.25 * (own - sum(paid) / 3)
        assert turns[0][1] == pytest.approx(wanted, abs=0.03)


def test_a_terminal_shows_thoughts_calls_and_results_apart(monkeypatch):
    text = "<think>so</think><tool_call>{}</tool_call><answer>x</answer> y"
    assert in_colours(text) == text  # a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert in_colours(text) == (
        "\x1b[2m<think>so</think>\x1b[0m\x1b[36m<tool_call>{}</tool_call>\x1b[0m"
        "\x1b[1m<answer>x</answer>\x1b[0m y"
    )
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            assert in_colours(text) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe.yaml", "--estimators"], "Give a QUESTION and its --answer"),
        (["recipe.yaml", "Why?", "--estimators"], "Give a QUESTION and its --answer"),
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
    for more in ([], ["--estimators"]):
        printed = play(capsys, *words, *more)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed)
        assert r"question   Number\x1b[2J 7\u202e?" in printed
        assert r"form: \x07" in printed
