"""The rooms of the design: a module imports only from its own and those above it in the list."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from abc import ABC
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import turnrl
import turnrl.types  # its contracts declare hooks
from turnrl.plugins import HOOKS

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LIST = re.search(r"^## Rooms\n.*?^```\n(.*?)^```$", DESIGN, re.DOTALL | re.MULTILINE)
ROOMS = re.findall(r"^\S+", LIST.group(1), re.MULTILINE) if LIST else []
CORE = ROOT / "turnrl"
MODULES = [path for path in sorted(CORE.rglob("*.py")) if path != CORE / "__init__.py"]
FOUND = sorted((ROOT / "plugins").glob("*/turnrl_*/**/*.py"))
# the one plugin that the core names: plugin authors look for its checks in `turnrl.testing`, and no
# hook could bring them there, because a test imports them by name
FACADE = {CORE / "testing.py": "turnrl_testing"}
# the tests of the package that `turnrl plugin new` writes may use what is there for tests
PLUGINS = [path for path in FOUND if path.parent.name != "tests"]


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Modules that a file imports, for types too, and the names it takes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from ((node.module or "", alias.name) for alias in node.names)


def part(module: str) -> str | None:
    """`credit` of `turnrl.credit`; None of other packages and of `turnrl` itself."""
    names = module.split(".")
    return names[1] if names[0] == "turnrl" and len(names) > 1 else None


def room(path: Path) -> str:
    """The room of a module, as the list names it: `credit`, or `testing/` for a folder's."""
    first, *more = path.relative_to(CORE).parts
    return f"{first}/" if more else path.stem


def test_the_list_of_rooms_names_every_module_and_folder_and_no_other():
    assert sorted(ROOMS) == sorted({room(path) for path in MODULES})


def plugin_of(module: str, name: str | None) -> str | None:
    """`record` if a name is one of turnrl-record's, also where `turnrl` passes it on."""
    if module == "turnrl" and name is not None:
        module = turnrl._HOMES.get(name, "")
    package, _, _ = module.partition(".")
    known = package.startswith("turnrl_") and package != "turnrl_example"  # which is written
    return package.removeprefix("turnrl_").replace("_", "-") if known else None


def test_the_design_names_every_plugin_that_takes_names_of_another():
    (block,) = re.findall(r"<!-- edges -->\n```\n(.*?)^```$", DESIGN, re.DOTALL | re.MULTILINE)
    told = {name: others for name, *others in map(str.split, block.splitlines())}
    found: dict[str, set[str]] = {}
    for path in PLUGINS:
        own = path.relative_to(ROOT / "plugins").parts[0].removeprefix("turnrl-")
        taken = {plugin_of(*one) for one in imports(path)} - {None, own}
        found.setdefault(own, set()).update(filter(None, taken))
    edges = {name: sorted(others) for name, others in sorted(found.items()) if others}
    assert told == edges
    assert list(TopologicalSorter(told).static_order())  # an error if there is a circle
    for name in found:
        project = (ROOT / "plugins" / f"turnrl-{name}" / "pyproject.toml").read_text()
        needs = tomllib.loads(project)["project"]["dependencies"]
        declared = [one.removeprefix("turnrl-") for one in needs if one.startswith("turnrl-")]
        assert sorted(declared) == edges.get(name, []), f"the dependencies of turnrl-{name}"


def test_the_design_names_the_modules_of_recipes_that_other_plugins_import():
    (sentence,) = re.findall(r"of its modules are for other plugins: (.*?)\. ", DESIGN, re.DOTALL)
    told = set(re.findall(r"`(\w+)`", sentence))
    others = [path for path in PLUGINS if "turnrl-recipes" not in path.parts]
    taken = {module for path in others for module, _ in imports(path)}
    home = "turnrl_recipes."
    assert told == {name.removeprefix(home) for name in taken if name.startswith(home)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_room_and_those_above_it(path):
    own = room(path)
    within = [name.rstrip("/") for name in ROOMS[: ROOMS.index(own) + 1]]
    for module, name in imports(path):
        plugin = module.startswith("turnrl_") and module != FACADE.get(path)
        assert not plugin, f"{path} names the plugin {module}"
        other = name if module == "turnrl" else part(module)
        assert other is None or other in within, f"{own} imports {other}, which is not above"


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_only_public_names(path):
    for module, name in imports(path):
        assert part(module) is None, f"{path} imports {module}, which is not public"
        if module == "turnrl" and name is not None:
            assert name in turnrl.__all__, f"{path} imports turnrl.{name}, which is not public"


def test_the_core_names_no_plugin_but_the_checks_of_turnrl_testing():
    names = [path.name for path in (ROOT / "plugins").glob("turnrl-*")]
    assert names
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for name in names:
            assert name not in text, f"{path} names {name}"
            module = name.replace("-", "_")
            known = module in HOOKS or module == FACADE.get(path)
            assert known or module not in text, f"{path} names {name}"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_turnrl_and_its_plugins_loads_no_torch():
    found = run(
        "import sys, turnrl, turnrl.testing; turnrl.installed('turnrl_tools'); "
        "print({'torch', 'lightning', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    )
    assert found.strip() == "set()"


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


def test_importing_turnrl_takes_little_longer_than_what_it_imports_of_python():
    def seconds(names):
        took = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
        return min(float(run(took.format(names))) for _ in range(4))

    # they take about the same; torch alone would be thirty times as long
    assert seconds("turnrl") < 3 * seconds("asyncio, importlib.metadata, inspect, json, pluggy")


def owned_classes() -> set[type]:
    """The classes of the core and of the plugins. The templates of `turnrl plugin new` are left
    out: they are no package here."""
    modules = [path.relative_to(ROOT) for path in MODULES if path.stem != "__main__"]
    modules += [Path(*path.relative_to(ROOT).parts[2:]) for path in PLUGINS]
    found: set[type] = set()
    for path in modules:
        if "templates" not in path.parts:
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            classes = vars(importlib.import_module(name)).values()
            found |= {value for value in classes if isinstance(value, type)}
    return {cls for cls in found if cls.__module__.startswith("turnrl")}


def test_a_class_that_another_class_extends_is_abstract():
    """So a class is read in one place: all that it does is written there."""
    owned = owned_classes()
    bases = {base for cls in owned for base in cls.__bases__ if base in owned}
    assert {cls.__module__.partition(".")[0] for cls in bases} >= {"turnrl", "turnrl_atlas"}
    for base in bases:
        abstract = inspect.isabstract(base) or ABC in base.__bases__
        assert abstract or issubclass(base, Exception), f"{base} is extended, and not abstract"
