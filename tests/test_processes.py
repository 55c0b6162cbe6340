"""More than one process: every start of one takes seconds, so few starts show many things."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from commands import RECIPE
from nursery import python
from turnrl import record
from turnrl.cli import main

TESTS = Path(__file__).parent
TWO = {"devices": 2, "strategy": "ddp"}
TIMEOUT_S = 150


def recipe(model, file, **trainer):
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


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory, nursery):
    """Where `ddp_script.py` has run on two processes."""
    folder = tmp_path_factory.mktemp("two")
    recipe(tiny_model, folder / "two.yaml", **TWO)
    recipe(tiny_model, folder / "one.yaml")
    (folder / "printed").write_text("".join(start(nursery, folder, TESTS / "ddp_script.py")))
    return folder


def agree(run):
    """What the two processes of a run left, once their weights are seen to be equal."""
    ranks = [torch.load(run / f"rank{rank}.pt") for rank in range(2)]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert [rank["steps"] for rank in ranks] == [4, 4]
    return ranks


def metrics(run):
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def shares_at_most_one(run):
    kinds = ("val/", "train/exact", "train/tool", "train/format", "reward/outcome", "rollout/deg")
    found = [
        float(value)
        for row in metrics(run)
        for name, value in row.items()
        if value and name.startswith(kinds)
    ]
    return len(found) > 10 and max(found) <= 1


@pytest.mark.slow
def test_two_processes_finish_with_a_bar_by_the_command_line(tiny_model, tmp_path, nursery):
    recipe(tiny_model, tmp_path / "bar.yaml")
    options = ("--trainer.devices", 2, "--trainer.strategy", "ddp")
    bar = ("--trainer.callbacks+", "TQDMProgressBar")
    out, err = start(nursery, tmp_path, "-m", "turnrl", "fit", "bar.yaml", *options, *bar)
    assert "Epoch 1: 100%" in out + err
    agree(tmp_path / "runs" / "bar")
    assert shares_at_most_one(tmp_path / "runs" / "bar" / "version_0")


def test_two_processes_finish_with_lines_and_print_each_once(folder):
    printed = (folder / "printed").read_text()
    for title in ("before training", "iteration   1/2", "iteration   2/2"):
        # of the recipe's run, and of a plain Trainer's
        assert len(re.findall(rf"^{title} +\d", printed, re.MULTILINE)) == 2
    agree(folder / "runs" / "two")
    assert shares_at_most_one(folder / "runs" / "two" / "version_0")


def test_two_processes_finish_with_a_bar_that_a_plain_trainer_was_given(folder):
    assert "Epoch 1: 100%" in (folder / "printed").read_text()
    agree(folder / "runs" / "padded")
    agree(folder / "runs" / "plain")
    assert shares_at_most_one(folder / "runs" / "plain" / "version_0")


def test_two_processes_learn_the_same_from_shared_and_from_padded_layouts(folder):
    agree(folder / "runs" / "padded")
    plain, padded = (metrics(folder / "runs" / name / "version_0") for name in ("plain", "padded"))
    first, other = (next(row for row in rows if row["train/grad_norm"]) for rows in (plain, padded))
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert float(first[name]) == pytest.approx(float(other[name]), rel=1e-4), name


@pytest.mark.parametrize("run", ["two", "plain"])
def test_each_token_of_a_step_weighs_the_same_on_both_processes(folder, run):
    first, second = (some["shares"] for some in agree(folder / "runs" / run))
    for shares in zip(first, second, strict=True):
        # the loss is the mean over the step's tokens, and Lightning averages over the processes
        whole = torch.cat(shares)
        assert torch.allclose(whole, torch.full_like(whole, 2 / len(whole)))
    # which totals of their own would not give
    assert any(len(one) != len(other) for one, other in zip(first, second, strict=True))


def test_two_processes_share_the_questions_and_sample_apart(folder):
    first, second = agree(folder / "runs" / "two")
    assert not set(first["asked"]) & set(second["asked"])  # a group never spans processes
    assert len({*first["asked"], *second["asked"]}) == 8
    assert first["stream"] != second["stream"]
    run = folder / "runs" / "two" / "version_0"
    rows = [row for row in record.read(run, split="train") if row["policy_version"] == 0]
    assert len(rows) == 16
    assert len({(row["question_id"], row["member"]) for row in rows}) == 16
    # three questions on two processes: none is scored twice
    rows = [row for row in record.read(run, split="val") if row["policy_version"] == 0]
    assert sorted(row["question_id"] for row in rows) == ["n100", "n101", "n102"]
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "transcripts" / "iteration_0001.txt").is_file()


@pytest.mark.parametrize(
    ("number", "split", "limit"), [(0, "val", 3), (1, "train", 5), (2, "val", 1)]
)
def test_an_evaluation_on_two_processes_gives_the_figures_of_one(
    folder, monkeypatch, capsys, number, split, limit
):
    monkeypatch.chdir(folder)
    checkpoint = "runs/two/version_0/checkpoints/last.ckpt"
    options = ["--ckpt_path", checkpoint, "--split", split, "--data.val_limit", str(limit)]
    assert main(["eval", "one.yaml", *options]) == 0
    (alone,) = metrics(folder / "runs" / "one-eval" / f"version_{number}")
    (shared,) = metrics(folder / "runs" / "two-eval" / f"version_{number}")
    assert float(alone[f"{split}/questions"]) == limit
    assert alone.keys() == shared.keys()
    for name, value in alone.items():
        assert float(shared[name]) == pytest.approx(float(value), abs=1e-6), name
    # and they are the means of what the record holds
    rows = record.read(folder / "runs" / "two-eval" / f"version_{number}" / "record")
    assert len(rows) == len({row["question_id"] for row in rows}) == limit
    for name in record.CURVES:
        mean = sum(row[name] for row in rows) / limit
        assert float(shared[f"{split}/{name}"]) == pytest.approx(mean, abs=1e-6)
    # both print the same account of the same questions
    account = re.findall(r"^    .*\[.*\]$", capsys.readouterr().out, re.MULTILINE)
    # the four curves, F1, two rewards and their sum; turns, calls and tokens
    assert len(account) == 11
    assert all(line in (folder / "printed").read_text() for line in account)


@pytest.mark.slow
def test_a_process_that_was_forked_after_a_collection_collects_and_trains(
    tiny_model, tmp_path, nursery
):
    # GNU's OpenMP hangs by itself in a process that was forked from one that had threads
    program = [sys.executable, TESTS / "fork_script.py"]
    start(nursery, tmp_path, tiny_model, tmp_path, program=program, OMP_NUM_THREADS="1")
    checkpoint = torch.load(tmp_path / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert len(record.read(tmp_path / "version_0" / "record")) == 16
