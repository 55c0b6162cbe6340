"""Whole training runs against a real server with `/retrieve`: outages, nonsense, replay."""

import re
import signal
import time

import pytest
import torch
import yaml

from nodes import free_port
from searching import ITERATIONS, PAGE, ROOT, metrics, on_server, retriever_of, train, turnrl
from turnrl_wiki_search import embedded
from turnrl_wiki_search.sources import Corpus, open_source

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas") / "index"
    embedded.build(folder, Corpus(open_source("Atlas")))
    with retriever_of(folder, free_port()) as server:
        yield server


@pytest.fixture
def server(module_server):
    module_server.behave()
    return module_server


def run_of(server, folder, during=None, **tool):
    quick = {"version": "atlas", "timeout_s": 1.0, "wait_s": 120.0}
    return train(None, folder, during, on_server("Retriever", url=server.url, **quick), **tool)


@pytest.fixture(scope="module")
def calm(module_server, tmp_path_factory):
    """A run in which nothing happens, and which fills a cache."""
    folder = tmp_path_factory.mktemp("calm")
    code, err = run_of(module_server, folder, cache="answers.sqlite")
    assert code == 0, err
    return folder


@pytest.mark.slow
def test_a_run_is_the_run_over_the_embedded_index(calm, module_server, tmp_path):
    code, err = train(None, tmp_path, index=str(module_server.index))
    assert code == 0, err
    assert metrics(tmp_path) == metrics(calm)


def crash(server):
    server.crash(3)


def hang(server):
    server.signal(signal.SIGSTOP)
    time.sleep(10)
    server.signal(signal.SIGCONT)


def busy(server):
    server.behave("status503", "cut", "status500", "status503", "drip", "status502")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [crash, hang, busy])
def test_a_run_outlives_its_server_and_trains_on_the_same_trajectories(
    server, calm, tmp_path, fault
):
    code, err = run_of(server, tmp_path, during=lambda: fault(server))
    assert code == 0, err
    assert f"{server.url} does not answer" in err
    assert re.search(rf"{server.url} answers again after \d+ s; the run continues", err)
    assert metrics(tmp_path) == metrics(calm)
    run = tmp_path / "runs" / "recipe" / "version_0"
    transcripts = "".join(p.read_text() for p in sorted((run / "transcripts").iterdir()))
    assert "result: " in transcripts
    for word in (server.url, "timed out", "refused", "not answer", "status", "out of order"):
        assert word not in transcripts, word


@pytest.mark.slow
def test_nonsense_in_the_middle_ends_a_run_with_a_checkpoint_and_the_next_step(
    server, calm, tmp_path
):
    code, err = run_of(server, tmp_path, during=lambda: server.behave(*["page"] * 100))
    assert code == 1
    assert "Traceback" not in err
    assert f"{server.url} answered a search with '{PAGE}'" in err
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    assert 2 <= finished < ITERATIONS
    for path in (tmp_path / "runs").rglob("transcripts/*"):
        assert "It works" not in path.read_text()
    # the run goes on from there, and ends where it would have ended
    server.behave()
    code, out, err = turnrl(None, tmp_path, ["fit", "recipe.yaml", "--ckpt_path", str(last)])
    assert code == 0, err
    assert out.count("\niteration ") == ITERATIONS - finished


@pytest.mark.slow
def test_a_run_is_replayed_from_its_cache_with_the_server_off(server, calm, tmp_path):
    server.signal(signal.SIGSTOP)
    try:
        cache = str(calm / "answers.sqlite")
        code, err = run_of(server, tmp_path, cache=cache, offline=True)
    finally:
        server.signal(signal.SIGCONT)
    assert code == 0, err
    assert metrics(tmp_path) == metrics(calm)


@pytest.mark.slow
def test_five_lines_of_a_recipe_train_with_the_server_of_the_page(server, tmp_path):
    page = (ROOT / "docs" / "howto" / "wikipedia-search.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.S) if '/retrieve"' in b]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 5
    text = block.replace("http://localhost:8000/retrieve", server.url)
    (tmp_path / "mine.yaml").write_text(text)
    assert list(yaml.safe_load(text)) == ["model"]
    small = ["--trainer.max_epochs", "1", "--data.val_limit", "8"]
    small += ["--data.questions_per_iteration", "2", "--model.group_size", "4"]
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    before = len(server.requests())
    code, out, err = turnrl(None, tmp_path, ["fit", recipe, "mine.yaml", *small])
    assert code == 0, err
    assert "iteration   1/1" in out
    assert len(server.requests()) > before


@pytest.mark.parametrize(("way", "words"), [
    ("retrieve", ()), ("page", ("It works!", "Correct Retriever.url")),
    ("status404", ("status 404", "Correct Retriever.url")),
])  # fmt: skip
def test_the_doctor_asks_the_server(server, tmp_path, way, words):
    tool = {"index": on_server("Retriever", url=server.at(way))}
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": tool}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = turnrl(None, tmp_path, ["doctor", "recipe.yaml"])
    assert "Traceback" not in out + err
    assert code == (1 if words else 0), out
    (line,) = [line for line in out.splitlines() if re.match(r"(pass|fail)  tool ", line)]
    assert line.startswith("fail" if words else "pass")
    text = " ".join(out.split())
    assert all(word in text for word in words)
