"""More than one process. Each takes seconds to start, so few starts show many things."""

from __future__ import annotations

import csv
import re
import sys

import pytest
import torch

from commands import TESTS, TWO, recipe, start
from turnrl.cli import main
from turnrl.runs import record


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
    values = [
        float(value)
        for row in metrics(run)
        for name, value in row.items()
        if value and name.startswith(kinds)
    ]
    return len(values) > 10 and max(values) <= 1


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


def test_two_processes_finish_with_a_plain_trainers_progress_bar(folder):
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
    first, second = (rank["shares"] for rank in agree(folder / "runs" / run))
    for shares in zip(first, second, strict=True):
        # the loss is the mean over the step's tokens, and Lightning averages over the processes
        whole = torch.cat(shares)
        assert torch.allclose(whole, torch.full_like(whole, 2 / len(whole)))
    # which would not be so if each process divided by its own number of tokens
    assert any(len(a) != len(b) for a, b in zip(first, second, strict=True))


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
    account = re.findall(rf"^{split}/.*$", capsys.readouterr().out, re.MULTILINE)
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
