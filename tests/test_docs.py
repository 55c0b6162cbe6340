"""What the documents promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_script_that_trains_by_hand_runs(tmp_path):
    script = ROOT / "docs" / "by_hand.py"
    assert len(script.read_text().splitlines()) <= 30
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = tmp_path.rglob("metrics.csv")
    header = metrics.read_text().splitlines()[0]
    assert "val/exact_match" in header
    assert "train/tool_execution" in header


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
