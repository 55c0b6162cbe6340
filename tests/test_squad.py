"""SQuAD's own paragraphs as the corpus. The data set on the hub is a small folder of the same name,
in the same layout."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from turnrl import DataError, RecipeError, load_questions
from turnrl.cli import main
from turnrl.data.paragraphs import SquadParagraphs
from turnrl.testing import check_source
from turnrl.types import Passage
from turnrl_wiki_search.embedded import read_info

TOWER = "The Dom Tower is in  Utrecht. It was begun in 1321."
PARIS = "Paris is the capital of France."


def row(number, title, context, *answers):
    """A row as the hub has it."""
    return {
        "id": f"q{number}",
        "title": title,
        "context": context,
        "question": f"Question {number}?",
        "answers": {"text": [*answers], "answer_start": [0] * len(answers)},
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A small SQuAD under the name that the hub has for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "rajpurkar" / "squad"
    path.mkdir(parents=True)
    files = {
        "train": [
            row(1, "Dom_Tower_of_Utrecht", TOWER, "Utrecht"),
            row(2, "Dom_Tower_of_Utrecht", TOWER, "1321", "in 1321"),
        ],
        "validation": [row(3, "Paris_%28city%29", PARIS, "France")],
    }
    of_split = [{"split": split, "path": f"{split}-*.parquet"} for split in files]
    configs = [{"config_name": "plain_text", "data_files": of_split}]
    (path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    for split, rows in files.items():
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, path / f"{split}-00000-of-00001.parquet")


def test_each_paragraph_becomes_one_passage_that_supports_its_questions(hub):
    tower, paris = SquadParagraphs().passages()
    assert tower == Passage(
        tower.id, "Dom Tower of Utrecht", "The Dom Tower is in Utrecht. It was begun in 1321."
    )
    assert (paris.title, paris.text) == ("Paris (city)", PARIS)
    assert [*SquadParagraphs(splits=["validation"]).passages()] == [paris]
    first, second = load_questions("SquadParagraphs", "train")
    assert (first.id, first.text, first.answers) == ("q1", "Question 1?", ("Utrecht",))
    assert second.answers == ("1321", "in 1321")
    assert {question.metadata["supporting_ids"][0] for question in (first, second)} == {tower.id}
    assert "context" not in first.metadata
    (held_out,) = load_questions(SquadParagraphs())
    assert held_out.metadata["supporting_ids"] == [paris.id]
    assert [question.id for question in SquadParagraphs(limit=1).questions("train")] == ["q1"]
    check_source(SquadParagraphs())


@pytest.mark.slow
def test_the_recipe_warms_up_and_trains(hub, tiny_model):
    small = ["--data.questions_per_iteration", "2", "--model.group_size", "2"]
    small += ["--model.rollout.max_tokens", "2000", "--model.steps_per_pass", "1"]
    small += ["--trainer.accelerator", "cpu"]
    short = ["--steps", "1", "--batch_size", "2", "--held_out", "1", *small]
    begun = ["--model.policy.model", str(tiny_model)]
    assert main(["warmup", "smollm2_wikipedia", "--to", "caller", *short, *begun]) == 0
    assert "<tool>" in Path("caller", "demonstrations.txt").read_text()
    begun = ["--model.policy.model", "caller"]
    once = ["--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1"]
    assert main(["fit", "smollm2_wikipedia", *small, *begun, *once]) == 0
    assert read_info("indexes/squad").passages == 2


@pytest.mark.parametrize("missing", ["context", "title"])
def test_a_row_in_another_layout_is_named(tmp_path, missing):
    other = {**row(1, "Dom_Tower", TOWER, "Utrecht"), missing: ["two", "texts"]}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row(0, "Paris", PARIS, "France")) + "\n" + json.dumps(other))
    with pytest.raises(DataError, match=r"mine\.jsonl, row 2 does not fit SquadParagraphs"):
        [*SquadParagraphs(str(file)).passages()]
    with pytest.raises(DataError, match=r"row 2 does not fit SquadParagraphs"):
        [*SquadParagraphs(str(file)).questions("")]
    with pytest.raises(RecipeError, match="splits is empty"):
        SquadParagraphs(splits=[])
