"""Search on a real Elasticsearch server, behind a proxy where a fault is the subject.

The server is the one at `TURNRL_TEST_ES_URL` if set, else `../shared/elasticsearch/server` beside
the repository starts one, else these tests are skipped.
"""

from __future__ import annotations

import random
import re
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodes import PASSWORD, Proxy
from searching import (
    API_KEY,
    ROWS,
    ask,
    corpus_of,
    ids_found,
    index_command,
    retry_once,
    search_tool,
    write_rows,
)
from turnrl import DataError, RecipeError, ToolError
from turnrl_wiki_search import Elasticsearch, WikiSearch, elastic, embedded
from turnrl_wiki_search.elastic import ElasticIndex

pytestmark = pytest.mark.elasticsearch

BUILD = sys.modules["turnrl_wiki_search.elastic.build"]
"""The module, whose name in its package is its function."""


@pytest.fixture
def proxy(url):
    proxy = Proxy(url)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def _retry_once(monkeypatch):
    retry_once(monkeypatch)


def new_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def name() -> str:
    return new_name()


@pytest.fixture(scope="session")
def small_index(url, tmp_path_factory) -> str:
    """An index that tests only read."""
    name = new_name()
    rows = write_rows(tmp_path_factory.mktemp("s") / "rows.jsonl")
    elastic.build(Elasticsearch(name, url), corpus_of(rows))
    return name


# --- searching and building ---


def test_the_tool_answers_from_the_server_as_from_a_folder(small_index, url, tmp_path):
    embedded.build(tmp_path / "index", corpus_of(write_rows(tmp_path / "rows.jsonl")))
    queries = ["capital city of France", "serving coffees", "", "zebra", "tower", "Utrecht"]
    ours = ask(search_tool(small_index, url), *queries)
    theirs = ask(WikiSearch(str(tmp_path / "index")), *queries)
    assert [r.content for r in ours] == [r.content for r in theirs]
    assert [r.metadata.get("passage_ids") for r in ours] == [
        r.metadata.get("passage_ids") for r in theirs
    ]
    assert ours[0].metadata["scores"] == sorted(ours[0].metadata["scores"], reverse=True)


@pytest.mark.parametrize("query", [
    'Utrecht AND (title:"x" OR *) ~2 ^3', 'Utrecht "', "Utrecht \ud800 half a surrogate pair",
    "Utrecht \0 \x01", "Utrecht " + "x" * 100_000,
    "Utrecht " + " ".join(f"word{i}" for i in range(5000)),
    '{"query": {"match_all": {}}} Utrecht\n{"index": "other"}\n',
])  # fmt: skip
def test_any_text_is_a_query_and_none_is_syntax(small_index, url, query):
    assert ask(search_tool(small_index, url), query)[0].metadata["passage_ids"][0] == "1"


def test_the_command_builds_describes_and_searches(url, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TURNRL_ES_URL", url)
    place = ["--index", f"{{class_path: Elasticsearch, init_args: {{name: {name}}}}}"]
    rows = write_rows(tmp_path / "rows.jsonl")
    assert index_command("build", "--source", rows, *place, "--analyzer", "standard") == 0
    assert "3 passages" in capsys.readouterr().out
    assert index_command("info", *place) == 0
    info = capsys.readouterr().out
    assert re.search(rf"version .*-standard\nsource    {rows}\n.*\n.*\npassages  3\n", info)
    assert index_command("search", "dom tower", *place, "-k", 1) == 0
    assert "Utrecht  [1]" in capsys.readouterr().out
    assert index_command("build", "--source", rows, *place) == 1
    assert "exists already. Add --overwrite" in capsys.readouterr().err
    assert index_command("build", "--source", rows, *place, "--overwrite") == 0
    gone = "{class_path: Elasticsearch, init_args: {name: gone}}"
    assert index_command("info", "--index", gone) == 1
    assert re.search(rf"no index 'gone' at {url}.*turnrl index build", capsys.readouterr().err)


def test_an_index_that_turnrl_did_not_build_is_neither_read_nor_deleted(url, name, tmp_path):
    import elasticsearch

    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name)
        with pytest.raises(ToolError, match="was not built by turnrl"):
            search_tool(name, url).check()
        rows = corpus_of(write_rows(tmp_path / "rows.jsonl"))
        with pytest.raises(ToolError, match="was not built by turnrl"):
            elastic.build(Elasticsearch(name, url), rows, overwrite=True)
        assert client.indices.exists(index=name)


# --- calls together ---


def test_a_batch_leaves_in_requests_of_64_and_answers_keep_their_order(small_index, proxy):
    tool = search_tool(small_index, proxy.url, top_k=1)
    words = {"Utrecht": "1", "Paris": "2", "coffee": "3"}
    queries = [f"{random.Random(i).choice(list(words))} number{i}" for i in range(150)]
    results = ask(tool, *queries)
    assert [r.metadata["passage_ids"] for r in results] == [[words[q.split()[0]]] for q in queries]
    # a header and a query, each on its line
    assert [body.count(b"\n") / 2 for *_, body in proxy.requests] == [64, 64, 22]


def test_batches_that_meet_share_the_two_connections(small_index, proxy):
    tool = search_tool(small_index, proxy.url, top_k=1)
    words = {"Utrecht": "1", "Paris": "2", "coffee": "3"}
    proxy.faults.extend([0.1] * 8)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda word: ask(tool, word)[0], [*words] * 3))
    assert [r.metadata["passage_ids"] for r in results] == [[i] for i in words.values()] * 3
    assert proxy.busiest == 2


# --- faults that pass ---


@pytest.mark.parametrize(
    "fault",
    [
        "drop",
        "cut",
        1.5,  # longer than timeout_s
        (503, {}, {"error": {"reason": "unavailable"}, "status": 503}),
        (429, {}, {"error": {"reason": "busy"}, "status": 429}),
        (200, {}, {"responses": [{"status": 429, "error": {"reason": "queue full"}}]}),
        (200, {}, {"responses": [{"status": 200, "_shards": {"failed": 1}, "hits": {"hits": []}}]}),
        (200, {}, {"responses": [{"status": 200, "timed_out": True, "hits": {"hits": []}}]}),
    ],
    ids=str,
)
def test_a_passing_fault_leaves_no_trace_in_the_answer(small_index, proxy, fault, capsys):
    tool = search_tool(small_index, proxy.url, timeout_s=1.0)
    calm = ask(tool, "tower")
    proxy.faults.append(fault)
    assert ask(tool, "tower") == calm
    assert capsys.readouterr().err == ""


def test_only_the_query_that_failed_is_asked_again(small_index, proxy):
    tool = search_tool(small_index, proxy.url, top_k=1)
    hit = {"_id": "9", "_score": 1.0, "_source": {"title": "From", "text": "proxy"}}
    good = {"status": 200, "_shards": {"failed": 0}, "hits": {"hits": [hit]}}
    busy = {"status": 429, "error": {"reason": "queue full"}}
    proxy.faults.append((200, {}, {"responses": [good, busy]}))
    first, second = ask(tool, "Paris", "Utrecht")
    assert first.content == "From\nproxy"
    assert second.metadata["passage_ids"] == ["1"]


def test_retry_after_is_honoured(small_index, proxy):
    tool = search_tool(small_index, proxy.url)
    ask(tool, "tower")
    proxy.faults.append((429, {"Retry-After": "1"}, {}))
    begin = time.monotonic()
    ask(tool, "tower")
    assert 1.0 <= time.monotonic() - begin <= 4


# --- faults that stay ---


@pytest.mark.parametrize(("fault", "message"), [
    ((400, {}, {"error": {"reason": "odd"}}), "refused a request .*400"),
    ((401, {}, {"error": {"reason": "who"}}), "without credentials .*401.*TURNRL_ES_API_KEY"),
    ((403, {}, {"error": {"reason": "no"}}), "'read' and 'view_index_metadata'"),
    ((406, {}, {"error": {"reason": "media-type"}}), r"Elasticsearch 8 and 9 .*upgrade"),
    ((200, {"X-Elastic-Product": "Other"}, {}), "does not answer as Elasticsearch"),
    ((200, {}, {"responses": [{"status": 404, "error": {"reason": "no such index"}}]}), "404"),
    ((200, {}, {"responses": [{"status": 400, "error": {"reason": "bad"}}]}), "refused a search"),
], ids=lambda value: None if isinstance(value, tuple) else value)  # fmt: skip
def test_a_fault_that_stays_is_an_error_at_once_and_never_an_answer(
    small_index, proxy, fault, message
):
    tool = search_tool(small_index, proxy.url)
    proxy.faults.append(fault)
    begin = time.monotonic()
    with pytest.raises(ToolError, match=message):
        ask(tool, "tower")
    assert time.monotonic() - begin < 2
    assert ask(tool, "Utrecht")[0].ok


def test_check_names_a_server_that_is_not_there_and_does_not_wait_for_it():
    begin = time.monotonic()
    with pytest.raises(
        ToolError, match=r"http://127\.0\.0\.1:1 does not answer .*refused.*TURNRL_ES_URL"
    ):
        search_tool("x", "http://127.0.0.1:1").check()
    assert time.monotonic() - begin < 5


# --- outages ---


def test_an_outage_pauses_all_callers_and_leaves_no_trace(small_index, proxy, capsys):
    tool = search_tool(small_index, proxy.url, top_k=1)
    words = ["Utrecht", "Paris", "coffee", "zebra"]
    calm = {word: ask(tool, word)[0] for word in words}
    capsys.readouterr()
    proxy.set_down(True)
    before = proxy.connections
    with ThreadPoolExecutor(16) as pool:
        calls = [(word, pool.submit(ask, tool, word)) for word in words * 8]
        time.sleep(1.5)
        tried = proxy.connections - before
        assert not any(call.done() for _, call in calls)
        proxy.set_down(False)
        assert all(call.result(timeout=20)[0] == calm[word] for word, call in calls)
    # two callers with 2 attempts each, then one request every 2 seconds, whoever asks
    assert 2 < tried <= 2 * 2 + 2
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"turnrl: {proxy.url} does not answer \(.*\); "
        r"the run waits for it, 30 s at most \(wait_s\)",
        first,
    )
    assert re.fullmatch(rf"turnrl: {proxy.url} answers again after \d+ s; the run continues", last)


def test_the_tools_time_limit_leaves_room_for_the_whole_wait(url):
    # 2 attempts and 1 after the wait, of 2 s each and up to a minute's pause that the server asks
    # for; 30 s of waiting; 2 s to a probe
    assert search_tool("x", url).timeout_s >= 3 * (2 + 60) + 30 + 2
    assert WikiSearch(Elasticsearch("x")).timeout_s > 900


# --- building through faults ---


def many_rows(folder: Path, count: int) -> Path:
    return write_rows(
        folder / "rows.jsonl",
        [{"id": i, "title": f"Page {i}", "text": f"only{i} shared"} for i in range(count)],
    )


def ids_held(url: str, name: str) -> list[int]:
    (hits,) = ElasticIndex(Elasticsearch(name, url)).search(["shared"], 9_999)
    return sorted(int(hit.passage.id) for hit in hits)


def test_a_build_continues_through_faults_without_losing_or_doubling_a_passage(
    url, proxy, name, tmp_path, monkeypatch
):
    monkeypatch.setattr(BUILD, "_AT_ONCE", 100)
    corpus = corpus_of(many_rows(tmp_path, 900))
    proxy.faults.extend([0.0, 0.0, 0.0, "drop", (429, {}, {"error": {"reason": "busy"}}), "cut"])
    assert elastic.build(Elasticsearch(name, proxy.url), corpus).passages == 900
    assert ids_held(url, name) == list(range(900))


def test_an_unfinished_index_is_never_searched_and_only_replaced_on_request(
    url, name, tmp_path, monkeypatch
):
    monkeypatch.setattr(BUILD, "_AT_ONCE", 20)
    path = many_rows(tmp_path, 50)
    whole = path.read_text()
    path.write_text(whole + '{"id": 1')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 51: not JSON"):
        elastic.build(Elasticsearch(name, url), corpus_of(path))
    with pytest.raises(ToolError, match="is unfinished"):
        search_tool(name, url).check()
    path.write_text(whole)
    with pytest.raises(ToolError, match="exists already"):
        elastic.build(Elasticsearch(name, url), corpus_of(path))
    assert elastic.build(Elasticsearch(name, url), corpus_of(path), overwrite=True).passages == 50


# --- secrets ---


def test_the_api_key_is_sent_and_masked_in_server_errors(small_index, proxy, monkeypatch):
    monkeypatch.setenv("TURNRL_ES_API_KEY", API_KEY)
    tool = search_tool(small_index, proxy.url)
    ask(tool, "tower")
    assert proxy.requests[-1][2]["authorization"] == f"ApiKey {API_KEY}"
    proxy.faults.append((400, {}, {"error": {"reason": f"cannot read {API_KEY}", "type": "x"}}))
    with pytest.raises(ToolError, match=r"cannot read \*\*\*"):
        ask(tool, "tower")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"url": f"http://elastic:{PASSWORD}@localhost:9200"}, "url holds a user, a password"),
    ({"url": "localhost:9200"}, "must look like http://localhost:9200"),
    ({"timeout_s": 0.0}, r"timeout_s is 0\.0"),
    ({"version": "a"}, "version would have no effect"),
    ({"fields": {"title": "a"}}, r"fields is \{'title': 'a'\}"),
    ({"fields": {"text": "*"}}, r"'\*'"),
])  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message) as error:
        Elasticsearch("x", **arguments)
    assert PASSWORD not in str(error.value)


# --- an index that turnrl did not build ---


def make_index(url, properties, documents, **mappings) -> str:
    """An index as somebody else makes it."""
    import elasticsearch

    name = new_name()
    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name, mappings={"properties": properties, **mappings})
        for number, document in enumerate(documents, 1):
            client.index(index=name, id=f"{number}", document=document)
        client.indices.refresh(index=name)
    return name


@pytest.fixture(scope="module")
def news(url):
    english = {"en": {"type": "text", "analyzer": "english"}}
    properties = {
        "body": {"type": "text", "fields": english},
        "meta": {"properties": {"head": {"type": "text"}}},
        "section": {"type": "keyword"},
        "hidden": {"type": "text", "index": False},
    }
    rows = [{"body": row["text"], "meta": {"head": row["title"]}} for row in ROWS]
    return make_index(url, properties, [*rows, {"section": "x"}])


NEWS = {"text": "body", "title": "meta.head"}


def test_a_foreign_index_is_searched_by_its_fields(news, url):
    tool = search_tool(news, url, fields=NEWS)
    tool.check()
    (result,) = ask(tool, "dom tower of Utrecht")
    assert result.content.startswith(f"Utrecht\n{ROWS[0]['text']}")
    assert result.metadata["passage_ids"][0] == "1"
    # a word of the title alone, and one that only a field within a field stems
    assert ids_found(tool, "Café") == ["3"]
    assert ids_found(tool, "serving coffees") == []
    stemmed = search_tool(news, url, fields={"text": "body.en"})
    assert ask(stemmed, "coffees")[0].content == ROWS[2]["text"]


@pytest.mark.parametrize(
    ("part", "field"), [("text", "boddy"), ("title", "section"), ("title", "hidden")]
)
def test_a_field_that_cannot_be_searched_is_named(news, url, part, field):
    tool = search_tool(news, url, fields={"text": "body", part: field})
    with pytest.raises(ToolError, match=rf"'{field}'.*body, body\.en, meta\.head.*\.{part}\."):
        tool.check()


@pytest.mark.parametrize("source", [{"excludes": ["body"]}, {"enabled": False}])
def test_a_foreign_index_that_does_not_return_its_text_is_refused(url, source):
    text = {"type": "text"}
    documents = [{"body": "A tower", "head": "B"}]
    name = make_index(url, {"body": text, "head": text}, documents, _source=source)
    tool = search_tool(name, url, fields={"text": "body", "title": "head"})
    for act in (tool.check, lambda: ask(tool, "tower")):
        with pytest.raises(ToolError, match=r"fields\.text"):
            act()


def test_a_field_that_no_search_can_match_is_refused_before_a_run(url):
    whole = {"type": "text", "analyzer": "keyword"}
    properties = {"body": {"type": "text", "fields": {"whole": whole}}, "unused": {"type": "text"}}
    name = make_index(url, properties, [{"body": row["text"] * 5} for row in ROWS])
    search_tool(name, url, fields={"text": "body"}).check()
    for field in ("unused", "body.whole"):
        with pytest.raises(ToolError, match=rf"find no text in its field '{field}'"):
            search_tool(name, url, fields={"text": field}).check()
    search_tool(make_index(url, properties, []), url, fields={"text": "unused"}).check()


def test_documents_without_the_text_take_no_places_of_others(url):
    text = {"type": "text"}
    documents = [{"head": "tower"}] * 30 + [{"head": "A", "body": "A tower of a castle"}] * 3
    name = make_index(url, {"body": text, "head": text}, documents)
    tool = search_tool(name, url, fields={"text": "body", "title": "head"})
    # ids decide between equal scores
    assert ids_found(tool, "tower") == ["31", "32", "33"]


def test_foreign_indexes_share_no_cached_answers(url, news, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    with pytest.raises(ToolError, match=r"turnrl did not build them. Set 'version'"):
        search_tool(news, url, fields=NEWS, cache=cache).check()
    ask(search_tool(news, url, fields=NEWS, cache=cache, version="a"), "tower")
    other = make_index(url, {"body": {"type": "text"}}, [{"body": "Another tower"}])
    tool = search_tool(other, url, fields={"text": "body"}, cache=cache, version="a")
    assert ask(tool, "tower")[0].content == "Another tower"


def test_a_foreign_index_that_is_not_there_is_named(url):
    with pytest.raises(ToolError, match=r"no index 'gone' at .*Correct Elasticsearch.name"):
        search_tool("gone", url, fields=NEWS).check()
