"""Training runs during which something happens to the server that they search."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import threading
from pathlib import Path

import pytest
import yaml

from nodes import PASSWORD
from runs import TIMINGS
from searching import retry_once
from turnrl.cli import main

ROOT = Path(__file__).parent.parent
ITERATIONS = 5


def environment_of(node, **more):
    """What the environment of a command needs to search a locked node, if there is one."""
    if node is None:
        return more
    return {
        "TURNRL_ES_URL": node.url,
        "TURNRL_ES_PASSWORD": PASSWORD,
        "TURNRL_ES_CA_CERTS": node.certificate,
        **more,
    }


class Listener(io.StringIO):
    """Keeps what is printed, and acts once, in a thread of its own, when an iteration has ended."""

    def __init__(self, action):
        super().__init__()
        self.action = threading.Thread(target=action) if action else None

    def write(self, text):
        if self.action and "iteration   2/" in text and not self.action.ident:
            self.action.start()
        return super().write(text)


def turnrl(node, folder, arguments, during=None, **environment):
    """Run a command in `folder`; `during` happens beside it, from the second iteration on.

    Returns:
        The exit code, standard output, and standard error.
    """
    out, err = Listener(during), io.StringIO()
    logged = logging.StreamHandler(err)  # in a process of its own these lines are on stderr too
    logging.getLogger().addHandler(logged)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(folder)
            retry_once(patch)
            for name, value in environment_of(node, **environment).items():
                patch.setenv(name, value)
            code = main(arguments)
    finally:
        logging.getLogger().removeHandler(logged)
        if out.action and out.action.ident:
            out.action.join()
    return code, out.getvalue(), err.getvalue()


def on_server(cls, /, **settings):
    """An index on a server, as a recipe has it."""
    return {"class_path": cls, "init_args": settings}


def train(node, folder, during=None, index=None, **tool):
    """Train for a few iterations in `folder`.

    Args:
        node: A locked Elasticsearch server, or None.
        folder: Where the run is.
        during: Called in the middle of it.
        index: The index, as a recipe has it; by default `atlas` on the node.
        tool: Other settings of the search.
    Returns:
        The exit code, and standard error.
    """
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    of_node = {"name": "atlas", "timeout_s": 1.0, "wait_s": 120.0}
    search = {"index": index or on_server("Elasticsearch", **of_node), "top_k": 1, **tool}
    recipe["model"]["rollout"]["tools"] = [{"class_path": "WikiSearch", "init_args": search}]
    recipe["model"] |= {"group_size": 4, "steps_per_pass": 1}
    recipe["record"] = {"transcripts": 100}
    recipe["data"] |= {"questions_per_iteration": 2, "val_limit": 8}
    recipe["trainer"] |= {"max_epochs": ITERATIONS, "check_val_every_n_epoch": ITERATIONS}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = turnrl(node, folder, ["fit", "recipe.yaml"], during)
    (folder / "output.log").write_text(out + err)
    return code, err


def metrics(folder):
    """The rows of a run's metrics, without what the clock says."""
    text = (folder / "runs" / "recipe" / "version_0" / "metrics.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]
