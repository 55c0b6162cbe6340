"""What the documents promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnrl.cli import main

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("default")  # a script of one's own shows Lightning's warnings
def test_the_script_that_trains_by_hand_runs(tmp_path, monkeypatch):
    script = (ROOT / "docs" / "by_hand.py").read_text()
    assert len(script.splitlines()) <= 34
    # as it stands but for its size, which is that of a demonstration
    small = script.replace("questions_per_iteration=8, val_limit=64", SMALLER)
    assert SMALLER in small
    monkeypatch.chdir(tmp_path)
    exec(compile(small, "docs/by_hand.py", "exec"), {"__name__": "__main__"})
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *rows = metrics.read_text().splitlines()
    assert "val/exact_match" in header
    assert "train/tool_execution" in header
    assert len(rows) >= 3  # untrained, and after each of two iterations


SMALLER = "questions_per_iteration=2, val_limit=8"


def test_readme_has_one_line_to_train_and_one_to_test():
    readme = (ROOT / "README.md").read_text()
    for name, word in [("quickstart", "fit recipes/quickstart.yaml"), ("test", "pytest")]:
        block = re.search(rf"<!-- {name} line -->\n```bash\n(.*?)\n```", readme, re.DOTALL)
        assert block, name
        assert "\n" not in block.group(1)
        assert word in block.group(1)


PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", [*PAGES, "recipes/README.md"])
def test_links_and_paths_of_a_page_lead_somewhere(page):
    file = ROOT / page
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (file.parent / target).exists(), target
    for recipe in re.findall(r"recipes/[a-z][\w.]+\.yaml", file.read_text()):
        assert (ROOT / recipe).is_file(), recipe


def test_every_recipe_stands_in_the_table():
    table = (ROOT / "recipes" / "README.md").read_text()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"[{recipe.name}]" in table


def test_the_record_is_read_as_the_how_to_says(tiny_model, tmp_path, monkeypatch, capsys):
    recipe = ROOT / "recipes" / "quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = {
        "model.policy.model": str(tiny_model),
        "model.rollout.segmenter": "worlds.Letters",
        "model.rollout.tools": "[worlds.Echo]",
        "model.rollout.max_turn_tokens": "6",
        "model.group_size": "2",
        "model.steps_per_update": "1",
        "data.train": "worlds.Numbers",
        "data.val": "worlds.Numbers",
        "data.questions_per_iteration": "2",
        "trainer.max_epochs": "1",
        "trainer.accelerator": "cpu",
        "trainer.check_val_every_n_epoch": "1",
    }
    options = [text for key, value in settings.items() for text in (f"--{key}", value)]
    assert main(["fit", str(recipe), *options]) == 0
    howto = (ROOT / "docs" / "howto.md").read_text()
    (example,) = re.findall(r"<!-- record example -->\n```python\n(.*?)```", howto, re.DOTALL)
    capsys.readouterr()
    exec(compile(example, "docs/howto.md", "exec"), space := {})
    assert len(space["record"]) == 2 * 2 + 2 * 3
    assert sorted(set(space["table"]["policy_version"].to_pylist())) == [0, 1]
    assert "letters" in capsys.readouterr().out
