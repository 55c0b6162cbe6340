"""Questions that are scored in addition to the validation have curves of their own."""

from __future__ import annotations

import pytest

from runs import column, data, make_module, rows, trainer
from turnrl import DataError, Question, RecipeError
from turnrl.training.also import AlsoScore
from turnrl.training.questions import QuestionData
from turnrl.watch.console import IterationLines


def test_other_questions_have_curves_in_every_row_with_a_validation(tiny_model, tmp_path):
    # the same questions under two names: greedy, so they have the same curves
    also = AlsoScore("again", "worlds.Numbers", batch_size=2)
    module = make_module(tiny_model)
    trainer(tmp_path, 2, [also], check_val_every_n_epoch=2).fit(module, data())
    for name in ("exact_match", "tool_execution", "format"):
        assert column(tmp_path, f"again/{name}") == pytest.approx(column(tmp_path, f"val/{name}"))
        assert len(column(tmp_path, f"again/{name}")) == 2  # untrained, and after two iterations
    assert [row["iteration"] for row in rows(tmp_path) if row["again/format"]] == ["0", "2"]


@pytest.mark.slow
def test_scoring_other_questions_does_not_change_the_run(tiny_model, tmp_path):
    own = [Question(f"q{n}", f"Which is {n}?", (str(n),)) for n in range(5)]
    trainer(tmp_path / "with", 2, [AlsoScore("own", own)]).fit(make_module(tiny_model), data())
    trainer(tmp_path / "without", 2).fit(make_module(tiny_model), data())
    theirs = [
        {name: value for name, value in row.items() if not name.startswith("own/")}
        for row in rows(tmp_path / "with")
    ]
    assert theirs == rows(tmp_path / "without")
    assert column(tmp_path / "with", "own/exact_match") == [0.0] * 3


@pytest.mark.slow
def test_a_split_of_the_validations_source_is_scored_if_it_exists(tiny_model, tmp_path, capsys):
    also = AlsoScore("again", split="train")
    trainer(tmp_path / "with", 1, [also]).fit(make_module(tiny_model), data())
    assert len(column(tmp_path / "with", "again/exact_match")) == 2
    # another recipe's questions have no such split: the run continues without it, and prints so
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "1", "question": "Which is 1?", "answers": ["1"]}\n')
    callbacks = [AlsoScore("famous", split="famous"), IterationLines()]
    run = trainer(tmp_path / "without", 1, callbacks, enable_progress_bar=True)
    run.fit(make_module(tiny_model), QuestionData(str(own), str(own), questions_per_iteration=1))
    assert "famous/exact_match" not in rows(tmp_path / "without")[0]
    printed = capsys.readouterr().out
    assert "no famous/exact_match: " in printed
    assert "is one split; leave out the split 'famous'" in printed


def test_at_most_the_limit_is_scored_with_the_rule_of_the_validation(tiny_model, tmp_path):
    own = [Question(f"q{n}", "Which is it?", ("-5",)) for n in range(3)]
    for rule, right in (("number", False), (None, True)):
        also = AlsoScore("own", own, limit=1)
        trainer(tmp_path / str(rule), 1, [also]).fit(make_module(tiny_model), data(answers=rule))
        (asked,) = also._data.eval_questions()  # a random policy never answers -5
        assert asked.rule.same("5", "-5") is right  # as a phrase, -5 is 5


def test_a_run_asks_no_question_that_leaves_no_room(tiny_model, tmp_path):
    short = [Question(str(n), "Which is it?", ("1",)) for n in range(2)]
    asked = [*short, Question("long", "word " * 900, ("1",))]
    also = AlsoScore("own", asked)
    everything = QuestionData(asked, asked, questions_per_iteration=3)
    run = trainer(tmp_path, 1, [also])
    run.fit(make_module(tiny_model), everything)
    assert run.current_epoch == 1
    for kept in (everything, also._data):
        assert kept.eval_questions() == short


def test_neither_a_source_nor_a_split_is_refused():
    with pytest.raises(RecipeError, match="has no source and no split"):
        AlsoScore("again")


@pytest.mark.parametrize("name", ["val", "train", "a/b", ""])
def test_a_name_that_is_taken_or_not_a_word_is_refused(name):
    with pytest.raises(RecipeError, match=r"AlsoScore\.name is"):
        AlsoScore(name, "worlds.Numbers")


def test_a_source_that_cannot_be_read_stops_the_run_before_it_begins(tiny_model, tmp_path):
    also = AlsoScore("famous", "Atlas", "celebrated")
    with pytest.raises(DataError, match="no split 'celebrated'"):
        trainer(tmp_path, 1, [also]).fit(make_module(tiny_model), data())
