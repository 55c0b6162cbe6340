"""HotpotQA's own paragraphs as the corpus: questions, passages, the index, and the recipe that
needs no server. The data set on the hub is a small folder of the same name, in the same layout."""

import argparse
import csv
import json
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from turnrl import (
    DataError,
    Question,
    QuestionSource,
    Reading,
    RecipeError,
    ToolCall,
    ToolError,
    Trajectory,
    Turn,
    load_questions,
)
from turnrl.cli import main
from turnrl.data.fields import Fields
from turnrl.data.paragraphs import HotpotParagraphs
from turnrl.plugin.hooks import load_classes
from turnrl.testing import check_source
from turnrl_rewards import Progress, SupportSeen
from turnrl_wiki_search import WikiSearch, embedded
from turnrl_wiki_search.command import add_index_command
from turnrl_wiki_search.sources import open_corpus, source_name

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "hotpotqa_qwen2.5_1.5b.yaml"
TOWERS = {
    "Dom Tower": ["The Dom Tower is in Utrecht.", " It was begun in 1321."],
    "Utrecht": ["Utrecht is a city in the Netherlands."],
    "Eiffel Tower": ["The Eiffel Tower is in Paris."],
    "Paris": ["Paris is the capital of France.", " It lies on the Seine."],
}


def row(number: int, titles: list[str], support: list[str], answer: str = "France") -> dict:
    """A row as the hub has it; what the paragraphs of other titles say is made up."""
    return {
        "id": f"q{number}",
        "question": f"Question {number}?",
        "answer": answer,
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": support, "sent_id": [0] * len(support)},
        "context": {
            "title": titles,
            "sentences": [
                TOWERS.get(t, [f"{t} is a page.", f" Nobody links {t}."]) for t in titles
            ],
        },
    }


TRAIN = [
    row(1, ["Dom Tower", "Utrecht", "Eiffel Tower"], ["Dom Tower", "Utrecht"], "the Netherlands"),
    row(2, ["Paris", "Utrecht", "Eiffel Tower"], ["Eiffel Tower", "Paris"]),
    row(3, ["Paris", "Page A"], ["Page A"], "Nobody"),
]
VALIDATION = [row(4, ["Utrecht", "Page B"], ["Page B"], "yes")]


def put_hub(folder: Path, train: list[dict], validation: list[dict] = VALIDATION) -> Path:
    """A folder that `datasets` reads as it reads HotpotQA on the hub."""
    path = folder / "hotpotqa" / "hotpot_qa"
    path.mkdir(parents=True, exist_ok=True)
    files = {"train": train, "validation": validation}
    of_split = [{"split": split, "path": f"{split}-*.parquet"} for split in files]
    configs = [{"config_name": "distractor", "data_files": of_split}]
    (path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    for split, rows in files.items():
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, path / f"{split}-00000-of-00001.parquet")
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts a small HotpotQA under the name that the hub has for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def put(train=TRAIN, validation=VALIDATION):
        return put_hub(tmp_path, train, validation)

    put()
    return put


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def titles(passages) -> list[str]:
    return [passage.title for passage in passages]


def turnrl(*words: object) -> int:
    """Run `turnrl index`."""
    parser = argparse.ArgumentParser()
    add_index_command(parser.add_subparsers())
    args = parser.parse_args([str(word) for word in words])
    return args.run(args) or 0


# --- questions and passages ---


def test_the_corpus_is_every_distinct_paragraph_of_both_splits(hub):
    passages = list(HotpotParagraphs().passages())
    assert titles(passages) == [
        *("Dom Tower", "Utrecht", "Eiffel Tower", "Paris", "Page A"),
        "Page B",
    ]
    # sentences are joined whether they begin with a space or not
    assert passages[0].text == "The Dom Tower is in Utrecht. It was begun in 1321."
    assert len({passage.id for passage in passages}) == 6
    assert titles(HotpotParagraphs(splits=["validation"]).passages()) == ["Utrecht", "Page B"]


def test_questions_name_the_passages_that_support_them(hub):
    ids = {passage.title: passage.id for passage in HotpotParagraphs().passages()}
    first, second, _ = load_questions("HotpotParagraphs", "train")
    support = [ids["Dom Tower"], ids["Utrecht"]]
    plain = {"type": "bridge", "level": "hard"}
    assert first == Question(
        "q1", "Question 1?", ("the Netherlands",), {**plain, "supporting_ids": support}
    )
    # in the order of the paragraphs
    assert second.metadata["supporting_ids"] == [ids["Paris"], ids["Eiffel Tower"]]
    (held_out,) = load_questions(HotpotParagraphs())
    assert held_out.metadata["supporting_ids"] == [ids["Page B"]]


def test_a_limit_is_of_questions_and_of_their_paragraphs(hub):
    source = HotpotParagraphs(limit=1)
    assert titles(source.passages()) == ["Dom Tower", "Utrecht", "Eiffel Tower", "Page B"]
    assert [question.id for question in source.questions("train")] == ["q1"]
    ids = {passage.id for passage in source.passages()}
    for split in ("train", "validation"):
        for question in source.questions(split):
            assert ids >= set(question.metadata["supporting_ids"])


def in_its_own_files(row: dict) -> dict:
    """A row as HotpotQA's own JSON has it."""
    facts, context = row["supporting_facts"], row["context"]
    pairs = [list(pair) for pair in zip(facts["title"], facts["sent_id"], strict=True)]
    paragraphs = [list(pair) for pair in zip(context["title"], context["sentences"], strict=True)]
    own = {k: v for k, v in row.items() if k != "id"}
    return {"_id": row["id"], **own, "supporting_facts": pairs, "context": paragraphs}


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".parquet"])
def test_a_users_file_is_read_as_one_split_in_either_layout(hub, tmp_path, ending):
    path = tmp_path / f"mine{ending}"
    fields = None
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TRAIN), path)
    elif ending == ".jsonl":
        write_jsonl(path, TRAIN)
    else:
        path.write_text(json.dumps([in_its_own_files(row) for row in TRAIN]))
        fields = Fields("_id", answers="answer")
    source = HotpotParagraphs(path=str(path), fields=fields)
    hub(TRAIN, TRAIN)
    assert list(source.passages()) == list(HotpotParagraphs().passages())
    assert load_questions(source) == load_questions(HotpotParagraphs())
    with pytest.raises(DataError, match=r"is one split; leave out the split 'train'"):
        list(source.questions("train"))


def test_the_source_keeps_to_the_contract(hub):
    check_source(HotpotParagraphs())
    assert load_classes("turnrl_datasets")["HotpotParagraphs"] is HotpotParagraphs


# --- what is wrong with the data ---


def without(name: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k != name} for row in TRAIN]


def changed(number: int, **fields) -> list[dict]:
    return [{**row, **fields} if n == number else row for n, row in enumerate(TRAIN)]


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        (without("context"), 1),
        (changed(2, context={"title": ["Paris"], "sentences": []}), 3),
        (changed(0, context=["Paris"]), 1),
        (changed(1, supporting_facts=[7]), 2),
    ],
)
def test_a_row_without_paragraphs_is_named(tmp_path, rows, number):
    message = rf"mine.jsonl, row {number} does not fit HotpotParagraphs, .*context: .title"
    source = HotpotParagraphs(path=write_jsonl(tmp_path / "mine.jsonl", rows))
    with pytest.raises(DataError, match=message):
        load_questions(source)
    if number != 2:  # whose paragraphs are in order
        with pytest.raises(DataError, match=message):
            WikiSearch(str(tmp_path / "index"), build_from=source).check()
        assert not (tmp_path / "index").exists()


def test_paragraphs_without_text_are_left_out_and_a_corpus_of_them_is_refused(tmp_path):
    empty = {"title": ["Paris", "", "Utrecht"], "sentences": [[], ["  "], ["A city."]]}
    source = HotpotParagraphs(path=write_jsonl(tmp_path / "a.jsonl", changed(0, context=empty)[:1]))
    (passage,) = source.passages()
    assert (passage.title, passage.text) == ("Utrecht", "A city.")
    (question,) = load_questions(source)
    assert question.metadata["supporting_ids"] == [passage.id]  # of two, the one with a text
    nothing = {"title": ["Paris"], "sentences": [[""]]}
    path = write_jsonl(tmp_path / "b.jsonl", changed(0, context=nothing)[:1])
    with pytest.raises(DataError, match=r"b.jsonl.* has no passages: every text is empty"):
        WikiSearch(str(tmp_path / "b"), build_from=HotpotParagraphs(path=path)).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit is 0; it must be at least 1"),
        ({"splits": []}, "splits is empty"),
        ({"path": "nowhere.jsonl"}, r"no file 'nowhere.jsonl'"),
        ({"splits": ["test"]}, r"split 'test'.*Should be one of \['train', 'validation'\]"),
    ],
)
def test_impossible_settings_are_refused(hub, settings, message):
    with pytest.raises((RecipeError, DataError), match=message):
        list(HotpotParagraphs(**settings).passages())


# --- the index ---


def test_the_index_is_built_once_and_finds_the_supporting_passages(hub, capsys):
    for _ in range(2):
        search = WikiSearch("indexes/hotpotqa", build_from="HotpotParagraphs", top_k=1)
        search.check()
    built = "turnrl: building the search index 'indexes/hotpotqa' from HotpotParagraphs"
    messages = [line for line in capsys.readouterr().err.splitlines() if line.startswith("turnrl:")]
    assert messages == [built]
    assert embedded.read_info("indexes/hotpotqa").passages == 6
    question = load_questions(HotpotParagraphs(), "train")[0]
    calls = [ToolCall("search", {"query": query}) for query in ("Utrecht Netherlands", "Dom Tower")]
    results = search.run(calls)
    readings = [Reading((call,)) for call in calls]
    turns = [
        Turn("", reading, (result,)) for reading, result in zip(readings, results, strict=True)
    ]
    trajectory = Trajectory(question, tuple(turns), "answer")
    reward = Progress(SupportSeen())
    # each search shows one of the two passages
    assert [reward.score(trajectory, k) for k in range(2)] == [0.5, 0.5]


def test_an_index_of_another_limit_is_refused_with_a_command_that_builds_it(hub, capsys):
    WikiSearch("index", build_from=HotpotParagraphs(limit=1)).check()
    assert embedded.read_info("index").passages == 4
    with pytest.raises(ToolError, match=r"built from '{class_path: .*limit: 1}}'.*limit: 2}}") as e:
        WikiSearch("index", build_from=HotpotParagraphs(limit=2)).check()
    command = shlex.split(str(e.value).partition("rebuild it: ")[2])
    assert command[:3] == ["turnrl", "index", "build"]
    assert turnrl(*command[1:]) == 0
    assert embedded.read_info("index").passages == 5
    capsys.readouterr()
    WikiSearch("index", build_from=HotpotParagraphs(limit=2)).check()
    # the class without settings is another source still
    with pytest.raises(ToolError, match=r"but build_from is 'HotpotParagraphs'"):
        WikiSearch("index", build_from="HotpotParagraphs").check()
    assert "building" not in capsys.readouterr().err


def test_a_source_has_the_same_name_however_it_is_given():
    source = HotpotParagraphs(limit=5, splits=["train"], fields=Fields("_id"))
    name = source_name(source)
    assert name == (
        "{class_path: HotpotParagraphs, init_args: {fields: {answer_pattern: '', answers: answers, "
        "id: _id, question: question}, limit: 5, splits: [train]}}"
    )
    assert open_corpus(name).name == open_corpus(source).name == source_name(name) == name
    assert source_name(HotpotParagraphs()) == "HotpotParagraphs"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{limit: 5}", "cannot make .*Write it as {class_path: Hotpot"),
        ("{class_path: HotpotParagraphs, init_args: {limt: 5}}", "Did you mean limit"),
        ("{class_path: HotpotParagraphs, init_args: {limit: 0}}", r"limit is 0; it must be"),
        ("{class_path: Hotpots}", r"'Hotpots', .* Did you mean HotpotParagraphs\?"),
    ],
)
def test_a_source_that_is_written_wrongly_is_answered_with_the_right_way(name, message):
    with pytest.raises((RecipeError, DataError), match=message):
        open_corpus(name)


class Forgetful(QuestionSource):
    """Keeps its setting under another name."""

    def __init__(self, size: int) -> None:
        self._size = size

    def questions(self, split):
        return []


def test_a_source_that_keeps_its_settings_to_itself_is_refused():
    with pytest.raises(RecipeError, match=r"Forgetful cannot record its setting 'size'.*Keep it"):
        WikiSearch("index", build_from=Forgetful(3)).check()


# --- the recipe ---


def small(model: Path) -> list[str]:
    """What makes the recipe small: size alone, and a model in place of the hub's."""
    return [
        *("--model.policy.model", str(model), "--model.policy.chat_template", "qwen3"),
        *("--trainer.accelerator", "cpu"),
        *("--model.group_size", "2", "--data.questions_per_iteration", "2"),
        *("--model.rollout.max_turn_tokens", "12", "--model.rollout.max_tokens", "2048"),
        *("--data.val_limit", "1"),
        *("--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "1"),
    ]


@pytest.mark.slow
def test_the_recipe_builds_its_index_and_trains(hub, tiny_model):
    assert main(["fit", str(RECIPE), *small(tiny_model)]) == 0
    assert embedded.read_info("indexes/hotpotqa").passages == 6
    run = Path("runs", RECIPE.stem, "version_0")
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows if row["train/exact_match"]] == ["1", "2", "3"]
    assert (run / "adapter").is_dir()
    # the run's own recipe goes on, with the index that is there
    built = Path("indexes/hotpotqa/turnrl-index.json").stat().st_mtime_ns
    more = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--trainer.max_epochs", "4"]
    assert main(["fit", str(run / "config.yaml"), *more]) == 0
    assert Path("indexes/hotpotqa/turnrl-index.json").stat().st_mtime_ns == built


# --- the pages ---

PAGE = (ROOT / "docs" / "howto" / "wikipedia-search.md").read_text()


def fenced(language: str) -> list[str]:
    return [block.partition("```")[0] for block in PAGE.split(f"```{language}\n")[1:]]


@pytest.mark.parametrize("limit", [None, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_recipes_on_the_page_train_over_paragraphs(hub, tiny_model, limit):
    blocks = [yaml.safe_load(text) for text in fenced("yaml")]
    shown = [block for block in blocks if "data" in block]
    assert len(shown) == 2
    Path("shown.yaml").write_text(yaml.safe_dump(shown[limit is not None]))
    few = ["--trainer.max_epochs", "1"]
    assert main(["fit", str(RECIPE), "shown.yaml", *small(tiny_model), *few]) == 0
    (index,) = [path for path in Path("indexes").iterdir() if path.is_dir()]
    assert embedded.read_info(index).source == source_name(HotpotParagraphs(limit=limit))


def test_the_row_that_the_page_shows_is_read(tmp_path):
    (text,) = fenced("json")
    path = write_jsonl(tmp_path / "mine.jsonl", [json.loads(text)])
    source = HotpotParagraphs(path=path)
    ids = [passage.id for passage in source.passages()]
    (question,) = load_questions(source)
    assert question.metadata["supporting_ids"] == ids
    assert question.answers == ("the Netherlands",)
