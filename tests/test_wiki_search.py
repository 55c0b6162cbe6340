"""Search without a server: embedded indexes, their sources, the tool, the command."""

import asyncio
import csv
import gzip
import json
import multiprocessing
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searching import ROWS as SMALL
from searching import (
    ask,
    corpus_of,
    ids_found,
    index_command,
    write_rows,
)
from turnrl import DataError, Question, RecipeError, ToolCall, ToolError, ToolResult, call_tools
from turnrl.types import Passage
from turnrl_wiki_search import WikiSearch, embedded
from turnrl_wiki_search.index import MAX_QUERY_CHARACTERS, clean_query
from turnrl_wiki_search.sources import open_corpus
from turnrl_wiki_search.splitting import Splitter
from turnrl_wiki_search.tool import cut_to_tokens, estimate_tokens

ROWS = [*SMALL, {"id": "4", "title": "The Who", "text": "The Who are an English rock band."}]


@pytest.fixture(scope="module")
def small_index(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("small"))


def built(folder: Path, rows=ROWS) -> Path:
    embedded.build(folder / "index", corpus_of(write_rows(folder / "rows.jsonl", rows)))
    return folder / "index"


# --- searching ---


def test_a_query_finds_passages_by_title_and_text_best_first(small_index):
    result = ask(WikiSearch(str(small_index)), "capital city of France")[0]
    assert result.ok
    assert result.content.startswith("Paris\nParis is the capital of France.")
    assert result.metadata["passage_ids"][0] == "2"
    assert result.metadata["scores"] == sorted(result.metadata["scores"], reverse=True)


def test_a_result_says_where_the_text_of_each_passage_begins(small_index):
    result = ask(WikiSearch(str(small_index), top_k=3), "tower Paris")[0]
    starts, ids = result.metadata["passage_starts"], result.metadata["passage_ids"]
    assert len(starts) == len(ids) > 1
    for start, block in zip(starts, result.content.split("\n\n"), strict=True):
        title, _, text = block.partition("\n")
        assert result.content[start:].startswith(text)
        assert result.content[:start].endswith(f"{title}\n")


def test_a_batch_is_answered_in_order_with_one_result_per_call(small_index):
    queries = ["Utrecht", " \n\0", "Paris", "Utrecht", "zebra", "serving coffees"]
    results = ask(WikiSearch(str(small_index), top_k=1), *queries)
    ids = [r.metadata.get("passage_ids") for r in results]
    assert ids == [["1"], None, ["2"], ["1"], [], ["3"]]
    assert results[1] == ToolResult("The query is empty.", ok=False)


def test_a_query_that_finds_nothing_has_run_and_says_nothing_that_counts_as_an_answer(small_index):
    for query in ("zebra", "the of and", "?!"):
        result = ask(WikiSearch(str(small_index)), query)[0]
        assert (result.ok, result.content) == (True, "Nothing found.")


@pytest.mark.parametrize("query", [
    'Utrecht AND (title:"x" OR *) ~2 ^3', "Utrecht\\", 'Utrecht "',
    "+Utrecht -nothing /re.*gex/ [a TO b] {!x}", "Utrecht \ud800 half a surrogate pair",
    "Utrecht \0 \x01", "Utrecht " + "x" * 100_000, "Utrecht " * 50_000,
    "Utrecht " + " ".join(f"word{i}" for i in range(5000)),
])  # fmt: skip
def test_any_text_is_a_query_and_none_is_syntax(small_index, query):
    assert ids_found(WikiSearch(str(small_index)), query)[0] == "1"


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=300))
def test_a_cleaned_query_is_valid_short_and_stays_as_it_is(text):
    cleaned = clean_query(text)
    cleaned.encode()
    assert len(cleaned) <= MAX_QUERY_CHARACTERS
    assert clean_query(cleaned) == cleaned


def test_a_long_query_keeps_whole_words_of_its_beginning():
    assert clean_query("ab " * 1000) == ("ab " * 1000)[: MAX_QUERY_CHARACTERS - 1].strip()
    assert clean_query("x" * 2000) == "x" * MAX_QUERY_CHARACTERS


def test_many_threads_get_the_answers_of_one(small_index):
    tool = WikiSearch(str(small_index), top_k=2)
    queries = [random.Random(i).choice(["tower", "Paris", "coffee", "band"]) for i in range(200)]
    alone = [ask(WikiSearch(str(small_index), top_k=2), q)[0] for q in queries]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda query: ask(tool, query)[0], queries)] == alone


# --- what the policy reads ---


def test_passages_are_left_out_last_first_beyond_the_budget(small_index):
    whole = ask(WikiSearch(str(small_index), top_k=2), "tower Utrecht")[0]
    first = whole.content.split("\n\n")[0]
    budget = estimate_tokens(whole.content) - 1
    tight = WikiSearch(str(small_index), top_k=2, max_result_tokens=budget)
    result = ask(tight, "tower Utrecht")[0]
    assert result.content == first
    assert result.metadata["passage_ids"] == ["1"]


def test_a_passage_too_long_by_itself_ends_at_a_sentence(small_index):
    tool = WikiSearch(str(small_index), top_k=1, max_result_tokens=14)
    assert ask(tool, "Utrecht")[0].content == "Utrecht\nUtrecht is a city in the Netherlands."


@given(st.text(max_size=200), st.integers(1, 60))
def test_a_cut_text_is_a_beginning_within_the_budget(text, tokens):
    cut = cut_to_tokens(text, tokens)
    assert text.startswith(cut)
    assert estimate_tokens(cut) <= tokens


# --- faults of the world, and of the recipe ---


@pytest.mark.parametrize(("file", "text"), [
    ("turnrl-index.json", "{"), ("turnrl-index.json", '{"format": 1}'), ("tantivy/meta.json", "{"),
])  # fmt: skip
def test_a_damaged_index_is_an_error_that_says_how_to_rebuild_it(tmp_path, file, text):
    (built(tmp_path) / file).write_text(text)
    with pytest.raises(ToolError, match=r"index' .*--overwrite"):
        WikiSearch(str(tmp_path / "index")).check()


def test_an_absent_index_names_the_folder_and_the_command(tmp_path):
    message = r"no search index in '.*nowhere' \(found: nothing\).*turnrl index build .*nowhere"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(tmp_path / "nowhere")).check()


def test_the_error_for_an_index_of_another_format_explains_how_to_rebuild(tmp_path):
    index = built(tmp_path)
    path = index / embedded.METADATA
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    message = r"has format 99, .*reads format 1\. .*rows\.jsonl --overwrite"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(index)).check()
    with pytest.raises(ToolError, match="format 99"):  # not silently built anew over the user's own
        WikiSearch(str(index), build_from=str(tmp_path / "rows.jsonl")).check()


# --- building ---


def test_build_from_builds_once_and_prints_one_line(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    for _ in range(2):
        tool = WikiSearch(str(tmp_path / "deep" / "index"), build_from=str(rows))
        tool.check()
    line = f"turnrl: building the search index {str(tool.index.folder)!r} from {rows}\n"
    assert capsys.readouterr().err == line
    assert ids_found(tool, "Utrecht") == ["1"]


def test_build_from_another_source_than_the_index_is_an_error(tmp_path):
    first, second = write_rows(tmp_path / "a.jsonl", ROWS), write_rows(tmp_path / "b.jsonl", ROWS)
    WikiSearch(str(tmp_path / "index"), build_from=str(first)).check()
    with pytest.raises(ToolError, match=r"built from '.*a\.jsonl', but build_from is '.*b\.jsonl'"):
        WikiSearch(str(tmp_path / "index"), build_from=str(second)).check()


def _check(index: str, source: str) -> None:
    WikiSearch(index, build_from=source).check()


@pytest.mark.slow
def test_workers_that_ask_at_once_build_once(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{**ROWS[0], "id": i} for i in range(5000)])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.starmap(_check, [(str(tmp_path / "index"), str(rows))] * 3, chunksize=1)
    assert embedded.read_info(tmp_path / "index").passages == 5000


def test_the_same_corpus_gives_the_same_version_and_the_same_ties_and_another_does_not(tmp_path):
    rows = [{"id": i, "title": f"Page {i}", "text": "The same words."} for i in range(3000)]
    corpus = corpus_of(write_rows(tmp_path / "rows.jsonl", rows))
    infos = [embedded.build(tmp_path / f"i{n}", corpus) for n in range(2)]
    assert infos[0].version == infos[1].version
    first, second = (ask(WikiSearch(i.index, top_k=9), "same words")[0] for i in infos)
    assert first == second
    rows[-1]["text"] = "Other words."
    corpus = corpus_of(write_rows(tmp_path / "rows.jsonl", rows))
    other = embedded.build(tmp_path / "i2", corpus)
    assert other.version != infos[0].version
    assert embedded.build(tmp_path / "i3", corpus, "standard").version != other.version


def test_an_index_is_replaced_only_on_request(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    embedded.build(tmp_path / "index", corpus_of(path))
    write_rows(path, ROWS[:2])
    with pytest.raises(ToolError, match=r"exists already\. Add --overwrite"):
        embedded.build(tmp_path / "index", corpus_of(path))
    assert embedded.build(tmp_path / "index", corpus_of(path), existing="keep").passages == 4
    assert embedded.build(tmp_path / "index", corpus_of(path), existing="replace").passages == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "index.lock", "rows.jsonl"]


def test_an_interrupted_build_leaves_no_index_and_begins_again(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    path.write_text(path.read_text() + "{")
    with pytest.raises(DataError, match="line 5: not JSON"):
        embedded.build(tmp_path / "index", corpus_of(path))
    with pytest.raises(ToolError, match="no search index"):
        WikiSearch(str(tmp_path / "index")).check()
    assert embedded.build(tmp_path / "index", corpus_of(write_rows(path, ROWS[:2]))).passages == 2
    assert len(ids_found(WikiSearch(str(tmp_path / "index"), top_k=9), "tower")) == 2


@pytest.mark.parametrize("name", [
    "{}", "{{class_path: SquadParagraphs, init_args: {{path: {}}}}}",
])  # fmt: skip
def test_an_index_whose_file_has_changed_is_refused(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    fields = {"title": "Cusco", "question": "Where?", "answers": {"text": ["Peru"]}}
    write_rows(path, [{"id": "1", "text": "In Peru.", "context": "In Peru."} | fields])
    tool = WikiSearch(str(tmp_path / "index"), build_from=name.format(path))
    tool.check()
    path.touch()  # the content is the same
    tool.check()
    write_rows(path, [{"id": "1", "text": "In Oslo.", "context": "In Oslo."} | fields])
    with pytest.raises(ToolError, match=rf"is older than '{path}'.* --overwrite"):
        tool.check()
    path.unlink()  # the index is enough
    tool.check()


# --- sources ---


def test_every_kind_of_source_gives_the_same_passages(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    jsonl = write_rows(tmp_path / "rows.jsonl", ROWS)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(jsonl.read_text())
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "title", "text", "more"])
        writer.writeheader()
        writer.writerows([{**row, "more": 'x,"y'} for row in ROWS])
    folder = tmp_path / "set"
    folder.mkdir()
    table = pyarrow.Table.from_pylist([{**row, "more": 1} for row in ROWS])
    pyarrow.parquet.write_table(table, folder / "train.parquet", row_group_size=2)
    wiki_18 = [{"id": r["id"], "contents": f'"{r["title"]}"\n{r["text"]}'} for r in ROWS]
    write_rows(tmp_path / "wiki.jsonl", wiki_18)
    expected = [Passage(row["id"], row["title"], row["text"]) for row in ROWS]
    names = ("rows.jsonl", "rows.jsonl.gz", "rows.csv", "set/train.parquet", "wiki.jsonl")
    for name in names:
        assert list(open_corpus(str(tmp_path / name)).passages()) == expected, name
    of_folder = open_corpus(str(folder))
    cut = [passage.id for passage in of_folder.passages()]
    assert (str(of_folder.splitter), cut) == ("words=100", [f"{n}-0" for n in (1, 2, 3, 4)])


def test_two_passages_with_one_id_are_refused(tmp_path):
    rows = [{"id": i, "title": "A", "text": f"Text {i}."} for i in (*range(1500), 7)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"passages 8 and 1,501 have the same id '7'\. Give each"):
        embedded.build(tmp_path / "index", corpus_of(path))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no passages"),
    ('{"id": 1, "title": "a", "text": " "}', "has no passages"),
    ('{"id": 1, "title": "a"}', r"row 1: no value in the field 'text' \(found: id, title\)"),
    ('{"title": "a", "text": "b"}', "row 1: no value in the field 'id'"),
    ('{"id": 1, "title": "a", "text": "b"}\n{"id', "line 2: not JSON"),
    ("[1]", "line 1: not a JSON object"),
    ('{"id": 1, "text": {"en": "a"}}', "row 1: 'text' is a dict"),
])  # fmt: skip
def test_a_bad_corpus_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        embedded.build(tmp_path / "index", corpus_of(path))
    assert not (tmp_path / "index").exists()


def test_the_error_for_an_unknown_source_suggests_existing_ones():
    message = r"no source 'Atlass'\. Did you mean Atlas\? .*found: .*Atlas"
    with pytest.raises(DataError, match=message):
        open_corpus("Atlass")
    with pytest.raises(DataError, match=r"no file 'gone\.jsonl'"):
        open_corpus("gone.jsonl")


# --- splitting ---


def split(text: str, words: int) -> list[str]:
    return [p.text for p in Splitter(words).split(Passage("a", "T", text))]


def test_articles_are_cut_at_sentence_ends_near_the_size():
    sentences = [" ".join(["Word", *["w"] * 23, f"end{i}."]) for i in range(9)]  # 25 words each
    pieces = split(" ".join(sentences), 100)
    # 9 sentences: 4, 4, and 1 of 25 words, less than a third of 100, which joins the second passage
    assert [len(piece.split()) for piece in pieces] == [100, 125]
    assert " ".join(pieces) == " ".join(sentences)


def test_each_passage_keeps_its_title_and_gets_its_own_id():
    text = " ".join(["One two three four five six seven eight nine ten."] * 4)
    passages = Splitter(20).split(Passage("12", "Utrecht", text))
    assert [(p.id, p.title) for p in passages] == [("12-0", "Utrecht"), ("12-1", "Utrecht")]


def test_abbreviations_and_initials_do_not_end_a_sentence():
    text = "Dr. J. R. Smith met Mrs. Jones in St. Louis. Then 3 left. Done."
    assert split(text, 10) == ["Dr. J. R. Smith met Mrs. Jones in St. Louis.", "Then 3 left. Done."]


def test_a_sentence_without_end_is_cut_between_words():
    assert [len(p.split()) for p in split("word " * 250, 100)] == [100, 100, 50]


def test_an_article_without_text_has_no_passages():
    for words in (None, 10):
        assert Splitter(words).split(Passage("a", "T", " \n ")) == []


WORDS = st.sampled_from(["Word", "word.", "U.S.", "end!", '"Quote."', "\n", "3"])


@given(st.lists(WORDS, max_size=300))
def test_splitting_loses_and_changes_no_word_and_keeps_near_the_size(words):
    text = " ".join(words)
    pieces = split(text, 10)
    assert " ".join(pieces).split() == text.split()
    # at most one and a half times the size, and a third of it joined to the last
    assert all(len(piece.split()) <= 15 + 3 for piece in pieces)


@pytest.mark.parametrize(
    "text", ["words=9", "words=x", "words", "sentences", "", "words=-100", "words=²"]
)
def test_an_unknown_splitter_is_refused(text):
    with pytest.raises(RecipeError, match=r"no splitter .* Use 'words=100'"):
        Splitter.parse(text)


# --- the cache, and a rehearsal ---


def test_a_cached_query_is_not_searched_for_again(small_index, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache.sqlite")
    first = ask(WikiSearch(str(small_index), cache=cache), "tower", "zebra", "Utrecht")
    asked = []
    monkeypatch.setattr(
        embedded.EmbeddedIndex, "search", lambda _, queries, k: asked.append(queries)
    )
    assert ask(WikiSearch(str(small_index), cache=cache), "tower", "zebra", "Utrecht") == first
    assert asked == []


def test_another_version_of_an_index_is_never_answered_from_the_cache(tmp_path):
    path, cache = write_rows(tmp_path / "rows.jsonl", ROWS), str(tmp_path / "cache.sqlite")
    embedded.build(tmp_path / "index", corpus_of(path))
    assert ids_found(WikiSearch(str(tmp_path / "index"), cache=cache), "tower") != []
    write_rows(path, [{"id": "9", "title": "New", "text": "A tower."}])
    embedded.build(tmp_path / "index", corpus_of(path), existing="replace")
    assert ids_found(WikiSearch(str(tmp_path / "index"), cache=cache), "tower") == ["9"]


def test_a_rehearsal_builds_nothing_and_writes_nothing(small_index, tmp_path):
    def found(search):
        with search.rehearsal() as rehearsed:
            rehearsed.check()
            return ask(rehearsed, "Utrecht")[0].metadata["passage_ids"]

    rows, cache = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "cache.sqlite"
    assert found(WikiSearch(str(small_index), cache=str(cache))) == ["1"]
    index = str(tmp_path / "index")
    assert found(WikiSearch(index, build_from=str(rows))) == ["1"]
    assert found(WikiSearch(index, build_from="wikimedia/wikipedia")) == ["1"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(DataError, match=r"no file '.*gone\.jsonl'"):
        found(WikiSearch(index, build_from=str(tmp_path / "gone.jsonl")))
    with pytest.raises(ToolError, match="no search index in"):
        found(WikiSearch(index))


def test_a_cache_file_that_is_not_a_cache_is_named(small_index, tmp_path):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be taken for one" * 30)
    with pytest.raises(ToolError, match=r"the cache '.*notes\.txt' cannot be used"):
        ask(WikiSearch(str(small_index), cache=str(tmp_path / "notes.txt")), "tower")


# --- the command ---


def test_the_command_builds_describes_and_searches(tmp_path, capsys):
    hostile = {"id": "\x07", "title": "\u202eKnut", "text": "A stave \x1b[2J \x9b31m."}
    rows, index = write_rows(tmp_path / "rows.jsonl", [*ROWS, hostile]), tmp_path / "index"
    assert index_command("build", "--source", rows, "--index", index) == 0
    assert "5 passages" in capsys.readouterr().out
    assert index_command("info", "--index", index) == 0
    info = capsys.readouterr().out
    assert re.search(rf"source    {rows}\n.*\nanalyzer  english\npassages  5\n", info)
    assert index_command("search", "dom tower", "--index", index, "-k", 1) == 0
    assert f"Utrecht  [1]\n{ROWS[0]['text']}" in capsys.readouterr().out
    assert index_command("search", "stave", "--index", index) == 0
    out = capsys.readouterr().out
    assert r"\u202eKnut" in out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_the_command_scores_a_file_of_questions(tmp_path, small_index, capsys, caplog):
    questions = write_rows(
        tmp_path / "questions.jsonl",
        [
            {"question": "What is the capital of France?", "answers": ["paris!", "Lutetia"]},
            {"question": "Which tower is in Utrecht?", "answers": ["Eiffel"]},  # second passage
            {"question": "Who is it?", "answers": "The Who"},  # "who" alone, found by title
            {"question": "Is there a zebra\ud800\0?", "answers": ["yes"]},
            {"question": "Is there a zebra?", "answers": ["the"]},  # nothing is left of the answer
        ],
    )
    words = ["search", "--questions", questions, "--index", small_index]
    assert index_command(*words, "-k", 4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 questions over 4 passages"
    scores = ["answer@1   0.500", "answer@3   0.750", "answer@4   0.750"]
    assert lines[1:] == scores
    assert "left out 1 of 5 rows" in caplog.text
    assert index_command(*words, "--sample", 2) == 0
    assert "2 questions" in capsys.readouterr().out
    assert index_command(*words, "--sample", 5) == 2
    assert "--sample 5: " in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["search", "x", "--index", "nowhere"], "no search index in 'nowhere'"),
    (["search", "--index", "nowhere"], "a query or --questions SOURCE"),
    (["search", " ", "--index", "nowhere"], "the query is empty"),
    (["search", "x", "--index", "nowhere", "-k", "0"], "-k is 0"),
    (["search", "--questions", "gone.jsonl", "--index", "x"], "no file 'gone.jsonl'"),
    (["info", "--index", "{class_path: Elastic}"], "Elastic"),
    (["info", "--index", "{class_path: Elasticsearch, init_args: {nam: x}}"], "Did you mean name?"),
    (["build", "--index", "x", "--source", "Nothing"], "no source 'Nothing'"),
    (["build", "--index", "x", "--source", "Atlas", "--split", "lines"], "no splitter 'lines'"),
])  # fmt: skip
def test_a_mistake_at_the_command_line_is_a_message_and_an_exit_code(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert index_command(*words) in (1, 2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_tool_keeps_to_the_contract(small_index):
    from turnrl.testing import check_tool

    good = [{"query": "Utrecht"}, {"query": "zebra"}]
    check_tool(WikiSearch(str(small_index)), good, [{"query": ""}, {}, {"query": 3}])


def test_two_searches_in_one_recipe_have_names_of_their_own(small_index, tmp_path):
    paper = [{"id": "7", "title": "Monday", "text": "The tower of Utrecht is closed."}]
    news = WikiSearch(str(built(tmp_path, paper)), name="search_news", description="News.")
    searches = [WikiSearch(str(small_index)), news]
    assert [search.specs[0].name for search in searches] == ["search", "search_news"]
    assert searches[0].specs[0].description.startswith("Searches an encyclopedia")
    question, query = Question("q", "?", ("x",)), {"query": "tower of Utrecht"}
    calls = [ToolCall("search", query), ToolCall("search_news", query)]
    ((first, second),) = asyncio.run(call_tools(searches, question, [calls]))
    assert first.metadata["passage_ids"][0] == "1"
    assert second.content == "Monday\nThe tower of Utrecht is closed."
    with pytest.raises(RecipeError, match=r"two tools are called 'search'"):
        asyncio.run(call_tools([searches[0], WikiSearch("elsewhere")], question, [calls]))


@pytest.mark.parametrize(("options", "message"), [
    ({"name": "search news"}, "WikiSearch.name is 'search news'. Take a word of letters"),
    ({"name": None}, "WikiSearch.name is None. Take a word of letters"),
    ({"top_k": 0}, "top_k is 0"),
])  # fmt: skip
def test_an_impossible_option_is_named_instead_of_raising_a_type_error(options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        WikiSearch(**{"index": "index", **options})


def test_a_search_finds_letters_with_marks_however_they_are_written(tmp_path):
    rows = [{"id": "1", "title": "Sa\u0303o Tome\u0301", "text": "An island."}]
    rows += [{"id": "2", "title": "Kōchi", "text": "A city."}]
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl", rows)))
    tool = WikiSearch(str(tmp_path / "index"))
    assert ids_found(tool, "S\u00e3o") == ids_found(tool, "Sa\u0303o") == ["1"]
    assert ids_found(tool, "ko\u0304chi") == ["2"]
