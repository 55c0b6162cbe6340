"""Search without a server: embedded indexes, their sources, the tool, the command."""

import asyncio
import csv
import gzip
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searching import ROWS as SMALL
from searching import (
    SHARED,
    ask,
    corpus_of,
    ids_found,
    index_command,
    needs_shared_data,
    write_rows,
)
from turnrl import DataError, Question, RecipeError, ToolCall, ToolError, ToolResult, call_tools
from turnrl.plugin.hooks import installed
from turnrl.types import Passage
from turnrl_wiki_search import Elasticsearch, Embedded, Retriever, WikiSearch, embedded
from turnrl_wiki_search.changes import changed_file, states_of
from turnrl_wiki_search.command import score_retrieval
from turnrl_wiki_search.index import MAX_QUERY_CHARACTERS, clean_query
from turnrl_wiki_search.sources import Corpus, files_of, open_source
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


def test_words_meet_in_their_stems(small_index):
    assert ids_found(WikiSearch(str(small_index), top_k=1), "serving coffees") == ["3"]


def test_top_k_bounds_the_passages(small_index):
    for k in (1, 2):
        assert len(ids_found(WikiSearch(str(small_index), top_k=k), "tower")) == k


def test_a_batch_is_answered_in_order_with_one_result_per_call(small_index):
    queries = ["Utrecht", "", "Paris", "Utrecht", "zebra", "rock band"]
    results = ask(WikiSearch(str(small_index), top_k=1), *queries)
    ids = [r.metadata.get("passage_ids") for r in results]
    assert ids == [["1"], None, ["2"], ["1"], [], ["4"]]
    assert [r.ok for r in results] == [True, False, True, True, True, True]


def test_an_empty_query_is_the_policys_mistake(small_index):
    for query in ("", "  \n", "\0"):
        (result,) = ask(WikiSearch(str(small_index)), query)
        assert result == ToolResult("The query is empty.", ok=False)


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


def test_a_thread_may_search_while_another_search_is_running(small_index):
    """Python may change threads wherever it collects garbage, also while words are being cut."""
    code = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from turnrl_wiki_search.embedded import EmbeddedIndex

index = EmbeddedIndex(sys.argv[1])
other, asked = ThreadPoolExecutor(1), []
def search_too(*_):
    asked.append(other.submit(index.search, ["a painter"], 3))
    asked[-1].exception()
gc.callbacks.append(search_too)
gc.set_threshold(5)
kept = [index._terms.analyzer.analyze("capital of Peru") for _ in range(1000)]
gc.callbacks.clear()
assert len(asked) > 200, len(asked)
for one in asked:
    one.result()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, small_index], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


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


def test_an_absent_index_names_the_folder_and_the_command(tmp_path):
    message = r"no search index in '.*nowhere' \(found: nothing\).*turnrl index build .*nowhere"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(tmp_path / "nowhere")).check()


def test_the_error_for_a_folder_without_an_index_lists_its_files(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    message = r"\(found: notes\.txt\).*turnrl index build"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(tmp_path)).check()


def test_the_error_for_an_index_of_another_format_explains_how_to_rebuild(tmp_path):
    index = built(tmp_path)
    path = index / embedded.METADATA
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    message = r"has format 99, .*reads format 1\. .*rows\.jsonl --overwrite"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(index)).check()
    with pytest.raises(ToolError, match="format 99"):  # not silently built anew over the user's own
        WikiSearch(str(index), build_from=str(tmp_path / "rows.jsonl")).check()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\x00"])
def test_damaged_metadata_is_an_error_that_names_it(tmp_path, text):
    (built(tmp_path) / embedded.METADATA).write_text(text)
    with pytest.raises(ToolError, match=r"turnrl-index\.json in '.*index'.*--overwrite"):
        WikiSearch(str(tmp_path / "index")).check()


def test_a_damaged_index_is_an_error_and_not_a_crash(tmp_path):
    (built(tmp_path) / "tantivy" / "meta.json").write_text("{")
    with pytest.raises(ToolError, match=r"cannot be opened by tantivy .*--overwrite"):
        WikiSearch(str(tmp_path / "index")).check()


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


class _Stop(Exception):
    pass


def many_rows(folder: Path, count: int) -> Path:
    rows = ({"id": i, "title": f"Page {i}", "text": f"only{i} shared."} for i in range(count))
    return write_rows(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("stop_at", [400, 1000, 2600])
def test_an_interrupted_build_resumes_without_losing_or_doubling_a_passage(
    tmp_path, monkeypatch, stop_at
):
    monkeypatch.setattr(embedded, "_COMMIT_EVERY", 500)
    monkeypatch.setattr(embedded, "_ONE_SEGMENT", 900)
    path = many_rows(tmp_path, 3000)

    def stop(passages: int) -> None:
        if passages >= stop_at:
            raise _Stop

    with pytest.raises(_Stop):
        embedded.build(tmp_path / "index", corpus_of(path, chunk=100), on_progress=stop)
    with pytest.raises(ToolError, match="an unfinished build beside it"):
        embedded.read_info(tmp_path / "index")
    seen = []
    info = embedded.build(tmp_path / "index", corpus_of(path, chunk=100), on_progress=seen.append)
    # 2600 passages: commits at 500 (or 900, when more threads start), so work was not repeated
    assert seen[0] > 100 or stop_at == 400
    whole = embedded.build(tmp_path / "whole", corpus_of(path, chunk=100))
    assert (info.passages, info.version) == (3000, whole.version)
    hits = embedded.EmbeddedIndex(tmp_path / "index").search(["shared"], 4000)[0]
    assert sorted(int(h.passage.id) for h in hits) == list(range(3000))
    assert not (tmp_path / "index.building").exists()


def test_a_build_killed_outright_is_taken_up(tmp_path):
    path = many_rows(tmp_path, 9_000)
    code = """
import os, sys
from turnrl_wiki_search import embedded
from turnrl_wiki_search.sources import Corpus, open_source
embedded._COMMIT_EVERY = 3_000
def stop(passages):
    if passages > 7_000:
        os.kill(os.getpid(), 9)
embedded.build(sys.argv[1], Corpus(open_source(sys.argv[2])), on_progress=stop)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "index"), str(path)]
    assert subprocess.run(command, check=False).returncode == -9
    seen = []
    embedded.build(tmp_path / "index", corpus_of(path), on_progress=seen.append)
    assert seen[0] == 6_000  # the first commit was at 4,000
    hits = embedded.EmbeddedIndex(tmp_path / "index").search(["shared"], 10_000)[0]
    assert len({h.passage.id for h in hits}) == len(hits) == 9_000


def test_an_interrupted_build_of_another_corpus_starts_over(tmp_path):
    def stop(passages: int) -> None:
        raise _Stop

    first, second = (
        write_rows(tmp_path / "a.jsonl", ROWS),
        write_rows(tmp_path / "b.jsonl", ROWS[:3]),
    )
    with pytest.raises(_Stop):
        embedded.build(tmp_path / "index", corpus_of(first, chunk=2), on_progress=stop)
    assert embedded.build(tmp_path / "index", corpus_of(second, chunk=2)).passages == 3


def test_an_index_is_replaced_only_on_request(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    embedded.build(tmp_path / "index", corpus_of(path))
    write_rows(path, ROWS[:2])
    with pytest.raises(ToolError, match=r"exists already\. Add --overwrite"):
        embedded.build(tmp_path / "index", corpus_of(path))
    assert embedded.build(tmp_path / "index", corpus_of(path), existing="keep").passages == 4
    assert embedded.build(tmp_path / "index", corpus_of(path), existing="replace").passages == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "index.lock", "rows.jsonl"]


# --- sources ---


def _rows_file(folder: Path, ending: str) -> Path:
    path = folder / f"rows{ending}"
    if ending == ".jsonl":
        write_rows(path, ROWS)
    elif ending == ".jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.write("\n".join(json.dumps(row) for row in ROWS))
    elif ending == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "title", "text", "more"])
            writer.writeheader()
            writer.writerows([{**row, "more": 'x,"y'} for row in ROWS])
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist([{**row, "more": 1} for row in ROWS])
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
def test_a_file_of_each_kind_is_read_and_taken_up_at_any_row(tmp_path, ending):
    path = str(_rows_file(tmp_path, ending))
    expected = [Passage(row["id"], row["title"], row["text"]) for row in ROWS]
    assert list(open_source(path).read()) == expected
    for row in range(len(ROWS)):
        source = open_source(path)
        articles = source.read()
        for _ in range(row):
            next(articles)
        position = json.loads(json.dumps(source.position()))
        articles.close()
        assert list(open_source(path).read(position or None)) == expected[row:]


def test_a_data_set_is_streamed_and_taken_up_at_any_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": str(i), "url": "u", "title": f"T{i}", "text": f"Text {i}."} for i in range(50)]
    for shard in range(5):
        table = pyarrow.Table.from_pylist(rows[shard * 10 : shard * 10 + 10])
        pyarrow.parquet.write_table(table, tmp_path / f"train-{shard}.parquet", row_group_size=3)
    source = open_source(str(tmp_path))
    assert str(source.splitter) == "words=100"
    articles = source.read()
    for row in range(1, 50):
        assert next(articles).id == str(row - 1)
        if row % 7 == 0:
            position = json.loads(json.dumps(source.position()))
            rest = open_source(str(tmp_path)).read(position)
            assert [a.id for a in rest] == [str(i) for i in range(row, 50)]
    articles.close()
    assert next(source.read()).id == "0"  # without a position, from the beginning
    info = embedded.build(tmp_path / "index", Corpus(open_source(str(tmp_path))))
    assert (info.passages, info.splitter) == (50, "words=100")


def test_an_installed_corpus_is_a_source_by_its_short_name(tmp_path):
    first = next(iter(installed("turnrl_datasets")["Atlas"]().passages()))
    assert next(iter(open_source("Atlas").read())) == first


def test_the_single_field_wiki_18_layout_is_read(tmp_path):
    path = write_rows(tmp_path / "wiki.jsonl", [{"id": 0, "contents": '"Utrecht"\nA city.'}])
    assert list(open_source(str(path)).read()) == [Passage("0", "Utrecht", "A city.")]


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no passages"),
    ("\n\n", "has no passages"),
    ('{"id": 1, "title": "a", "text": " "}', "has no passages"),
    ('{"id": 1, "title": "a"}', r"row 1: no value in the field 'text' \(found: id, title\)"),
    ('{"title": "a", "text": "b"}', "row 1: no value in the field 'id'"),
    ('{"id": 1, "title": "a", "text": "b"}\n{"id', "line 2: not JSON"),
    ("[1]", "line 1: not a JSON object"),
])  # fmt: skip
def test_a_bad_corpus_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        embedded.build(tmp_path / "index", corpus_of(path))
    assert not (tmp_path / "index").exists()


def test_a_bad_parquet_file_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"cannot read '.*rows\.parquet': Parquet magic"):
        list(open_source(str(tmp_path / "rows.parquet")).read())


def test_the_error_for_an_unknown_source_suggests_existing_ones():
    message = r"no source 'Atlass'\. Did you mean Atlas\? .*found: .*Atlas"
    with pytest.raises(DataError, match=message):
        open_source("Atlass")
    with pytest.raises(DataError, match=r"no file 'gone\.jsonl'"):
        [*open_source("gone.jsonl").read()]


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


# --- cache and replay ---


def test_a_replay_from_the_cache_needs_no_index(small_index, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    queries = ["tower", "zebra", "Utrecht"]
    first = ask(WikiSearch(str(small_index), cache=cache), *queries)
    moved = small_index.rename(small_index.with_name("away"))
    try:
        replay = WikiSearch(str(small_index), cache=cache, offline=True)
        replay.check()
        assert ask(replay, *queries) == first
        message = r"1 of 2 queries are not in the search cache .*'coffee'"
        with pytest.raises(ToolError, match=message):
            ask(replay, "tower", "coffee")
    finally:
        moved.rename(small_index)


def test_a_replay_of_nothing_is_an_error(tmp_path):
    tool = WikiSearch("index", cache=str(tmp_path / "cache.sqlite"), offline=True)
    with pytest.raises(ToolError, match="has never seen the index 'index'"):
        tool.check()


def test_another_version_of_an_index_is_never_answered_from_the_cache(tmp_path):
    path, cache = write_rows(tmp_path / "rows.jsonl", ROWS), str(tmp_path / "cache.sqlite")
    embedded.build(tmp_path / "index", corpus_of(path))
    assert ids_found(WikiSearch(str(tmp_path / "index"), cache=cache), "tower") != []
    write_rows(path, [{"id": "9", "title": "New", "text": "A tower."}])
    embedded.build(tmp_path / "index", corpus_of(path), existing="replace")
    assert ids_found(WikiSearch(str(tmp_path / "index"), cache=cache), "tower") == ["9"]


def rehearsed(tool):
    """Whether calls of the rehearsal found something."""
    with tool.rehearsal() as search:
        search.check()
        (result,) = search.run([ToolCall("search", {"query": "Utrecht lighthouse"})])
        assert result.ok
        return "Nothing" not in result.content


def test_a_rehearsal_builds_its_own_small_index_and_leaves_no_files(tmp_path):
    source = tmp_path / "rows.jsonl"
    rows = ({"id": n, "title": "", "text": "The lighthouse stands."} for n in range(300))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = tmp_path / "index"
    assert rehearsed(WikiSearch(str(index), build_from=str(source)))
    # of the hub, where it would be downloaded: a made-up passage
    assert rehearsed(WikiSearch(str(index), build_from="wikimedia/wikipedia"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(DataError, match=r"no file '.*gone\.jsonl'"):
        rehearsed(WikiSearch(str(index), build_from=str(tmp_path / "gone.jsonl")))
    with pytest.raises(ToolError, match="no search index in"):
        rehearsed(WikiSearch(str(index)))


def test_a_rehearsal_adds_nothing_to_a_cache_and_asks_it_nothing_new(small_index, tmp_path):
    cache = tmp_path / "cache.sqlite"
    assert rehearsed(WikiSearch(str(small_index), cache=str(cache))) is not None
    assert not cache.exists()
    replay = WikiSearch(str(small_index), cache=str(cache), offline=True)
    with pytest.raises(ToolError, match="has never seen"):
        rehearsed(replay)
    WikiSearch(str(small_index), cache=str(cache)).check()
    before = cache.read_bytes()
    assert rehearsed(replay)
    assert cache.read_bytes() == before


def test_a_cache_file_that_is_not_a_cache_is_named(small_index, tmp_path):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be taken for one" * 30)
    with pytest.raises(ToolError, match=r"the cache '.*notes\.txt' cannot be used"):
        ask(WikiSearch(str(small_index), cache=str(tmp_path / "notes.txt")), "tower")


# --- the command ---


def test_the_command_builds_describes_and_searches(tmp_path, capsys):
    rows, index = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "index"
    assert index_command("build", "--source", rows, "--index", index) == 0
    assert "4 passages" in capsys.readouterr().out
    assert index_command("info", "--index", index, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    fields = [info[name] for name in ("source", "splitter", "analyzer", "passages")]
    assert fields == [str(rows), "none", "english", 4]
    assert index_command("search", "dom tower", "--index", index, "-k", 1, "--json") == 0
    hits = json.loads(capsys.readouterr().out)
    assert [(h["id"], h["title"]) for h in hits] == [("1", "Utrecht")]


def test_nothing_in_a_passage_acts_on_the_terminal(tmp_path, capsys):
    hostile = {"id": "\x07", "title": "\u202eTower", "text": "A tower \x1b[2J \x9b31m."}
    index = built(tmp_path, [hostile])
    for more in ((), ("--json",)):
        assert index_command("search", "tower", "--index", index, *more) == 0
        out = capsys.readouterr().out
        assert r"\u202eTower" in out
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
    assert index_command(*words, "-k", 5, "--json") == 0
    score = json.loads(capsys.readouterr().out)
    assert [score[f"answer@{n}"] for n in (1, 3, 5)] == [0.5, 0.75, 0.75]
    assert (score["questions"], score["queries_per_s"] > 0) == (4, True)
    assert "left out 1 of 5 rows" in caplog.text
    assert index_command(*words, "--sample", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["questions"] == 2
    assert index_command(*words, "--sample", 5) == 2
    assert "--sample 5: " in capsys.readouterr().err


def test_the_command_scores_the_questions_of_an_installed_data_set(small_index, capsys):
    words = ["--questions", "Atlas", "--sample", 3, "--index", small_index]
    assert index_command("search", *words) == 0
    assert capsys.readouterr().out.startswith("3 questions over 4 passages")


@pytest.mark.parametrize(("words", "message"), [
    (["search", "x", "--index", "nowhere"], "no search index in 'nowhere'"),
    (["search", "--index", "nowhere"], "a query or --questions SOURCE"),
    (["search", " ", "--index", "nowhere"], "the query is empty"),
    (["search", "x", "--index", "nowhere", "-k", "0"], "-k is 0"),
    (["search", "--questions", "gone.jsonl", "--index", "x"], "no file 'gone.jsonl'"),
    (["search", "--questions", "Atlass", "--index", "x"], "'Atlass'"),
    (["info", "--index", "nowhere"], "no search index in 'nowhere'"),
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


def test_importing_the_plugin_loads_no_heavy_library():
    code = """
import sys, turnrl_wiki_search
heavy = {"torch", "elasticsearch", "elastic_transport", "tantivy", "datasets", "pyarrow"}
sys.exit(", ".join(heavy & set(sys.modules)) or 0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- real passages ---


@needs_shared_data
def test_retrieval_of_real_passages_reaches_the_figures(tmp_path, capsys):
    squad = SHARED / "squad"
    embedded.build(tmp_path / "index", corpus_of(squad / "corpus.jsonl"))
    words = ["--questions", squad / "dev.jsonl", "--sample", 500, "--index", tmp_path / "index"]
    assert index_command("search", *words, "-k", 5, "--json") == 0
    score = json.loads(capsys.readouterr().out)
    assert score["passages"] == 4496
    assert all(score[f"answer@{n}"] >= least for n, least in {1: 0.77, 3: 0.89, 5: 0.92}.items())


def test_a_forked_process_searches_as_its_parent_did(small_index):
    """A notebook forks its workers after a search, and has the threads of no pool in them."""
    code = """
import faulthandler, os, sys
from turnrl_wiki_search.embedded import EmbeddedIndex

index = EmbeddedIndex(sys.argv[1])
queries = ["capital of Peru", "river", "a painter"]
before = index.search(queries, 3)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    same = index.search(queries, 3) == before and index.search(queries[:1], 3) == before[:1]
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, small_index], check=False)
    assert done.returncode == 0


def test_the_tool_keeps_to_the_contract(small_index):
    from turnrl.testing import check_tool

    good = [{"query": "Utrecht"}, {"query": "zebra"}]
    check_tool(WikiSearch(str(small_index)), good, [{"query": ""}, {}, {"query": 3}])


def test_score_retrieval_counts_the_first_passage_that_holds_an_answer(small_index):
    index = embedded.EmbeddedIndex(small_index)
    questions = [Question("1", "tower", ("Eiffel",)), Question("2", "tower", ("Dom",))]
    score = score_retrieval(index, questions, 2)
    # each answer stands in one of the two passages on towers, one of which is first
    assert (score["answer@1"], score["answer@2"]) == (0.5, 1.0)
    assert "answer@3" not in score


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
    ({"name": ""}, "WikiSearch.name is ''."),
    ({"description": " "}, "WikiSearch.description is ' '. Say in one sentence"),
    ({"description": 5}, "WikiSearch.description is 5. Say in one sentence"),
    ({"name": None}, "WikiSearch.name is None. Take a word of letters"),
    ({"top_k": 0}, "top_k is 0"),
    ({"max_result_tokens": 0}, "max_result_tokens is 0"),
    ({"offline": True}, "offline needs a cache"),
])  # fmt: skip
def test_an_impossible_option_is_named_instead_of_raising_a_type_error(options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        WikiSearch(**{"index": "index", **options})


def test_only_the_outer_quotes_of_a_title_in_contents_are_removed(tmp_path):
    rows = [{"id": "1", "contents": '""Weird Al" Yankovic"\nHe sings.'}]
    (passage,) = open_source(str(write_rows(tmp_path / "rows.jsonl", rows))).read()
    assert passage == Passage("1", '"Weird Al" Yankovic', "He sings.")


@pytest.mark.parametrize("cls", [WikiSearch, Elasticsearch, Embedded, Retriever])
def test_every_argument_is_explained_in_its_docstring(cls):
    import inspect

    explained = inspect.getdoc(cls).partition("Args:")[2]
    for name in inspect.signature(cls).parameters:
        assert f"\n    {name}: " in explained


# --- a corpus and its index ---


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_two_passages_with_one_id_are_refused(tmp_path, kind):
    rows = [{"id": i, "title": "A", "text": f"Text {i}."} for i in (*range(1500), 7)]
    path = tmp_path / f"rows{kind}"
    if kind == ".jsonl":
        write_rows(path, rows)
    elif kind == ".csv":
        lines = [f"{row['id']},{row['title']},{row['text']}" for row in rows]
        path.write_text("\n".join(["id,title,text", *lines]))
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"passages 8 and 1,501 have the same id '7'\. Give each"):
        embedded.build(tmp_path / "index", corpus_of(path, chunk=100))


@pytest.mark.parametrize(("row", "message"), [
    ({"id": "1", "text": ["a", "b"]}, r"row 1: 'text' is a list, \['a', 'b'\], not a text"),
    ({"id": "1", "text": {"en": "a"}}, "row 1: 'text' is a dict"),
    ({"id": ["1"], "text": "a"}, r"row 1: 'id' is a list"),
    ({"id": "1", "title": ["a"], "text": "a"}, r"row 1: 'title' is a list"),
    ({"id": "1", "text": float("nan")}, r"row 1: no value in the field 'text'"),
    ({"id": float("nan"), "text": "a"}, r"row 1: no value in the field 'id'"),
])  # fmt: skip
def test_a_passage_that_is_not_text_is_refused(tmp_path, row, message):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=message):
        [*open_source(str(path)).read()]


def by_file(path: Path) -> str:
    return str(path)


def by_settings(path: Path) -> str:
    return f"{{class_path: SquadParagraphs, init_args: {{path: {path}}}}}"


@pytest.mark.parametrize("named", [by_file, by_settings])
def test_an_index_whose_file_has_changed_is_refused(tmp_path, named):
    path = tmp_path / "rows.jsonl"
    fields = {"title": "Cusco", "question": "Where?", "answers": {"text": ["Peru"]}}
    rows = [
        {"id": "1", "text": text, "context": text} | fields for text in ("In Peru.", "In Oslo.")
    ]
    write_rows(path, rows[:1])
    tool = WikiSearch(str(tmp_path / "index"), build_from=named(path))
    tool.check()
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))  # the content is the same
    tool.check()
    write_rows(path, rows[1:])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 2 * 10**9))
    message = rf"is older than '{path}', from which it was built\. Rebuild it: .* --overwrite"
    with pytest.raises(ToolError, match=message):
        WikiSearch(str(tmp_path / "index"), build_from=named(path)).check()
    embedded.build(tmp_path / "index", Corpus(open_source(named(path))), existing="replace")
    tool.check()
    path.unlink()  # the index is enough
    tool.check()


def test_a_file_added_to_the_folder_of_a_corpus_is_a_change(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS)
    source = str(tmp_path)
    states = states_of(files_of(source))
    assert changed_file(files_of(source), states) is None
    write_rows(tmp_path / "b.jsonl", ROWS)
    assert changed_file(files_of(source), states) == str(tmp_path / "b.jsonl")


def test_a_build_tells_of_passages_without_spaces_between_words(tmp_path, capsys):
    rows = [{"id": "1", "title": "京都", "text": "京都は日本の都市である。"}, *ROWS[1:]]
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl", rows)))
    assert "1 of 4 passages are in a script without spaces" in capsys.readouterr().err
    spaced = [
        {"id": "1", "title": "Cusco", "text": "Куско, Κούσκο, Cuzco 京都, 쿠스코는 페루의 도시다."}
    ]
    embedded.build(tmp_path / "other", corpus_of(write_rows(tmp_path / "other.jsonl", spaced)))
    assert not capsys.readouterr().err


def test_a_search_finds_letters_with_marks_however_they_are_written(tmp_path):
    rows = [{"id": "1", "title": "Sa\u0303o Tome\u0301", "text": "An island."}]
    rows += [{"id": "2", "title": "Kōchi", "text": "A city."}]
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl", rows)))
    tool = WikiSearch(str(tmp_path / "index"))
    assert ids_found(tool, "S\u00e3o") == ids_found(tool, "Sa\u0303o") == ["1"]
    assert ids_found(tool, "ko\u0304chi") == ["2"]
