"""Whole training runs against a real Elasticsearch: outages, replay from the cache, secrets.

The server is one of our own, with a password, for it is killed and stopped here.
"""

from __future__ import annotations

import base64
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from test_elasticsearch import PASSWORD, Node

pytestmark = pytest.mark.elasticsearch

ROOT = Path(__file__).parent.parent
ITERATIONS, TRAJECTORIES = 20, 8
TIMED = ("rollout/seconds", "rollout/tokens_per_s")


@pytest.fixture(scope="module")
def node():
    node = Node("--password", PASSWORD, "--heap", "384m")
    build = "index build --source Atlas --backend elasticsearch --index atlas --split none"
    with command(node, *build.split()) as building:
        _, told = building.communicate(timeout=120)
    assert building.returncode == 0, told
    yield node
    node.close()


def command(node, *arguments, cwd=None, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "turnrl.cli", *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "TURNRL_ES_URL": node.url,
            "TURNRL_ES_PASSWORD": PASSWORD,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(node, folder, during=None, **tool):
    """A run of 20 iterations in `folder`; `during` is called once, when a few have passed."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    search = {"backend": "elasticsearch", "index": "atlas", "top_k": 1}
    search |= {"timeout_s": 2.0, "retries": 1, "wait_s": 120.0, **tool}
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": search}]
    recipe["model"] |= {"group_size": 4, "minibatch_size": 8, "transcripts_per_iteration": 100}
    recipe["data"] |= {"questions_per_iteration": 2, "val_limit": 8}
    recipe["trainer"] |= {"max_epochs": ITERATIONS, "check_val_every_n_epoch": ITERATIONS}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    told: list[str] = []
    said: list[str] = []
    with command(node, "fit", "recipe.yaml", cwd=folder) as run:
        listener = threading.Thread(target=lambda: told.extend(run.stderr))
        listener.start()
        for line in run.stdout:
            said.append(line)
            if during and line.startswith("iteration   4/"):
                during()
                during = None
        listener.join()
    (folder / "output.log").write_text("".join([*said, *told]))
    return run.returncode, "".join(told)


def metrics(folder):
    text = (folder / "runs" / "recipe" / "version_0" / "metrics.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


@pytest.fixture(scope="module")
def calm(node, tmp_path_factory):
    """A run in which nothing happens, and which fills a cache."""
    folder = tmp_path_factory.mktemp("calm")
    code, told = train(node, folder, cache="answers.sqlite")
    assert code == 0, told
    return folder


def crash(node, seconds):
    node.signal(signal.SIGKILL)
    time.sleep(seconds)
    node.resume()


def hang(node, seconds):
    node.signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.signal(signal.SIGCONT)


LONG = pytest.param(20, marks=pytest.mark.slow)


@pytest.mark.parametrize("seconds", [6, LONG])
@pytest.mark.parametrize("fault", [crash, hang])
def test_a_run_outlives_its_server_and_trains_on_the_same_trajectories(
    node, calm, tmp_path, fault, seconds
):
    code, told = train(node, tmp_path, during=lambda: fault(node, seconds))
    assert code == 0, told
    # it says what happened
    assert f"{node.url} does not answer" in told
    assert re.search(rf"{node.url} answers again after \d+ s; the run goes on", told)
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
    def kill():
        node.signal(signal.SIGKILL)

    try:
        code, told = train(node, tmp_path, during=kill, wait_s=3.0)
    finally:
        node.resume()
    assert code == 1
    assert "Traceback" not in told
    assert f"the search server {node.url} does not answer" in told
    assert "--ckpt_path runs/recipe/version_0/checkpoints/last.ckpt" in told
    last = tmp_path / "runs" / "recipe" / "version_0" / "checkpoints" / "last.ckpt"
    finished = torch.load(last, weights_only=True)["global_step"]
    # the run goes on from there, once the server is back
    with command(node, "fit", "recipe.yaml", "--ckpt_path", str(last), cwd=tmp_path) as again:
        out, told = again.communicate(timeout=300)
    assert again.returncode == 0, told
    assert out.count("iteration ") == ITERATIONS - finished


def test_a_run_is_replayed_from_its_cache_with_the_server_off(node, calm, tmp_path):
    node.signal(signal.SIGKILL)
    try:
        code, told = train(node, tmp_path, cache=str(calm / "answers.sqlite"), offline=True)
    finally:
        node.resume()
    assert code == 0, told
    assert metrics(tmp_path) == metrics(calm)


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
    with command(node, "fit", "recipe.yaml", cwd=tmp_path, **environment) as run:
        said, told = run.communicate(timeout=120)
    assert run.returncode == 1
    assert name in told
    (tmp_path / "output.log").write_text(said + told)
    hidden = [SECRETS[name], SECRETS[name].partition(":")[2], "0123abcd", PASSWORD]
    assert_hidden(tmp_path, hidden)


def test_no_file_that_a_run_wrote_holds_the_password(calm):
    names = {p.name for p in calm.rglob("*")}
    wanted = {"metrics.csv", "config.yaml", "last.ckpt", "answers.sqlite", "output.log"}
    assert wanted <= names
    assert_hidden(calm, [PASSWORD, base64.b64encode(f"elastic:{PASSWORD}".encode()).decode()])


def assert_hidden(folder, secrets):
    for path in folder.rglob("*"):
        for secret in secrets:
            assert not path.is_file() or secret.encode() not in path.read_bytes(), (path, secret)
