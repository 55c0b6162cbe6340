import csv
import gzip
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import huggingface_hub
import lightning as L
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from rollouts import Look
from turnrl import (
    DataError,
    Question,
    QuestionData,
    QuestionSource,
    RecipeError,
    Rollout,
    exact_match,
    load_questions,
)
from turnrl.data.fields import Fields
from turnrl.data.known import PRESETS, Preset
from turnrl.plugin.hub import check_hub
from turnrl.types import Phrase, answer_rule
from turnrl_segmenters import TwoTurn

ROWS = [
    {"id": "a", "question": "Who?", "answers": ["Ada", "Ada Lovelace"], "level": "easy"},
    {"id": "b", "question": "When?", "answers": ["1999-05-04"], "level": "hard"},
    {"id": "007", "question": "Which code?", "answers": ["NA"], "level": "hard"},
]


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def numbered(tmp_path, size, name="many.jsonl"):
    rows = [{"id": i, "question": f"q{i}?", "answers": [f"answer {i}"]} for i in range(size)]
    return write_jsonl(tmp_path / name, rows)


def table_file(path, rows):
    """Rows as a file; lists are JSON in the cells of a CSV."""
    suffix = "".join(path.suffixes)
    if suffix in (".jsonl", ".lines.json"):
        write_jsonl(path, rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix.endswith(".gz"):
        plain = Path(table_file(path.with_suffix(""), rows))
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            for row in rows:
                lists = {k: json.dumps(v) for k, v in row.items() if isinstance(v, list)}
                writer.writerow(row | lists)
    return str(path)


def write_file(tmp_path, suffix):
    return table_file(tmp_path / f"questions{suffix}", ROWS)


# ---------------------------------------------------------------------- files


KINDS = [".jsonl", ".json", ".lines.json", ".parquet", ".csv", ".jsonl.gz", ".csv.gz"]


@pytest.mark.parametrize("suffix", KINDS)
def test_every_kind_of_file_gives_the_same_questions(tmp_path, suffix):
    assert load_questions(write_file(tmp_path, suffix)) == [
        Question("a", "Who?", ("Ada", "Ada Lovelace"), {"level": "easy"}),
        Question("b", "When?", ("1999-05-04",), {"level": "hard"}),
        Question("007", "Which code?", ("NA",), {"level": "hard"}),
    ]


def test_an_answer_may_be_a_text_a_number_or_a_list(tmp_path):
    values = ["Ada", 7, 1.5, ["x", 2, None], '["y", "z"]', "[not JSON", ["[1, 2]", "[2, 1]"]]
    rows = [{"id": i, "question": "?", "answers": v} for i, v in enumerate(values)]
    answers = [q.answers for q in load_questions(write_jsonl(tmp_path / "q.jsonl", rows))]
    texts = [('["y", "z"]',), ("[not JSON",), ("[1, 2]", "[2, 1]")]
    assert answers == [("Ada",), ("7",), ("1.5",), ("x", "2"), *texts]


def test_fields_name_other_columns_and_nested_ones_by_dotted_path(tmp_path):
    rows = [{"ask": "Who?", "gold": {"text": ["Ada"], "start": [3]}, "aka": [{"name": "A. L."}]}]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    fields = Fields(None, "ask", ["gold.text", "aka.name"])
    # what else a mapping holds is not lost
    assert load_questions(path, fields=fields) == [
        Question("0", "Who?", ("Ada", "A. L."), {name: rows[0][name] for name in ("gold", "aka")})
    ]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("key", CHAT, "is a list, [{'role': 'system'"),
        ("prompt", {"text": "Who?"}, "name a path into it, such as prompt.text"),
        ("prompt", b"Who?", "is a bytes, b'Who?', not a text."),
        ("gold", CHAT, "name a path into it, such as gold.role"),
        ("gold", [["Ada"], [b"A. L."]], "is a bytes, b'A. L.', not a text."),
    ],
)
def test_a_value_that_is_not_text_is_reported_with_its_source_row_and_column(name, value, message):
    good = {"key": "a", "prompt": "When?", "gold": "1843"}
    with pytest.raises(DataError) as caught:
        load_questions([good, good | {name: value}], fields=Fields("key", "prompt", "gold"))
    assert str(caught.value).startswith(f"the list of rows, row 2: {name!r} is ")
    assert message in str(caught.value)


PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]}
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "rows"])
def test_a_prompt_of_chat_messages_is_a_question_with_its_own_system_message(tmp_path, kind):
    rows = [{"prompt": CHAT, "solution": "Ada", "level": 3}, {"prompt": CHAT[1:], "solution": "B"}]
    source = rows
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "chat.jsonl", rows)
    elif kind == "parquet":
        source = str(tmp_path / "chat.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    fields = Fields(None, "prompt", "solution")
    first, second = load_questions(source, fields=fields)
    assert (first.text, first.system, first.answers) == ("Who?", "Be brief.", ("Ada",))
    assert (second.text, second.system, second.answers) == ("Who?", "", ("B",))
    assert load_questions([{"prompt": PARTS, "solution": "B"}], fields=fields)[0].text == "Who?"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([*CHAT, {"role": "assistant", "content": "She."}], "messages of system, user, assistant."),
        ([CHAT[0]], "has messages of system. turnrl takes one of the user"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content is not text"),
        ([{"role": "user", "content": None}], "content is not text"),
    ],
)
def test_a_prompt_of_other_messages_is_refused(prompt, message):
    with pytest.raises(DataError, match="the list of rows, row 1: 'prompt' has ") as caught:
        load_questions([{"prompt": prompt, "answers": "Ada"}], fields=Fields(None, "prompt"))
    assert message in str(caught.value)


def test_a_question_whose_id_or_text_is_not_a_string_is_refused():
    for question, name in ((("1", CHAT), "text"), ((1, "Who?"), "id")):
        with pytest.raises(DataError, match=rf"^the {name} of question '?1'? is the .*Give a text"):
            Question(*question)


def test_numbers_dates_and_arrays_are_read_as_text_and_gaps_are_dropped():
    numpy = pytest.importorskip("numpy")
    rows = [
        {"question": 7, "answers": numpy.array(["b", "c"])},
        {"question": "Who?", "answers": ("d", None, float("nan"), numpy.float64(1.5))},
        {"question": "When?", "answers": date(1999, 5, 4)},
        {"question": "How many?", "answers": 7.0},  # as pandas holds 7 in a column with gaps
        {"question": "Gone?", "answers": Decimal("nan")},
        {"question": float("nan"), "answers": "e"},
    ]
    read = [(q.text, q.answers) for q in load_questions(rows)]
    first = [("7", ("b", "c")), ("Who?", ("d", "1.5")), ("When?", ("1999-05-04",))]
    assert read == [*first, ("How many?", ("7",))]


INFO = {"task": "sort", "cases": [{"in": [3, 1], "out": [1, 3]}, None], "depth": {"a": {"b": 1.5}}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "rows"])
def test_other_columns_become_metadata_whatever_they_hold(tmp_path, kind):
    more = {"info": INFO, "tags": [["x"], []], "n": 3, "ok": False, "level": "hard"}
    rows = [{"id": "a", "question": "?", "answers": "x", **more, "gone": None}]
    source = {"jsonl": tmp_path / "q.jsonl", "parquet": tmp_path / "q.parquet", "rows": rows}[kind]
    if kind == "jsonl":
        write_jsonl(source, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    assert load_questions(source) == [Question("a", "?", ("x",), more)]


# ------------------------------------------------------- the answer within a field


def solved(*answers):
    return [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]


def test_a_pattern_finds_the_answer_within_a_field(tmp_path, caplog):
    rows = solved("7 of 6 are <<7*6=42>>42.\n#### 42", "So #### 1,000 ", "It is lost.")
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    fields = Fields(None, answers="answer", answer_pattern="#### (.*)")
    with caplog.at_level(logging.WARNING, "turnrl.data.sources"):
        assert [q.answers for q in load_questions(path, fields=fields)] == [("42",), ("1,000",)]
    assert "left out 1 of 3 rows" in caplog.text
    whole = Fields(None, answers="answer", answer_pattern="[0-9,]+$")
    assert [q.answers for q in load_questions(path, fields=whole)] == [("42",)]


def test_a_path_loads_its_file_and_an_empty_file_is_reported(tmp_path):
    path = tmp_path / "mine.jsonl"
    write_jsonl(path, [{"id": "a", "question": "?", "answers": ["x"]}])
    assert QuestionData(path, path).eval_questions()[0].id == "a"
    path.write_text("")
    with pytest.raises(DataError, match=rf"{path} has no usable question: it is empty"):
        QuestionData(path, path).eval_questions()


def test_a_pattern_that_matches_nothing_or_is_invalid_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", solved("The answer is 42"))
    with pytest.raises(DataError, match=r"'### \(.*\)' matches no answer of .*'The answer is 42'"):
        load_questions(path, fields=Fields(None, answers="answer", answer_pattern="### (.*)"))
    for pattern in ("#### (.*", None):
        with pytest.raises(DataError, match=r"answer_pattern .* is not a regular expression"):
            Fields(answer_pattern=pattern)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".csv", "rows"])
def test_an_answer_that_looks_like_a_list_is_a_single_answer(tmp_path, kind, caplog):
    texts = ["[0, 1]", "[-1, 1)", "[[1, 0], [0, 1]]", "[x]", "[]", "[None]", "['x' 'y']"]
    rows = [{"id": f"{n}", "question": f"{n}?", "answers": t} for n, t in enumerate(texts)]
    source = rows if kind == "rows" else table_file(tmp_path / f"q{kind}", rows)
    pytest.importorskip("math_verify")
    math = answer_rule("math")
    questions = load_questions(source, rule=math)
    assert [q.answers for q in questions] == [(text,) for text in texts]
    assert exact_match("[0, 1]", questions[0])
    assert not any(exact_match(wrong, questions[0]) for wrong in ("0", "1"))
    assert "the answers of 4 of 7 rows are texts that look like lists, such as '[0" in caplog.text
    caplog.clear()
    load_questions([*rows, *({"question": f"{n}?", "answers": "x"} for n in "abc")], rule=math)
    assert "look like lists" not in caplog.text


def test_a_list_of_quoted_texts_in_a_cell_of_csv_is_a_list_of_answers(tmp_path):
    cells = {'["x", "y"]': ("x", "y"), "['x', 'y']": ("x", "y"), '["x", null]': ("x",)}
    cells |= {"['[0, 1]']": ("[0, 1]",), '["x", 1]': ('["x", 1]',)}
    rows = [{"question": f"{n}?", "answers": c, "at": "[1, 2]"} for n, c in enumerate(cells)]
    questions = load_questions(table_file(tmp_path / "q.csv", rows))
    assert [q.answers for q in questions] == [*cells.values()]
    assert questions[0].metadata == {"at": [1, 2]}


def test_a_cell_of_csv_that_is_no_answer_stays_a_text(tmp_path):
    rows = [{"id": "['a']", "question": '["x", "y"]', "answers": "z"}]
    (question,) = load_questions(table_file(tmp_path / "q.csv", rows))
    assert (question.id, question.text) == ("['a']", '["x", "y"]')


# ------------------------------------------------------------ of the datasets library


@pytest.fixture
def hub_rows(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(ROWS)


EXPECTED = [(row["id"], tuple(row["answers"])) for row in ROWS]


def loaded(source, *arguments, **options):
    return [(q.id, q.answers) for q in load_questions(source, *arguments, **options)]


def test_data_sets_written_by_save_to_disk_load_as_questions(hub_rows, tmp_path):
    import datasets

    hub_rows.save_to_disk(tmp_path / "one")
    assert loaded(str(tmp_path / "one")) == EXPECTED
    both = datasets.DatasetDict({"train": hub_rows, "test": hub_rows.select([2])})
    both.save_to_disk(tmp_path / "two")
    folder = str(tmp_path / "two")
    assert loaded(folder, role="train") == EXPECTED
    assert loaded(folder, "test") == EXPECTED[2:]
    with pytest.raises(DataError, match=r"two has no split 'validation'. It has train, test\."):
        load_questions(folder)
    with pytest.raises(DataError, match=r"one has no split 'test'. It has one without"):
        load_questions(str(tmp_path / "one"), "test")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"cannot read the data set in '.*one': "):
        load_questions(str(tmp_path / "one"))


def test_class_labels_are_their_names(hub_rows, tmp_path):
    import datasets

    label = datasets.ClassLabel(names=["no", "maybe"])
    features = datasets.Features({"question": datasets.Value("string"), "answers": label})
    columns = {"question": ["a", "b", "c"], "answers": [0, 1, -1]}
    labelled = datasets.Dataset.from_dict(columns, features)
    labelled.save_to_disk(tmp_path / "saved")
    for source in [labelled, labelled.to_iterable_dataset(), str(tmp_path / "saved")]:
        answers = [question.answers for question in load_questions(source)]
        assert answers == [("no",), ("maybe",)]  # -1 is none


def test_a_data_set_with_a_transform_gives_what_the_transform_makes(hub_rows):
    asked = hub_rows.with_transform(lambda rows: {**rows, "question": ["Who?"] * len(rows["id"])})
    assert {question.text for question in load_questions(asked)} == {"Who?"}


def test_a_data_set_in_memory_is_a_question_set(hub_rows):
    import datasets

    data = QuestionData(hub_rows.shuffle(seed=3).select([0, 1]), val=hub_rows)
    data.setup()
    shuffled = [(q.id, q.answers) for q in data.iteration_questions(0, 0, 1)]
    assert {*shuffled} < {*EXPECTED}
    assert len({*shuffled}) == 2
    assert [(q.id, q.answers) for q in data.eval_questions()] == EXPECTED
    assert loaded(hub_rows.to_iterable_dataset()) == EXPECTED
    both = datasets.DatasetDict({"train": hub_rows, "dev": hub_rows.select([1])})
    data = QuestionData(both, both, val_split="dev", train_limit=1)
    assert [(q.id, q.answers) for q in data.eval_questions()] == EXPECTED[1:2]
    renamed = hub_rows.rename_columns({"question": "ask", "id": "key"})
    data = QuestionData(renamed, fields=Fields("key", "ask"), questions_per_iteration=3)
    data.setup("fit")
    assert sorted(q.id for q in data.iteration_questions(0, 0, 1)) == ["007", "a", "b"]
    with pytest.raises(DataError, match=r"the Dataset has no field 'question'\. It has: answers"):
        load_questions(renamed)


def test_rows_in_memory_are_a_question_set_and_other_things_are_none():
    assert loaded(ROWS) == EXPECTED
    with pytest.raises(DataError, match=r"a set is not a data set: \{7\}\. Give a path"):
        load_questions({7})
    with pytest.raises(DataError, match=r"a list is not a data set: \['Who\?'\]"):
        load_questions(["Who?"])


# -------------------------------------------------------------------- presets

# rows as the data sets on the hub have them, shortened
HUB_ROWS = {
    "triviaqa": (
        {"question": "Who wrote Emma?", "question_id": "tc_1", "question_source": "x",
         "entity_pages": {"title": []},
         "answer": {"aliases": ["Austen", "J. Austen"], "value": "Jane Austen",
                    "normalized_aliases": ["austen", "j austen"], "type": "WikipediaEntity"}},
        Question("tc_1", "Who wrote Emma?",
                 ("Jane Austen", "Austen", "J. Austen", "austen", "j austen"),
                 {"question_source": "x"}),
    ),
    "nq_open": (
        {"question": "where is it", "answer": ["in Rome", "Italy"]},
        Question("0", "where is it", ("in Rome", "Italy")),
    ),
    "hotpotqa": (
        {"id": "5a", "question": "Were they?", "answer": "yes", "level": "hard",
         "context": {"title": ["t"], "sentences": [["s"]]}},
        Question("5a", "Were they?", ("yes",), {"level": "hard"}),
    ),
    "2wikimultihopqa": (
        {"id": "13", "question": "Who?", "answer": "Ada", "type": "bridge",
         "context": {"title": []}},
        Question("13", "Who?", ("Ada",), {"type": "bridge"}),
    ),
    "musique": (
        {"id": "2hop__1", "paragraphs": [{"idx": 0, "title": "t"}], "question": "Who?",
         "answer": "Ada", "answer_aliases": ["A. L."], "answerable": True},
        Question("2hop__1", "Who?", ("Ada", "A. L."), {"answerable": True}),
    ),
    "gsm8k": (
        {"question": "How many?", "answer": "21 and 21 are <<21+21=42>>42.\n#### 42"},
        Question("0", "How many?", ("42",), rule="number"),
    ),
    "popqa": (
        {"id": 42, "question": "Who?", "possible_answers": '["Ada", "A. L."]', "s_pop": 142},
        Question("42", "Who?", ("Ada", "A. L."), {"s_pop": 142}),
    ),
    "bamboogle": ({"Question": "Who?", "Answer": "Ada"}, Question("0", "Who?", ("Ada",))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_maps_the_rows_of_its_data_set(name, monkeypatch):
    import datasets

    row, question = HUB_ROWS[name]
    rows = datasets.Dataset.from_list([row])  # through Arrow, as they arrive from the hub
    monkeypatch.setattr("turnrl.data.known.open_hub", lambda *_: rows)
    assert load_questions(name) == [question]


def test_a_preset_says_how_its_answers_compare(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([HUB_ROWS["gsm8k"][0]])
    monkeypatch.setattr("turnrl.data.known.open_hub", lambda *_: rows)
    (question,) = load_questions("gsm8k")
    assert question == HUB_ROWS["gsm8k"][1]
    (question,) = load_questions("gsm8k", rule=Phrase())  # a recipe's rule goes first
    assert question.rule == Phrase()


@pytest.mark.parametrize("name", ["popqa", "bamboogle"])
def test_a_preset_without_training_split_says_so(name):
    with pytest.raises(DataError, match=f"'{name}' has no split to train on, only 'test'"):
        load_questions(name, role="train")


def test_a_data_set_on_the_hub_that_cannot_be_loaded_is_named(monkeypatch):
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"cannot load 'nobody/nothing' \(configuration None, split 'va"
    ):
        load_questions("nobody/nothing")


ASKED = {
    "turnrl.load_questions('nobody/nothing')": "cannot load 'nobody/nothing' .* the hub: ",
    "import datasets; turnrl.load_questions('nobody/nothing')": "cannot load 'nobody/nothing'",
    "turnrl.Policy('nobody/nothing').build().tokenizer": "'nobody/nothing' .* connect to 'http://127",
    "next(open_corpus('nobody/nothing:en').passages())": "cannot load 'nobody/nothing' .*Couldn",
    "p = turnrl.Policy('nobody/tiny').build(); p.config; p.tokenizer": None,
}
# each is the first that asks the hub, in a process that has imported the libraries
ASKING = """
import os, sys, time
import turnrl, torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from turnrl_wiki_search.sources import open_corpus
for asks in sys.stdin:
    if os.fork() == 0:
        began = time.monotonic()
        try:
            exec(asks)
        except turnrl.plugin.errors.TurnRLError as error:
            print("Error:", " ".join(str(error).split()), file=sys.stderr)
        print(f"{time.monotonic() - began} s", file=sys.stderr)
        os._exit(0)
    os.wait()
    print("----", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_hub_out_of_reach_is_reported_at_once_and_the_cache_is_used(tiny_model, tmp_path):
    cached = tmp_path / "hub/models--nobody--tiny"
    shutil.copytree(tiny_model, cached / "snapshots/0")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    asked = subprocess.run(
        # from Python 3.12 on, to fork where a library has threads is worth a warning
        [sys.executable, "-W", "ignore::DeprecationWarning", "-u", "-c", ASKING],
        env=os.environ | away,
        input="".join(f"{asks}\n" for asks in ASKED),
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    message = (
        r"^the hub \(http://127.0.0.1:9\) is out of reach \(.*\): only cached files are used\n"
    )
    answers = asked.stderr.split("----\n")[:-1]
    for (asks, error), answer in zip(ASKED.items(), answers, strict=True):
        assert answer.count("out of reach") == 1, asks
        assert re.match(message, answer)
        assert ("Error: " in answer) == (error is not None), answer
        assert error is None or re.search(f"Error: .*{error}", answer)
        assert float(answer.split()[-2]) < 25, answer  # on its own the client tries for longer


def test_a_hub_that_answers_is_used_and_asked_once_whether_it_is_there(monkeypatch):
    asked = []

    class Client:
        def head(self, url, timeout):
            asked.append((url, timeout))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Client)
    check_hub.cache_clear()
    check_hub()
    check_hub()
    assert asked == [(huggingface_hub.constants.ENDPOINT, 5)]
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_split_missing_on_the_hub_is_refused_with_the_available_ones(tmp_path, monkeypatch):
    # `datasets` takes a local folder of Parquet files where it takes a name on the hub
    (tmp_path / "owner/name").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "owner/name/test-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(PRESETS, "mine", Preset("owner/name", Fields(), train=None, val="test"))
    assert [q.id for q in load_questions("mine")] == ["a", "b", "007"]
    with pytest.raises(DataError, match=r"'validation'.*Should be one of \['test'\]"):
        load_questions("mine", "validation")


# -------------------------------------------------------------- bad sources


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", r"no file 'nowhere.jsonl' in "),
        (
            "trivia_qa",
            r"no data set 'trivia_qa'. Did you mean triviaqa\?.*HotpotParagraphs, .*, triviaqa, nq",
        ),
        ("no.such.Source", r"'no.such.Source', which .*: No module named 'no'"),
        ("turnrl.plugin.errors.gone", r"'turnrl.plugin.errors.gone', .* no attribute 'gone'"),
        (
            "turnrl.types.Question",
            "'turnrl.types.Question'.*does not extend QuestionSource",
        ),
        ("turnrl.QuestionSource", "'turnrl.QuestionSource'.*lacks questions"),
    ],
)
def test_an_unknown_source_is_refused_with_the_known_names_or_the_reason(name, message):
    with pytest.raises(DataError, match=message):
        load_questions(name)


def test_rows_without_any_id_are_numbered(tmp_path):
    rows = [{"question": f"{n}?", "answers": ["x"]} for n in range(3)]
    path = write_jsonl(tmp_path / "q.jsonl", [rows[0], {**rows[1], "answers": []}, rows[2]])
    assert [q.id for q in load_questions(path)] == ["0", "2"]
    # where some have one, theirs count
    path = write_jsonl(tmp_path / "some.jsonl", [rows[0], {**rows[1], "id": "b"}])
    assert [q.id for q in load_questions(path)] == ["0", "b"]
    # a field that was asked for has to be there
    with pytest.raises(DataError, match=r"no field 'key'. It has: answers, id, question"):
        load_questions(path, fields=Fields("key"))


def test_a_missing_field_is_reported_with_the_available_ones(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"qestion": "?", "gold": {"text": "x"}}])
    message = r"no field 'question'. Did you mean qestion\? It has: gold, qestion. Set data.fi"
    for fields in (None, Fields(None)):
        with pytest.raises(DataError, match=message):
            load_questions(path, fields=fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1, "question": "?", "answers": []}', "none of its 1 rows can be used"),
        ('{"id": 1, "question": "?", "answers": ["the", "..."]}', "none of its 1 rows"),
        ('{"id": 1, "question": " ", "answers": ["x"]}', "none of its 1 rows"),
        ('{"id": 1}\n{"id": ', "line 2: not JSON"),
        ("[1, 2]", "line 1: not a JSON object, but '.1, 2.'"),
    ],
)
def test_a_file_without_usable_questions_is_an_error(tmp_path, content, message):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_questions(str(path))
    with pytest.raises(DataError, match=r"cannot read '.*q.parquet'"):
        load_questions(str(path.rename(tmp_path / "q.parquet")))


TORN = gzip.compress(b'{"id": "1", "question": "?", "answers": "b"}\n' * 500)[:-20]
BROKEN = {
    "q.csv": [
        (b'id,question,answers\n1,?,"Lima\n2,?,Tokyo\n3,?,"Oslo"\n', "line 4: ',' expected after"),
        (b'id,question,answers\n1,?,"Lima\n2,?,Tokyo\n', "line 3: unexpected end of data"),
        (b"id,question,answers\n1,?,x\n2,?,Lima, big\n", "line 3: 4 cells, and the header has 3"),
        (b"id,question,answers\n1,?\n", "line 2: 2 cells, and the header has 3"),
        (b"id,id,answers\n1,?,x\n", "its header names 'id' twice"),
    ],
    "q.json": [
        (b'{"id": "1", "question": "?"}\n{"question"', "line 2: not JSON"),
        (b'["x"]', "is not a list of objects"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
    "q.jsonl.gz": [
        (TORN, "Compressed file ended"),
        (b'{"question": "?", "answers": "b"}\n', "Not a gzipped file"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [(name, content, message) for name, cases in BROKEN.items() for content, message in cases],
)
def test_a_file_whose_rows_cannot_be_read_as_meant_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load_questions(str(tmp_path / name))
    assert name in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_a_file_that_is_not_utf_8_is_refused_with_the_fix(tmp_path, suffix, encoding):
    file = tmp_path / f"q.{suffix}"
    file.write_bytes("question,answers\nWhich café?,x\n".encode(encoding))
    with pytest.raises(DataError, match=r"cannot read '.*q\.\w+': .*\. Save it as UTF-8"):
        load_questions(str(file))


def test_a_split_of_a_file_and_a_folder_are_errors(tmp_path):
    path = numbered(tmp_path, 2)
    with pytest.raises(DataError, match=r"no split 'dev'\. It has one without a name"):
        load_questions(path, "dev")
    with pytest.raises(DataError, match=r"is a folder. Name a file in it \(many.jsonl\), or a f"):
        load_questions(str(tmp_path))


def test_unusable_rows_are_counted_in_one_warning(tmp_path, caplog):
    rows = [
        *ROWS,
        {"id": "c", "question": "Article?", "answers": ["The"]},
        {"id": "d", "question": "Empty?", "answers": []},
        ROWS[0],
    ]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    with caplog.at_level(logging.WARNING, "turnrl.data.sources"):
        assert len(load_questions(path)) == 3
    (record,) = caplog.records
    assert (
        "left out 3 of 6 rows (1 with an answer of articles and punctuation, 1 without an answer, "
        "1 repeated)" in record.message
    )


def test_answers_that_normalise_to_nothing_are_dropped_and_the_rest_stays(tmp_path):
    rows = [{"id": "a", "question": "?", "answers": ["The", "x", "", "x", "..."]}]
    (question,) = load_questions(write_jsonl(tmp_path / "q.jsonl", rows))
    assert question.answers == ("x",)


def test_different_questions_sharing_an_id_get_distinct_ids_and_a_warning(tmp_path, caplog):
    texts = ("One?", "Two?", "One?", "Three?")
    rows = [{"id": "7", "question": text, "answers": "x"} for text in texts]
    usable = load_questions(write_jsonl(tmp_path / "q.jsonl", rows))
    assert [(q.id, q.text) for q in usable] == [("7", "One?"), ("7#2", "Two?"), ("7#3", "Three?")]
    assert "3 questions share an id with another, such as '7'" in caplog.text
    # also where another row has such an id already, before or after
    caplog.clear()
    rows = [
        {"id": name, "question": f"{n}?", "answers": "x"}
        for n, name in enumerate(("7#2", "7", "7", "8", "8", "8#2"))
    ]
    usable = load_questions(write_jsonl(tmp_path / "q.jsonl", rows))
    assert [q.id for q in usable] == ["7#2", "7", "7#3", "8", "8#2", "8#2#2"]
    caplog.clear()
    load_questions(write_jsonl(tmp_path / "q.jsonl", rows[:2]))
    assert caplog.text == ""


# ------------------------------------------------------- sources of packages


class Tiny(QuestionSource):
    """Two splits of one question."""

    def questions(self, split):
        if split not in ("train", "val"):
            raise DataError(f"Tiny has no split {split!r}; it has train, val")
        return [Question(split, f"{split}?", ("x", "the"))]


def test_a_question_source_is_used_by_its_dotted_path():
    name = f"{__name__}.Tiny"
    assert load_questions(name, role="train") == [Question("train", "train?", ("x",))]
    assert load_questions(name) == [Question("val", "val?", ("x",))]
    with pytest.raises(DataError, match="it has train, val"):
        load_questions(name, "dev")


# ------------------------------------------------------------- QuestionData


@settings(deadline=None)
@given(
    size=st.integers(1, 40),
    share=st.integers(1, 5),
    world=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_question_is_asked_once_before_any_is_asked_again(
    tmp_path_factory, size, share, world, seed
):
    path = numbered(tmp_path_factory.getbasetemp(), size, f"{size}.jsonl")
    data = QuestionData(path, questions_per_iteration=share * world, seed=seed)
    asked = []
    while len(asked) < 2 * size:
        parts = [
            data.iteration_questions(len(asked) // (share * world), r, world) for r in range(world)
        ]
        assert [len(part) for part in parts] == [share] * world
        asked += [q.id for part in parts for q in part]
    for epoch in (asked[:size], asked[size : 2 * size]):
        assert Counter(epoch) == Counter(str(i) for i in range(size))


def test_the_order_depends_on_seed_and_iteration_and_on_nothing_else(tmp_path):
    path = numbered(tmp_path, 100)
    first, same, other = (QuestionData(path, seed=seed) for seed in (1, 1, 2))
    late = first.iteration_questions(5, 0, 1)
    random.seed(7)
    assert [first.iteration_questions(i, 0, 1) for i in range(6)][5] == late
    assert same.iteration_questions(5, 0, 1) == late
    assert other.iteration_questions(5, 0, 1) != late
    # and each time that all have been asked it is another
    whole = QuestionData(path, questions_per_iteration=100, seed=1)
    orders = [tuple(q.id for q in whole.iteration_questions(i, 0, 1)) for i in range(4)]
    assert len(set(orders)) == 4
    assert len({frozenset(order) for order in orders}) == 1
    # two processes together ask what one process asks
    assert first.iteration_questions(5, 0, 2) + first.iteration_questions(5, 1, 2) == late


def test_processes_that_cannot_share_an_iteration_are_an_error(tmp_path):
    data = QuestionData(numbered(tmp_path, 9), questions_per_iteration=16)
    with pytest.raises(
        RecipeError, match=r"16 cannot be shared by 3 processes. Set it to a multiple of 3"
    ):
        data.iteration_questions(0, 0, 3)


def test_evaluation_asks_the_same_questions_whatever_the_seed(tmp_path):
    path = numbered(tmp_path, 200)
    chosen = [QuestionData(val=path, val_limit=50, seed=s).eval_questions() for s in (0, 1)]
    assert len(chosen[0]) == 50
    assert chosen[0] == chosen[1]
    ids = [int(q.id) for q in chosen[0]]
    assert ids == sorted(ids)
    assert ids != list(range(50))
    fewer = QuestionData(val=path, val_limit=20).eval_questions()
    assert {q.id for q in fewer} < {q.id for q in chosen[0]}


def test_a_limit_of_training_questions_is_a_fixed_choice(tmp_path):
    path = numbered(tmp_path, 60)
    for seed in (0, 1):
        data = QuestionData(path, train_limit=10, questions_per_iteration=10, seed=seed)
        asked = {q.id for i in range(3) for q in data.iteration_questions(i, 0, 1)}
        assert len(asked) == 10
        assert asked == {q.id for q in data.eval_questions("train")}


def test_evaluation_can_take_another_split_of_the_source():
    data = QuestionData(f"{__name__}.Tiny", f"{__name__}.Tiny")
    assert [q.id for q in data.eval_questions()] == ["val"]
    assert [q.id for q in data.eval_questions("train")] == ["train"]
    data.split = "train"
    assert [q.id for q in data.eval_questions()] == ["train"]
    with pytest.raises(DataError, match="it has train, val"):
        data.eval_questions("dev")


class Ids(L.LightningModule):
    """Keeps the ids of the questions it is given."""

    def validation_step(self, batch, batch_idx):
        self.batches = [*getattr(self, "batches", []), [q.id for q in batch]]


def test_lightning_validates_with_batches_of_questions(tmp_path):
    module = Ids()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(accelerator="cpu", **dict.fromkeys(off, False))
    data = QuestionData(val=numbered(tmp_path, 5), val_batch_size=2)
    trainer.validate(module, data, verbose=False)
    assert module.batches == [["0", "1"], ["2", "3"], ["4"]]


def test_questions_whose_prompts_leave_no_room_are_left_out_and_counted(chat, caplog):
    short = [Question(str(i), f"Which is {i}?", ("1",)) for i in range(4)]
    long = [
        Question("wide", "word " * 200, ("1",)),
        Question("told", "?", ("1",), system="so " * 90),
    ]
    rollout = Rollout(TwoTurn(), [Look()], max_tokens=400)
    own = chat.encode_prompt(rollout.segmenter_loop.messages(short[0], chat))
    for limit, left in ((len(own), []), (len(own) + 1, short[:1])):
        exactly = replace(rollout, max_tokens=limit)
        assert exactly.questions_with_room(short[:1], chat)[0] == left
    data = QuestionData([*short, *long], [*short[:2], long[0]], questions_per_iteration=4)
    data.setup("fit")
    data.leave_out_overlong(replace(rollout, max_tokens=len(own) + 40), chat)
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert [line[:32] for line in lines] == [
        "data.train: left out 2 of 6 ques",
        "data.val: left out 1 of 3 questi",
    ]
    assert "'wide' makes a prompt of" in lines[0]
    asked = {q.id for n in range(2) for q in data.iteration_questions(n, 0, 1)}
    assert asked == {"0", "1", "2", "3"}
    assert data.eval_questions() == short[:2]
    # with more room they are asked again, and with none the run is refused
    data.leave_out_overlong(replace(rollout, max_tokens=2000), chat)
    assert len(data.eval_questions()) == 3
    with pytest.raises(DataError, match=r"left out 6 of 6 .*Raise max_tokens"):
        data.leave_out_overlong(replace(rollout, max_tokens=8), chat)


def test_a_source_that_is_not_set_is_asked_for():
    with pytest.raises(DataError, match=r"data.train is not set"):
        QuestionData().setup("fit")
    with pytest.raises(DataError, match=r"data.val is not set"):
        QuestionData().setup("validate")


def test_without_evaluation_questions_there_are_no_batches(tmp_path):
    data = QuestionData(numbered(tmp_path, 3))
    data.setup("fit")
    assert list(data.val_dataloader()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("questions_per_iteration", 0), ("val_limit", 0), ("train_limit", -1), ("val_batch_size", 0),
     ("val_split", "dev")],
)  # fmt: skip
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(RecipeError, match=rf"data.{name} is"):
        QuestionData("train.jsonl", **{name: value})


def test_options_that_no_source_uses_are_refused(tmp_path):
    path, tiny = numbered(tmp_path, 3), f"{__name__}.Tiny"
    with pytest.raises(RecipeError, match=r"data.config is set, but no source"):
        QuestionData(path, config="x").setup("fit")
    with pytest.raises(RecipeError, match=r"data.fields is set, but no source"):
        QuestionData(tiny, fields=Fields()).setup("fit")


def test_a_file_comes_before_a_preset_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("triviaqa").write_text("")
    with pytest.raises(DataError, match="cannot tell the format of 'triviaqa'"):
        load_questions("triviaqa")


def test_an_installed_data_set_is_used_by_its_short_name():
    data = QuestionData("Atlas", "Atlas", train_limit=20, val_limit=10)
    data.setup("fit")
    trained = {q.id for q in data.iteration_questions(0, 0, 1)}
    assert len(trained) == 16
    assert len(data.eval_questions()) == 10
    assert not trained & {q.id for q in data.eval_questions()}


def test_fields_are_set_from_the_command_line(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"ask": "Who?", "gold": ["Ada"], "aka": "A. L."}])
    parser = ArgumentParser()
    parser.add_class_arguments(QuestionData, "data")
    options = ["--data.val", path, "--data.fields.id", "null", "--data.fields.question", "ask"]
    parsed = parser.parse_args([*options, '--data.fields.answers=["gold", "aka"]'])
    data = parser.instantiate(parsed).data
    assert data.eval_questions() == [Question("0", "Who?", ("Ada", "A. L."))]
