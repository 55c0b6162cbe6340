"""Runs that are killed with -9 at random moments and resumed: their last metrics are always
those of a run that nobody disturbed. Slow; `pytest -m slow tests/test_kill.py -s`."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from commands import RECIPE
from nursery import command
from runs import TIMINGS

ITERATIONS = 8
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]


class Runs:
    """Starts runs of a recipe, in a folder.

    Args:
        program: What starts `turnrl`.
    """

    def __init__(self, folder: Path, program: list[str], **environment: str) -> None:
        self._folder = folder
        self._program = program
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._environment = {**os.environ, "PYTHONPATH": path, **environment}

    def run(self, arguments: list[str], kill_after_s: float | None) -> int:
        """The exit code of one run, killed with all its processes if it is not over in time."""
        running = subprocess.Popen(
            [*self._program, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return running.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return running.wait()


def last_metrics(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a run's last iteration, without what is timed: of the latest of its parts that
    has any, since one that was killed after its last iteration leaves nothing to do."""
    parts = sorted(folder.glob(f"runs/{name}/version_*/metrics.csv"), key=_version, reverse=True)
    for part in parts:
        with part.open() as file:
            rows = [row for row in csv.DictReader(file) if row["epoch"] == str(ITERATIONS - 1)]
        if rows:
            return [{k: v for k, v in row.items() if v and k not in TIMINGS} for row in rows]
    return []


def drill(folder: Path, start, number: int, options: list[str], whole_s: float) -> tuple[int, list]:
    """One run, killed up to four times at random moments: how often it was, and its last
    metrics."""
    draw, name = random.Random(number), f"drill{number}"
    limits_s = [draw.uniform(0, whole_s) for _ in range(draw.randint(1, 4))]
    for kills, limit_s in enumerate([*limits_s, None]):
        checkpoints = folder.glob(f"runs/{name}/version_*/checkpoints/last.ckpt")
        last = max(checkpoints, key=_version, default=None)
        resume = ["--ckpt_path", str(last)] if last else []
        named = ["--trainer.logger.init_args.name", name]
        code = start(["fit", "recipe.yaml", *options, *named, *resume], limit_s)
        if code == 0:
            return kills, last_metrics(folder, name)
        assert (code, limit_s is None) == (-signal.SIGKILL, False)
    raise AssertionError


def _version(file: Path) -> int:
    return next(int(part[8:]) for part in file.parts if part.startswith("version_"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "runs"), [(1, 50), (2, 10)])
def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_run(
    tiny_model, tmp_path, nursery, processes, runs
):
    recipe = json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model)))
    recipe["trainer"]["max_epochs"] = ITERATIONS
    recipe["trainer"]["check_val_every_n_epoch"] = ITERATIONS
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = TWO if processes == 2 else []
    # two processes start each other, as Lightning does it
    program = [sys.executable, "-m", "turnrl"] if processes == 2 else command()
    start = Runs(tmp_path, program, **nursery.environment).run
    for name in ("warm", "whole"):  # the first also waits for the imports
        began = time.monotonic()
        named = ["--trainer.logger.init_args.name", name]
        assert start(["fit", "recipe.yaml", *options, *named], None) == 0
        whole_s = time.monotonic() - began
    expected = last_metrics(tmp_path, "whole")
    assert expected
    total = 0
    for number in range(runs):
        kills, metrics = drill(tmp_path, start, number, options, whole_s)
        total += kills
        assert metrics == expected, f"run {number}, killed {kills} times"
    print(f"{runs} runs of {processes} processes, killed {total} times, all ended alike")
    assert total > runs / 2
