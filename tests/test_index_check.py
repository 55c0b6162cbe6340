"""`turnrl index check`: of how many questions an index holds an answer at all."""

import json
import random
import re
import uuid
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodes import free_port
from proxies import Proxy
from retrieving import retriever_of
from searching import SHARED, corpus_of, index_command, needs_shared_data, shared_rows, write_rows
from turnrl import (
    Passage,
    Phrase,
    Question,
    ToolError,
    answer_rule,
    can_be_found,
    contains_answer,
    load_questions,
)
from turnrl_wiki_search import elastic, embedded
from turnrl_wiki_search.coverage import Coverage, coverage
from turnrl_wiki_search.index import SearchIndex
from turnrl_wiki_search.retrieve import RetrieveIndex
from turnrl_wiki_search.server import SearchServer

ROWS = [
    {"id": "1", "title": "Utrecht", "text": "The Dom Tower, begun in 1321, is 112.5 m high."},
    {"id": "2", "title": "U.S.A. today", "text": "The U.S. Senate sits in Washington, D.C."},
    {"id": "3", "title": "New", "text": "York is an old city."},
    {"id": "4", "title": "Rock", "text": "The Who sang; others heard. Bonaparte did not."},
]
ASKED = [
    ("tower", "Which tower is in Utrecht?", ["dom tower"], True),
    ("joined", "Which senate is it?", ["us senate"], True),  # "U.S." is two terms of the index
    ("dc", "Where is the capital?", ["DC"], True),
    ("title", "Which city is old?", ["New York"], True),  # over title and text
    ("stop", "Who sang?", ["zzz", "others"], True),  # a second answer
    ("part", "What did he paint?", ["art"], False),  # within "Bonaparte" only
    ("order", "Which tower?", ["Tower Dom"], False),
    ("absent", "Which river is it?", ["Vecht"], False),
    ("yes", "Is it high?", ["yes"], None),
    ("stated", "Which is older, Radio City or Ashoka?", ["Ashoka"], None),
]
QUESTIONS = [Question(name, text, tuple(answers)) for name, text, answers, _ in ASKED]


def ids(questions: list[Question]) -> list[str]:
    return [question.id for question in questions]


def expected(verdict: bool | None) -> list[str]:
    return [name for name, *_, held in ASKED if held is verdict]


def checked(index: SearchIndex, questions=QUESTIONS, k=3) -> Coverage:
    return coverage(index, questions, k, lambda _: None, lambda _: None)


def naive(rows: list[dict], questions: list[Question]) -> list[str]:
    """Every passage times every question."""
    texts = [f"{row['title']}\n{row['text']}" for row in rows]
    return [
        question.id
        for question in questions
        if can_be_found(question) and any(contains_answer(text, question) for text in texts)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    embedded.build(folder / "index", corpus_of(write_rows(folder / "rows.jsonl", ROWS)))
    return folder / "index"


@pytest.fixture
def asked(tmp_path):
    rows = [{"id": n, "question": q, "answers": a} for n, q, a, _ in ASKED]
    return write_rows(tmp_path / "questions.jsonl", rows)


def test_an_answer_counts_wherever_in_the_index_it_stands(folder):
    coverage = checked(embedded.EmbeddedIndex(folder))
    assert ids(coverage.held) == expected(True) == naive(ROWS, QUESTIONS)
    assert ids(coverage.missing) == expected(False)
    assert ids(coverage.unchecked) == expected(None)
    assert (coverage.whole, coverage.scanned) == (True, 4)


def test_an_answer_that_no_search_finds_counts(tmp_path):
    rows = [
        {"id": "1", "title": "A", "text": "Each senate has seats for us, and which is it?"},
        {"id": "2", "title": "B", "text": "The U.S. Senate sits."},
    ]
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl", rows)))
    index, question = embedded.EmbeddedIndex(tmp_path / "index"), QUESTIONS[1]
    for hits in index.search([question.text, *question.answers], 1):
        assert [hit.passage.id for hit in hits] == ["1"]
    coverage = checked(index, [question], k=1)
    assert (ids(coverage.held), coverage.scanned) == (["joined"], 2)


class Unsearchable(SearchIndex):
    """An index whose searches find nothing, so that the pass over its passages decides alone."""

    def __init__(self, index: SearchIndex) -> None:
        self.index, self.read = index, 0

    def info(self):
        return self.index.info()

    def search(self, queries, k):
        return [[] for _ in queries]

    def passages(self):
        for passage in self.index.passages():
            self.read += 1
            yield passage


def test_the_pass_decides_alone_and_ends_when_nothing_is_left(folder):
    index = Unsearchable(embedded.EmbeddedIndex(folder))
    assert ids(checked(index).held) == expected(True)
    first = Unsearchable(index.index)
    assert ids(checked(first, QUESTIONS[:1]).held) == ["tower"]
    assert (index.read, first.read) == (4, 1)


class Listed(Unsearchable):
    """Passages in a list, which no search finds."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def passages(self):
        return (Passage(str(n), "", text) for n, text in enumerate(self.texts))


WORDS = st.sampled_from(["so", "also", "tower", "towers", "U.S.", "us", "the", "in,", "x"])
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)


@given(st.lists(TEXTS, max_size=6), st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=6))
@example(["also tower"], [["so tower"]])
@example(["so tower"], [["so", "tower"], ["tower"]])
def test_it_agrees_with_the_naive_count_on_any_texts(texts, answers):
    questions = [Question(str(n), "?", tuple(texts)) for n, texts in enumerate(answers)]
    rows = [{"title": "", "text": text} for text in texts]
    assert ids(checked(Listed(texts), questions).held) == naive(rows, questions)


def test_questions_that_share_an_answer_or_its_longest_word_are_all_found(folder):
    answers = ["Dom Tower", "tower begun", "Dom", "Dom Tower", "tower eiffel", "begun", "in 1321"]
    questions = [Question(str(n), "What?", (answer, "zzz")) for n, answer in enumerate(answers)]
    index = Unsearchable(embedded.EmbeddedIndex(folder))
    assert ids(checked(index, questions).held) == naive(ROWS, questions) == [*"012356"]


class Loose(Phrase):
    """A rule that extends SQuAD's."""

    def occurs_in(self, text, accepted):
        return accepted.lower() in text.lower()


@pytest.mark.parametrize(("rule", "held"), [
    (answer_rule("number"), ["112.50", "1321"]), (Loose(), ["1321", "onapart"]),
])  # fmt: skip
def test_the_rule_of_the_question_decides(folder, rule, held):
    texts = ["112.50", "1321", "onapart", "13"]
    questions = [Question(text, "What?", (text,), rule=rule) for text in texts]
    usable = [question for question in questions if rule.read(question.answers[0]) is not None]
    ids_held = ids(checked(Unsearchable(embedded.EmbeddedIndex(folder)), usable).held)
    assert ids_held == naive(ROWS, usable)
    assert set(held) <= set(ids_held)


@needs_shared_data
@pytest.mark.parametrize("searching", [True, False])
def test_it_agrees_with_every_passage_times_every_question(tmp_path, searching):
    rows = random.Random(1).sample(shared_rows(), 600)
    questions = [
        question
        for name in ("squad", "multihop/hotpotqa", "multihop/2wiki")
        for question in load_questions(str(SHARED / name / "dev.jsonl"))[:150]
    ]
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl", rows)))
    index = embedded.EmbeddedIndex(tmp_path / "index")
    coverage = checked(index if searching else Unsearchable(index), questions)
    held = naive(rows, questions)
    assert ids(coverage.held) == held
    assert 40 < len(held) < 350
    assert len(coverage.held) + len(coverage.missing) + len(coverage.unchecked) == len(questions)


def test_an_index_of_several_segments_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_ONE_SEGMENT", 50)
    monkeypatch.setattr(embedded, "_COMMIT_EVERY", 100)
    rows = [{"id": str(n), "title": f"t{n}", "text": f"text {n}"} for n in range(1000)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    embedded.build(tmp_path / "index", corpus_of(path, chunk=50))
    index = embedded.EmbeddedIndex(tmp_path / "index")
    assert index._searcher.num_segments > 1
    assert sorted(int(passage.id) for passage in index.passages()) == [*range(1000)]


@needs_shared_data
def test_the_page_shows_what_the_command_prints(tmp_path, capsys):
    embedded.build(tmp_path / "index", corpus_of(SHARED / "squad" / "corpus.jsonl"))
    questions = SHARED / "multihop" / "hotpotqa" / "dev.jsonl"
    assert index_command("check", "--index", tmp_path / "index", "--questions", questions) == 0
    shown = "".join(capsys.readouterr().out.splitlines(keepends=True)[:2])
    page = Path(__file__).parents[1] / "docs" / "howto" / "wikipedia-search.md"
    assert shown in page.read_text(encoding="utf-8")


# --- other backends ---


def test_behind_retrieve_only_the_best_passages_are_read_and_this_is_printed(folder, asked, capsys):
    with retriever_of(folder, free_port()) as server:
        coverage = checked(RetrieveIndex(SearchServer(), server.url), k=3)
        assert not coverage.whole
        assert (coverage.scanned, set(ids(coverage.held)) <= set(expected(True))) == (0, True)
        words = ["--index", server.url, "--backend", "retrieve", "--questions", asked]
        assert index_command("check", *words, "-k", 2) == 0
        out = capsys.readouterr().out
        assert out.startswith("At least ")
        assert "only the 2 best passages of each search were" in out
        assert "interval" not in out
        assert index_command("check", *words, "--json") == 0
        fields = json.loads(capsys.readouterr().out)
        assert (fields["whole"], fields["high"], fields["passages"]) == (False, None, None)


@pytest.fixture(scope="module")
def on_server(url, tmp_path_factory):
    name = f"test-check-{uuid.uuid4().hex[:8]}"
    path = write_rows(tmp_path_factory.mktemp("check") / "rows.jsonl", ROWS)
    elastic.build(SearchServer(url=url), name, corpus_of(path))
    return name


@pytest.mark.elasticsearch
def test_an_index_on_a_server_is_read_whole(on_server, url, asked, capsys, monkeypatch):
    monkeypatch.setattr("turnrl_wiki_search.elastic.search._PAGE", 3)
    index = elastic.ElasticIndex(SearchServer(url=url), on_server)
    assert sorted(passage.id for passage in index.passages()) == ["1", "2", "3", "4"]
    for source in (index, Unsearchable(index)):
        coverage = checked(source)
        assert ids(coverage.held) == expected(True)
        assert ids(coverage.missing) == expected(False)
    words = ["--index", on_server, "--backend", "elasticsearch", "--url", url]
    assert index_command("check", *words, "--questions", asked) == 0
    assert capsys.readouterr().out.startswith("5 of 8 questions (62.5 %, 95 % interval 30.6 % to")


@pytest.mark.elasticsearch
@pytest.mark.parametrize("fault", [
    "drop", "cut", (503, {}, {"error": {"reason": "unavailable"}, "status": 503}),
], ids=str)  # fmt: skip
def test_a_server_that_fails_amid_the_pass_gives_no_count(on_server, url, fault, monkeypatch):
    monkeypatch.setattr("turnrl_wiki_search.elastic.search._PAGE", 1)
    proxy = Proxy(url)
    try:
        index = elastic.ElasticIndex(SearchServer(url=proxy.url, timeout_s=2.0), on_server)
        passages = index.passages()
        next(passages)
        proxy.faults.append(fault)
        with pytest.raises(ToolError, match=r"broke off after 1 passages .*Run the command again"):
            list(passages)
    finally:
        proxy.close()


# --- the command ---


def test_the_command_prints_the_share_and_writes_what_is_missing(folder, asked, tmp_path, capsys):
    words = ["check", "--index", folder, "--questions", asked]
    missing = tmp_path / "new" / "missing.jsonl"
    assert index_command(*words, "--missing", missing) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "5 of 8 questions (62.5 %, 95 % interval 30.6 % to 86.3 %) have an accepted answer in the "
        "index."
    )
    assert lines[1].startswith("2 more cannot be checked")
    assert "4 of 4 passages read" in lines[2]
    assert lines[3] == "  not found: 'What did he paint?' (art) [part]"
    rows = [json.loads(line) for line in missing.read_text().splitlines()]
    assert [row["id"] for row in rows] == expected(False)
    assert rows[0] == {"id": "part", "question": "What did he paint?", "answers": ["art"]}
    # what it wrote is a file of questions
    assert index_command(*words[:3], "--questions", missing, "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["held"], fields["checked"], fields["low"], fields["whole"]) == (0, 3, 0, True)


def test_limit_takes_the_first_and_sample_draws(folder, asked, capsys):
    words = ["check", "--index", folder, "--questions", asked, "--json"]
    assert index_command(*words, "--limit", 3) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["held"], fields["checked"], fields["high"]) == (3, 3, 1.0)
    assert index_command(*words, "--sample", 4) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["checked"] + fields["unchecked"] == 4


def test_the_check_uses_the_given_split_and_answer_rule(folder, capsys, tmp_path):
    words = ["check", "--index", folder, "--questions"]
    assert index_command(*words, "Atlas", "--split", "train", "--limit", 20, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checked"] > 0
    rows = [{"id": "1", "question": "How high?", "answers": ["112.50"]}]
    numbers = write_rows(tmp_path / "numbers.jsonl", rows)
    for more, held in (((), 0), (("--answers", "number"), 1)):
        assert index_command(*words, numbers, *more, "--json") == 0
        assert json.loads(capsys.readouterr().out)["held"] == held


def test_nothing_in_a_question_acts_on_the_terminal(folder, tmp_path, capsys):
    rows = [{"id": "\x1b[2J", "question": "A \u202e?", "answers": ["\x9b31m x"]}]
    file = write_rows(tmp_path / "q.jsonl", rows)
    assert index_command("check", "--index", folder, "--questions", file) == 0
    out = capsys.readouterr().out
    assert "not found" in out
    assert not {"\x1b", "\u202e", "\x9b"} & set(out)


@pytest.mark.parametrize(("words", "message"), [
    (["--index", "nowhere"], "no search index in 'nowhere'"),
    (["--questions", "gone.jsonl"], "Check --questions."),
    (["--questions", "my.gone"], "--questions names 'my.gone', which cannot be used"),
    (["--questions", "Atlas", "--split", "tets"], "'tets'"),
    (["--limit", "0"], "--limit is 0; it must be 1 or more"),
    (["-k", "0"], "-k is 0; it must be 1 or more"),
    (["--sample", "99"], "--sample 99: "),
    (["--answers", "nubmer"], "--answers is 'nubmer', which is not a rule. Did you mean number?"),
    (["--answers", "math"], "none of the 10 questions of"),
    (["--missing", "."], "--missing '.' is a folder. Name a file in it."),
    (["--index", "http://localhost:1/retrieve", "--backend", "retrieve"], "Start it, or correct"),
    (["--index", "i", "--backend", "elasticsearch", "--url", "http://localhost:1"],
     "Start it, or correct 'url'"),
    (["--url", "http://localhost:1"], "--url: an embedded index has no server"),
])  # fmt: skip
def test_a_mistake_is_a_message_with_the_next_step(
    words, message, folder, asked, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = ["--index", folder, "--questions", asked, *words]  # the last of an option counts
    assert index_command("check", *options) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    # what a recipe sets, and what a run does, is no next step of this command
    assert not re.search(r"data\.|offline|--ckpt_path|wait_s", error)


def test_a_file_with_other_fields_is_to_be_changed(folder, tmp_path, capsys):
    file = write_rows(tmp_path / "q.jsonl", [{"id": "1", "prompt": "Is it?", "answers": ["x"]}])
    assert index_command("check", "--index", folder, "--questions", file) == 2
    error = capsys.readouterr().err
    assert (
        "has no field 'question'. It has: answers, id, prompt. Rename the one that holds it"
        in error
    )
    assert "holds it to 'question'." in error
    assert "data." not in error


@pytest.mark.parametrize(("row", "message"), [
    ({"question": {"a": 1}}, "'question' is a mapping, {'a': 1}, not a text. Write a text there."),
    ({"answers": [{"a": 1}]}, "'answers' is a mapping, {'a': 1}, not a text. Write a text there."),
    ({"answers": []}, "can be used (1 without an answer). Check --answers, or name another source"),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_named_without_the_settings_of_a_recipe(
    row, message, folder, tmp_path, capsys
):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Is it?", "answers": ["x"], **row}))
    assert index_command("check", "--index", folder, "--questions", file) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "data." not in error
    assert index_command("search", "--index", folder, "--questions", file) in (1, 2)
    assert not re.search(r"data\.|--answers", capsys.readouterr().err)


def test_a_saved_data_set_without_the_split_names_the_option_if_there_is_one(
    folder, tmp_path, capsys
):
    import datasets

    rows = datasets.Dataset.from_list([{"id": "1", "question": "Is it?", "answers": ["x"]}])
    datasets.DatasetDict({"dev": rows}).save_to_disk(str(tmp_path / "saved"))
    words = ["--index", folder, "--questions", tmp_path / "saved"]
    assert index_command("check", *words) == 2
    assert (
        "has no split 'validation'. It has dev. Set --split to what it" in capsys.readouterr().err
    )
    assert index_command("search", *words) == 2
    assert "It has dev. Name another source." in capsys.readouterr().err


def test_a_file_that_cannot_be_written_does_not_cost_the_count(folder, asked, capsys):
    words = ["--index", folder, "--questions", asked, "--missing", asked / "missing.jsonl"]
    assert index_command("check", *words) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("5 of 8 questions")
    assert "cannot be written (" in printed.err
    assert "Choose another file." in printed.err


def test_a_file_without_any_checkable_question_is_reported(folder, tmp_path, capsys):
    rows = [{"id": "1", "question": "Is it?", "answers": ["no"]}]
    file = write_rows(tmp_path / "q.jsonl", rows)
    assert index_command("check", "--index", folder, "--questions", file) == 2
    assert "none of the 1 questions of" in capsys.readouterr().err
    empty = write_rows(tmp_path / "e.jsonl", [{"id": "1", "question": "Is it?", "answers": [""]}])
    assert index_command("check", "--index", folder, "--questions", empty) in (1, 2)
    assert "no usable question" in capsys.readouterr().err
