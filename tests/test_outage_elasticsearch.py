"""Whole training runs against a real Elasticsearch: outages, replay from the cache, secrets.

The server is one of our own, with a password and a certificate, for it is killed and stopped here.
"""

from __future__ import annotations

import base64
import logging
import re
import shutil
import signal
import time

import pytest
import torch

from nodes import PASSWORD
from searching import (
    API_KEY,
    ITERATIONS,
    ROOT,
    ask,
    corpus_of,
    metrics,
    on_server,
    search_tool,
    train,
    turnrl,
    write_rows,
)
from turnrl import ToolError
from turnrl_wiki_search import Elasticsearch, elastic

pytestmark = [pytest.mark.elasticsearch, pytest.mark.usefixtures("one_thread")]

TRAJECTORIES = 8


@pytest.fixture(scope="module")
def node(locked_node):
    index = "{class_path: Elasticsearch, init_args: {name: atlas}}"
    build = ["index", "build", "--source", "Atlas", "--index", index, "--split", "none"]
    code, _, err = turnrl(locked_node, ROOT, build)
    assert code == 0, err
    return locked_node


@pytest.fixture(scope="module")
def calm(node, tmp_path_factory):
    """A run in which nothing happens, and which fills a cache."""
    folder = tmp_path_factory.mktemp("calm")
    code, err = train(node, folder, cache="answers.sqlite")
    assert code == 0, err
    return folder


def crash(node, seconds):
    node.crash(seconds)


def hang(node, seconds):
    node.signal(signal.SIGSTOP)
    # two attempts of 1 s each and their pause, and then it counts as away
    time.sleep(seconds + 4)
    node.signal(signal.SIGCONT)


LONG = [
    pytest.param(fault, seconds, marks=pytest.mark.slow)
    for fault, seconds in ((crash, 0), (crash, 20), (hang, 20))
]


@pytest.mark.parametrize(("fault", "seconds"), [(hang, 0), *LONG])
def test_a_run_outlives_its_server_and_trains_on_the_same_trajectories(
    node, calm, tmp_path, fault, seconds
):
    code, err = train(node, tmp_path, during=lambda: fault(node, seconds))
    assert code == 0, err
    # it says what happened
    assert f"{node.url} does not answer" in err
    assert re.search(rf"{node.url} answers again after \d+ s; the run continues", err)
    # every iteration trained, on the very trajectories of a run without an outage
    assert metrics(tmp_path) == metrics(calm)
    run = tmp_path / "runs" / "recipe" / "version_0"
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == ITERATIONS
    # nothing of the outage reached the policy
    transcripts = [p.read_text() for p in sorted((run / "transcripts").iterdir())]
    assert len(transcripts) == ITERATIONS
    assert "result: " in "".join(transcripts)
    for word in (node.url, "Connection", "timed out", "Timeout", "refused", "not answer", "status"):
        assert not any(word in text for text in transcripts), word


def test_a_run_that_loses_its_server_saves_a_checkpoint_and_prints_how_to_resume(node, tmp_path):
    try:
        index = on_server("Elasticsearch", name="atlas", timeout_s=1.0, wait_s=1.0)
        code, err = train(node, tmp_path, lambda: node.signal(signal.SIGSTOP), index)
    finally:
        node.signal(signal.SIGCONT)
    assert code == 1
    assert "Traceback" not in err
    assert f"the search server {node.url} does not answer" in err
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in err
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    assert_hidden(tmp_path, [PASSWORD, BASIC])
    # the run goes on from there, once the server is back
    code, out, err = turnrl(node, tmp_path, ["fit", "recipe.yaml", "--ckpt_path", str(last)])
    assert code == 0, err
    assert out.count("\niteration ") == ITERATIONS - finished


BASIC = base64.b64encode(f"elastic:{PASSWORD}".encode()).decode()


def test_a_key_that_opens_nothing_is_not_shown(node, calm, tmp_path):
    shutil.copy(calm / "recipe.yaml", tmp_path)
    code, out, err = turnrl(node, tmp_path, ["fit", "recipe.yaml"], TURNRL_ES_API_KEY=API_KEY)
    assert code == 1
    assert "TURNRL_ES_API_KEY" in err
    (tmp_path / "output.log").write_text(out + err)
    assert_hidden(tmp_path, [API_KEY, API_KEY.partition(":")[2], PASSWORD])


def test_no_file_that_a_run_wrote_holds_the_password(calm):
    names = {p.name for p in calm.rglob("*")}
    wanted = {"metrics.csv", "config.yaml", "last.ckpt", "answers.sqlite", "output.log"}
    assert wanted <= names
    assert_hidden(calm, [PASSWORD, BASIC])


def assert_hidden(folder, secrets):
    for path in folder.rglob("*"):
        for secret in secrets:
            assert not path.is_file() or secret.encode() not in path.read_bytes(), (path, secret)


# --- without a run ---


def test_a_locked_server_opens_to_secrets_that_nothing_else_ever_shows(
    locked_node, tmp_path, monkeypatch, caplog, capsys
):
    name = "secrets"
    monkeypatch.setenv("MY_PASSWORD", PASSWORD)
    caplog.set_level(logging.DEBUG)
    access = {"url": locked_node.url, "ca_certs": locked_node.certificate}
    rows = corpus_of(write_rows(tmp_path / "rows.jsonl"))
    elastic.build(Elasticsearch(name, **access, password="${MY_PASSWORD}"), rows)
    tool = search_tool(
        name, **access, password="${MY_PASSWORD}", cache=str(tmp_path / "cache.sqlite")
    )
    tool.check()
    assert ask(tool, "Paris")[0].ok
    shown = [repr(tool), repr(tool.__dict__), repr(tool._opened().__dict__), caplog.text]
    wrong = [
        ({"ca_certs": None}, r"certificate .* is not trusted .*Set ca_certs"),
        ({"password": None}, r"refused a request without credentials .*Set TURNRL_ES_API_KEY"),
        ({"password": "${WRONG}"}, r"refused user 'elastic' with the password in \$\{WRONG\}"),
        ({"password": None, "api_key": "${KEY}"}, r"refused the API key in \$\{KEY\} \(status 401"),
    ]
    monkeypatch.setenv("WRONG", "wrong-" + PASSWORD)
    monkeypatch.setenv("KEY", API_KEY)
    errors = []
    for settings, message in wrong:
        with pytest.raises(ToolError, match=message) as error:
            search_tool(name, **{**access, "password": "${MY_PASSWORD}", **settings}).check()
        errors.append(error)
    shown += [str(e.getrepr(style="long", showlocals=False)) for e in errors] + [
        *capsys.readouterr()
    ]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    assert not [text for text in shown for secret in (PASSWORD, API_KEY, BASIC) if secret in text]
