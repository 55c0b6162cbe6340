"""A small recipe that trains, and how a command line that must fail is run on it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import turnrl
import turnrl.recipe.build
from nursery import python
from turnrl.cli import main
from turnrl.engines import Engine

RECIPE = {
    "model": {
        "policy": {"model": "MODEL"},
        "rollout": {"segmenter": "worlds.Letters", "tools": ["worlds.Echo"], "max_turn_tokens": 6},
        "rewards": ["worlds.Answered", "worlds.Called"],
        "group_size": 4,
        "steps_per_pass": 2,
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
        },
    },
    "data": {"train": "worlds.Numbers", "val": "worlds.Numbers", "questions_per_iteration": 4},
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_model_summary": False},
}


def save(contents, name="recipe.yaml"):
    Path(name).write_text(yaml.safe_dump(contents))


def fails(capsys, arguments, code=2):
    """Run a command that must fail, and give what it told the user, in one line."""
    try:
        exit_code = main(arguments)
    except SystemExit as stop:  # of argparse, where the command itself is wrong
        exit_code = stop.code
    captured = capsys.readouterr()
    assert exit_code == code, captured.err
    assert "Traceback" not in captured.err
    (message,) = [line for line in captured.err.splitlines() if line.startswith("turnrl: ")]
    return message


def forget(package):
    """Remove a package that was imported for a test, and its classes: a message of another test
    lists the subclasses that there are."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    gc.collect()
    bases = (turnrl.Tool, turnrl.Segmenter, Engine, turnrl.QuestionSource)
    left = [cls for base in bases for cls in base.__subclasses__()]
    assert [cls for cls in left if cls.__module__.split(".")[0] == package] == []


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
