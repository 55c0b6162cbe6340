"""The files of a run: checkpoints that are whole, metrics that plot, and folders that are found."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, Logger

import turnrl
from commands import fails
from runs import column, data, last, make_module, rows, trainer
from turnrl import RecipeError
from turnrl.cli import main
from turnrl.plugin.errors import CheckpointError, WorldError
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.merging import as_list
from turnrl.runs import record
from turnrl.runs.checkpoints import read_position
from turnrl.runs.claim import claim_number
from turnrl.runs.files import remove_torn, whole_file
from turnrl.watch.checkpoints import BestCheckpoint
from turnrl.watch.recorder import Recorder


@pytest.fixture
def full_disk(monkeypatch):
    """Lets the disk be full when a checkpoint is written; by the number of the checkpoint."""

    def after(count):
        saved = []

        def fill(file):
            saved.append(file)
            if len(saved) > count:
                file.with_name(f"{file.name}.new").symlink_to("/dev/full")
            return whole_file(file)

        monkeypatch.setattr("turnrl.watch.checkpoints.whole_file", fill)

    return after


NO_VALIDATION = ["--trainer.limit_val_batches", "0"]

# ------------------------------------------------------------------------------- which one is kept


def test_a_disk_that_fills_later_keeps_the_iteration_before(recipe, capsys, full_disk):
    full_disk(2)
    assert main(["fit", "recipe.yaml", *NO_VALIDATION]) == 1
    printed, errors = capsys.readouterr()
    assert "Iteration 1 is kept. To resume from it, repeat the command with" in errors
    assert re.findall(r"^iteration +\S+", printed, re.MULTILINE) == ["iteration   1/2"]
    assert (
        torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)["epoch"] == 0
    )


def test_a_best_checkpoint_that_cannot_be_written_leaves_the_previous_one(
    tiny_model, tmp_path, full_disk
):
    full_disk(5)  # untrained; best and last of two iterations; not the best of the third
    with pytest.raises(WorldError, match=r"best.ckpt' in iteration 3, after step 6: No space left"):
        trainer(tmp_path, 3, [BestCheckpoint("step")]).fit(make_module(tiny_model), data())
    folder = tmp_path / "version_0" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"best.ckpt", "last.ckpt"}
    for path in folder.iterdir():
        assert torch.load(path, weights_only=True)["epoch"] == 1


# --------------------------------------------------------------- a disk or a folder that gives out


class Meddles(L.Callback):
    """Does something to the run's folder when an iteration begins."""

    def __init__(self, act, iteration=2):
        self.act, self.iteration = act, iteration

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.iteration:
            self.act(pl_module.folder)


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("record/train-000002-0.parquet", "record/train-000002-0.parquet.new"),
        ("metrics.csv", "metrics.csv"),
        ("model", "model"),
    ],
)
def test_a_full_disk_stops_the_run_with_the_file_and_the_step(tiny_model, tmp_path, name, link):
    def fill(folder):
        file = folder / link
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to("/dev/full")

    run = trainer(tmp_path, 2, [Meddles(fill), Recorder()])
    place, why = "iteration 2, after step [24]", r"No space left on device\. Make room"
    if name == "model":
        place, why = "iteration 3, after step 4", r"File exists\. Correct that"
    full = rf"cannot write '\S+/version_0/{name}' in {place}: {why}"
    with pytest.raises(WorldError, match=full):
        run.fit(make_module(tiny_model), data())
    checkpoint = torch.load(last(tmp_path), weights_only=True)
    assert checkpoint["global_step"] == (4 if name == "model" else 2)
    assert not Path(f"{last(tmp_path)}.new").exists()


@pytest.mark.parametrize(
    ("act", "iteration"), [(shutil.rmtree, 2), (lambda folder: folder.rename("moved"), 3)]
)
def test_a_run_whose_folder_is_gone_stops(tiny_model, tmp_path, monkeypatch, act, iteration):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorldError, match=r"folder '\S+version_0\S*' is gone in iteration"):
        trainer(tmp_path, 3, [Meddles(act, iteration)]).fit(make_module(tiny_model), data())
    assert not Path(last(tmp_path)).exists()


def test_what_a_killed_process_left_is_removed_unless_another_is_writing_it(tmp_path):
    torn, whole = tmp_path / "last.ckpt.new", tmp_path / "best.ckpt"
    torn.write_bytes(b"half")
    with whole_file(whole) as new:
        new.write_bytes(b"whole")
        remove_torn(tmp_path)
        assert new.exists()
        assert not torn.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]


def test_a_file_reaches_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    done, sync, move = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("sync"), sync(number)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (done.append("move"), move(a, b)))
    with whole_file(tmp_path / "last.ckpt") as new:
        new.write_bytes(b"whole")
    assert done == ["sync", "move", "sync"]  # the contents, the name, the folder


# ---------------------------------------------------------------------------------------- metrics


def test_metrics_have_one_row_per_policy_and_every_file_numbers_iterations_alike(recipe, capsys):
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "3"]) == 0
    logged = metrics("runs/recipe/version_0")
    assert [row["iteration"] for row in logged] == ["0", "1", "2", "3"]
    assert [row["step"] for row in logged] == ["0", "2", "4", "6"]
    assert all(row["val/exact_match"] for row in logged)
    assert [bool(row["train/loss"]) for row in logged] == [False, True, True, True]
    printed = re.findall(r"^iteration +(\d+)/3", capsys.readouterr().out, re.MULTILINE)
    assert printed == ["1", "2", "3"]
    run = Path("runs/recipe/version_0")
    files = sorted(path.name for path in (run / "transcripts").iterdir())
    assert files == [f"iteration_000{k}.txt" for k in (1, 2, 3)]
    for k, row in enumerate(logged):
        kept = [r for r in record.read(run / "record") if r["iteration"] == k]
        val = [r["tool_execution"] for r in kept if r["split"] == "val"]
        assert sum(val) / 3 == pytest.approx(float(row["val/tool_execution"]), abs=1e-6)
        train = [r["outcome"] for r in kept if r["split"] == "train"]
        if k:  # what iteration k collected is in the row of the policy that it trained
            assert sum(train) / 16 == pytest.approx(float(row["reward/outcome"]), abs=1e-6)
        else:
            assert not train


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"check_val_every_n_epoch": 2}, [0, 4, 6]),
        ({"check_val_every_n_epoch": 2, "max_steps": 3}, [0, 3]),  # inside an iteration
        ({"val_check_interval": 1}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_final_policy_is_validated_whatever_the_interval(tiny_model, tmp_path, options, steps):
    run = trainer(tmp_path, 3, **options)
    run.fit(make_module(tiny_model), data())
    steps_validated = [int(row["step"]) for row in rows(tmp_path) if row["val/exact_match"]]
    assert steps_validated == steps
    assert len({row["step"] for row in rows(tmp_path)}) == len(rows(tmp_path))
    assert run.check_val_every_n_epoch == options.get("check_val_every_n_epoch", 1)


def test_early_stopping_on_a_training_figure_validates_the_final_policy(tiny_model, tmp_path):
    stop = EarlyStopping("train/entropy", mode="max", patience=1, check_on_train_epoch_end=True)
    stop.best_score = torch.tensor(100.0)  # nothing reaches it
    run = trainer(tmp_path, 9, [stop], check_val_every_n_epoch=4)
    run.fit(make_module(tiny_model), data())
    logged = rows(tmp_path)
    assert [(row["iteration"], bool(row["val/exact_match"])) for row in logged] == [
        ("0", True),
        ("1", True),
    ]


def test_a_resumed_run_has_one_row_per_iteration_of_its_own(tiny_model, tmp_path):
    trainer(tmp_path / "a", 2).fit(make_module(tiny_model), data())
    run = trainer(tmp_path / "b", 3)
    run.fit(make_module(tiny_model), data(), ckpt_path=last(tmp_path / "a"))
    assert column(tmp_path / "b", "iteration") == [3]


# ---------------------------------------------------------------------------------------- folders


def metrics(run):
    with Path(run, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


class Elsewhere(Logger):
    """Logs as W&B does: a project for a name, a version that it makes up, no folder of its own."""

    def __init__(self, project: str = "lightning_logs", save_dir: str = ".") -> None:
        super().__init__()
        self.project, self._save_dir, self.logged = project, save_dir, []

    name = property(lambda self: self.project)
    version = property(lambda self: "1a2b3c")
    save_dir = property(lambda self: self._save_dir)

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


ELSEWHERE = ["--trainer.logger", "test_run_files.Elsewhere"]


@pytest.mark.parametrize(
    ("logger", "home"),
    [
        (ELSEWHERE, "runs/recipe"),
        (["--trainer.default_root_dir", "mine"], "mine/recipe"),
    ],
)
def test_every_run_has_its_own_folder_that_last_and_best_find_with_any_logger(
    recipe, capsys, logger, home
):
    fit = ["fit", "recipe.yaml", "--trainer.max_epochs", "1", *logger]
    assert main(fit) == 0
    assert f"writing to {home}/version_0\n" in capsys.readouterr().out
    assert main([*fit, "--model.group_size", "2"]) == 0
    for number, size in ((0, 4), (1, 2)):
        run = Path(home, f"version_{number}")
        saved = yaml.safe_load((run / "config.yaml").read_text())
        assert saved["model"]["group_size"] == size
        assert [row["iteration"] for row in metrics(run)] == ["0", "1"]
        assert (run / "checkpoints" / "best.ckpt").is_file()
    assert not Path("config.yaml").exists()
    for name in ("last", "best"):
        invocation = read_invocation("eval", ["recipe.yaml", "--ckpt_path", name, *logger])
        file = f"{home}/version_1/checkpoints/{name}.ckpt"
        assert invocation.with_checkpoint().contents["ckpt_path"] == file


def test_a_logger_gets_the_rows_of_metrics_csv(tiny_model, tmp_path):
    elsewhere = Elsewhere(save_dir=str(tmp_path))
    trainer(tmp_path, 2, logger=elsewhere).fit(make_module(tiny_model), data())
    run = tmp_path / "lightning_logs" / "1a2b3c"  # made from Python, so it is the logger's choice
    assert (run / "model").is_dir()
    logged_rows = metrics(run)
    assert (
        [int(row["step"]) for row in logged_rows]
        == [step for step, _ in elsewhere.logged]
        == [0, 2, 4]
    )
    for row, (_, logged) in zip(logged_rows, elsewhere.logged, strict=True):
        assert {k: float(v) for k, v in row.items() if v and k != "step"} == logged


@pytest.mark.slow
def test_an_evaluation_after_a_fit_keeps_the_rows_of_the_fit(tiny_model, tmp_path):
    run = trainer(tmp_path, 2, logger=Elsewhere(save_dir=str(tmp_path)))
    policy = make_module(tiny_model)
    run.fit(policy, data())
    before = metrics(tmp_path / "lightning_logs" / "1a2b3c")
    run.validate(policy, data(), verbose=False)
    after = metrics(tmp_path / "lightning_logs" / "1a2b3c")
    assert [row["step"] for row in after[:3]] == [row["step"] for row in before]
    assert [row["iteration"] for row in after] == ["0", "1", "2", "2"]


def test_the_position_of_a_checkpoint_counts_the_iterations_behind_its_policy():
    loops = {"fit_loop": {"epoch_progress": {"current": {"ready": 3}}}}
    assert read_position({"global_step": 4, "epoch": 2, "loops": loops}) == (3, 4)
    assert read_position({"global_step": 4, "epoch": 1}) == (2, 4)
    # saved before anything was learned
    assert read_position({"global_step": 0, "epoch": 0, "loops": loops}) == (0, 0)


class Shared(Elsewhere):
    """Writes events as TensorBoard does, into the same folder for every run."""

    log_dir = "boards"


def test_a_run_that_fails_keeps_folders_with_other_files(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("boards").mkdir()
    events = Path("boards/events.out.tfevents.1")
    events.write_text("of earlier runs")
    os.utime(events, (0, 0))
    too_long = {"max_tokens": 10**6}
    for loggers in (Shared(), [CSVLogger("runs", name="mine"), Shared()]):
        with pytest.raises(RecipeError):
            trainer(tmp_path, 1, logger=loggers).fit(
                make_module(tiny_model, rollout=too_long), data()
            )
        assert events.is_file()
    assert not Path("runs").exists()


def test_the_folder_of_a_run_means_its_last_checkpoint(trained, capsys):
    run = trained
    for folder in (run, run / "checkpoints"):
        invocation = read_invocation("eval", ["recipe.yaml", "--ckpt_path", str(folder)])
        assert invocation.contents["ckpt_path"] == str(run / "checkpoints" / "last.ckpt")
    assert main(["eval", "recipe.yaml", "--ckpt_path", str(run)]) == 0
    assert main(["fit", "recipe.yaml", "--ckpt_path", str(run)]) == 0
    assert [row["iteration"] for row in metrics("runs/recipe/version_1")] == ["2"]
    Path("empty").mkdir()
    capsys.readouterr()
    message = fails(capsys, ["fit", "recipe.yaml", "--ckpt_path", "empty"])
    assert "no checkpoint in 'empty'. Give the folder of a run" in message
    message = fails(capsys, ["fit", "recipe.yaml", "--ckpt_path", "runs/recipe"])
    assert "Runs in it: runs/recipe/version_0, runs/recipe/version_1" in message
    message = fails(capsys, ["fit", "recipe.yaml", "--ckpt_path", "lst"])
    assert "no checkpoint at 'lst'. Did you mean last?" in message
    with pytest.raises(CheckpointError, match=r"no checkpoint in 'empty'"):
        turnrl.load("empty")
    # without a last.ckpt it means its newest checkpoint, by any name
    kept = Path("empty/checkpoints")
    for number, name in enumerate(("b.ckpt", "a.ckpt")):
        kept.mkdir(exist_ok=True)
        shutil.copy(run / "checkpoints" / "last.ckpt", kept / name)
        os.utime(kept / name, (number, number))
    invocation = read_invocation("fit", ["recipe.yaml", "--ckpt_path", "empty"])
    assert invocation.contents["ckpt_path"] == str(kept / "a.ckpt")


@pytest.mark.parametrize(
    "mistake",
    [
        ["--data.train", "missing.jsonl"],
        ["--model.rollout.max_tokens", "4096"],  # more than the model has positions
        ["--model.rollout.tools", "[worlds.Raises]"],
    ],
)
def test_a_start_that_fails_leaves_no_folder(recipe, capsys, mistake):
    there = set(Path().iterdir())
    fails(capsys, ["fit", "recipe.yaml", *mistake], code=1 if "Raises" in mistake[1] else 2)
    assert set(Path().iterdir()) == there


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # it writes over metrics.csv
def test_a_start_that_fails_leaves_other_runs_alone(trained, capsys):
    version = ["--trainer.logger.init_args.version", "0"]
    fails(capsys, ["fit", "recipe.yaml", "--data.train", "missing.jsonl", *version])
    assert [path.name for path in Path("runs/recipe").iterdir()] == ["version_0"]
    assert (trained / "checkpoints" / "last.ckpt").is_file()
    assert (trained / "model").is_dir()


def csv_logger(**settings):
    return json.dumps({"class_path": "CSVLogger", "init_args": settings})


@pytest.mark.parametrize(
    "logger",
    [
        [],
        ["--trainer.logger", f"[{csv_logger(save_dir='out')}]"],
        ["--trainer.logger.init_args.version", "mine"],
        ["--trainer.logger", f"[test_run_files.Elsewhere, {csv_logger(save_dir='o', name='x')}]"],
        [*ELSEWHERE, "--trainer.logger.save_dir", "other"],
    ],
    ids=str,
)
def test_the_announced_folder_is_used(recipe, logger):
    start = turnrl.build(["recipe.yaml", *logger]).start
    assert read_invocation("fit", ["recipe.yaml", *logger]).location.folder == start.folder


@pytest.mark.parametrize(
    ("command", "options", "place"),
    [
        ("fit", ["--trainer.fast_dev_run", "2"], "no files: trainer.fast_dev_run is a trial"),
        ("fit", ["--trainer.logger", "false"], "only checkpoints/: trainer.logger is false"),
        ("eval", [], "to runs/recipe-eval/version_0"),
    ],
)
def test_the_first_line_says_where_files_go(recipe, request, capsys, command, options, place):
    if command == "eval":
        request.getfixturevalue("trained")
        options = [*options, "--ckpt_path", "last"]
    before = {path for path in Path().rglob("*") if path.is_dir()}
    options = [*options, "--trainer.max_epochs", "1"]
    capsys.readouterr()
    assert main([command, "recipe.yaml", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"writing {place}"
    made = {str(path) for path in Path().rglob("*") if path.is_dir() and path not in before}
    folders = {path for path in made if path.startswith("runs/") and "version" in path}
    assert bool(folders) == place.startswith("to ")
    assert ("checkpoints" in made) == place.startswith("only checkpoints")


@pytest.mark.slow
def test_a_recipe_that_an_evaluation_saved_finds_the_runs_of_the_training(trained):
    assert main(["eval", "recipe.yaml", "--ckpt_path", "best"]) == 0
    saved = "runs/recipe-eval/version_0/config.yaml"
    for name in ("last", "best"):
        invocation = read_invocation("eval", [saved, "--ckpt_path", name])
        assert invocation.location.trained == Path("runs/recipe")
        # a look-up changes nothing of what was given
        file = f"runs/recipe/version_0/checkpoints/{name}.ckpt"
        assert invocation.with_checkpoint().contents == {**invocation.contents, "ckpt_path": file}
        assert invocation.contents["ckpt_path"] == name
    assert main(["eval", saved, "--ckpt_path", "best"]) == 0
    assert Path("runs/recipe-eval/version_1/metrics.csv").is_file()


def test_folders_are_numbered_as_lightning_numbers_them(recipe):
    for number in (0, 3, 11):
        Path(f"runs/recipe/version_{number}").mkdir(parents=True)
    Path("runs/recipe/version_old").mkdir()
    place = read_invocation("fit", ["recipe.yaml"]).location
    assert str(place.folder) == CSVLogger("runs", "recipe").log_dir == "runs/recipe/version_12"


def test_no_two_runs_claim_the_same_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home, together = Path("some/runs"), threading.Barrier(8)
    taken = []

    def begin():
        together.wait()
        with claim_number(home) as number:
            taken.append(number)
            together.wait()

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [*range(8)]
    # nothing was written, so nothing is left but what others may have found there
    assert not any(home.glob("*"))
    with claim_number(Path("alone/runs")):
        pass
    assert not Path("alone").exists()
    with claim_number(home) as number:
        Path(home, "version_0", "file").touch()
    assert number == 0
    with claim_number(home) as number:
        pass
    assert number == 1
    assert [path.name for path in home.iterdir()] == ["version_0"]
    Path("scratch").symlink_to("/not/mounted")
    with (
        pytest.raises(RecipeError, match="scratch/runs takes no folder"),
        claim_number(Path("scratch/runs")),
    ):
        pass


def test_the_saved_recipe_has_no_claimed_number(recipe):
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    run = Path("runs/recipe/version_0")
    (logger,) = as_list(yaml.safe_load((run / "config.yaml").read_text())["trainer"]["logger"])
    assert logger["init_args"].get("version") is None
    assert main(["fit", str(run / "config.yaml"), "--trainer.max_epochs", "1"]) == 0
    assert (run.with_name("version_1") / "metrics.csv").is_file()
