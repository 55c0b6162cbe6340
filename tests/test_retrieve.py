"""Search behind a real server that speaks Search-R1's `/retrieve`, in a process of its own."""

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodes import free_port
from searching import (
    KEY,
    QUICK,
    ROWS,
    ask,
    asked_throughout,
    corpus_of,
    index_command,
    retriever_of,
    retry_once,
    write_rows,
)
from turnrl import RecipeError, ToolError
from turnrl_wiki_search import Retriever, WikiSearch, embedded
from turnrl_wiki_search.retrieve import RetrieveIndex
from turnrl_wiki_search.settings import check_url

QUERIES = ["capital city of France", "serving coffees", "", "zebra", "tower", "Utrecht"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieve")
    embedded.build(folder / "index", corpus_of(write_rows(folder / "rows.jsonl")))
    return folder / "index"


@pytest.fixture(scope="module")
def module_server(folder):
    with retriever_of(folder, free_port()) as server:
        yield server


@pytest.fixture
def server(module_server):
    module_server.behave()
    return module_server


@pytest.fixture(autouse=True)
def _retry_once(monkeypatch):
    retry_once(monkeypatch)


def search_tool(url: str, top_k=3, cache=None, offline=False, **server) -> WikiSearch:
    index = Retriever(url, **{**QUICK, **server})
    return WikiSearch(index, top_k=top_k, cache=cache, offline=offline)


# --- answers ---


def test_the_server_answers_like_the_index_it_serves(server, folder):
    assert ask(search_tool(server.url), *QUERIES) == ask(WikiSearch(str(folder)), *QUERIES)


def test_a_server_on_this_machine_is_asked_without_a_proxy(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert search_tool(server.url, wait_s=0).check() is None


def test_a_batch_is_sent_as_one_request_with_each_query_once(server):
    before = len(server.requests())
    tool = search_tool(server.url, top_k=2)
    ask(tool, *(f"tower {n % 200}" for n in range(400)))
    (request,) = server.requests()[before:]
    assert request["queries"] == [f"tower {n}" for n in range(200)]
    assert (request["topk"], request["return_scores"]) == (2, True)


def test_the_documented_request_and_answer_match_the_protocol(server):
    page = Path(__file__).parents[1].joinpath("docs/howto/wikipedia-search.md").read_text()
    shown, answer = re.search(r"POST (\{.*\})\n(\{.*\})\n", page).groups()
    before = len(server.requests())
    tool = search_tool(server.url)
    ask(tool, "capital of Peru")
    (sent,) = server.requests()[before:]
    assert sent.items() >= json.loads(shown).items()
    ((hit,),) = RetrieveIndex(Retriever(server.url))._hits(answer.encode(), 1, 3)
    assert (hit.passage.title, hit.passage.id, hit.score) == ("Peru", "7", 12.5)


def test_concurrent_batches_each_get_their_own_results(server):
    tool = search_tool(server.url, top_k=1)
    words = {"Utrecht": "1", "Paris": "2", "coffee": "3"}
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda word: ask(tool, word)[0], [*words] * 5))
    assert [r.metadata["passage_ids"] for r in results] == [[i] for i in words.values()] * 5


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


def test_passages_beyond_top_k_are_left_out_and_half_a_character_is_replaced(server):
    (result,) = ask(search_tool(server.at("many"), top_k=1), "tower")
    assert len(result.metadata["passage_ids"]) == 1
    (result,) = ask(search_tool(server.at("surrogate"), top_k=1), "tower")
    assert result.content == "A\nhalf ?"


# --- answers of another shape ---

ODD = {
    "page": "<html><body>It works!",
    "list": "indices",
    "other": "'result'",
    "null": "NoneType",
    "first": "1 lists of passages for 2 queries",
    "flat": "1 lists of passages for 2 queries",
    "text": "2 lists of passages for 2 queries",
    "strings": "'str' object",
    "nothing": "'NoneType' object",
    "document": "the document 'a text' is not an object",
    "empty": "a document without 'contents'",
    "number": "a document without 'contents'",
    "score": "the score 'high' is not a number",
    "nan": "the score nan is not a number",
}
REFUSED = {
    "status404": "status 404",
    "status405": "status 405",
    "moved": "status 307: /retrieve",
    "status401": "status 401.*variable TURNRL_RETRIEVE_API_KEY",
    "status403": "status 403.*variable TURNRL_RETRIEVE_API_KEY",
    "status422": "status 422.*'queries', 'topk' and 'return_scores'",
}
MEANINGS = ODD | REFUSED


@pytest.mark.parametrize("way", MEANINGS)
def test_a_server_of_another_shape_is_refused_before_a_run_with_the_next_step(server, way):
    with pytest.raises(ToolError, match=MEANINGS[way]) as error:
        search_tool(server.at(way)).check()
    assert server.at(way) in str(error.value)
    assert re.search(r"Correct Retriever\.url|Set the environment variable", str(error.value))


@pytest.mark.parametrize("way", MEANINGS)
def test_malformed_data_in_the_middle_ends_the_run_instead_of_giving_a_result(server, way):
    tool = search_tool(server.url)
    tool.check()
    server.behave(way)
    with pytest.raises(ToolError):
        ask(tool, "tower Utrecht", "tower Paris")
    assert ask(tool, "tower")[0].ok


# --- faults that pass ---


@pytest.mark.parametrize("way", ["status500", "status502", "status503", "status504", "cut", "drip"])
def test_a_passing_fault_leaves_no_trace_in_the_answer(server, way, capsys):
    tool = search_tool(server.url, timeout_s=1.0)
    calm = ask(tool, "tower")
    server.behave(way)
    assert ask(tool, "tower") == calm
    assert capsys.readouterr().err == ""


def test_retry_after_is_honoured(server):
    server.behave("busy")
    begin = time.monotonic()
    ask(search_tool(server.url), "tower")
    assert time.monotonic() - begin >= 1.0


def test_a_server_that_goes_away_and_comes_back_is_waited_for(folder):
    with retriever_of(folder, free_port()) as server:
        tool = search_tool(server.url, top_k=1, timeout_s=1.0, wait_s=90.0)
        assert asked_throughout(tool, server.crash) >= 80


def test_a_server_that_stays_away_ends_the_run_with_the_next_step(folder):
    with retriever_of(folder, free_port()) as server:
        tool = search_tool(server.url, wait_s=0.5)
        ask(tool, "tower")
        server.kill()
        with pytest.raises(ToolError, match=r"does not answer \(.*waited 0\.5 s .*--ckpt_path"):
            ask(tool, "tower")
        begin = time.monotonic()
        with pytest.raises(ToolError, match=r"Start it, or correct Retriever\.url"):
            tool.check()
        assert time.monotonic() - begin < 5
        server.start()
        assert ask(tool, "tower")[0].ok


# --- secrets ---


def test_the_api_key_is_sent_and_redacted_from_server_errors(server, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", KEY)
    tool = search_tool(server.url, api_key="${MY_KEY}")
    ask(tool, "tower")
    assert server.requests()[-1]["authorization"] == f"Bearer {KEY}"
    server.behave("secret")
    with pytest.raises(ToolError, match=r"I cannot read Bearer \*\*\*") as error:
        ask(tool, "tower")
    assert KEY not in str(error.value)
    assert KEY not in caplog.text
    assert KEY not in repr(tool.__dict__)
    monkeypatch.setenv("TURNRL_RETRIEVE_API_KEY", "another")
    ask(search_tool(server.url), "tower")
    assert server.requests()[-1]["authorization"] == "Bearer another"


def test_a_key_in_the_address_is_sent_and_not_shown(server, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", f"{KEY}&x")
    address = f"{server.at('status404')}?api_key=${{MY_KEY}}"
    tool = search_tool(address, version="a", cache=str(tmp_path / "cache.sqlite"))
    with pytest.raises(
        ToolError, match=r"status404\?api_key=\$\{MY_KEY\} refused a search"
    ) as error:
        tool.check()
    assert server.paths()[-1] == f"/status404?api_key={KEY}%26x"
    answering = search_tool(f"{server.url}?api_key=${{MY_KEY}}", version="a", cache=tool.cache)
    assert ask(answering, "tower")[0].ok
    shown = [str(error.value), caplog.text, repr(tool.__dict__)]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    assert "HTTP Request" in caplog.text
    assert not [text for text in shown if KEY in text]
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(
        RecipeError, match="names the environment variable MY_KEY, which is not set"
    ):
        search_tool(address).check()


@pytest.mark.parametrize(("value", "message"), [
    ("two words", r"the API key in \$\{MY_KEY\} for .* has a space"),
    ("kéy", r"has a space or another character"), ("", "variable MY_KEY, which is not set"),
])  # fmt: skip
def test_an_invalid_api_key_is_refused_without_being_shown(server, monkeypatch, value, message):
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises((ToolError, RecipeError), match=message) as error:
        search_tool(server.url, api_key="${MY_KEY}").check()
    assert not value or value not in str(error.value)


# --- settings ---


@pytest.mark.parametrize(("arguments", "message"), [
    ({"api_key": KEY}, "api_key must name an environment variable"),
    ({"timeout_s": 0.0}, r"timeout_s is 0\.0"), ({"version": " "}, "version is empty"),
])  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message) as error:
        Retriever("http://localhost:8000/retrieve", **arguments)
    assert KEY not in str(error.value)


def test_the_address_alone_is_short_for_its_settings():
    assert WikiSearch("http://localhost:8000/retrieve").index == Retriever(
        "http://localhost:8000/retrieve"
    )
    with pytest.raises(RecipeError, match="build_from"):
        WikiSearch("http://localhost:8000/retrieve", build_from="Atlas")


@pytest.mark.parametrize("address", ["localhost:8000", "indexes/wiki", "http://", "http://a:b/x"])
def test_an_index_that_is_not_an_address_is_refused(address):
    message = r"Retriever\.url is '.*'; it must look like http://localhost:8000/retrieve"
    with pytest.raises(RecipeError, match=message):
        search_tool(address).check()


@pytest.mark.parametrize("parameter", ["api_key", "apiKey", "access-token", "jwt", "X-Credentials"])
def test_a_key_in_an_address_is_refused_and_not_shown(parameter):
    address = f"http://localhost:1/retrieve?k=3&{parameter}=SEKRET"
    with pytest.raises(RecipeError, match=rf"{parameter} must name an environment var") as error:
        search_tool(address).check()
    assert "SEKRET" not in str(error.value)


@pytest.mark.parametrize("parameter", ["k", "max_tokens", "author", "keyword", "design", "sign"])
def test_an_unrelated_url_parameter_is_not_taken_for_an_api_key(parameter):
    check_url("Retriever.url", f"http://localhost:1/retrieve?{parameter}=3")


# --- cache ---


def test_a_cache_needs_a_version_and_then_costs_no_request_and_a_replay_no_server(folder, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    with retriever_of(folder, free_port()) as server:
        with pytest.raises(ToolError, match=r"turnrl did not build them\. Set 'version' to"):
            search_tool(server.url, cache=cache).check()
        first = ask(search_tool(server.url, cache=cache, version="a"), *QUERIES)
        tool = search_tool(server.url, cache=cache, version="a")
        tool.check()
        before = len(server.requests())
        assert ask(tool, *QUERIES) == first
        assert len(server.requests()) == before
        ask(search_tool(server.url, cache=cache, version="b"), "tower")
        assert len(server.requests()) == before + 2  # the check, and the search
    replay = search_tool(server.url, cache=cache, version="a", offline=True)
    replay.check()
    assert ask(replay, *QUERIES) == first
    with pytest.raises(ToolError, match="not in the search cache"):
        ask(search_tool(server.url, cache=cache, version="b", offline=True), "Utrecht")
    with pytest.raises(ToolError, match=r"has never seen the index '.*, version c'"):
        search_tool(server.url, cache=cache, version="c", offline=True).check()


# --- the command ---


def test_the_command_describes_and_searches(server, capsys):
    assert index_command("info", "--index", server.url) == 0
    assert "passages  unknown" in capsys.readouterr().out
    assert index_command("search", "dom tower", "--index", server.url, "-k", 1) == 0
    assert f"Utrecht  [1]\n{ROWS[0]['text']}" in capsys.readouterr().out
    assert index_command("build", "--source", "Atlas", "--index", server.url) == 2
    assert "is a server with an index of its own" in capsys.readouterr().err
