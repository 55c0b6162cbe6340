"""What a run shows: where it writes and what it does, a row per iteration, and the end."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import lightning as L
import pyte
import pytest
from lightning.pytorch.callbacks import (
    ModelSummary,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

import turnrl
import turnrl.agent.rollout
from commands import save
from runs import data, make_module, rows, trainer
from turnrl.cli import main
from turnrl.policy.model import LanguageModel
from turnrl.watch.console import IterationLines, duration
from turnrl.watch.resume_notes import changed_settings

HEAD = ["turnrl fit: recipe.yaml", "writing to runs/recipe/version_0"]


def fit(capsys, *options):
    """The lines that a run prints."""
    assert main(["fit", "recipe.yaml", *options]) == 0
    return capsys.readouterr().out.splitlines()


@contextlib.contextmanager
def terminal(columns=80, rows=100):
    """Whatever is printed in the block goes to a terminal; gives the lines that it shows then."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen, lines = pyte.Screen(columns, rows), []
    stream = pyte.ByteStream(screen)

    def read():
        with contextlib.suppress(OSError):  # its other end was closed
            while sent := os.read(master, 65536):
                stream.feed(sent)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            os.fdopen(slave, "w", buffering=1) as out,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            yield lines
    finally:
        reader.join()
        os.close(master)
    lines += [line.rstrip() for line in screen.display]


# ------------------------------------------------------------------------------------------- lines


def test_a_run_prints_its_steps_before_the_first_figures_and_no_flops_summary(recipe, capsys):
    del recipe["trainer"]["enable_model_summary"]
    save(recipe)
    lines = [line for line in fit(capsys) if line != "loading torch and Lightning"]
    assert lines[:7] == [
        *HEAD,
        "reading the questions",
        f"loading {recipe['model']['policy']['model']}",
        "96,768 trained parameters on the CPU",
        "evaluating the policy before training",
        "                      time    left  split  reward exact_match tool_execution",
    ]
    assert "FLOPs" not in "\n".join(lines)


def test_lines_say_the_split_the_time_left_and_fit_into_80_columns(recipe, capsys):
    lines = fit(capsys, "--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "2")
    shown = [line for line in lines if re.match("before training|iteration|validation", line)]
    kinds = [(line[:17].strip(), line[36:41].strip(), line[27:34].strip()) for line in shown]
    assert [(title, split) for title, split, _ in kinds] == [
        ("before training", "val"),
        ("iteration   1/3", "train"),
        ("iteration   2/3", "train"),
        ("validation", "val"),
        ("iteration   3/3", "train"),
        ("validation", "val"),
    ]
    left = [left for title, _, left in kinds if title.startswith("iteration")]
    assert left[2] == "0s"
    assert all(re.fullmatch(r"(\d+[dhms] ?)+", time) for time in left)
    assert not any(left for title, _, left in kinds if not title.startswith("iteration"))
    assert all(len(line) <= 80 for line in lines if "model" not in line)


@pytest.fixture
def bars_at_once(monkeypatch):
    """Bars of trajectories that are shown at once, and not after three seconds. Those of steps, as
    short as these are, never are."""
    bar = turnrl.agent.rollout.tqdm
    at_once = {"delay": 0, "mininterval": 0}
    monkeypatch.setattr(turnrl.agent.rollout, "tqdm", lambda **options: bar(**options | at_once))


def test_bars_leave_the_rows_whole_on_a_terminal_of_80_columns(recipe, bars_at_once):
    often = ["--trainer.max_epochs", "4", "--trainer.check_val_every_n_epoch", "2"]
    with terminal() as lines:
        assert main(["fit", "recipe.yaml", *often]) == 0
    first = lines.index(
        "                      time    left  split  reward exact_match tool_execution"
    )
    last = lines.index("", first)
    assert [line[:17].rstrip() for line in lines[first + 1 : last]] == [
        "before training",
        *("iteration   1/4", "iteration   2/4", "validation"),
        *("iteration   3/4", "iteration   4/4", "validation"),
    ]
    row = re.compile(r".{20} \d\d:\d\d .{7}  (train|val  )  [ .0-9]{12,}")
    assert all(row.fullmatch(line) for line in lines[first + 1 : last])


def test_nothing_of_lightnings_stands_between_the_rows_at_the_end(tiny_model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shown = {"enable_progress_bar": True}
    trainer(tmp_path / "a", 1, [IterationLines()], **shown).fit(make_module(tiny_model), data())
    assert "stopped" not in caplog.text
    trainer(tmp_path / "b", 1).fit(
        make_module(tiny_model), data()
    )  # where there are no rows it stays
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in caplog.text


def test_a_run_that_reaches_its_steps_says_so(recipe, capsys):
    lines = fit(capsys, "--trainer.max_steps", "2", "--trainer.max_epochs", "9")
    assert "stopped at step 2: trainer.max_steps is reached" in lines


def test_a_line_is_printed_when_its_row_is_written(recipe, monkeypatch):
    seen = []

    def seen_at(self, text):
        if line := re.match(r"iteration +(\d+)/", text):
            with Path("runs/recipe/version_0/metrics.csv").open() as file:
                seen.append((int(line[1]), int([*csv.DictReader(file)][-1]["iteration"])))

    monkeypatch.setattr(IterationLines, "print", seen_at)
    assert main(["fit", "recipe.yaml"]) == 0
    assert seen == [(1, 1), (2, 2)]  # who stops a run at a line finds its figures


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.4, "0s"), (61, "1m 1s"), (3600, "1h 0m"), (90000, "1d 1h"), (8.6e6, "99d 12h")),
    ],
)
def test_time_left_is_short(seconds, text):
    assert duration(seconds) == text


def test_a_run_ends_with_before_beside_final_and_how_to_ask_it(recipe, capsys):
    lines = fit(capsys)
    (title,) = [
        n for n, line in enumerate(lines) if line.split() == ["before", "training", "final"]
    ]
    (before,) = [line.split() for line in lines if line.startswith("before training")]
    final = [line.split() for line in lines if line.startswith("validation")][-1]
    table = [line.split()[:3] for line in lines[title + 1 : title + 4]]
    names = ["val/reward/total", "val/exact_match", "val/tool_execution"]
    assert table == [list(row) for row in zip(names, before[-3:], final[-3:], strict=True)]
    assert lines[title + 4 :] == [
        "the trained model is in runs/recipe/version_0/model (best.ckpt, of iteration 1)",
        'ask it: turnrl.load("runs/recipe/version_0").ask("a question")',
        "see what it does: turnrl report runs/recipe/version_0",
    ]
    # a run that goes on shows its own first figures
    again = fit(capsys, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert any(line.split() == ["iteration", "3/3", "final"] for line in again)
    assert "collecting trajectories" in again
    assert not any(line.startswith("before training  ") for line in again)


@pytest.mark.slow
def test_without_a_validation_the_first_iteration_stands_beside_the_last(recipe, capsys):
    lines = fit(capsys, "--trainer.limit_val_batches", "0")
    (title,) = [n for n, line in enumerate(lines) if line.split() == ["iteration", "1/2", "final"]]
    shown = [line.split() for line in lines if re.match(r"iteration +\d+/2", line)]
    assert lines[title + 1].split()[:3] == ["reward/total", shown[0][-3], shown[1][-3]]


@pytest.mark.slow
def test_early_stopping_says_why(recipe, capsys):
    stop = "{class_path: EarlyStopping, init_args: {monitor: val/exact_match, patience: 1}}"
    lines = fit(capsys, "--trainer.callbacks", f"[{stop}]", "--trainer.max_epochs", "9")
    (reason,) = [line for line in lines if line.startswith("stopped early")]
    assert reason.startswith(
        "stopped early after iteration 2: Monitored metric val/exact_match did"
    )
    assert "Signaling" not in reason


def test_a_plain_trainer_shows_the_same_lines_and_no_summary(tiny_model, tmp_path, capsys):
    options = {"accelerator": "cpu", "log_every_n_steps": 1}  # and a check of sanity first
    logger = CSVLogger(tmp_path, name="", version=0)
    run = L.Trainer(max_epochs=1, logger=logger, enable_checkpointing=False, **options)
    module = make_module(tiny_model)
    run.fit(module, data())
    lines = capsys.readouterr().out.splitlines()
    assert "FLOPs" not in "\n".join(lines)
    assert f"writing to {tmp_path}/version_0" in lines
    for title in (
        "evaluating the policy",
        "before training  ",
        "iteration   1/1  ",
        "validation  ",
    ):
        assert sum(line.startswith(title) for line in lines) == 1
    assert lines[-3:] == [
        f"the trained model is in {tmp_path}/version_0/model",
        'ask it: module.ask("a question")',
        f"see what it does: turnrl report {tmp_path}/version_0",
    ]
    metrics = rows(tmp_path)
    assert [(row["iteration"], bool(row["train/loss"])) for row in metrics] == [
        ("0", False),
        ("1", True),
    ]
    assert metrics[0]["val/reward/total"] != metrics[1]["val/reward/total"]
    run.validate(module, data(), verbose=False)
    assert sum(isinstance(c, IterationLines) for c in run.callbacks) == 1


def test_a_validation_inside_an_iteration_is_not_taken_for_the_one_at_its_end(
    tiny_model, tmp_path, capsys
):
    run = trainer(tmp_path, 2, [IterationLines()], val_check_interval=1, enable_progress_bar=True)
    run.fit(make_module(tiny_model), data())
    lines = capsys.readouterr().out.splitlines()
    shown = [
        line.split()
        for line in lines
        if re.match("before training  |iter.*/|validation|at s", line)
    ]
    titles = [" ".join(line[: 3 if line[0] == "at" else 2]) for line in shown]
    assert [re.sub(r"\d\d:\d\d", "", title).strip() for title in titles] == [
        "before training",
        *["at step 1", "iteration 1/2", "validation"],
        *["at step 3", "iteration 2/2", "validation"],
    ]
    # each with the figures of its own policy
    rewards = {row["step"]: float(row["val/reward/total"]) for row in rows(tmp_path)}
    of_val = [line[-3] for line in shown if "val" in line]
    assert of_val == [f"{rewards[step]:.3f}" for step in "01234"]


def test_without_a_logger_a_run_prints_where_checkpoints_are_and_how_to_ask(
    tiny_model, tmp_path, capsys
):
    options = {"enable_progress_bar": True, "logger": False, "default_root_dir": tmp_path}
    run = trainer(tmp_path, 1, [IterationLines()], **options)
    run.fit(make_module(tiny_model), data())
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"writing to only checkpoints/ in {tmp_path}: trainer.logger is false") == 1
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert lines[-1] == 'ask it: module.ask("a question")'


def test_a_bar_and_a_summary_that_were_asked_for_stay(tiny_model, tmp_path, capsys):
    class Bar(TQDMProgressBar):
        pass

    options = {"enable_progress_bar": True, "enable_model_summary": True, "limit_val_batches": 0}
    summary = ModelSummary(max_depth=2)
    trainer(tmp_path, 1, [Bar(), summary], **options).fit(make_module(tiny_model), data())
    printed = capsys.readouterr()
    assert "iteration   1/1" not in printed.out
    assert "Epoch 0: 100%" in printed.out + printed.err


def test_a_bar_that_a_recipe_names_stays_though_it_is_lightnings_default(recipe, capsys):
    bar = type(L.Trainer(logger=False, enable_checkpointing=False).progress_bar_callback).__name__
    capsys.readouterr()
    options = ["--trainer.callbacks+", bar, "--trainer.max_epochs", "1", "--data.val", "null"]
    lines = fit(capsys, *options)
    assert not any(line.startswith("iteration   1/1") for line in lines)


def test_no_bar_no_lines(tiny_model, tmp_path, capsys):
    trainer(tmp_path, 1, limit_val_batches=0).fit(make_module(tiny_model), data())
    assert capsys.readouterr().out == ""


def test_the_recipe_the_folder_and_the_device_are_named_before_torch_is_loaded(recipe):
    code = (
        "import gc, os, sys\n"
        # what the command does next is to import torch
        "gc.disable = lambda: (print('torch' in sys.modules, flush=True), os._exit(0))\n"
        "from turnrl.cli import main\n"
        "main(['fit', 'recipe.yaml'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},  # the recipe names `worlds`
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [*HEAD, "loading torch and Lightning", "False"]


# ------------------------------------------------------------------------------- runs that go on


def test_resuming_a_finished_run_says_how_to_train_on_and_leaves_no_folder(recipe, capsys):
    assert main(["fit", "recipe.yaml"]) == 0
    capsys.readouterr()
    assert main(["fit", "recipe.yaml", "--ckpt_path", "last"]) == 0
    out, err = capsys.readouterr()
    # below Lightning's lines
    assert re.search(r"finished: 2 iterations .* To train on, raise trainer.max_epochs.\n$", err)
    assert "resumes with" not in err
    assert "ask it" not in out
    assert [path.name for path in Path("runs/recipe").iterdir()] == ["version_0"]


def test_changed_settings_are_listed_by_their_keys():
    old = {"model": {"rewards": [{"w": 1.0}], "group_size": 4}, "trainer": {"logger": False}}
    new = {"model": {"rewards": [{"w": 0.2}], "group_size": 4}, "seed_everything": 1}
    assert changed_settings(old, new) == {
        "model.rewards": ('[{"w": 1.0}]', '[{"w": 0.2}]'),
        "seed_everything": ("not set", "1"),
    }
    assert changed_settings(old, old) == changed_settings("no recipe", None) == {}


# ------------------------------------------------------------------ lines too long for a terminal


def test_an_error_is_wrapped_at_words_on_a_terminal_but_is_one_line_in_a_pipe(capsys):
    with terminal() as lines:
        assert main(["fit", "nosuch"]) == 2
    shown = [line for line in lines if line]
    assert main(["fit", "nosuch"]) == 2
    (whole,) = capsys.readouterr().err.splitlines()
    assert len(whole) > 80
    assert len(shown) > 1
    assert " ".join(line.strip() for line in shown) == whole


def test_a_run_that_is_interrupted_while_weights_load_says_that_nothing_is_kept(
    recipe, monkeypatch, capsys
):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "load", interrupted)
    assert main(["fit", "recipe.yaml"]) == 130
    printed = capsys.readouterr().err
    assert printed.endswith(
        "\nNo iteration is finished. Repeat the command to start again.\n"
        "\nturnrl: stopped by Ctrl-C\n"
    )
