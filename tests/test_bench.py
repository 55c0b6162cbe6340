"""The scripts behind the performance page run, and both sides of a comparison do equal work.

Nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "plugins" / "turnrl-bench"
PAGE = ROOT / "docs" / "explanation" / "performance.md"


def run(*command, **environment):
    """What a script prints."""
    done = subprocess.run(
        [*map(str, command)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_command_on_the_page_exists_in_its_script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    commands = re.findall(
        r"python plugins/turnrl-bench/(\w+)\.py (.*?)(?:  |$)", PAGE.read_text(), re.M
    )
    assert len(commands) == 5
    for script, command in commands:
        kind, *options = command.split()
        known = inspect.signature(getattr(importlib.import_module(script), kind)).parameters
        assert {option[2:] for option in options if option.startswith("--")} <= set(known)


@pytest.mark.slow
def test_learning_is_measured_in_processes_of_its_own():
    small = ("--blocks", "1", "--steps", "1", "--prompts", "2")
    shown = run(sys.executable, FOLDER / "compare.py", "learn", *small)
    assert re.search(r"^\| learning, s \| [\d.]+ \| [\d.]+ \| .*x", shown, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_and_turnrl_do_equal_work_in_a_small_case():
    small = ("--blocks", "1", "--steps", "1", "--prompts", "2", "--rows", "4")
    shown = run(sys.executable, FOLDER / "compare.py", "trl", *small)
    assert "Equal work: 16 trajectories" in shown
    assert len(re.findall(r"^\| whole step, s \|", shown, re.MULTILINE)) == 3


@pytest.mark.slow
def test_the_steps_for_a_new_card_are_rehearsed_on_a_cpu(tmp_path):
    program = {"TURNRL": f"{sys.executable} -m turnrl", "PYTHON": sys.executable}
    environment = {**program, "WHERE": "cpu", "RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    steps = ("doctor", "four-bit", "sampling", "minibatch", "iteration")
    shown = run("bash", FOLDER / "first_gpu.sh", *steps, **environment)
    assert re.findall(r"^(PASS|FAIL)  (\S+)", shown, re.MULTILINE) == [("PASS", s) for s in steps]
    assert re.search(r"^\| 4 rows, NF4 and adapter, graphs off \| [\d,]+ \|$", shown, re.MULTILINE)
