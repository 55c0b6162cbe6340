"""What a run exports says what it is of, and is found again: elsewhere, and after a move."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch

import turnrl
from commands import save
from turnrl import export
from turnrl.cli import main
from turnrl.watch.card import base_name, write_card

HUB = "Qwen/Qwen2.5-7B"
IDS = torch.tensor([[5, 9, 33, 71, 120, 8]])


def test_a_base_is_named_by_hub_name_package_or_relative_path(tmp_path):
    base, run = tmp_path / "models" / "base", tmp_path / "runs" / "adapter"
    base.mkdir(parents=True)
    assert base_name(HUB, HUB, run) == HUB
    assert base_name("package://some/folder", str(base), run) == "package://some/folder"
    assert base_name(str(base), str(base), run) == "../../models/base"
    assert base_name("base", "/usr", run) == "/usr"  # they have nothing in common


@pytest.fixture
def exported(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/one/machine"}')
    return tmp_path


def test_the_card_of_a_hub_model_has_the_fields_peft_and_the_hub_read(exported):
    write_card(exported, HUB, "v1", True, {"recipe": "mine"})
    card = huggingface_hub.ModelCard.load(exported / "README.md")
    assert card.data.base_model == HUB
    assert card.data.library_name == "peft"
    assert {f"base_model:adapter:{HUB}", "lora"} < {*card.data.tags}
    assert "| recipe | mine |" in card.text
    assert f"turnrl {turnrl.__version__}" in card.text
    assert f"from_pretrained('{HUB}', revision='v1')" in card.text
    config = json.loads((exported / "adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": HUB, "revision": "v1"}


def test_the_card_of_a_whole_model_and_of_a_base_outside_the_hub(exported):
    write_card(exported, HUB, None, False, {})
    card = huggingface_hub.ModelCard.load(exported / "README.md")
    assert card.data.library_name == "transformers"
    assert "PeftModel" not in card.text
    write_card(exported, "../base", None, True, {})
    card = huggingface_hub.ModelCard.load(exported / "README.md")
    assert card.data.base_model is None  # the hub accepts only its own names
    assert "| base model | `../base` |" in card.text
    write_card(exported, "package://turnrl_atlas/starter", None, True, {})
    assert (
        "Policy('package://turnrl_atlas/starter').build().folder"
        in (exported / "README.md").read_text()
    )


@pytest.mark.slow
def test_a_run_loads_from_another_folder_and_after_a_move(
    recipe, tiny_model, tmp_path, monkeypatch, capsys
):
    project = tmp_path / "project"
    shutil.copytree(tiny_model, project / "models" / "base")
    monkeypatch.chdir(project)
    recipe["model"]["policy"] = {"model": "models/base", "lora": {"r": 4}}
    recipe["trainer"] |= {"max_epochs": 1, "limit_val_batches": 0}
    save(recipe)
    assert main(["fit", "recipe.yaml"]) == 0
    run = Path("runs/recipe/version_0")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../../../../models/base"
    card = (run / "adapter" / "README.md").read_text()
    assert "| prompts while training | each message tokenised on its own" in card
    assert str(tmp_path) not in card
    digest = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    assert f"`config.yaml` of the run, SHA-256 `{digest}`" in card
    assert "| iterations | 1, in 2 optimiser steps |" in card
    with torch.no_grad():
        trained = turnrl.load(run).policy.network.eval()(IDS).logits

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for folder in (project, tmp_path / "moved"):
        if not folder.exists():
            project.rename(folder)
        again = turnrl.load(folder / run)
        assert Path(again.policy.settings.model) == (folder / "models" / "base").resolve()
        # as the card says
        (code,) = re.findall(r"^```python\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
        space = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            exec(code.replace('Path(".")', f"Path({str(folder / run / 'adapter')!r})"), space)
        with torch.no_grad():
            for network in (again.policy.network, space["model"]):
                assert torch.allclose(network.eval()(IDS).logits, trained, atol=1e-5)
        assert space["tokenizer"]("text")["input_ids"]


def test_only_turnrls_export_writes_a_card(tiny_model, tmp_path):
    policy = turnrl.Policy(str(tiny_model)).build()
    policy.load()
    bare, carded = policy.export(tmp_path / "bare"), export(policy, tmp_path / "carded")
    added = {path.name for path in carded.iterdir()} - {path.name for path in bare.iterdir()}
    assert added == {"README.md"}
    with pytest.raises(turnrl.RecipeError, match="holds the model that training starts from"):
        export(policy, tiny_model)


def test_relative_paths_of_a_saved_recipe_follow_the_run(tmp_path, monkeypatch):
    from turnrl.recipe.merging import map_values, relocate

    run = tmp_path / "old" / "runs" / "x" / "last.ckpt"
    for path in ("old/indexes/mine", "old/models/base", "here/models/base", "old/a"):
        (tmp_path / path).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    saved = {
        "model": {"policy": {"model": "models/base"}},
        "tools": [{"index": "indexes/mine", "name": "a", "text": "</answer>" * 99}],
        "data": "/gone/indexes/mine",
    }
    moved = map_values(saved, partial(relocate, run))
    assert moved["model"]["policy"]["model"] == "models/base"
    (tool,) = moved["tools"]
    assert tool == {**saved["tools"][0], "index": str(tmp_path / "old/indexes/mine")}
    assert moved["data"] == "/gone/indexes/mine"
