"""Whole training runs against a real Elasticsearch: outages, replay from the cache, secrets.

The server is one of our own, with a password and a certificate, for it is killed and stopped here.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import logging
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from nodes import PASSWORD
from runs import TIMINGS
from searching import ask, asked_throughout, corpus_of, write_rows
from test_elasticsearch import API_KEY, search_tool
from turnrl import ToolError
from turnrl.cli import main
from turnrl_wiki_search import elastic
from turnrl_wiki_search.elastic import SearchServer

pytestmark = [pytest.mark.elasticsearch, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parent.parent
ITERATIONS, TRAJECTORIES = 5, 8


@pytest.fixture(scope="module")
def node(locked_node):
    build = "index build --source Atlas --backend elasticsearch --index atlas --split none"
    code, _, told = turnrl(locked_node, ROOT, build.split())
    assert code == 0, told
    return locked_node


def environment_of(node, **more):
    if node is None:
        return more
    return {
        "TURNRL_ES_URL": node.url,
        "TURNRL_ES_PASSWORD": PASSWORD,
        "TURNRL_ES_CA_CERTS": node.certificate,
        **more,
    }


class Listener(io.StringIO):
    """Keeps what is said, and acts once, in a thread of its own, when an iteration has ended."""

    def __init__(self, action):
        super().__init__()
        self.action = threading.Thread(target=action) if action else None

    def write(self, text):
        if self.action and "iteration   2/" in text and not self.action.ident:
            self.action.start()
        return super().write(text)


def turnrl(node, folder, arguments, during=None, **environment):
    """Run a command in `folder`; `during` happens beside it, from the second iteration on."""
    said, told = Listener(during), io.StringIO()
    logged = logging.StreamHandler(told)  # in a process of its own these lines are on stderr too
    logging.getLogger().addHandler(logged)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(told),
        ):
            patch.chdir(folder)
            for name, value in environment_of(node, **environment).items():
                patch.setenv(name, value)
            code = main(arguments)
    finally:
        logging.getLogger().removeHandler(logged)
        if said.action and said.action.ident:
            said.action.join()
    return code, said.getvalue(), told.getvalue()


def train(node, folder, during=None, **tool):
    """A run of a few iterations in `folder`."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    search = {"backend": "elasticsearch", "index": "atlas", "top_k": 1}
    search |= {"timeout_s": 1.0, "retries": 1, "wait_s": 120.0, **tool}
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": search}]
    recipe["model"] |= {"group_size": 4, "steps_per_update": 1}
    recipe["record"] = {"transcripts": 100}
    recipe["data"] |= {"questions_per_iteration": 2, "val_limit": 8}
    recipe["trainer"] |= {"max_epochs": ITERATIONS, "check_val_every_n_epoch": ITERATIONS}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, said, told = turnrl(node, folder, ["fit", "recipe.yaml"], during)
    (folder / "output.log").write_text(said + told)
    return code, told


def metrics(folder):
    text = (folder / "runs" / "recipe" / "version_0" / "metrics.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


@pytest.fixture(scope="module")
def calm(node, tmp_path_factory):
    """A run in which nothing happens, and which fills a cache."""
    folder = tmp_path_factory.mktemp("calm")
    code, told = train(node, folder, cache="answers.sqlite")
    assert code == 0, told
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
    code, told = train(node, tmp_path, during=lambda: fault(node, seconds))
    assert code == 0, told
    # it says what happened
    assert f"{node.url} does not answer" in told
    assert re.search(rf"{node.url} answers again after \d+ s; the run continues", told)
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


def test_a_run_whose_server_stays_away_stops_with_a_checkpoint_and_the_next_step(node, tmp_path):
    try:
        code, told = train(node, tmp_path, lambda: node.signal(signal.SIGSTOP), wait_s=1.0)
    finally:
        node.signal(signal.SIGCONT)
    assert code == 1
    assert "Traceback" not in told
    assert f"the search server {node.url} does not answer" in told
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in told
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    assert_hidden(tmp_path, [PASSWORD, BASIC])
    # the run goes on from there, once the server is back
    code, said, told = turnrl(node, tmp_path, ["fit", "recipe.yaml", "--ckpt_path", str(last)])
    assert code == 0, told
    assert said.count("iteration ") == ITERATIONS - finished


def test_a_run_is_replayed_from_its_cache_with_the_server_off(node, calm, tmp_path):
    node.signal(signal.SIGSTOP)
    try:
        code, told = train(node, tmp_path, cache=str(calm / "answers.sqlite"), offline=True)
    finally:
        node.signal(signal.SIGCONT)
    assert code == 0, told
    assert metrics(tmp_path) == metrics(calm)


BASIC = base64.b64encode(f"elastic:{PASSWORD}".encode()).decode()
SECRETS = {
    "TURNRL_ES_API_KEY": "VuaCfGcBCdbkQm-e5aOx:ui2lp2axTNmsyakw9tvNnw",
    "TURNRL_ES_CLOUD_ID": "deployment:" + base64.b64encode(b"example.test$0123abcd$ef").decode(),
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_key_or_cloud_id_that_opens_nothing_is_not_shown(node, calm, tmp_path, name):
    environment = {name: SECRETS[name]}
    if name == "TURNRL_ES_CLOUD_ID":
        environment["TURNRL_ES_URL"] = ""  # the id is the address
    shutil.copy(calm / "recipe.yaml", tmp_path)
    code, said, told = turnrl(node, tmp_path, ["fit", "recipe.yaml"], **environment)
    assert code == 1
    assert name in told
    (tmp_path / "output.log").write_text(said + told)
    hidden = [SECRETS[name], SECRETS[name].partition(":")[2], "0123abcd", PASSWORD]
    assert_hidden(tmp_path, hidden)


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


@pytest.mark.parametrize("how", [pytest.param("crash", marks=pytest.mark.slow), "stop"])
def test_a_real_server_that_goes_away_and_comes_back_is_waited_for(
    locked_node, tmp_path, how, monkeypatch, capsys
):
    monkeypatch.setenv("TURNRL_ES_PASSWORD", PASSWORD)
    monkeypatch.setenv("TURNRL_ES_CA_CERTS", locked_node.certificate)
    elastic.build(
        SearchServer(url=locked_node.url), how, corpus_of(write_rows(tmp_path / "rows.jsonl"))
    )
    tool = search_tool(how, locked_node.url, top_k=1, timeout_s=1.0, wait_s=90.0)

    def outage():
        if how == "crash":
            locked_node.crash()
        else:
            locked_node.signal(signal.SIGSTOP)
            time.sleep(4)  # two attempts of 1 s each and their pause, and then it counts as away
            locked_node.signal(signal.SIGCONT)

    assert asked_throughout(tool, outage) >= 80
    told = capsys.readouterr().err
    assert "does not answer" in told
    assert "answers again after" in told


def test_a_locked_server_opens_to_secrets_that_nothing_else_ever_shows(
    locked_node, tmp_path, monkeypatch, caplog, capsys
):
    name = "secrets"
    monkeypatch.setenv("MY_PASSWORD", PASSWORD)
    caplog.set_level(logging.DEBUG)
    access = {"url": locked_node.url, "ca_certs": locked_node.certificate}
    elastic.build(
        SearchServer(**access, password="${MY_PASSWORD}"),
        name,
        corpus_of(write_rows(tmp_path / "rows.jsonl")),
    )
    tool = search_tool(
        name, **access, password="${MY_PASSWORD}", cache=str(tmp_path / "cache.sqlite")
    )
    tool.check()
    assert ask(tool, "Paris")[0].ok
    shown = [repr(tool), repr(tool.__dict__), repr(tool._opened().__dict__), caplog.text]
    errors = []
    with pytest.raises(ToolError, match=r"certificate .* is not trusted .*Set ca_certs") as error:
        search_tool(name, locked_node.url, password="${MY_PASSWORD}").check()
    errors.append(error)
    with pytest.raises(
        ToolError,
        match=r"does not answer without credentials .*Set the environment variable TURNRL_ES_API",
    ) as error:
        search_tool(name, **access).check()
    errors.append(error)
    monkeypatch.setenv("TURNRL_ES_API_KEY", API_KEY)
    with pytest.raises(
        ToolError, match=r"refused the API key in \$\{TURNRL_ES_API_KEY\} \(status 401"
    ) as error:
        search_tool(name, **access).check()
    errors.append(error)
    monkeypatch.setenv("MY_PASSWORD", "wrong-" + PASSWORD)
    with pytest.raises(
        ToolError, match=r"refused user 'elastic' with the password in \$\{MY_PASSWORD\}"
    ) as error:
        search_tool(name, **access, password="${MY_PASSWORD}").check()
    errors.append(error)
    shown += [str(e.getrepr(style="long", showlocals=False)) for e in errors] + [
        *capsys.readouterr()
    ]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    assert not [text for text in shown for secret in (PASSWORD, API_KEY, BASIC) if secret in text]
