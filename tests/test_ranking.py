"""Search by vectors and by both rankings, and indexes that turnrl did not build: what needs no
server, and what a real Elasticsearch answers."""

import csv
import json
import random
import re
import sys
import uuid
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import encoders
from outages import ROOT, turnrl
from proxies import Proxy
from searching import QUICK, ROWS, ask, corpus_of, ids_found, index_command, write_rows
from turnrl import Passage, RecipeError, ToolError
from turnrl_wiki_search import WikiSearch, elastic
from turnrl_wiki_search.elastic import ElasticIndex, SearchServer
from turnrl_wiki_search.elastic.asking import Asking
from turnrl_wiki_search.encoding import open_encoder, unit
from turnrl_wiki_search.fusion import fuse
from turnrl_wiki_search.server import check_url
from turnrl_wiki_search.sources import Corpus, open_pages

# --- fusion ---


def naive_fusion(first: list, second: list) -> list:
    """Every key scored on its own, in fractions."""

    def score(key) -> Fraction:
        ranks = [ranking.index(key) + 1 for ranking in (first, second) if key in ranking]
        return sum((Fraction(1, 60 + rank) for rank in ranks), Fraction(0))

    def place(key) -> int:
        return first.index(key) if key in first else 10**6

    keys = sorted({*first, *second})
    ranked = sorted(keys, key=lambda key: (-score(key), place(key)))
    return [(key, score(key)) for key in ranked]


KEYS = st.lists(st.integers(0, 300).map(lambda n: (f"{n:03}", "i")), max_size=130, unique=True)


@given(KEYS, KEYS)
@example([("a", "i"), ("b", "i")], [("b", "i"), ("a", "i")])  # the same sum: words decide
@example([], [("b", "i"), ("a", "i")])
@example([("z", "i")], [("a", "i")])  # the same place in each
# 1/61 = 1/122 + 1/122, which floating point need not know
@example([("a", "i"), *((f"x{n}", "i") for n in range(60)), ("b", "i")],
         [*((f"y{n}", "i") for n in range(61)), ("b", "i")])  # fmt: skip
def test_ranks_are_fused_as_a_naive_sum_of_fractions(first, second):
    fused, naive = fuse(first, second), naive_fusion(first, second)
    assert [key for key, _ in fused] == [key for key, _ in naive]
    for (_, score), (_, exact) in zip(fused, naive, strict=True):
        assert score == pytest.approx(float(exact), rel=1e-12)


def test_the_score_of_a_fused_passage_is_the_sum_of_its_reciprocal_ranks():
    a, b, c = ("a", "i"), ("b", "i"), ("c", "i")
    # a: 1/61 + 1/63 = .03227, b: 1/62 = .01613, c: 1/61 = .01639
    fused = fuse([a, b], [c, ("d", "i"), a])
    assert [key[0] for key, _ in fused] == ["a", "c", "b", "d"]
    assert fused[0][1] == pytest.approx(1 / 61 + 1 / 63)


# --- settings ---

DENSE = {"ranking": "knn", "encoder": "encoders.words"}


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ranking": "knnn", "encoder": "m"}, "ranking is 'knnn'; choose one of bm25, knn, hybrid"),
    ({"ranking": "knn"}, "the ranking 'knn' needs an encoder for the queries. Set encoder"),
    ({"encoder": "m.f"}, "encoder would have no effect, because the ranking is 'bm25'. Set rank"),
    ({"query_prefix": "query: "}, "query_prefix would have no effect, because the ranking is"),
    ({"fields": {"text": "body", "vector": "v"}}, "fields.vector would have no effect"),
    ({**DENSE, "fields": {"text": "body"}}, "needs the field that holds the vectors. Add it to f"),
    ({"fields": {"title": "a"}}, "fields has no 'text', the field with the passages"),
    ({"fields": {"txt": "a"}}, r"fields has the part 'txt'\. Did you mean text\? It takes 'text'"),
    ({"fields": {"text": ""}}, "fields.text is '', which is not the name of a field"),
    ({"fields": {"text": "*"}}, r"fields.text is '\*', which is not the name of a field"),
    ({"fields": {"text": ["a"]}}, r"fields.text is \['a'\], which is not the name of a field"),
    ({"fields": "body"}, r"fields is 'body', which is not a mapping\. Write it as \{text: body"),
    ({"version": "a"}, "version would have no effect, because an index that turnrl built has one"),
])  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message):
        WikiSearch("x", "elasticsearch", **arguments)


@pytest.mark.parametrize(("backend", "arguments", "message"), [
    ("embedded", DENSE, "ranks by 'bm25' alone. Build an index on Elasticsearch with 'turnrl ind"),
    ("embedded", {"fields": {"text": "a"}}, "fields would have no effect, because an embedded"),
    ("retrieve", DENSE, "ranking, encoder would have no effect, because the backend is 'retrieve'"),
    ("retrieve", {"fields": {"text": "a"}}, "fields would have no effect"),
])  # fmt: skip
def test_other_backends_refuse_settings_only_elasticsearch_supports(backend, arguments, message):
    with pytest.raises(RecipeError, match=message):
        WikiSearch("http://localhost:1/retrieve", backend, **arguments)


def test_cache_keys_differ_for_every_setting_that_affects_the_hits():
    fields = {"text": "body", "vector": "v"}
    servers = [
        SearchServer(),
        SearchServer(**DENSE),
        SearchServer(**{**DENSE, "ranking": "hybrid"}),
        SearchServer(ranking="knn", encoder="other"),
        SearchServer(**DENSE, query_prefix="query: "),
        SearchServer(fields={"text": "body"}, version="a"),
        SearchServer(fields={"text": "other"}, version="a"),
        SearchServer(fields={"text": "body", "title": "head"}, version="a"),
        SearchServer(fields={"text": "body"}, version="b"),
        SearchServer(fields=fields, version="a", **DENSE),
        SearchServer(fields={**fields, "vector": "w"}, version="a", **DENSE),
    ]
    assert len({server.known_as("wiki") for server in servers}) == len(servers)
    assert SearchServer().known_as("wiki") == "wiki"  # as caches of earlier versions know it
    assert SearchServer(url="http://elsewhere:1").known_as("wiki") == "wiki"


def test_a_recipe_names_fields_and_an_encoder():
    from jsonargparse import ArgumentParser

    from turnrl import Tool

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--tool", type=Tool)
    how = {"fields": {"text": "body", "title": "head", "vector": "v"}, **DENSE}
    init = {"index": "wiki", "backend": "elasticsearch", "query_prefix": "query: ", **how}
    config = parser.parse_object({"tool": {"class_path": "WikiSearch", "init_args": init}})
    server = parser.instantiate(config).tool._server
    assert server == SearchServer(**how, query_prefix="query: ")
    init = {"index": "wiki", "backend": "elasticsearch", "ranking": "colbert"}
    with pytest.raises(Exception, match=r"bm25.*knn.*hybrid"):
        parser.parse_object({"tool": {"class_path": "WikiSearch", "init_args": init}})


def test_title_and_text_of_a_foreign_index_are_searched_as_one_field():
    titled = Asking("bm25", {"text": "body", "title": "head"})
    (body,) = titled.bodies("dom tower", None, 3)
    fields = {"type": "cross_fields", "fields": ["head", "body"]}
    there = {"exists": {"field": "body"}}
    matching = {"multi_match": {"query": "dom tower", **fields}}
    assert body["query"] == {"bool": {"must": matching, "filter": there}}
    assert (body["size"], body["_source"], body["fields"]) == (3, False, ["head", "body"])
    (body,) = Asking("bm25", {"text": "body"}).bodies("dom tower", None, 3)
    matching = {"match": {"body": {"query": "dom tower"}}}
    assert body["query"] == {"bool": {"must": matching, "filter": there}}


def test_a_document_of_somebody_else_may_have_several_values_or_none():
    asking = Asking("bm25", {"text": "body", "title": "head"})
    hits = [
        {"_id": "1", "_score": 2.0, "fields": {"body": ["one", "two"], "head": ["A\nB"]}},
        {"_id": "2", "_score": 1.0},
        {"_id": "3", "_score": 0.5, "fields": {"body": ["three"]}},
    ]
    passages = [hit.passage for hit in asking.hits([hits], 3)]
    assert passages == [Passage("1", "A B", "one\ntwo"), Passage("3", "", "three")]
    # in hybrid they are left out before the best k are taken, and not after
    hits = [{**hit, "_index": "i"} for hit in reversed(hits)]
    for n, hit in enumerate(hits):
        hit["_score"] = 1.0 - n * 0.1
    hybrid = Asking("hybrid", {"text": "body", "vector": "v"})
    assert [hit.passage.id for hit in hybrid.hits([hits, hits], 2)] == ["3", "1"]


def test_ids_decide_between_equal_scores():
    def hit(name, score):
        return {"_id": name, "_index": "i", "_score": score,
                "_source": {"title": name, "text": name}}  # fmt: skip

    hits = [hit("z", 2.0), hit("c", 1.0), hit("a", 1.0), hit("b", 1.0)]
    for ranking in ("bm25", "knn"):
        ids = [hit.passage.id for hit in Asking(ranking, None).hits([hits], 3)]
        assert ids == ["z", "a", "b"]
    hybrid = Asking("hybrid", None).hits([hits, hits], 3)
    assert [hit.passage.id for hit in hybrid] == ["z", "a", "b"]
    assert [hit.score for hit in hybrid] == pytest.approx([2 / 61, 2 / 62, 2 / 63])


def test_hits_without_any_text_raise_an_error_instead_of_an_empty_answer():
    asking = Asking("bm25", {"text": "body", "title": "head"})
    hits = [{"_id": f"{n}", "_index": "news", "_score": 1.0} for n in range(2)]
    assert asking.hits([[]], 3) == []
    with pytest.raises(ToolError, match=r"index 'news' is searched by its field 'body', but does"):
        asking.hits([hits], 3)
    titled = [{**hit, "fields": {"head": ["A"]}} for hit in hits]
    with pytest.raises(ToolError, match=r"leaves the field out of '_source'\. Set fields.text"):
        asking.hits([titled], 3)


# --- encoders ---


@pytest.fixture(autouse=True)
def fresh():
    open_encoder.cache_clear()
    encoders.ASKED.clear()


def test_texts_keep_their_order_though_batches_are_by_length():
    texts = [f"word{n} " * (1 + n * 7 % 13) for n in range(200)]
    encoder, seen = open_encoder("encoders.noted"), []
    vectors = encoder(texts, "query", seen.append)
    assert np.array_equal(vectors, encoders.words(texts))
    assert seen == [64, 128, 192, 200]
    assert [len(batch) for batch in encoders.ASKED] == [64, 64, 64, 8]
    lengths = [len(text) for batch in encoders.ASKED for text in batch]
    assert lengths == sorted(lengths)
    assert np.array_equal(open_encoder("encoders:listed")(texts, "query"), vectors)
    assert np.allclose(np.linalg.norm(unit(vectors), axis=1), 1, atol=1e-4)


@pytest.mark.parametrize(("name", "message"), [
    ("nan", "returned a vector with NaN or infinity for the text 'tower'"),
    ("zeros", "returned a vector of zeros for the text 'tower'"),
    ("flat", r"returned an array of shape \(128,\) for 2 texts. Return one row for each text"),
    ("miscounted", r"returned an array of shape \(1, 64\) for 2 texts"),
    ("strings", "returned something that is not an array of numbers"),
    ("ragged", "returned something that is not an array of numbers"),
    ("nothing", r"returned an array of shape \(\) for 2 texts"),
    ("raises", r"the encoder 'encoders.raises' raised KeyError: .*encoders.py:\d+\). Correct it"),
])  # fmt: skip
def test_vectors_that_are_none_are_refused_with_the_encoders_name(name, message):
    with pytest.raises(ToolError, match=message) as error:
        open_encoder(f"encoders.{name}")(["tower", "a longer text"], "passage")
    assert f"'encoders.{name}'" in str(error.value)


def test_an_encoder_may_return_zeros_for_unknown_words_but_not_nan():
    assert not open_encoder("encoders.zeros")(["tower"], "query").any()
    with pytest.raises(ToolError, match="returned a vector with NaN or infinity for the text"):
        open_encoder("encoders.nan")(["tower"], "query")


def test_an_encoder_whose_dimensions_change_is_refused():
    encoder = open_encoder("encoders.grows")
    encoder(["a"], "query")
    with pytest.raises(ToolError, match="returned vectors of 9 dimensions, and of 8 before"):
        encoder(["a"], "query")


@pytest.mark.parametrize(("name", "message"), [
    ("gone_module.encode", "cannot be imported .*'gone_module'.*or lie in the current folder"),
    ("encoders.notedd", "the module encoders has no 'notedd'. Did you mean noted"),
    ("encoders.NOT_A_FUNCTION", "NOT_A_FUNCTION'"),
    ("collections.Counter", "the encoder 'collections.Counter' is a class. Write a function that"),
    ("encoders:", "encoder is 'encoders.', and the module encoders has no ''. Correct the name"),
])  # fmt: skip
def test_an_encoder_that_is_not_there_is_named_with_the_next_step(name, message):
    with pytest.raises(RecipeError, match=message):
        open_encoder(name)


def test_a_module_that_raises_is_blamed(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"'broken_module.encode', .*\(ZeroDivisionError: divi"):
        open_encoder("broken_module.encode")


def test_a_model_needs_a_library_that_the_message_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        RecipeError,
        match=r"pip install '\.\[encoders\]'\" in your clone of turnrl. Or set encoder to a",
    ):
        open_encoder("sentence-transformers/all-MiniLM-L6-v2")
    with pytest.raises(RecipeError, match="is a model of sentence-transformers"):
        open_encoder("all-MiniLM-L6-v2")


def test_a_folder_with_a_model_encodes_and_leaves_the_random_numbers_alone(tiny_model):
    library = pytest.importorskip("sentence_transformers", reason="needs turnrl[encoders]")
    import torch

    state = torch.random.get_rng_state()
    encoder = open_encoder(str(tiny_model), "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    texts = ["the capital of France", "London", "Rome and Paris", "What is it?"]
    plain = library.SentenceTransformer(str(tiny_model), device="cpu")
    for kind in ("query", "passage"):
        assert np.allclose(encoder(texts, kind), plain.encode(texts), atol=1e-5)


# --- addresses with a key ---


@pytest.mark.parametrize("parameter", [
    "api_key", "apikey", "apiKey", "token", "access-token", "accesskey", "authtoken",
    "subscriptionkey", "subscription-key", "jwt", "id_jwt", "bearer", "credential", "X-Credentials",
])  # fmt: skip
def test_a_key_in_an_address_is_refused_and_not_shown(parameter):
    address = f"http://localhost:1/retrieve?k=3&{parameter}=SEKRET"
    with pytest.raises(RecipeError, match=rf"index holds the secret '{parameter}'") as error:
        WikiSearch(address, "retrieve").check()
    assert "SEKRET" not in str(error.value)
    assert f"?{parameter}=${{NAME}}" in str(error.value)


@pytest.mark.parametrize("parameter", ["k", "max_tokens", "author", "keyword", "design", "sign"])
def test_an_unrelated_url_parameter_is_not_taken_for_an_api_key(parameter):
    check_url(f"http://localhost:1/retrieve?{parameter}=3", "index")


# --- on a server: indexes of ours with vectors ---

server_test = pytest.mark.elasticsearch
WORDS = "river tower bridge castle lake church market island garden palace".split()  # noqa: SIM905
DRAWN = random.Random(3)
MANY = [
    {"id": f"{n}", "title": DRAWN.choice(WORDS), "text": " ".join(DRAWN.choices(WORDS, k=12))}
    for n in range(400)
]
QUERIES = [" ".join(DRAWN.choices(WORDS, k=3)) for _ in range(70)]


def new_name() -> str:
    return f"tests-of-ranking-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def dense(url, tmp_path_factory):
    name = new_name()
    path = write_rows(tmp_path_factory.mktemp("dense") / "rows.jsonl", MANY)
    elastic.build(
        SearchServer(url=url), name, corpus_of(path), encoder=open_encoder("encoders.words")
    )
    return name


def index_of(url, name, ranking, **more) -> ElasticIndex:
    how = {} if ranking == "bm25" else {"encoder": "encoders.words"}
    return ElasticIndex(SearchServer(url=url, ranking=ranking, **{**how, **QUICK, **more}), name)


@server_test
def test_knn_search_agrees_with_comparing_every_vector(dense, url):
    answers = index_of(url, dense, "knn").search(QUERIES, 5)
    texts = [f"{row['title']}\n{row['text']}" for row in MANY]
    similar = unit(encoders.words(QUERIES)) @ unit(encoders.words(texts)).T
    ids = [row["id"] for row in MANY]
    overlap = 0
    for hits, row in zip(answers, similar, strict=True):
        best = sorted(row, reverse=True)
        # numbers of 8 bits, and a graph that is searched in part
        for hit, score in zip(hits, best[:5], strict=True):
            assert hit.score == pytest.approx((1 + score) / 2, abs=0.01)
        overlap += len({hit.passage.id for hit in hits} & {ids[i] for i in np.argsort(-row)[:5]})
    assert overlap >= 0.8 * 5 * len(QUERIES)


@server_test
@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 60))])
def test_hybrid_search_fuses_the_hits_of_both_rankings(dense, url, k):
    depth = max(20, k)
    bm25, knn = (index_of(url, dense, kind).search(QUERIES, depth) for kind in ("bm25", "knn"))
    hybrid = index_of(url, dense, "hybrid").search(QUERIES, k)
    moved = 0
    for fused, words, near in zip(hybrid, bm25, knn, strict=True):
        lists = [[hit.passage.id for hit in hits] for hits in (words, near)]
        naive = naive_fusion(*lists)[:k]
        assert [hit.passage.id for hit in fused] == [key for key, _ in naive]
        assert [hit.score for hit in fused] == pytest.approx([float(score) for _, score in naive])
        moved += lists[0][:k] != [key for key, _ in naive]
    assert moved > 5


@server_test
def test_a_query_with_a_vector_of_zeros_has_no_neighbours_and_stops_nothing(dense, url):
    unknown, known = "tower ZZZ", "castle lake"
    (words,) = index_of(url, dense, "bm25").search([unknown], 20)
    how = {"encoder": "encoders.zeros_for_z"}
    near, nothing = index_of(url, dense, "knn", **how).search([known, unknown], 3)
    assert (len(near), nothing) == (3, [])
    assert index_of(url, dense, "knn", **how).search([unknown], 3) == [[]]
    before, fused, after = index_of(url, dense, "hybrid", **how).search([known, unknown, "lake"], 3)
    assert [hit.passage for hit in fused] == [hit.passage for hit in words[:3]]
    assert [hit.score for hit in fused] == pytest.approx([1 / 61, 1 / 62, 1 / 63])
    assert [before, after] == index_of(url, dense, "hybrid").search([known, "lake"], 3)


@server_test
def test_both_searches_of_every_query_are_sent_in_one_request(dense, url):
    proxy = Proxy(url)
    try:
        tool = WikiSearch(dense, "elasticsearch", url=proxy.url, ranking="hybrid",
                          encoder="encoders.noted", **QUICK)  # fmt: skip
        calm = ask(tool, *QUERIES[:20])
        (body,) = [body for _, path, _, body in proxy.requests if "_msearch" in path]
        assert body.count(b"\n") == 2 * 2 * len({*QUERIES[:20]})
        assert sum(len(batch) for batch in encoders.ASKED[1:]) == len({*QUERIES[:20]})
        # copies of a shard may score differently: each query has its own, and keeps them
        lines = [json.loads(line) for line in body.splitlines()]
        copies = [line["preference"] for line in lines[::2]]
        assert copies[::2] == copies[1::2]
        assert len(set(copies)) == len({*QUERIES[:20]})
        ask(tool, QUERIES[0])
        assert json.loads(proxy.requests[-1][3].splitlines()[0])["preference"] == copies[0]
        busy = {"status": 429, "error": {"reason": "queue full"}}
        proxy.faults.append((200, {}, {"responses": [busy] * 2}))
        assert ask(tool, QUERIES[0]) == calm[:1]
    finally:
        proxy.close()


@server_test
def test_vectors_are_not_stored_in_the_source_and_leave_the_bm25_version_unchanged(
    dense, url, tmp_path
):
    import elasticsearch

    with elasticsearch.Elasticsearch(url) as client:
        source = client.get(index=dense, id="1")["_source"]
        options = client.indices.get_mapping(index=dense)[dense]["mappings"]["properties"]["vector"]
    assert set(source) == {"title", "text"}
    assert options["index_options"]["type"] == "int8_hnsw"
    plain = new_name()
    path = write_rows(tmp_path / "rows.jsonl", MANY)
    without = elastic.build(SearchServer(url=url), plain, corpus_of(path))
    infos = {kind: index_of(url, dense, kind).info() for kind in ("bm25", "knn", "hybrid")}
    assert infos["bm25"].version == without.version
    assert len({info.version for info in infos.values()}) == 3
    assert {info.encoder for info in infos.values()} == {"encoders.words"}
    prefixed = index_of(url, dense, "knn", query_prefix="query: ").info()
    assert prefixed.version != infos["knn"].version
    assert replace(without, encoder="encoders.words", built="") == replace(
        infos["bm25"], index=plain, source=str(path), built=""
    )


@pytest.mark.slow
@server_test
def test_shards_change_the_answers_and_so_the_version(url, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", MANY)
    versions, answers = [], []
    for shards in (1, 3):
        name = new_name()
        info = elastic.build(SearchServer(url=url), name, corpus_of(path), shards=shards)
        versions.append(info.version)
        answers.append(index_of(url, name, "bm25").search(QUERIES, 3))
        assert index_of(url, name, "bm25").info().version == info.version
    assert answers[0] != answers[1]
    assert versions[0].endswith("-english-1.2-0.75")  # as caches of earlier versions know it
    assert versions[1] == f"{versions[0]}-3-shards"


@server_test
@pytest.mark.parametrize(("encoder", "message"), [
    ("encoders.others", r"'encoders.words', and the encoder 'encoders.others' gives other vectors"),
    ("encoders.wide", "gives vectors of 96 dimensions, and the index has 64. Set encoder to"),
    ("encoders.nan", "returned a vector with NaN"),
])  # fmt: skip
def test_another_encoder_than_the_indexs_is_refused(dense, url, encoder, message):
    with pytest.raises(ToolError, match=message):
        index_of(url, dense, "knn", encoder=encoder).info()
    with pytest.raises(ToolError, match=message):
        index_of(url, dense, "hybrid", encoder=encoder).search(["tower"], 1)
    # another name of the same encoder is no other encoder
    assert index_of(url, dense, "knn", encoder="encoders:listed").search(["tower"], 1)


@server_test
def test_an_index_without_vectors_ranks_by_words_alone(url, tmp_path):
    name = new_name()
    elastic.build(SearchServer(url=url), name, corpus_of(write_rows(tmp_path / "rows.jsonl")))
    message = r"has no vectors, which .*'turnrl index build --backend elasticsearch --index .* "
    with pytest.raises(ToolError, match=message + "--encoder encoders.words --overwrite'"):
        index_of(url, name, "knn").info()


@server_test
def test_a_passage_prefix_is_encoded_and_part_of_the_version(url, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl")
    versions = set()
    for prefix in ("", "passage: "):
        name = new_name()
        encoder = open_encoder("encoders.noted")
        elastic.build(SearchServer(url=url), name, corpus_of(path), encoder=encoder,
                      passage_prefix=prefix)  # fmt: skip
        assert any(f"{prefix}Utrecht\nUtrecht is" in text for text in encoders.ASKED[-1])
        versions.add(index_of(url, name, "knn").info().version)
    assert len(versions) == 2


@server_test
def test_an_interrupted_build_resumes_and_encodes_nothing_twice(url, tmp_path):
    name, path = new_name(), write_rows(tmp_path / "rows.jsonl", MANY)

    class Stop(Exception):
        pass

    def stop(count, read):
        assert count <= read
        if count >= 300:
            raise Stop

    def build(on_progress, encoder="encoders.noted"):
        return elastic.build(SearchServer(url=url), name, corpus_of(path, chunk=20),
                             on_progress=on_progress, encoder=open_encoder(encoder))  # fmt: skip

    with pytest.raises(Stop):
        build(stop)
    encoders.ASKED.clear()
    with pytest.raises(ToolError, match="holds another, unfinished build"):
        build(None, "encoders.others")
    counts = []
    assert build(lambda count, read: counts.append(count)).passages == 400
    assert counts == sorted(counts)
    encoded = sum(map(len, encoders.ASKED))
    assert encoded == 400 - 280  # the chunk that ends at 300 was under way
    results = index_of(url, name, "knn").search(QUERIES, 3)
    assert all(len(hits) == 3 for hits in results)


@server_test
def test_answers_by_vectors_are_cached_and_replayed_without_server_or_encoder(dense, url, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    how = {"ranking": "hybrid", "encoder": "encoders.noted", "cache": cache, **QUICK}
    first = ask(WikiSearch(dense, "elasticsearch", url=url, **how), *QUERIES[:9])
    encoders.ASKED.clear()
    again = WikiSearch(dense, "elasticsearch", url="http://localhost:1", offline=True, **how)
    again.check()
    assert ask(again, *QUERIES[:9]) == first
    assert encoders.ASKED == []
    other = WikiSearch(dense, "elasticsearch", url=url, **{**how, "ranking": "knn"})
    assert ask(other, *QUERIES[:9]) != first
    with pytest.raises(ToolError, match="has never seen the elasticsearch index"):
        WikiSearch(dense, "elasticsearch", url=url, **{**how, "query_prefix": "x"},
                   offline=True).check()  # fmt: skip


@server_test
def test_the_command_builds_describes_and_searches_by_vectors(url, tmp_path, capsys):
    name, rows = new_name(), write_rows(tmp_path / "rows.jsonl")
    place = ["--index", name, "--backend", "elasticsearch", "--url", url]
    assert index_command("build", "--source", rows, *place, "--passage-prefix", "p: ") == 2
    assert "--passage-prefix would have no effect" in capsys.readouterr().err
    assert index_command("build", "--source", rows, *place, "--encoder", "encoders.words") == 0
    assert "3 passages" in capsys.readouterr().out
    assert index_command("info", *place) == 0
    assert "encoder   encoders.words" in capsys.readouterr().out
    for ranking in ("knn", "hybrid"):
        how = ["--ranking", ranking, "--encoder", "encoders.words", "-k", 1, "--json"]
        assert index_command("search", "a dom tower in Utrecht", *place, *how) == 0
        assert [hit["id"] for hit in json.loads(capsys.readouterr().out)] == ["1"]
    assert index_command("search", "x", "--index", "i", "--ranking", "knn") == 2
    assert (
        "--ranking: an embedded index has no server, and ranks by BM25" in capsys.readouterr().err
    )


# --- on a server: indexes of somebody else ---


@pytest.fixture(scope="module")
def news(url):
    """An index as somebody else made it."""
    import elasticsearch

    name = new_name()
    english = {"en": {"type": "text", "analyzer": "english"}}
    properties = {
        "body": {"type": "text", "fields": english},
        "meta": {"properties": {"head": {"type": "text"}}},
        "section": {"type": "keyword"},
        "hidden": {"type": "text", "index": False},
        "embedding": {"type": "dense_vector", "dims": 64, "similarity": "cosine"},
        "bytes": {"type": "dense_vector", "dims": 64, "element_type": "byte"},
    }
    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name, mappings={"properties": properties})
        for row in ROWS:
            vector = encoders.words([f"{row['title']}\n{row['text']}"])[0].tolist()
            document = {"body": row["text"], "meta": {"head": row["title"]}, "embedding": vector}
            client.index(index=name, id=row["id"], document=document)
        client.index(index=name, id="empty", document={"section": "x"})
        client.indices.refresh(index=name)
    return name


NEWS = {"text": "body", "title": "meta.head"}


def news_tool(url, news, fields=NEWS, **more) -> WikiSearch:
    return WikiSearch(news, "elasticsearch", url=url, fields=fields, **{**QUICK, **more})


@server_test
def test_an_index_of_somebody_else_is_searched_by_its_fields(news, url):
    tool = news_tool(url, news)
    tool.check()
    (result,) = ask(tool, "dom tower of Utrecht")
    assert result.content.startswith(f"Utrecht\n{ROWS[0]['text']}")
    assert result.metadata["passage_ids"][0] == "1"
    assert result.metadata["passage_starts"][0] == len("Utrecht\n")
    # a word of the title alone, and one that only a field within a field stems
    assert ids_found(tool, "Café") == ["3"]
    assert ids_found(tool, "serving coffees") == []
    assert ids_found(news_tool(url, news, {"text": "body.en"}), "coffees") == ["3"]
    assert ask(news_tool(url, news, {"text": "body.en"}), "coffees")[0].content == ROWS[2]["text"]


@server_test
@pytest.mark.parametrize("ranking", ["knn", "hybrid"])
def test_vectors_of_somebody_else_are_searched(news, url, ranking):
    fields = {**NEWS, "vector": "embedding"}
    tool = news_tool(url, news, fields, ranking=ranking, encoder="encoders.words")
    tool.check()
    assert ids_found(tool, ROWS[1]["text"])[0] == "2"


@server_test
@pytest.mark.parametrize(("fields", "message"), [
    ({"text": "boddy"}, r"by fields.text: the field 'boddy' is not in it. Its text fields are: bod"
     r"y, body.en, meta.head. Correct fields.text."),
    ({"text": "section"}, "'section' has the type keyword, and text needs text. Its text fields"),
    ({"text": "hidden"}, "'hidden' is not indexed, so nothing can be searched for in it"),
    ({"text": "body", "title": "section"}, "by fields.title: the field 'section' has the type key"),
    ({"text": "body", "vector": "meta.head"}, "has the type text, and vector needs dense_vector. I"
     "ts dense_vector fields are: bytes, embedding"),
    ({"text": "body", "vector": "bytes"}, "has vectors of bytes, and encoders give decimal"),
])  # fmt: skip
def test_a_field_that_is_not_there_or_of_another_type_is_named(news, url, fields, message):
    more = {"ranking": "knn", "encoder": "encoders.words"} if "vector" in fields else {}
    tool = news_tool(url, news, fields, **more)
    for act in (tool.check, lambda: ask(tool, "tower")):
        with pytest.raises(ToolError, match=message) as error:
            act()
        assert news in str(error.value)


@server_test
@pytest.mark.parametrize(("source", "text"), [
    ({"excludes": ["body"]}, "body"), ({"excludes": ["body"]}, "body.en"),
    ({"enabled": False}, "body"),
])  # fmt: skip
def test_an_index_that_does_not_return_its_text_is_refused_before_a_run(url, source, text):
    import elasticsearch

    name = new_name()
    body = {"type": "text", "fields": {"en": {"type": "text"}}}
    properties = {"body": body, "head": {"type": "text"}}
    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name, mappings={"properties": properties, "_source": source})
        tool = news_tool(url, name, {"text": text, "title": "head"})
        tool.check()  # an index without documents is no mistake yet
        client.index(index=name, document={"head": "A tower"}, refresh=True)
        assert ids_found(tool, "tower") == []
        client.index(index=name, document={"body": "A tower", "head": "B"}, refresh=True)
    message = rf"index '{name}' is searched by its field '{text}', but does not return its text"
    for act in (tool.check, lambda: ask(tool, "tower")):
        with pytest.raises(ToolError, match=message):
            act()


@server_test
def test_a_field_that_no_search_can_match_is_refused_before_a_run(url):
    import elasticsearch

    name = new_name()
    whole = {"type": "text", "analyzer": "keyword"}
    text = {
        "type": "text",
        "fields": {"whole": whole, "english": {"type": "text", "analyzer": "english"}},
    }
    properties = {"body": text, "unused": {"type": "text"}}
    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name, mappings={"properties": properties})
        for row in ROWS:
            client.index(index=name, document={"body": row["text"] * 5}, refresh=True)
    for field in ("body", "body.english"):
        news_tool(url, name, {"text": field}).check()
    with pytest.raises(
        ToolError, match=rf"no document of index '{name}' .* has the field 'unused'"
    ):
        news_tool(url, name, {"text": "unused"}).check()
    with pytest.raises(ToolError, match=r"the analyzer of the field 'body\.whole' does not split"):
        news_tool(url, name, {"text": "body.whole"}).check()


@server_test
@pytest.mark.parametrize("ranking", ["bm25", "knn", "hybrid"])
def test_documents_without_the_text_take_no_places_of_others(url, ranking):
    import elasticsearch

    name = new_name()
    text, vector = {"type": "text"}, {"type": "dense_vector", "dims": 64, "similarity": "cosine"}
    properties = {"body": text, "head": text, "embedding": vector}
    near = encoders.words(["tower"])[0].tolist()
    far = encoders.words(["tower of a castle"])[0].tolist()
    with elasticsearch.Elasticsearch(url) as client:
        client.indices.create(index=name, mappings={"properties": properties})
        for _ in range(30):
            client.index(index=name, document={"head": "tower", "embedding": near})
        for n in range(3):
            document = {"head": "A", "body": "A tower of a castle", "embedding": far}
            client.index(index=name, id=f"{n}", document=document)
        client.indices.refresh(index=name)
    fields, how = {"text": "body", "title": "head"}, {"top_k": 3}
    if ranking != "bm25":
        fields["vector"] = "embedding"
        how |= {"ranking": ranking, "encoder": "encoders.words"}
    tool = news_tool(url, name, fields, **how)
    assert ids_found(tool, "tower") == ["0", "1", "2"]


@server_test
def test_vectors_of_somebody_else_of_other_dimensions_are_refused(news, url):
    fields = {"text": "body", "vector": "embedding"}
    message = r"has vectors of 64 dimensions, and the encoder 'encoders.wide' gives 96"
    with pytest.raises(ToolError, match=message):
        news_tool(url, news, fields, ranking="knn", encoder="encoders.wide").check()


@server_test
def test_an_index_of_somebody_else_that_is_not_there_is_named(url):
    with pytest.raises(ToolError, match=r"no index 'gone' at .*\(found: .*\). Correct 'index'"):
        news_tool(url, "gone").check()


@server_test
def test_a_cache_over_somebody_elses_index_needs_a_version(news, url, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    with pytest.raises(ToolError, match=r"turnrl did not build them. Set 'version'"):
        news_tool(url, news, cache=cache).check()
    first = ask(news_tool(url, news, cache=cache, version="a"), "tower")
    replay = news_tool("http://localhost:1", news, cache=cache, version="a", offline=True)
    assert ask(replay, "tower") == first
    with pytest.raises(ToolError, match="has never seen"):
        news_tool(url, news, {"text": "body"}, cache=cache, version="a", offline=True).check()


@server_test
def test_two_foreign_indexes_share_no_answers(
    news,
    url,
    tmp_path,
):
    import elasticsearch

    other = new_name()
    with elasticsearch.Elasticsearch(url) as client:
        document = {"body": "Another tower", "meta": {"head": "Other"}}
        client.index(index=other, id="other", document=document, refresh=True)
    how = {"cache": str(tmp_path / "cache.sqlite"), "version": "a"}
    assert sorted(ids_found(news_tool(url, news, **how), "tower")) == ["1", "2"]
    assert ids_found(news_tool(url, other, **how), "tower") == ["other"]


@server_test
def test_the_answers_in_somebody_elses_index_are_counted(news, url, tmp_path, capsys):
    rows = [
        {"id": "1", "question": "Where is it?", "answers": ["the Netherlands"]},
        {"id": "2", "question": "Who?", "answers": ["Rietveld"]},
        {"id": "3", "question": "What is served?", "answers": ["Café A café"]},  # title and text
    ]
    asked = write_rows(tmp_path / "questions.jsonl", rows)
    place = ["--index", news, "--backend", "elasticsearch", "--url", url]
    words = [*place, "--fields", "text=body,title=meta.head", "--questions", asked]
    assert index_command("check", *words) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 of 3 questions (66.7 %")
    assert "4 of 4 passages read" in out
    assert index_command("info", *place, "--fields", "text=body") == 0
    assert "passages  4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        index_command("info", *place, "--fields", "body")
    assert "must look like text=body,title=headline" in capsys.readouterr().err


# --- runs ---


@pytest.fixture(scope="module")
def places(url, tmp_path_factory):
    """Atlas as an index of somebody else, and as one of ours with vectors; their names."""
    import elasticsearch
    from elasticsearch import helpers

    source = open_pages("Atlas")
    names = {"news": new_name(), "corpus": new_name()}
    rows = [{"_index": names["news"], "_id": page.id, "headline": page.title, "body": page.text}
            for page in source.read()]  # fmt: skip
    with elasticsearch.Elasticsearch(url) as client:
        helpers.bulk(client, rows, refresh=True)
    encoder = open_encoder("encoders.words")
    elastic.build(SearchServer(url=url), names["corpus"], Corpus(source), encoder=encoder)
    return names


@pytest.mark.slow
@server_test
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("words", "name"), [("headline", "news"), ("ranking: hybrid", "corpus")])
def test_a_few_lines_of_a_recipe_of_the_page_train(places, url, tmp_path, words, name):
    page = (ROOT / "docs" / "howto" / "wikipedia-search.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.S) if words in b]
    assert f"index: {name}" in block
    assert len(block.splitlines()) <= 9
    text = block.replace(f"index: {name}", f"index: {places[name]}")
    text = text.replace("sentence-transformers/all-MiniLM-L6-v2", "encoders.noted")
    (tmp_path / "mine.yaml").write_text(text)
    small = ["--trainer.max_epochs", "1", "--data.val_limit", "8"]
    small += ["--data.questions_per_iteration", "4", "--model.group_size", "4"]
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    arguments = ["fit", recipe, "mine.yaml", *small]
    code, out, err = turnrl(None, tmp_path, arguments, TURNRL_ES_URL=url)
    assert code == 0, err
    assert "iteration   1/1" in out
    (metrics,) = (tmp_path / "runs").rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    assert max(float(row["train/tool_execution"] or 0) for row in rows) > 0
    assert bool(encoders.ASKED) == (name == "corpus")


@pytest.mark.slow
@server_test
def test_a_run_with_another_encoder_than_the_indexs_does_not_begin(places, url, tmp_path):
    tool = {"backend": "elasticsearch", "index": places["corpus"], "url": url}
    tool |= {"ranking": "knn", "encoder": "encoders.others"}
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": tool}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = turnrl(None, tmp_path, ["fit", "recipe.yaml"])
    assert code == 1
    assert "Traceback" not in err
    assert "the encoder 'encoders.others' gives other vectors" in err
    assert "iteration" not in out
