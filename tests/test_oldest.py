"""The oldest versions that `pyproject.toml` allows. As a script: the suite with them.

    .venv/bin/python tests/test_oldest.py [REQUIREMENT ...]

This makes a virtual environment in `build/oldest`, has uv install the lowest version of each direct
dependency there, prints these versions and runs the suite. A requirement goes before the lowest
version: `torch==2.13.0` where an older torch cannot be installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "oldest"
PYTHON = HOME / ("Scripts" if os.name == "nt" else "bin") / "python"

# what old libraries say of newer ones that they use is no fault of turnrl
_DEPRECATED = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


def lower_bounds(project: dict, extra: str) -> dict[str, str]:
    """By package, the oldest version that a project allows; empty where it names none.

    Args:
        project: The table `project` of its `pyproject.toml`.
        extra: An optional group that is installed with it.
    """
    bounds: dict[str, str] = {}
    for wanted in _requirements(project, extra):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        versions = [
            clause.version for clause in wanted.specifier if clause.operator in (">=", "~=", "==")
        ]
        bounds[canonicalize_name(wanted.name)] = versions[0].removesuffix(".*") if versions else ""
    return bounds


def _requirements(project: dict, extra: str) -> Iterator[Requirement]:
    yield from map(Requirement, project["dependencies"])
    for line in project["optional-dependencies"][extra]:
        wanted = Requirement(line)
        if wanted.name == project["name"]:  # another group of its own
            for group in wanted.extras:
                yield from map(Requirement, project["optional-dependencies"][group])
        else:
            yield wanted


def main(requirements: list[str]) -> int:
    """Make the environment and run the suite in it; pytest's exit code."""
    venv.create(HOME, with_pip=True, clear=True)
    _python("-m", "pip", "install", "-q", "uv")
    _python(
        *("-m", "uv", "pip", "install", "--python", PYTHON, "--resolution", "lowest-direct"),
        *("--editable", f"{ROOT}[dev]", *requirements),
    )
    listed = json.loads(_python("-m", "pip", "list", "--format", "json", output=True))
    there = {canonicalize_name(package["name"]): package["version"] for package in listed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name, bound in sorted(lower_bounds(project, "dev").items()):
        print(f"{name} {there[name]} (at least {bound or 'any'})", flush=True)
    ignored = [word for kind in _DEPRECATED for word in ("-W", f"default::{kind}")]
    suite = [PYTHON, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", *ignored]
    return subprocess.run(suite, cwd=ROOT).returncode


def _python(*words: str | Path, output: bool = False) -> str:
    done = subprocess.run(
        [PYTHON, *words], check=True, text=True, stdout=subprocess.PIPE if output else None
    )
    return done.stdout or ""


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
