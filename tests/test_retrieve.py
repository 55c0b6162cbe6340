"""Search behind a real server that speaks Search-R1's `/retrieve`."""

import json
import logging
import re
import time
from pathlib import Path

import pytest

from searching import (
    KEY,
    QUICK,
    ROWS,
    ask,
    corpus_of,
    index_command,
    retrieve_server,
    retry_once,
    write_rows,
)
from turnrl import RecipeError, ToolError
from turnrl_wiki_search import Retriever, WikiSearch, embedded
from turnrl_wiki_search.retrieve import RetrieveIndex

QUERIES = ["capital city of France", "serving coffees", "", "zebra", "tower", "Utrecht"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieve")
    embedded.build(folder / "index", corpus_of(write_rows(folder / "rows.jsonl")))
    return folder / "index"


@pytest.fixture(scope="module")
def module_server(folder):
    with retrieve_server(folder) as server:
        yield server


@pytest.fixture
def server(module_server):
    module_server.behaviour.clear()
    return module_server


@pytest.fixture(autouse=True)
def _retry_once(monkeypatch):
    retry_once(monkeypatch)


def search_tool(url: str, top_k=3, cache=None, **server) -> WikiSearch:
    return WikiSearch(Retriever(url, **{**QUICK, **server}), top_k=top_k, cache=cache)


# --- answers ---


def test_the_server_answers_like_the_index_it_serves(server, folder):
    assert ask(search_tool(server.url), *QUERIES) == ask(WikiSearch(str(folder)), *QUERIES)


def test_a_server_on_this_machine_is_asked_without_a_proxy(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert search_tool(server.url, wait_s=0).check() is None


def test_a_batch_is_sent_as_one_request_with_each_query_once(server):
    before = len(server.requests)
    tool = search_tool(server.url, top_k=2)
    ask(tool, *(f"tower {n % 200}" for n in range(400)))
    (request,) = server.requests[before:]
    assert request["queries"] == [f"tower {n}" for n in range(200)]
    assert (request["topk"], request["return_scores"]) == (2, True)


def test_the_documented_request_and_answer_match_the_protocol(server):
    page = Path(__file__).parents[1].joinpath("docs/howto/wikipedia-search.md").read_text()
    shown, answer = re.search(r"POST (\{.*\})\n(\{.*\})\n", page).groups()
    before = len(server.requests)
    tool = search_tool(server.url)
    ask(tool, "capital of Peru")
    (sent,) = server.requests[before:]
    assert sent.items() >= json.loads(shown).items()
    ((hit,),) = RetrieveIndex(Retriever(server.url))._hits(answer.encode(), 1, 3)
    assert (hit.passage.title, hit.passage.id, hit.score) == ("Peru", "7", 12.5)


@pytest.mark.parametrize("way", ["unscored", "bare"])
def test_a_server_without_scores_gives_passages_without_scores(server, folder, way):
    tool = search_tool(server.at(way))
    tool.check()
    (result,) = ask(tool, "tower")
    assert result.content == ask(WikiSearch(str(folder)), "tower")[0].content
    assert result.metadata["scores"] == [None] * len(result.metadata["passage_ids"])


def test_documents_may_lack_an_id_or_a_title_or_have_separate_fields_for_them(server):
    (untitled,) = ask(search_tool(server.at("untitled"), top_k=1), "Utrecht")
    assert untitled.content == ROWS[0]["text"]
    assert len(untitled.metadata["passage_ids"][0]) == 16
    again = ask(search_tool(server.at("untitled"), top_k=1), "Utrecht")[0]
    assert untitled.metadata["passage_ids"] == again.metadata["passage_ids"]
    (fields,) = ask(search_tool(server.at("fields"), top_k=1), "Utrecht")
    assert fields.content == f"Utrecht\n{ROWS[0]['text']}"
    (numbered,) = ask(search_tool(server.at("numbered"), top_k=1), "Utrecht")
    assert numbered.metadata["passage_ids"] == ["7"]
    (many,) = ask(search_tool(server.at("many"), top_k=1), "tower")
    assert len(many.metadata["passage_ids"]) == 1
    (half,) = ask(search_tool(server.at("surrogate"), top_k=1), "tower")
    assert half.content == "A\nhalf ?"


# --- answers of another shape ---

ODD = {
    "page": "<html><body>It works!",
    "list": "indices",
    "other": "'result'",
    "first": "1 lists of passages for 2 queries",
    "text": "2 lists of passages for 2 queries",
    "nothing": "'NoneType' object",
    "document": "the document 'a text' is not an object",
    "number": "a document without 'contents'",
    "score": "the score 'high' is not a number",
    "nan": "the score nan is not a number",
}
REFUSED = {
    "status404": "status 404",
    "moved": "status 307: /retrieve",
    "status401": "status 401.*variable TURNRL_RETRIEVE_API_KEY",
    "status422": "status 422.*'queries', 'topk' and 'return_scores'",
}
MEANINGS = ODD | REFUSED


@pytest.mark.parametrize("way", MEANINGS)
def test_an_answer_of_another_shape_is_refused_and_never_a_result(server, way):
    with pytest.raises(ToolError, match=MEANINGS[way]) as error:
        search_tool(server.at(way)).check()
    assert server.at(way) in str(error.value)
    tool = search_tool(server.url)
    server.behaviour.append(way)
    with pytest.raises(ToolError):
        ask(tool, "tower Utrecht", "tower Paris")


# --- faults that pass ---


@pytest.mark.parametrize("way", ["status500", "busy", "cut", "drip"])
def test_a_passing_fault_leaves_no_trace_in_the_answer(server, way, capsys):
    tool = search_tool(server.url, timeout_s=1.0)
    calm = ask(tool, "tower")
    server.behaviour.append(way)
    assert ask(tool, "tower") == calm
    assert capsys.readouterr().err == ""


def test_a_server_that_stays_away_ends_the_run_with_the_next_step(folder):
    with retrieve_server(folder) as server:
        tool = search_tool(server.url, wait_s=0.5)
        ask(tool, "tower")
        server.stop()
        with pytest.raises(ToolError, match=r"does not answer \(.*waited 0\.5 s .*--ckpt_path"):
            ask(tool, "tower")
        begin = time.monotonic()
        with pytest.raises(ToolError, match=r"Start it, or correct Retriever\.url"):
            tool.check()
        assert time.monotonic() - begin < 5
        server.start()
        assert ask(tool, "tower")[0].ok


# --- the key, and settings ---


def test_the_api_key_is_sent_and_redacted_from_server_errors(server, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TURNRL_RETRIEVE_API_KEY", KEY)
    tool = search_tool(server.url)
    ask(tool, "tower")
    assert server.requests[-1]["authorization"] == f"Bearer {KEY}"
    server.behaviour.append("secret")
    with pytest.raises(ToolError, match=r"I cannot read Bearer \*\*\*") as error:
        ask(tool, "tower")
    assert KEY not in f"{error.value} {caplog.text} {tool.__dict__}"
    monkeypatch.setenv("TURNRL_RETRIEVE_API_KEY", "two words")
    with pytest.raises(ToolError, match=r"TURNRL_RETRIEVE_API_KEY for .* has a space") as error:
        search_tool(server.url).check()
    assert "two words" not in str(error.value)


@pytest.mark.parametrize(("settings", "message"), [
    ({"url": "indexes/wiki"}, r"Retriever\.url is '.*'; it must look like http"),
    ({"url": f"http://a/retrieve?api_key={KEY}"}, r"Retriever\.url holds .*_RETRIEVE_API_KEY"),
    ({"timeout_s": 0.0}, r"timeout_s is 0\.0"), ({"version": " "}, "version is empty"),
])  # fmt: skip
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message) as error:
        Retriever(**{"url": "http://localhost:8000/retrieve", **settings})
    assert KEY not in str(error.value)


def test_the_address_alone_is_short_for_its_settings():
    assert WikiSearch("http://localhost:8000/retrieve").index == Retriever(
        "http://localhost:8000/retrieve"
    )
    with pytest.raises(RecipeError, match="build_from"):
        WikiSearch("http://localhost:8000/retrieve", build_from="Atlas")


# --- cache ---


def test_a_cache_needs_a_version_and_then_costs_no_request(server, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    with pytest.raises(ToolError, match=r"turnrl did not build them\. Set 'version' to"):
        search_tool(server.url, cache=cache).check()
    first = ask(search_tool(server.url, cache=cache, version="a"), *QUERIES)
    before = len(server.requests)
    assert ask(search_tool(server.url, cache=cache, version="a"), *QUERIES) == first
    assert len(server.requests) == before + 1  # to ask for the version
    ask(search_tool(server.url, cache=cache, version="b"), "tower")
    assert len(server.requests) == before + 3


# --- the command ---


def test_the_command_describes_and_searches(server, capsys):
    assert index_command("info", "--index", server.url) == 0
    assert "passages  unknown" in capsys.readouterr().out
    assert index_command("search", "dom tower", "--index", server.url, "-k", 1) == 0
    assert f"Utrecht  [1]\n{ROWS[0]['text']}" in capsys.readouterr().out
    assert index_command("build", "--source", "Atlas", "--index", server.url) == 2
    assert "is a server with an index of its own" in capsys.readouterr().err
