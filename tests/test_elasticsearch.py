"""Search on a real Elasticsearch server, behind a proxy where a fault is the subject.

The server is the one at `TURNRL_TEST_ES_URL` if set, else `../shared/elasticsearch/server` beside
the repository starts one, else these tests are skipped. Those that crash or stop a server, or need
a password, share a second one, which is always our own.
"""

import base64
import json
import logging
import os
import random
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodes import PASSWORD
from proxies import Proxy
from searching import (
    API_KEY,
    QUICK,
    ROWS,
    SHARED,
    ask,
    corpus_of,
    index_command,
    needs_shared_data,
    search_tool,
    shared_rows,
    write_rows,
)
from turnrl import DataError, Question, RecipeError, Tool, ToolError
from turnrl_wiki_search import WikiSearch, elastic, embedded
from turnrl_wiki_search.coverage import score_retrieval
from turnrl_wiki_search.elastic import ElasticIndex, SearchServer
from turnrl_wiki_search.server import explained

pytestmark = pytest.mark.elasticsearch

CLOUD_HOST = "0123456789abcdef"


@pytest.fixture
def proxy(url):
    proxy = Proxy(url)
    yield proxy
    proxy.close()


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def small_index(url, tmp_path_factory) -> str:
    """An index that tests only read."""
    name = f"test-small-{uuid.uuid4().hex[:8]}"
    elastic.build(
        SearchServer(url=url),
        name,
        corpus_of(write_rows(tmp_path_factory.mktemp("s") / "rows.jsonl")),
    )
    return name


# --- searching and building ---


def test_a_forked_process_has_its_own_client():
    index = ElasticIndex(SearchServer(url="http://localhost:1"), "nothing")
    client = index._client
    assert index._client is client
    child = os.fork()
    if child == 0:
        own = index._client
        os._exit(0 if own is not client and index._client is own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index._client is client
    index.close()


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


def test_the_command_builds_describes_and_searches(url, name, tmp_path, capsys):
    place = ["--index", name, "--backend", "elasticsearch", "--url", url]
    rows = write_rows(tmp_path / "rows.jsonl")
    assert index_command("build", "--source", rows, *place, "--k1", 0.9, "--b", 0.4) == 0
    assert "3 passages" in capsys.readouterr().out
    assert index_command("info", *place, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["source"], info["splitter"], info["passages"]) == (str(rows), "none", 3)
    assert info["version"].endswith("-english-0.9-0.4")
    assert index_command("search", "dom tower", *place, "-k", 1, "--json") == 0
    assert [h["id"] for h in json.loads(capsys.readouterr().out)] == ["1"]
    assert index_command("build", "--source", rows, *place) == 1
    assert "exists already. Add --overwrite" in capsys.readouterr().err
    assert index_command("build", "--source", rows, *place, "--overwrite") == 0
    assert index_command("info", *place[1:1], "--index", "gone", *place[2:]) == 1
    assert re.search(
        rf"no index 'gone' at {url} \(found: .*{name}.*turnrl index build", capsys.readouterr().err
    )


def test_an_index_that_turnrl_did_not_build_is_neither_read_nor_deleted(url, name, tmp_path):
    import elasticsearch

    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name)
        with pytest.raises(ToolError, match="was not built by turnrl"):
            search_tool(name, url).check()
        with pytest.raises(ToolError, match="was not built by turnrl"):
            elastic.build(
                SearchServer(url=url),
                name,
                corpus_of(write_rows(tmp_path / "rows.jsonl")),
                overwrite=True,
            )
        assert client.indices.exists(index=name)


def test_passages_that_share_an_id_are_noticed(url, name, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "id": "1"}])
    with pytest.raises(DataError, match="passages 1 and 2 have the same id '1'"):
        elastic.build(SearchServer(url=url), name, corpus_of(path))


@needs_shared_data
def test_retrieval_of_real_passages_reaches_the_figures_of_the_folder(url, name, tmp_path):
    corpus = SHARED / "squad" / "corpus.jsonl"
    lines = (SHARED / "squad" / "dev.jsonl").read_text().splitlines()
    random.Random(0).shuffle(lines)
    rows = [json.loads(line) for line in lines[:500]]
    questions = [Question(row["id"], row["question"], tuple(row["answers"])) for row in rows]
    elastic.build(SearchServer(url=url), name, corpus_of(corpus))
    embedded.build(tmp_path / "index", corpus_of(corpus))
    server = score_retrieval(ElasticIndex(SearchServer(url=url), name), questions, 5)
    folder = score_retrieval(embedded.EmbeddedIndex(tmp_path / "index"), questions, 5)
    for rank, least in {1: 0.77, 3: 0.89, 5: 0.92}.items():
        assert server[f"answer@{rank}"] >= least
        assert abs(server[f"answer@{rank}"] - folder[f"answer@{rank}"]) <= 0.02


# --- calls together ---


def test_a_batch_leaves_in_requests_of_64_over_two_connections_and_answers_keep_their_order(
    small_index, proxy
):
    tool = search_tool(small_index, proxy.url, top_k=1)
    words = {"Utrecht": "1", "Paris": "2", "coffee": "3"}
    queries = [f"{random.Random(i).choice(list(words))} number{i}" for i in range(300)]
    proxy.faults.extend([0.1] * 5)
    results = ask(tool, *queries)
    assert [r.metadata["passage_ids"] for r in results] == [[words[q.split()[0]]] for q in queries]
    # a header and a query, each on its line
    sizes = [body.count(b"\n") / 2 for *_, body in proxy.requests]
    assert sorted(sizes) == [300 - 4 * 64, 64, 64, 64, 64]
    assert (proxy.connections, proxy.busiest) == (2, 2)


def test_batches_that_meet_share_the_two_connections(small_index, proxy):
    tool = search_tool(small_index, proxy.url, top_k=1)
    words = {"Utrecht": "1", "Paris": "2", "coffee": "3"}
    proxy.faults.extend([0.1] * 8)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda word: ask(tool, word)[0], [*words] * 3))
    assert [r.metadata["passage_ids"] for r in results] == [[i] for i in words.values()] * 3
    assert proxy.busiest == 2


def test_one_refused_request_in_a_batch_is_an_error(small_index, proxy):
    proxy.faults.extend([0.0, (400, {}, {"error": {"reason": "odd"}})])
    with pytest.raises(ToolError, match=r"refused a request .*odd"):
        ask(search_tool(small_index, proxy.url), *(f"tower {i}" for i in range(200)))


# --- faults that pass ---


@pytest.mark.parametrize(
    "fault",
    [
        "drop",
        "cut",
        1.5,  # longer than timeout_s
        (502, {}, {}),
        (503, {}, {"error": {"reason": "unavailable"}, "status": 503}),
        (504, {}, {}),
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
    ((406, {}, {"error": {"reason": "media-type"}}), r"servers of major 8 and 9; upgrade"),
    ((200, {"X-Elastic-Product": "Other"}, {}), "is not an Elasticsearch server"),
    ((200, {}, {"responses": [{"status": 404, "error": {"reason": "no such index"}}]}), "is gone"),
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


def test_a_server_of_another_major_is_named_with_its_version(small_index, proxy):
    proxy.faults.append((200, {}, {"nodes": {"n": {"version": "7.17.28"}}}))
    with pytest.raises(ToolError, match=r"runs Elasticsearch 7\.17\.28, .* major 8 and 9"):
        search_tool(small_index, proxy.url).check()


def test_a_client_of_another_major_is_named_with_the_command_that_mends_it(url, monkeypatch):
    import elasticsearch

    monkeypatch.setattr(elasticsearch, "__version__", (9, 5, 1))
    with pytest.raises(
        ToolError, match=r"elasticsearch 9\.5\.1 is installed, .*'elasticsearch>=8\.19,<9'"
    ):
        search_tool("x", url).check()


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


def test_an_outage_that_lasts_stops_the_run_with_the_next_step(small_index, proxy):
    tool = search_tool(small_index, proxy.url, wait_s=1.0)
    ask(tool, "tower")
    proxy.set_down(True)
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ask, tool, "tower") for _ in range(8)]
        for call in calls:
            with pytest.raises(
                ToolError, match=rf"{proxy.url} does not answer .*waited 1 s for it.*--ckpt_path"
            ):
                call.result()
    assert 1 <= time.monotonic() - begin < 3  # all eight wait for the one outage together
    proxy.set_down(False)
    assert ask(tool, "Utrecht")[0].ok


def test_the_tools_time_limit_leaves_room_for_the_whole_wait(url):
    # 2 attempts and 1 after the wait, of 2 s each and up to a minute's pause that the server asks
    # for; 30 s of waiting; 2 s to a probe
    assert search_tool("x", url).timeout_s >= 3 * (2 + 60) + 30 + 2
    assert WikiSearch("x", "elasticsearch", url=url).timeout_s > 900


# --- building through faults ---


def many_rows(folder: Path, count: int) -> Path:
    return write_rows(
        folder / "rows.jsonl",
        [{"id": i, "title": f"Page {i}", "text": f"only{i} shared"} for i in range(count)],
    )


def ids_held(url: str, name: str) -> list[int]:
    (hits,) = ElasticIndex(SearchServer(url=url), name).search(["shared"], 9_999)
    return sorted(int(hit.passage.id) for hit in hits)


def test_a_build_continues_through_faults_without_losing_or_doubling_a_passage(
    url, proxy, name, tmp_path, capsys
):
    path = many_rows(tmp_path, 900)
    hits = iter(range(1_000_000))

    def fault(passages: int) -> None:
        if next(hits) == 1:
            proxy.faults.extend(["drop", (429, {}, {"error": {"reason": "busy"}}), "cut"])

    corpus = corpus_of(path, chunk=100)
    info = elastic.build(SearchServer(url=proxy.url), name, corpus, on_progress=fault)
    assert info.passages == 900
    assert ids_held(url, name) == list(range(900))
    assert "resuming there" in capsys.readouterr().err


def test_an_interrupted_build_resumes_where_it_stopped(url, name, tmp_path):
    path = many_rows(tmp_path, 900)

    class Stop(Exception):
        pass

    def stop(passages: int) -> None:
        if passages >= 600:
            raise Stop

    with pytest.raises(Stop):
        elastic.build(SearchServer(url=url), name, corpus_of(path, chunk=10), on_progress=stop)
    # the place is saved every 25 chunks, and the last time it was not reached
    with pytest.raises(ToolError, match=r"is unfinished: 500 passages so far\. Finish it with"):
        search_tool(name, url).check()
    seen: list[int] = []
    corpus = corpus_of(path, chunk=10)
    info = elastic.build(SearchServer(url=url), name, corpus, on_progress=seen.append)
    assert seen[0] == 510
    assert ids_held(url, name) == list(range(900))
    *_, (_, mark) = corpus_of(path, chunk=10).chunks()
    assert info.version == f"elasticsearch-{mark.digest}-english-1.2-0.75"


def test_a_corpus_that_breaks_off_is_named_and_the_server_keeps_an_unfinished_index(
    url, name, tmp_path
):
    path = many_rows(tmp_path, 50)
    path.write_text(path.read_text() + '{"id": 1')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 51: not JSON"):
        elastic.build(SearchServer(url=url), name, corpus_of(path, chunk=20))
    with pytest.raises(ToolError, match="is unfinished"):
        search_tool(name, url).check()


def test_an_unfinished_build_of_something_else_is_not_taken_up(url, name, tmp_path):
    def stop(passages: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        elastic.build(
            SearchServer(url=url), name, corpus_of(many_rows(tmp_path, 30)), on_progress=stop
        )
    other = corpus_of(write_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(ToolError, match=r"holds another, unfinished build\. Add --overwrite"):
        elastic.build(SearchServer(url=url), name, other)
    assert elastic.build(SearchServer(url=url), name, other, overwrite=True).passages == 3


# --- cache and replay ---


def test_a_repeated_question_costs_no_request_and_a_replay_no_server(small_index, proxy, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    queries = ["tower", "zebra", "Utrecht"]
    first = ask(search_tool(small_index, proxy.url, cache=cache), *queries)
    tool = search_tool(small_index, proxy.url, cache=cache)
    tool.check()
    before = len(proxy.requests)
    assert ask(tool, *queries) == first
    assert len(proxy.requests) == before
    proxy.set_down(True)
    replay = search_tool(small_index, proxy.url, cache=cache, offline=True)
    replay.check()
    assert ask(replay, *queries) == first
    with pytest.raises(ToolError, match="not in the search cache"):
        ask(replay, "coffee")


# --- secrets ---


def test_the_api_key_is_sent_and_masked_in_server_errors(small_index, proxy, monkeypatch):
    monkeypatch.setenv("KEY", API_KEY)
    tool = search_tool(small_index, proxy.url, api_key="${KEY}")
    ask(tool, "tower")
    assert proxy.requests[-1][2]["authorization"] == f"ApiKey {API_KEY}"
    proxy.faults.append((400, {}, {"error": {"reason": f"cannot read {API_KEY}", "type": "x"}}))
    with pytest.raises(ToolError, match=r"cannot read \*\*\*"):
        ask(tool, "tower")


@pytest.mark.parametrize("argument", ["api_key", "password", "cloud_id"])
def test_a_secret_written_out_is_refused_and_not_repeated(argument):
    with pytest.raises(
        RecipeError, match=rf"{argument} must name an environment variable"
    ) as error:
        WikiSearch("x", "elasticsearch", **{argument: PASSWORD})
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"url": f"http://elastic:{PASSWORD}@localhost:9200"}, "url holds a user or a password"),
    ({"url": "localhost:9200"}, "must look like http://localhost:9200"),
    ({"url": "http://localhost", "cloud_id": "${C}"}, "url and cloud_id both name a server"),
    ({"api_key": "${A}", "password": "${B}"}, "two ways to sign in"),
    ({"timeout_s": 0.0}, r"timeout_s is 0\.0"),
    ({"retries": -1}, "retries is -1"),
])  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message) as error:
        WikiSearch("x", "elasticsearch", **arguments)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"api_key": "${NOT_SET_ANYWHERE}"}, "variable NOT_SET_ANYWHERE, which is not set"),
    ({"username": "me"}, "username is 'me', but there is no password"),
    ({"ca_certs": "gone.crt"}, r"no file 'gone\.crt' with certificates"),
    ({"ca_certs": __file__, "url": "http://localhost:9200"}, "is not https"),
])  # fmt: skip
def test_access_that_leads_nowhere_is_noticed_before_a_run(arguments, message):
    with pytest.raises(RecipeError, match=message):
        WikiSearch("x", "elasticsearch", **arguments).check()


def test_neither_a_cloud_id_nor_the_host_in_it_is_ever_shown(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    hidden = base64.b64encode(f"invalid${CLOUD_HOST}$kibana".encode()).decode()
    monkeypatch.setenv("TURNRL_ES_CLOUD_ID", f"my-deployment:{hidden}")
    tool = WikiSearch("x", "elasticsearch", **{**QUICK, "retries": 0})
    with pytest.raises(
        ToolError, match=r"the Elastic Cloud deployment in \$\{TURNRL_ES_CLOUD_ID\}"
    ) as error:
        tool.check()
    for text in (str(error.value), str(error.getrepr()), caplog.text):
        assert hidden not in text
        assert CLOUD_HOST not in text


def test_a_recipe_gives_each_argument_of_the_server_by_its_own_name(tmp_path, capsys):
    from jsonargparse import ArgumentParser

    arguments = {"url": ["https://a:1", "https://b:1"], "username": "me", "password": "${P}"}
    arguments |= {"ca_certs": "c.crt", "timeout_s": 3.0, "retries": 2, "wait_s": 7.0}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--tool", type=Tool)
    init = {"index": "wiki", "backend": "elasticsearch", **arguments}
    config = parser.parse_object({"tool": {"class_path": "WikiSearch", "init_args": init}})
    assert parser.instantiate(config).tool._server == SearchServer(**arguments)
    with pytest.raises(Exception, match="Option 'ulr' is not accepted"):
        parser.parse_object({"tool": {"class_path": "WikiSearch", "init_args": {"ulr": "x"}}})
    with pytest.raises(SystemExit):
        parser.parse_args(["--tool.help", "WikiSearch"])
    printed = capsys.readouterr().out
    for name, text in explained().items():
        assert re.search(rf"--tool\.{name}\b", printed)
        assert text.split()[0] in printed


def test_a_saved_recipe_holds_names_and_no_secrets(monkeypatch):
    from jsonargparse import ArgumentParser

    monkeypatch.setenv("MY_KEY", API_KEY)
    monkeypatch.setenv("TURNRL_ES_PASSWORD", PASSWORD)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--tool", type=Tool)
    init = {"index": "wiki", "backend": "elasticsearch", "api_key": "${MY_KEY}"}
    config = parser.parse_object({"tool": {"class_path": "WikiSearch", "init_args": init}})
    saved = parser.dump(config)
    assert "${MY_KEY}" in saved
    assert API_KEY not in saved
    assert PASSWORD not in saved
    assert WikiSearch(**vars(config.tool.init_args)).backend == "elasticsearch"


# --- figures ---


@pytest.mark.slow
@needs_shared_data
def test_figures_of_the_server(url, name, tmp_path):
    """Rates over 400,000 passages, in batches as the rollout sends them; run alone."""
    import elasticsearch

    rows = shared_rows()
    many = [{**rows[i % len(rows)], "id": f"{i}"} for i in range(400_000)]
    path = write_rows(tmp_path / "rows.jsonl", many)
    del many
    begin = time.perf_counter()
    elastic.build(SearchServer(url=url), name, corpus_of(path))
    rate = 400_000 / (time.perf_counter() - begin)
    print(f"\nbuild {rate:,.0f} passages/s")
    lines = (SHARED / "squad" / "dev.jsonl").read_text().splitlines()
    queries = [json.loads(line)["question"] for line in lines]
    client = elasticsearch.Elasticsearch(url, connections_per_node=64)
    tool = WikiSearch(name, "elasticsearch", url=url, top_k=3)

    def plain(query: str) -> None:
        client.search(index=name, query={"match": {"contents": query}}, size=3)

    def threads(count: int, asked: list[str]) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(plain, asked))

    def batches(size: int, asked: list[str]) -> None:
        for start in range(0, len(asked), size):
            ask(tool, *asked[start : start + size])

    def timed(call, size: int, asked: list[str]) -> float:
        begin = time.perf_counter()
        call(size, asked)
        return len(asked) / (time.perf_counter() - begin)

    threads(8, queries[:1000])
    rates = {"plain 1": timed(threads, 1, queries[1000:2000])}
    rates["plain 64"] = timed(threads, 64, queries[2000:5000])
    # 336: the calls of 16 questions, each asked 21 times; a query that came twice would be warm
    for part, size in enumerate((1, 16, 64, 336)):
        asked = queries[5000 + part * 1344 :][:1344]
        rates[f"batches of {size}"] = timed(batches, size, asked)
    client.close()
    print({key: round(value) for key, value in rates.items()})
    assert rates["batches of 336"] >= 1.4 * rates["plain 64"]
    assert rates["batches of 64"] >= 2 * rates["plain 1"]
