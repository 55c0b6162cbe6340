"""The bundled recipes: found by name in a clone and in what is installed, listed and copied."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import yaml

import turnrl
import turnrl.recipe.bundled
from commands import fails
from turnrl.cli import main
from turnrl.recipe.bundled import bundled_recipes, find_recipe
from turnrl.recipe.invocation import read_invocation

ROOT = Path(__file__).parents[1]
FILES = {
    str(file.relative_to(ROOT / "recipes")).removesuffix(".yaml"): file
    for file in (ROOT / "recipes").rglob("*.yaml")
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_accepts_a_recipe_by_name(folder, capsys):
    assert main(["fit", "quickstart", "--model.group_size", "3", "--print_config"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["model"]["policy"]["model"] == "package://turnrl_atlas/starter"
    assert recipe["model"]["group_size"] == 3
    assert main(["doctor", "quickstart", "--model.group_size", "1"]) == 2  # the recipe is read
    assert "group_size is 1" in capsys.readouterr().out
    message = fails(capsys, ["eval", "quickstart", "--ckpt_path", "last"])
    assert "no run in 'runs/quickstart' has a last.ckpt" in message
    assert turnrl.load("quickstart").policy.settings.model == "package://turnrl_atlas/starter"


def test_bundled_recipes_match_the_folder_including_variants(folder):
    assert bundled_recipes() == FILES
    base, variant = "hotpotqa_qwen2.5_1.5b", "variants/hotpotqa_qwen2.5_0.5b_full"
    invocation = read_invocation("fit", [base, variant])
    assert invocation.files == [str(FILES[base]), str(FILES[variant])]
    assert invocation.name == "hotpotqa_qwen2.5_0.5b_full"
    assert invocation.contents["model"]["policy"]["dtype"] == "bfloat16"
    assert (
        read_invocation("fit", invocation.arguments).contents == invocation.contents
    )  # in another process


def test_a_local_file_of_that_name_goes_first(folder):
    assert find_recipe("quickstart") == str(FILES["quickstart"])
    Path("quickstart.yaml").touch()
    assert find_recipe("quickstart") == "quickstart.yaml"
    Path("quickstart").touch()
    assert find_recipe("quickstart") == "quickstart"


def test_the_error_for_an_unknown_recipe_suggests_existing_ones(folder, capsys):
    assert "Did you mean quickstart?" in fails(capsys, ["fit", "recipes/quickstart.yaml"])
    assert "Did you mean quickstart?" in fails(capsys, ["fit", "quikstart"])
    assert "'turnrl recipes' lists" in fails(capsys, ["fit", "nothing_like_it"])
    variant = " Did you mean variants/hotpotqa_qwen2.5_3b? "
    assert variant in fails(capsys, ["fit", "hotpotqa_qwen2.5_3b"])
    assert variant in fails(capsys, ["recipes", "copy", "hotpotqa_qwen2.5_3b"])
    assert " Did you mean atlas_react" in fails(capsys, ["recipes", "copy", "atlas_reac"])


def test_every_recipe_is_listed_with_its_command_and_its_row(capsys):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    blocks = dict(block.partition("\n")[::2] for block in printed.split("turnrl fit ")[1:])
    assert {command.split()[-1] for command in blocks} == {*FILES}
    assert all(("reproduces  " in text) == ("needs  " in text) for text in blocks.values())
    assert "needs       a GPU, the hub, Elasticsearch" in blocks["musique_qwen2.5_7b_react"]
    variant = blocks["hotpotqa_qwen2.5_1.5b variants/hotpotqa_qwen2.5_3b"]
    assert variant.split() == ["changes", "Qwen2.5-3B-Instruct"]


def test_a_copy_is_a_file_to_change_and_replaces_none(folder, capsys):
    assert main(["recipes", "copy", "quickstart"]) == 0
    assert "turnrl fit quickstart.yaml" in capsys.readouterr().out
    assert Path("quickstart.yaml").read_text() == FILES["quickstart"].read_text()
    Path("quickstart.yaml").write_text("mine: 1")
    message = fails(capsys, ["recipes", "copy", "quickstart"])
    assert (
        "'quickstart.yaml' is there already. Name another: turnrl recipes copy quickstart"
        in message
    )
    assert Path("quickstart.yaml").read_text() == "mine: 1"
    assert main(["recipes", "copy", "variants/triviaqa_qwen2.5_3b", "small.yaml"]) == 0
    assert "turnrl fit triviaqa_qwen2.5_7b_qlora small.yaml" in capsys.readouterr().out
    assert "no recipe 'quick' comes with turnrl" in fails(capsys, ["recipes", "copy", "quick"])
    message = fails(capsys, ["recipes", "copy", "quickstart", "none/such.yaml"])
    assert "cannot write 'none/such.yaml': No such file or directory" in message


def test_an_installed_turnrl_has_its_recipes(tmp_path, monkeypatch, capsys):
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    package = tmp_path / "site" / "turnrl" / "recipe"
    with zipfile.ZipFile(wheel) as archive:
        recipes = [name for name in archive.namelist() if name.startswith("turnrl/recipe/recipes/")]
        archive.extractall(tmp_path / "site", recipes)
    monkeypatch.setattr(turnrl.recipe.bundled, "__file__", str(package / "bundled.py"))
    assert bundled_recipes() == {name: package / "recipes" / f"{name}.yaml" for name in FILES}
    assert main(["recipes"]) == 0
    assert "turnrl fit quickstart\n    reproduces  MT-GRPO" in capsys.readouterr().out
