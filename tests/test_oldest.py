"""The range of versions: the oldest ones are read from `pyproject.toml`, and plugins take them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from oldest import lower_bounds

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_lower_bounds_include_optional_groups_and_skip_other_pythons():
    project = {
        "name": "thing",
        "dependencies": ["one>=1.5,<3", "Two_words[more]<9,>=2", "three"],
        "optional-dependencies": {
            "dev": ["four==1.16.*", "thing[docs]", "gone>=7; python_version < '3'"],
            "docs": ["five~=2.4"],
            "other": ["six>=6"],
        },
    }
    assert lower_bounds(project, "dev") == {
        **{"one": "1.5", "two-words": "2", "three": ""},
        **{"four": "1.16", "five": "2.4"},
    }


def test_the_oldest_torch_and_transformers_run_on_many_gpu_machines():
    bounds = lower_bounds(PROJECT, "dev")
    assert (bounds["torch"], bounds["transformers"]) == ("2.11", "5.17")
    # every direct dependency has a lowest version, except for types that only mypy reads
    assert [name for name, bound in bounds.items() if not bound and name[:6] != "types-"] == []
