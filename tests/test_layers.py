"""The rooms of the design: its list names every module, and imports form no circle."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from abc import ABC
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Protocol

import pytest

import turnrl
import turnrl.types  # its contracts declare hooks

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LIST = re.search(r"^## Rooms\n.*?^```\n(.*?)^```$", DESIGN, re.DOTALL | re.MULTILINE)
ROOMS = re.findall(r"^\S+", LIST.group(1), re.MULTILINE) if LIST else []
DOORS = {
    door
    for item in re.findall(r"^- (`turnrl\.[^:]+):", DESIGN, re.MULTILINE)
    for door in re.findall(r"`(turnrl\.[\w.]+)`", item)
}
CORE = ROOT / "turnrl"
TEMPLATES = CORE / "commands" / "scaffold" / "templates"
MODULES = [
    path
    for path in sorted(CORE.rglob("*.py"))
    if path != CORE / "__init__.py" and not path.is_relative_to(TEMPLATES)
]
ROOMS_WITH_INDEX = "agent credit data plugin policy recipe rewards runs sft training watch"
INDEXED = [CORE / name for name in ROOMS_WITH_INDEX.split()]
FOLDERS = sorted((ROOT / "plugins").glob("turnrl-*"))
PACKAGES = {folder.name.replace("-", "_"): folder for folder in FOLDERS}
PLUGINS = [
    path for name, folder in PACKAGES.items() for path in sorted((folder / name).rglob("*.py"))
]
# what `turnrl plugin new` writes, whose tests may use what is there for tests
WRITTEN = [path for path in sorted(TEMPLATES.rglob("*.py")) if path.parent.name != "tests"]
# `turnrl eval` scores a model behind a server beside the policy's
NAMED = {
    "turnrl_openai": {CORE / "commands" / "eval" / name for name in ("command.py", "evaluating.py")}
}


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    home = (
        ROOT if path.is_relative_to(CORE) else path.parents[len(path.relative_to(ROOT).parts) - 3]
    )
    return ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def homes(package: str) -> dict[tuple[str, str], str]:
    """The module of each name that a stub lists."""
    stub = (ROOT / package.replace(".", "/") / "__init__.pyi").read_text(encoding="utf-8")
    found = re.findall(r"^from (\.[\w.]*) import (\w+)", stub, re.MULTILINE)
    return {(package, name): f"{package}{home}".rstrip(".") for home, name in found}


HOMES = homes("turnrl") | homes("turnrl.runs")
FILES = {name_of(path): path for path in [*MODULES, *PLUGINS]}


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Modules that a file imports, anywhere in it and for types too, and the names it takes.
    Of settings, those at its top: they build what they describe, which knows them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if path.name == "settings.py" else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from ((node.module or "", alias.name) for alias in node.names)


def taken(path: Path) -> Iterator[str]:
    """The files of this repository that a file imports, by their dotted names. A name of `turnrl`
    is of the file that has it."""
    for module, name in imports(path):
        if name is not None and (module, name) in HOMES:
            module = HOMES[module, name]
        candidates = (f"{module}.{name}", module)
        home = next((candidate for candidate in candidates if candidate in FILES), None)
        if home is not None and FILES[home] != path:
            yield home


def room(path: Path) -> str:
    """The room of a module, as the list names it: `credit`, or `testing/` for a folder's."""
    first, *more = path.relative_to(CORE).parts
    return f"{first}/" if more else path.stem


def test_the_list_of_rooms_names_exactly_the_modules_and_folders():
    assert sorted(ROOMS) == sorted({room(path) for path in MODULES})


def test_files_import_each_other_in_no_circle():
    graph = {name: set(taken(path)) for name, path in FILES.items()}
    assert sum(map(len, graph.values())) > 500
    assert list(TopologicalSorter(graph).static_order())  # an error that names the circle


def test_a_room_imports_only_rooms_above_it_in_the_list():
    for path in MODULES:
        for name in taken(path):
            if name.startswith("turnrl."):
                other = room(FILES[name])
                assert ROOMS.index(other) <= ROOMS.index(room(path)), f"{path} imports {name}"


def test_the_framework_imports_plugins_only_in_the_listed_modules():
    for path in MODULES:
        for module, _ in imports(path):
            plugin = module.partition(".")[0]
            assert plugin not in PACKAGES or path in NAMED.get(plugin, ()), f"{path}: {module}"


@pytest.mark.parametrize("path", [*PLUGINS, *WRITTEN], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_only_public_names(path):
    for module, name in imports(path):
        if module == "turnrl" and name is not None:
            assert name in turnrl.__all__, f"{path} imports turnrl.{name}, which is not public"
        elif module.startswith("turnrl."):
            assert module in DOORS, f"{path} imports {module}, which is not public"


def test_the_design_names_every_plugin_that_takes_names_of_another():
    (block,) = re.findall(r"<!-- edges -->\n```\n(.*?)^```$", DESIGN, re.DOTALL | re.MULTILINE)
    in_design = {name: others for name, *others in map(str.split, block.splitlines())}
    in_code: dict[str, set[str]] = {}
    for own, folder in PACKAGES.items():
        paths = (folder / own).rglob("*.py")
        names = {module.partition(".")[0] for path in paths for module, _ in imports(path)}
        in_code[folder.name] = {
            PACKAGES[other].name for other in names - {own} if other in PACKAGES
        }
    short = {
        name.removeprefix("turnrl-"): sorted(other.removeprefix("turnrl-") for other in others)
        for name, others in in_code.items()
        if others
    }
    assert in_design == short


def test_the_walk_of_a_question_names_what_is_there():
    (block,) = re.findall(r"<!-- walk -->\n```\n(.*?)^```$", DESIGN, re.DOTALL | re.MULTILINE)
    for file, name, *_ in map(str.split, block.splitlines()):
        tree = ast.parse((CORE / file).read_text(encoding="utf-8"))
        assert name in {getattr(node, "name", None) for node in ast.walk(tree)}, f"{file}: {name}"


@pytest.mark.parametrize("folder", INDEXED, ids=lambda folder: folder.name)
def test_the_index_of_a_room_lists_its_modules(folder):
    listed = re.findall(r"^ *(\w+)  +\S", (folder / "__init__.py").read_text("utf-8"), re.MULTILINE)
    inside = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(inside)


def test_the_design_lists_every_plugin():
    listed = re.findall(r"^(turnrl-[\w-]+)  +\S", DESIGN, re.MULTILINE)
    assert listed == [folder.name for folder in FOLDERS]
    assert all((folder / "README.md").is_file() for folder in FOLDERS)


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_turnrl_and_its_plugins_loads_no_torch():
    loaded = run(
        "import sys, turnrl.testing; from turnrl.plugin import hooks; "
        "hooks.load_classes('turnrl_tools'); "
        "print({'torch', 'lightning', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    )
    assert loaded.strip() == "set()"


@pytest.mark.slow
def test_a_command_lets_a_gpus_memory_grow_unless_its_user_says_otherwise(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    code = (
        "import contextlib, os, sys\n"
        f"names, before = {names}, dict(os.environ)\n"
        "import turnrl, turnrl.cli, turnrl.__main__\n"
        "assert dict(os.environ) == before, 'importing turnrl changed the environment'\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):\n"
        "    turnrl.__main__.main(['--version'])\n"
        "print([os.environ.get(name) for name in names])"
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert run(code).strip() == str(["expandable_segments:True", None])
    monkeypatch.setenv(names[1], "max_split_size_mb:128")
    assert run(code).strip() == str([None, "max_split_size_mb:128"])
    monkeypatch.setenv(names[0], "")
    assert run(code).strip() == str(["", "max_split_size_mb:128"])


def test_importing_turnrl_takes_little_longer_than_the_modules_it_imports():
    def seconds(names):
        took = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
        return min(float(run(took.format(names))) for _ in range(4))

    # they take about the same; torch alone would be thirty times as long
    assert seconds("turnrl") < 3 * seconds("asyncio, importlib.metadata, inspect, json, pluggy")


def owned_classes() -> set[type]:
    """The classes of the framework and of the plugins."""
    owned: set[type] = set()
    for name in FILES:
        if not name.endswith("__main__"):
            classes = vars(importlib.import_module(name)).values()
            owned |= {value for value in classes if isinstance(value, type)}
    return {cls for cls in owned if cls.__module__.startswith("turnrl")}


def test_a_class_that_another_class_extends_is_abstract():
    """So a class is read in one place: all that it does is written there."""
    owned = owned_classes()
    bases = {base for cls in owned for base in cls.__bases__ if base in owned}
    assert {cls.__module__.partition(".")[0] for cls in bases} >= {"turnrl", "turnrl_atlas"}
    for base in bases:
        abstract = inspect.isabstract(base) or not {ABC, Protocol}.isdisjoint(base.__bases__)
        assert abstract or issubclass(base, Exception), f"{base} is extended, and not abstract"


def test_no_test_module_imports_another():
    tests = Path(__file__).parent
    importing = [
        file.name
        for file in tests.rglob("*.py")
        if re.search(r"^\s*(from|import) test_", file.read_text(), re.MULTILINE)
    ]
    assert importing == []
