"""The bundled recipes: found by name in a clone and in what is installed, listed and copied."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

import pytest
import yaml

import turnrl
import turnrl.recipe.bundled
import turnrl_openai
import turnrl_rewards
from commands import fails
from turnrl.cli import main
from turnrl.recipe.bundled import find_recipe
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.merging import dropped, merged
from turnrl.recipe.moved import renamed
from turnrl.text import say_once
from turnrl_rewards import ExactMatch, Number, SearchCost
from turnrl_segmenters import TwoTurn

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
    assert turnrl.load("quickstart").policy.model == "package://turnrl_atlas/starter"


def test_bundled_recipes_match_the_folder_including_variants(folder):
    assert turnrl.bundled_recipes() == FILES
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
    assert turnrl.bundled_recipes() == {
        name: package / "recipes" / f"{name}.yaml" for name in FILES
    }
    assert main(["recipes"]) == 0
    assert "turnrl fit quickstart\n    reproduces  MT-GRPO" in capsys.readouterr().out


def test_a_recipe_with_version_0_8_class_paths_still_builds_the_same_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(FILES["quickstart"].read_text("utf-8"))
    recipe["model"]["rewards"] = [
        {"class_path": "turnrl_qa_rewards.ExactMatch"},
        {"class_path": "turnrl_turn_rewards.calls.SearchCost", "init_args": {"weight": 0.3}},
    ]
    recipe["model"]["rollout"]["segmenter"] = {"class_path": "turnrl_react.ReAct"}
    recipe["data"]["answers"] = {"class_path": "turnrl_answers.Number"}
    recipe["trainer"]["callbacks"] = [
        {"class_path": "turnrl_alarms.Alarms", "init_args": {"stop": True}},
        {
            "class_path": "turnrl_questions.also.AlsoScore",
            "init_args": {"name": "famous", "split": "famous"},
        },
    ]
    Path("old.yaml").write_text(yaml.safe_dump(recipe))
    built = turnrl.build(["old.yaml", "--model.rollout.segmenter", "turnrl_two_turn.TwoTurn"])
    exact, cost = built.module.rewards
    assert (type(exact), type(cost), cost.weight) == (ExactMatch, SearchCost, 0.3)
    assert type(built.module.rollout.segmenter) is TwoTurn
    assert type(built.data.rule) is Number
    there = {type(callback): callback for callback in built.trainer.callbacks}
    assert there[turnrl.Alarms].stop
    assert there[turnrl.AlsoScore].name == "famous"


@pytest.mark.parametrize(
    "path",
    [
        "turnrl_alarms.Alarms",
        *("turnrl_answers.Choice", "turnrl_answers.Compared", "turnrl_answers.Math"),
        "turnrl_card.ending.ExportsPolicy",
        *("turnrl_checkpoints.BestCheckpoint", "turnrl_checkpoints.LastCheckpoint"),
        "turnrl_console.resumed.FirstFigures",
        "turnrl_qa_rewards.WellFormed",
        *("turnrl_questions.HotpotParagraphs", "turnrl_questions.QuestionFile"),
        *("turnrl_questions.also.AlsoScore", "turnrl_questions.data.QuestionData"),
        *("turnrl_react.ReAct", "turnrl_react.search_r1.SearchR1", "turnrl_two_turn.TwoTurn"),
        *("turnrl_record.loggers.ToLoggers", "turnrl_record.recording.Recorder"),
        *("turnrl_report.curves.Curves", "turnrl_testing.ScriptedEngine"),
        "turnrl_turn_rewards.progress.SupportSeen",
    ],
)
def test_a_class_path_that_version_0_8_or_0_9_saved_leads_to_the_class(path):
    module, _, name = renamed(path).rpartition(".")
    assert not module.startswith(path.partition(".")[0])
    assert getattr(importlib.import_module(module), name).__name__ == path.rpartition(".")[2]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("turnrl_endpoint.Server", turnrl_openai.EndpointServer),
        ("turnrl_openai.Server", turnrl_openai.EndpointServer),
        ("turnrl_openai.Endpoint", turnrl_openai.Endpoint),
        ("turnrl_turn_rewards.Server", turnrl_rewards.JudgeServer),
        ("turnrl_rewards.server.Server", turnrl_rewards.JudgeServer),
        ("turnrl_rewards.qa.ExactMatch", turnrl_rewards.ExactMatch),
    ],
)
def test_renamed_server_paths_are_found_and_other_paths_are_unchanged(before, now):
    module, _, name = renamed(before).rpartition(".")
    assert getattr(importlib.import_module(module), name) is now


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ({"class_path": "Tree", "init_args": {"probes": 2}}, "TurnLevel",
         "estimator is TurnLevel instead of Tree, and starts without its settings: probes."),
        ({"class_path": "a.Tree", "init_args": {"probes": 2, "coef": 1}},
         {"class_path": "Branched", "init_args": {"probes": 3}},
         "estimator is Branched instead of Tree, and starts without its settings: coef."),
        ({"class_path": "Tree", "init_args": {"probes": 2}}, "turnrl_estimators.Tree", None),
        ({"class_path": "Tree", "init_args": {}}, "TurnLevel", None),
        ("Tree", "TurnLevel", None),
    ],
)  # fmt: skip
def test_settings_lost_by_a_change_of_class_are_listed(old, new, line):
    before = {"model": {"class_path": "MTGRPO", "init_args": {"estimator": old}}}
    after = merged(before, {"model": {"init_args": {"estimator": new}}})
    assert [*dropped(before, after)] == ([] if line is None else [f"model.{line}"])


def test_an_option_that_changes_a_class_prints_a_notice(recipe, capsys):
    say_once.cache_clear()
    option = ("--model.optimizer", "torch.optim.SGD")
    read_invocation("fit", ["recipe.yaml", *option])
    printed = capsys.readouterr().err
    assert "turnrl: model.optimizer is SGD instead of" in printed
    read_invocation("fit", ["recipe.yaml"])
    assert capsys.readouterr().err == ""
