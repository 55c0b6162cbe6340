"""A word means the same run to every command; if it means none, the error names the next step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trajectories
import turnrl
from commands import fails, save
from turnrl import DataError, RecipeError
from turnrl.cli import main
from turnrl.commands.eval.command import choose_checkpoint
from turnrl.plugin.errors import CheckpointError
from turnrl.recipe.agents import NamedAgent, find_agent
from turnrl.recipe.invocation import read_invocation
from turnrl.runs import find_run, record
from turnrl.runs.checkpoints import find_named_checkpoint, newest_checkpoint
from turnrl.runs.find import resolve_run
from turnrl.runs.load import open_runs

ONE = ("--trainer.max_epochs", "1")


def made(place, *files, began=0):
    """A folder of a run with empty files, whose recipe was written at a moment."""
    for name in ("config.yaml", *files):
        file = Path(place, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (began, began))
    return Path(place)


def checkpoint(word, name=None):
    return str(find_agent(word, name).weights())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_word_means_the_same_run_to_every_command(recipe, capsys):
    assert main(["fit", "recipe.yaml", *ONE]) == 0
    assert main(["fit", "recipe.yaml", *ONE, "--seed_everything", "1"]) == 0
    untrained = ["--trainer.enable_checkpointing", "false"]
    assert main(["fit", "recipe.yaml", *ONE, *untrained]) == 0
    trained = Path("runs/recipe/version_1")  # the newest one trained nothing that is kept
    assert not Path("runs/recipe/version_2/checkpoints").exists()
    for word in ("recipe", "runs/recipe", str(trained), str(trained / "record")):
        assert find_run(word) == trained
        assert {file.parent for file in record.list_files(word)} == {trained / "record"}
        (run,) = open_runs([word])
        assert run.folder == trained
        capsys.readouterr()
        assert main(["compare", f"{word}@0", f"{word}@1", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["first"][0]["folder"] == str(trained)
        assert main(["eval", word, "--data.val_limit", "1"]) == 0
        assert f"checkpoint {trained}/checkpoints/best.ckpt" in capsys.readouterr().out
        assert main(["play", word, "Number 7?"]) == 0
        errors = capsys.readouterr().err
        assert f"turnrl play: checkpoint {trained}/checkpoints/best.ckpt\n" in errors


def test_a_name_is_looked_up_once():
    old = made("runs/mine/version_0", began=1)
    (old / "config.yaml").write_text("model: {group_size: 4}")
    os.utime(old / "config.yaml", (1, 1))
    best = old / "checkpoints" / "best.ckpt"
    best.parent.mkdir()
    with zipfile.ZipFile(best, "w"):
        pass

    def late(invocation):
        shutil.copytree(old, "runs/mine/version_1")
        os.utime("runs/mine/version_1/config.yaml", (2, 2))
        assert find_run("mine", "recipe") == Path("runs/mine/version_1")
        return choose_checkpoint(invocation)

    invocation = read_invocation("eval", ["mine"], takes_run=True, prepare=late)
    assert invocation.files == [str(old / "config.yaml")]
    assert invocation.contents["ckpt_path"] == str(best)
    assert (invocation.name, invocation.agent) == (
        "mine",
        NamedAgent("mine", "run", old / "config.yaml", old, best),
    )


def test_a_checkpoint_outside_any_run_is_found_by_its_path(capsys):
    for name in ("alone.ckpt", "alone.pt", "kept/last.ckpt"):
        Path(name).parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(name, "w"):
            pass
        assert find_agent(name) == NamedAgent(name, "checkpoint", Path(name), None, Path(name))
        assert f"the checkpoint {name!r} is in no run." in fails(capsys, ["eval", name])
    kept = Path("kept/last.ckpt")
    assert find_agent("kept") == NamedAgent("kept", "checkpoint", kept, None, kept)
    with pytest.raises(CheckpointError, match="'kept' is one checkpoint already"):
        find_agent("kept", "best")
    Path("notes.txt").write_text("no recipe")
    Path("broken.ckpt").write_text("no checkpoint")
    for command in (["eval"], ["play"]):
        assert "recipe 'notes.txt' is not a YAML" in fails(capsys, [*command, "notes.txt"])
    assert "'broken.ckpt' is not a checkpoint" in fails(capsys, ["play", "broken.ckpt"])
    with pytest.raises(DataError, match=r"no record of a run at 'notes\.txt'"):
        record.list_files("notes.txt")


def test_the_newest_run_that_trained_is_taken():
    last = "checkpoints/last.ckpt"
    for number, began, *files in ((0, 3, last), (1, 9), (2, 1, last), (10, 2, last)):
        made(f"runs/mine/version_{number}", *files, began=began)
    assert find_run("mine", "recipe") == Path("runs/mine/version_0")
    assert newest_checkpoint(Path("runs/mine"), "last") == Path("runs/mine/version_0", last)
    # what is written later is no later beginning
    made("runs/mine/version_2", "metrics.csv", began=1)
    os.utime("runs/mine/version_2/metrics.csv", (99, 99))
    assert find_run("mine", "recipe") == Path("runs/mine/version_0")
    shutil.rmtree("runs/mine/version_0/checkpoints")
    assert find_run("mine", "recipe") == Path("runs/mine/version_10")
    for number in (2, 10):
        shutil.rmtree(f"runs/mine/version_{number}/checkpoints")
    assert find_run("mine", "recipe") == Path("runs/mine/version_1")


def test_an_existing_folder_takes_precedence_over_a_name():
    named, own = made("runs/mine/version_0"), made("mine/version_3")
    assert resolve_run("mine") == own
    shutil.rmtree("mine/version_3")  # and a folder without runs does not
    assert resolve_run("mine") == named
    inside = ("config.yaml", "model", "adapter", "checkpoints")
    for name in inside[1:]:
        (named / name).mkdir()
    assert {resolve_run(f"runs/mine/version_0/{name}") for name in inside} == {named}
    assert resolve_run("runs") is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("quickstrat", "no record of a run at 'quickstrat'. Did you mean quickstart? Give the"),
        ("runs/quickstart/version_7", "Did you mean runs/quickstart/version_0?"),
        ("zzz", "at 'zzz'. There are quickstart, study. Give the folder of a run"),
        ("study", "at 'study'. It has folders of runs: runs/study/a, runs/study/b. Give the"),
        ("quickstart", "the run 'runs/quickstart/version_0' has no record: record/ is empty. Wait"),
        ("study/a", "the run 'runs/study/a/version_0' has no record: there is no record/. Wait"),
    ],
)
def test_a_name_without_a_run_and_a_run_without_a_record_are_errors(word, message):
    for place in ("quickstart", "study/a", "study/b"):
        made(f"runs/{place}/version_0")
    Path("runs/quickstart/version_0/record").mkdir()
    with pytest.raises(DataError) as refusal:
        record.list_files(word)
    assert message in str(refusal.value)


def test_a_run_without_the_files_a_command_needs_is_refused(capsys):
    folder = trajectories.run(Path("runs/mine/version_0"))
    (folder / "config.yaml").unlink()
    with pytest.raises(RecipeError, match=r"'runs/mine/version_0' has no config\.yaml"):
        find_run("mine", "recipe")
    assert "the run 'runs/mine/version_0' has no config.yaml" in fails(capsys, ["eval", "mine"])
    lacks = "the run 'runs/mine/version_0' has no checkpoint, no model/ and no adapter/. Wait for"
    assert lacks in fails(capsys, ["play", "mine", "Why?"])
    assert find_run("mine") == folder
    made("runs/new/version_0")
    assert "'runs/new/version_0' has no record and no metrics.csv: there is no record/" in fails(
        capsys, ["report", "new"]
    )


def test_the_best_checkpoint_is_taken_or_else_the_last(trained, capsys):
    run = trained
    best, last = (str(run / "checkpoints" / f"{name}.ckpt") for name in ("best", "last"))
    assert checkpoint("recipe") == str(find_named_checkpoint(run)) == best
    assert checkpoint("recipe", "last") == checkpoint(last) == last
    # the folders of what was exported at the end mean the same one
    assert checkpoint(run / "model") == best
    assert checkpoint(run / "model", "last") == last
    with pytest.raises(CheckpointError, match=r"is one checkpoint already\. Leave 'last' out"):
        find_agent(best, "last")
    capsys.readouterr()
    assert main(["play", "recipe", "Number 7?", "--checkpoint", "last"]) == 0
    assert f"turnrl play: checkpoint {last}\n" in capsys.readouterr().err
    assert main(["eval", last, "--data.val_limit", "1"]) == 0
    assert f"checkpoint {last}\n" in capsys.readouterr().out
    assert turnrl.load("recipe", checkpoint="last").ask(["Number 7?"])[0].turns
    shutil.copy(best, "alone.ckpt")
    message = fails(capsys, ["eval", "alone.ckpt"])
    assert "'alone.ckpt' is in no run. Give a recipe for it: 'turnrl eval RECIPE --ckpt" in message
    Path(best).unlink()
    assert checkpoint("recipe") == last
    message = fails(capsys, ["play", "recipe", "Why?", "--checkpoint", "best"])
    assert message.endswith(
        f"'runs/recipe/version_0' has no best.ckpt in checkpoints/. It has {last}."
    )
    message = fails(capsys, ["play", "recipe", "Why?", "--checkpoint", "bets"])
    assert "no checkpoint 'bets' of the run 'runs/recipe/version_0'. Did you mean best?" in message
    # without one the exported policy is left, and without that the recipe
    Path(last).unlink()
    assert checkpoint("recipe") == str(run / "model")
    assert turnrl.load("recipe").ask(["Number 7?"])[0].turns
    shutil.rmtree(run / "model")
    message = fails(capsys, ["play", "recipe", "Why?"])
    assert message.endswith(
        f"or give its recipe, for the policy before training: {run / 'config.yaml'}"
    )


def test_a_bundled_recipe_takes_precedence_over_runs_of_its_name(recipe, capsys):
    assert find_agent("quickstart").recipe.name == "quickstart.yaml"
    made("runs/quickstart/version_0", "checkpoints/last.ckpt")
    assert find_agent("quickstart").recipe.name == "quickstart.yaml"
    message = fails(capsys, ["play", "quickstart", "Why?", "--checkpoint", "last"])
    assert "'quickstart' is a recipe, and has no last.ckpt. Give a run: runs/quickstart." in message
    save(recipe, "quickstart.yaml")  # your own recipe comes first, and the message names the runs
    assert main(["play", "quickstart", "Number 7?"]) == 0
    errors = capsys.readouterr().err
    assert (
        "the policy of quickstart.yaml before any training; for its newest run give runs/" in errors
    )
    assert main(["play", "quickstart.yaml", "Number 7?"]) == 0
    assert "quickstart.yaml before any training\n" in capsys.readouterr().err


def test_play_and_eval_report_a_typo_before_torch_is_loaded():
    made("runs/mine/version_0", "checkpoints/last.ckpt")
    code = (
        "import sys; from turnrl.cli import main; "
        "print(main(['play', 'mien']), main(['eval', 'mien']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 2 False\n"
    message = "no run, no recipe and no checkpoint at 'mien'. Did you mean mine?"
    assert [message in line for line in done.stderr.splitlines()] == [True] * 2
    assert done.stderr.count("the name of its runs, or a recipe.") == 2
