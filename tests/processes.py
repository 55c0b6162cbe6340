"""Runs in processes of their own: a recipe that trains, and Python that is ended if it hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from commands import RECIPE
from nursery import python

TESTS = Path(__file__).parent
TWO = {"devices": 2, "strategy": "ddp"}
TIMEOUT_S = 150


def recipe(model, file, **trainer):
    """Write a recipe that trains, and leaves what `KeepWeights` leaves."""
    contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(model)))
    contents["model"]["rollout"]["max_tokens"] = 128
    contents["model"]["optimizer"]["init_args"]["lr"] = 3e-3
    contents["data"]["val_batch_size"] = 2
    contents["trainer"] |= {"callbacks": ["runs.KeepWeights"], **trainer}
    file.write_text(yaml.safe_dump(contents))


def start(nursery, folder, *arguments, program=None, **environment):
    """Run Python, and end it with all its children if it hangs."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*(program or python()), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **nursery.environment, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"it hangs after:\n{out[-2000:]}\n{err[-2000:]}")
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return out, err
