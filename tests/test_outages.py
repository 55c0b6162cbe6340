"""Whole training runs while a search server is away, answers nonsense, or wants a password."""

import base64
import contextlib
import logging
import re
import shutil
import time

import pytest
import torch
import yaml

from nodes import PASSWORD, Proxy
from searching import (
    API_KEY,
    ITERATIONS,
    PAGE,
    ROOT,
    ask,
    corpus_of,
    environment_of,
    metrics,
    on_server,
    retrieve_server,
    search_tool,
    train,
    turnrl,
    write_rows,
)
from turnrl import ToolError
from turnrl_wiki_search import Elasticsearch, elastic, embedded
from turnrl_wiki_search.sources import open_corpus

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"timeout_s": 1.0, "wait_s": 120.0}
BASIC = base64.b64encode(f"elastic:{PASSWORD}".encode()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas") / "index"
    embedded.build(folder, open_corpus("Atlas"))
    with retrieve_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def node(locked_node):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(locked_node).items():
            patch.setenv(name, value)
        elastic.build(Elasticsearch("atlas"), open_corpus("Atlas"), overwrite=True)
    return locked_node


@pytest.fixture(scope="module")
def calm(server, tmp_path_factory):
    """The metrics of a run in which nothing happens, over the index in its folder."""
    folder = tmp_path_factory.mktemp("calm")
    code, err = train(folder, str(server.folder))
    assert code == 0, err
    return metrics(folder)


@contextlib.contextmanager
def stopped(server):
    server.stop()
    try:
        yield
    finally:
        server.start()


@contextlib.contextmanager
def hanging(server):
    server.hangs, server.behaviour[:] = True, ["hang"] * 100
    try:
        yield
    finally:
        server.behaviour.clear()
        server.hangs = False


def go_away(server, fault):
    """Be away until the run says so, and a little longer."""
    with fault(server):
        time.sleep(6)


def assert_unnoticed(folder, url, err):
    """The run says that the server was away, and no transcript does."""
    assert f"{url} does not answer" in err
    assert re.search(rf"{url} answers again after \d+ s; the run continues", err)
    run = folder / "runs" / "recipe" / "version_0"
    transcripts = "".join(p.read_text() for p in sorted((run / "transcripts").iterdir()))
    assert "result: " in transcripts
    for word in (url, "Connection", "timed out", "refused", "not answer", "status", "of order"):
        assert word not in transcripts, word


@pytest.mark.parametrize("fault", [stopped, pytest.param(hanging, marks=pytest.mark.slow)])
def test_a_run_outlives_its_retriever_and_trains_on_the_same_trajectories(
    server, calm, tmp_path, fault
):
    index = on_server("Retriever", url=server.url, **QUICK)
    code, err = train(tmp_path, index, lambda: go_away(server, fault))
    assert code == 0, err
    assert_unnoticed(tmp_path, server.url, err)
    assert metrics(tmp_path) == calm


def test_nonsense_in_the_middle_ends_a_run_with_a_checkpoint_and_the_next_step(server, tmp_path):
    index = on_server("Retriever", url=server.url, **QUICK)
    code, err = train(tmp_path, index, lambda: server.behaviour.extend(["page"] * 100))
    server.behaviour.clear()
    assert code == 1
    assert "Traceback" not in err
    assert f"{server.url} answered a search with '{PAGE}'" in err
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    assert 2 <= finished < ITERATIONS
    for path in (tmp_path / "runs").rglob("transcripts/*"):
        assert "It works" not in path.read_text()
    # the run goes on from there, and ends where it would have ended
    code, out, err = turnrl(tmp_path, ["fit", "recipe.yaml", "--ckpt_path", str(last)])
    assert code == 0, err
    assert out.count("\niteration ") == ITERATIONS - finished


@pytest.mark.slow
def test_five_lines_of_a_recipe_train_with_the_server_of_the_page(server, tmp_path):
    page = (ROOT / "docs" / "howto" / "wikipedia-search.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.S) if '/retrieve"' in b]
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    (tmp_path / "mine.yaml").write_text(block.replace("http://localhost:8000/retrieve", server.url))
    small = ["--trainer.max_epochs", "1", "--data.val_limit", "8"]
    small += ["--data.questions_per_iteration", "2", "--model.group_size", "4"]
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    before = len(server.requests)
    code, out, err = turnrl(tmp_path, ["fit", recipe, "mine.yaml", *small])
    assert code == 0, err
    assert "iteration   1/1" in out
    assert len(server.requests) > before


@pytest.mark.parametrize(("way", "words"), [
    ("retrieve", ()), ("page", ("It works!", "Correct Retriever.url")),
])  # fmt: skip
def test_the_doctor_asks_the_server(server, tmp_path, way, words):
    tool = {"index": on_server("Retriever", url=server.at(way))}
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": tool}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = turnrl(tmp_path, ["doctor", "recipe.yaml"])
    assert "Traceback" not in out + err
    assert code == (1 if words else 0), out
    (line,) = [line for line in out.splitlines() if re.match(r"(pass|fail)  tool ", line)]
    assert line.startswith("fail" if words else "pass")
    text = " ".join(out.split())
    assert all(word in text for word in words)


# --- Elasticsearch ---


@pytest.fixture(scope="module")
def quiet(node, tmp_path_factory):
    """A run on the node in which nothing happens, and which fills a cache."""
    folder = tmp_path_factory.mktemp("quiet")
    index = on_server("Elasticsearch", name="atlas", **QUICK)
    code, err = train(folder, index, cache="answers.sqlite", **environment_of(node))
    assert code == 0, err
    return folder


def disconnect(proxy):
    proxy.set_down(True)
    time.sleep(6)
    proxy.set_down(False)


def hang(proxy):
    proxy.hangs = True
    time.sleep(8)
    proxy.hangs = False


@pytest.mark.elasticsearch
@pytest.mark.parametrize("fault", [hang, pytest.param(disconnect, marks=pytest.mark.slow)])
def test_a_run_outlives_elasticsearch_and_trains_on_the_same_trajectories(
    node, quiet, tmp_path, fault
):
    proxy = Proxy(node.url, node)
    index = on_server("Elasticsearch", name="atlas", url=proxy.url, **QUICK)
    code, err = train(tmp_path, index, lambda: fault(proxy))
    proxy.close()
    assert code == 0, err
    assert_unnoticed(tmp_path, proxy.url, err)
    assert metrics(tmp_path) == metrics(quiet)


@pytest.mark.elasticsearch
def test_a_run_that_loses_its_server_saves_a_checkpoint_and_prints_how_to_resume(node, tmp_path):
    proxy = Proxy(node.url, node)
    index = on_server("Elasticsearch", name="atlas", url=proxy.url, timeout_s=1.0, wait_s=1.0)
    code, err = train(tmp_path, index, lambda: proxy.set_down(True))
    assert code == 1
    assert "Traceback" not in err
    assert f"the search server {proxy.url} does not answer" in err
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in err
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    # the run goes on from there, once the server is back
    proxy.set_down(False)
    code, out, err = turnrl(tmp_path, ["fit", "recipe.yaml", "--ckpt_path", str(last)])
    proxy.close()
    assert code == 0, err
    assert out.count("\niteration ") == ITERATIONS - finished


@pytest.mark.elasticsearch
def test_no_file_that_a_run_wrote_holds_a_password_or_a_key(node, quiet, tmp_path):
    names = {path.name for path in quiet.rglob("*")}
    assert {"metrics.csv", "config.yaml", "last.ckpt", "answers.sqlite", "output.log"} <= names
    shutil.copy(quiet / "recipe.yaml", tmp_path)
    access = {**environment_of(node), "TURNRL_ES_API_KEY": API_KEY}
    code, out, err = turnrl(tmp_path, ["fit", "recipe.yaml"], **access)
    assert code == 1
    assert "TURNRL_ES_API_KEY" in err
    (tmp_path / "output.log").write_text(out + err)
    for path in (path for path in [*quiet.rglob("*"), *tmp_path.rglob("*")] if path.is_file()):
        for secret in (PASSWORD, BASIC, API_KEY, API_KEY.partition(":")[2]):
            assert secret.encode() not in path.read_bytes(), (path, secret)


@pytest.mark.elasticsearch
def test_a_locked_server_opens_to_secrets_that_nothing_else_ever_shows(
    locked_node, tmp_path, monkeypatch, caplog, capsys
):
    caplog.set_level(logging.DEBUG)
    for name, value in environment_of(locked_node).items():
        monkeypatch.setenv(name, value)
    rows = corpus_of(write_rows(tmp_path / "rows.jsonl"))
    elastic.build(Elasticsearch("secrets"), rows, overwrite=True)
    tool = search_tool("secrets", None, cache=str(tmp_path / "cache.sqlite"))
    tool.check()
    assert ask(tool, "Paris")[0].ok
    shown = [repr(tool), repr(tool.__dict__), repr(tool._open_index().__dict__), caplog.text]
    wrong = [
        ({"TURNRL_ES_CA_CERTS": ""}, "certificate .* is not trusted .*Set TURNRL_ES_CA_CERTS"),
        ({"TURNRL_ES_PASSWORD": ""}, "a request without credentials .*Set TURNRL_ES_API_KEY"),
        ({"TURNRL_ES_PASSWORD": "w" + PASSWORD}, "refused user 'elastic' with the password"),
        ({"TURNRL_ES_API_KEY": API_KEY}, "refused the API key in TURNRL_ES_API_KEY .status 401"),
    ]
    for settings, message in wrong:
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            with pytest.raises(ToolError, match=message) as error:
                search_tool("secrets", None).check()
        shown.append(str(error.getrepr(style="long", showlocals=False)))
    shown += [*capsys.readouterr()]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    assert not [text for text in shown for secret in (PASSWORD, API_KEY, BASIC) if secret in text]
