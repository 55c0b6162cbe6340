"""Variables in a recipe: only the constructors of its objects get their values."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import turnrl
from commands import fails, forget, save
from turnrl.cli import main
from turnrl.recipe.build import build

KEY = "sk-live-0123456789abcdef"
KEYED = """
import os
from pathlib import Path

import worlds


class Keyed(worlds.Echo):
    def __init__(self, key: str, headers: dict[str, str] | None = None, times: int = 1, refuse=""):
        self.given = (key, headers, times)
        if refuse:
            raise ValueError(f"the vendor refuses {key}")
        lines = [Path(f"/proc/{n}/cmdline").read_text() for n in (os.getpid(), os.getppid())]
        Path(f"commands-{os.getpid()}.txt").write_text(" ".join(lines))
"""
SETTINGS = {"key": "${MY_KEY}", "headers": {"X-Key": "${MY_KEY}"}}


@pytest.fixture
def keyed(recipe, monkeypatch):
    """A function that writes the small recipe with a tool that takes a key, with more settings."""
    monkeypatch.setenv("MY_KEY", KEY)
    Path("keyed.py").write_text(KEYED)

    def write(**more):
        tool = {"class_path": "keyed.Keyed", "init_args": SETTINGS | more}
        recipe["model"]["rollout"]["tools"] = [tool]
        save(recipe)
        return recipe

    yield write
    forget("keyed")


def with_key(folder):
    files = (file for file in Path(folder).rglob("*") if file.is_file())
    return [str(file) for file in files if KEY.encode() in file.read_bytes()]


def test_a_run_keeps_the_name_of_a_variable_and_its_tool_gets_the_value(keyed, capfd, monkeypatch):
    keyed()
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    run = Path("runs/recipe/version_0")
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["recipe"]
    for text in (saved, (run / "config.yaml").read_text()):
        (tool,) = yaml.safe_load(text)["model"]["rollout"]["tools"]
        assert tool["init_args"] == {**SETTINGS, "times": 1, "refuse": ""}
    assert main(["fit", "recipe.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"]) == 0
    assert main(["fit", "recipe.yaml", "--print_config"]) == 0
    assert with_key(".") == []
    assert KEY not in "".join(capfd.readouterr())
    monkeypatch.setenv("MY_KEY", "sk-rotated")
    (tool,) = turnrl.load(run).rollout.tools
    assert tool.given == ("sk-rotated", {"X-Key": "sk-rotated"}, 1)


@pytest.mark.slow
def test_a_second_process_gets_the_recipe_but_no_key_on_its_command_line(keyed, nursery):
    from commands import start

    recipe = keyed()
    # written out in full, it is in the recipe alone
    recipe["model"]["rollout"]["tools"][0]["init_args"]["headers"] = {"X-Key": f"{KEY}-2"}
    save(recipe)
    options = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=1"]
    words = ["-m", "turnrl", "fit", "recipe.yaml", *options, "--trainer.logger=false"]
    out, err = start(nursery, Path.cwd(), *words)
    lines = [file.read_text() for file in Path().glob("commands-*.txt")]
    assert len(lines) == 2
    assert KEY not in "".join([out, err, *lines])


def test_a_variable_that_stands_for_a_number_is_named_and_not_shown(keyed, capsys):
    keyed()
    message = fails(capsys, ["fit", "recipe.yaml", "--model.group_size", "${MY_KEY}"])
    assert "model.group_size is '${MY_KEY}'; it must be a whole number" in message
    assert KEY not in message


def test_a_variable_in_a_header_is_filled_in_and_in_prose_only_if_it_is_set(keyed):
    written = {"Authorization": "Bearer ${MY_KEY}", "Note": "costs $5 in ${NOWHERE_SET}, $MY_KEY"}
    recipe = keyed(headers=written)
    module = build(["recipe.yaml"]).module
    assert module.rollout.tools[0].given[1] == written | {"Authorization": f"Bearer {KEY}"}
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "x", "api_key_env": "${MY_KEY}"}
    recipe["model"]["rewards"] = [{"class_path": "LLMJudge", "init_args": {"server": server}}]
    save(recipe)
    (judge,) = build(["recipe.yaml"]).module.rewards
    assert judge._verdicts._server.api_key_env == "MY_KEY"


def test_an_error_that_quotes_a_key_shows_the_variable_instead(keyed, capsys):
    keyed(refuse="x")
    assert "the vendor refuses ${MY_KEY}" in fails(capsys, ["fit", "recipe.yaml"])


@pytest.mark.parametrize(
    "text", ["${MISSING_KEY}", "$MISSING_KEY", "https://x/?key=${MISSING_KEY}"]
)
def test_a_variable_that_is_not_set_is_refused_by_name_at_the_start(
    text, keyed, capsys, monkeypatch
):
    monkeypatch.delenv("MISSING_KEY", raising=False)
    keyed(key=text)
    message = fails(capsys, ["fit", "recipe.yaml"])
    assert f"key is {text!r}, and no variable MISSING_KEY is set" in message


def test_a_result_that_quotes_a_key_shows_the_policy_the_variable(keyed):
    keyed()
    rollout = build(["recipe.yaml"]).module.rollout
    chat = SimpleNamespace(sanitize=lambda text, *_: text)
    make_safe = rollout.make_agent(None, chat).box.make_safe
    assert make_safe(f"401 for https://x/?key={KEY}") == "401 for https://x/?key=${MY_KEY}"


def test_the_folder_of_an_index_may_begin_with_a_variable(keyed, monkeypatch):
    recipe = keyed()
    monkeypatch.setenv("SCRATCH", str(Path.cwd()))
    search = {"class_path": "WikiSearch", "init_args": {"index": "$SCRATCH/wiki"}}
    recipe["model"]["rollout"]["tools"] = [search]
    save(recipe)
    (tool,) = build(["recipe.yaml"]).module.rollout.tools
    assert tool.index.folder == f"{Path.cwd()}/wiki"


def test_a_logger_gets_its_key_and_the_runs_folder_its_variables(keyed, monkeypatch):
    recipe = keyed()
    monkeypatch.setenv("SCRATCH", str(Path.cwd() / "scratch"))
    recipe["trainer"]["logger"] = [
        {"class_path": "CSVLogger", "init_args": {"save_dir": "$SCRATCH/runs", "name": "mine"}},
        {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "$SCRATCH/runs"}},
    ]
    save(recipe)
    built = build(["recipe.yaml"])
    csv, board = built.trainer.loggers
    assert (
        Path(csv.log_dir)
        == built.invocation.location.folder
        == Path("scratch/runs/mine/version_0").absolute()
    )
    assert board.root_dir.startswith(os.environ["SCRATCH"])
