"""The floors of the design: a module imports only from floors below its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnrl

ROOT = Path(__file__).parents[1]
FLOORS = {
    0: ["types", "errors", "text"],
    1: ["plugins", "testing"],
    2: ["credit", "objective"],
    3: ["rollout", "engines", "policy", "experience"],
    4: ["module", "data", "callbacks"],
    5: ["cli"],
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
EXCEPTIONS = {
    ("types", "errors"),  # QuestionSource.passages raises
    ("rollout", "engines"),  # the loop speaks the engines' protocol
    ("module", "callbacks"),  # the module brings its callbacks
}
CORE = ROOT / "turnrl"
MODULES = [path for path in sorted(CORE.rglob("*.py")) if path != CORE / "__init__.py"]
PLUGINS = sorted((ROOT / "plugins").glob("*/turnrl_*/**/*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Modules that a file imports when it runs (not for types alone), and the names it takes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for_types = [node for node in ifs if ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for node in for_types for stmt in node.body for inner in ast.walk(stmt)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from ((node.module or "", alias.name) for alias in node.names)


def part(module: str) -> str | None:
    """`credit` of `turnrl.credit`; None of other packages and of `turnrl` itself."""
    names = module.split(".")
    return names[1] if names[0] == "turnrl" and len(names) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_floors_below(path):
    own = path.relative_to(CORE).with_suffix("").parts[0]
    assert own in FLOOR_OF, f"{path} stands on no floor of the design"
    for module, name in imports(path):
        other = part(module)
        if module == "turnrl":
            other = name if name in FLOOR_OF else None
            assert other or FLOOR_OF[own] == 5, f"{path}: import {name} from its own module"
        assert not module.startswith("turnrl_"), f"{path} names the plugin {module}"
        if other is None or other == own or (own, other) in EXCEPTIONS:
            continue
        assert FLOOR_OF[other] < FLOOR_OF[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_only_public_names(path):
    for module, name in imports(path):
        assert part(module) is None, f"{path} imports {module}, which is not public"
        if module == "turnrl" and name is not None:
            assert name in turnrl.__all__, f"{path} imports turnrl.{name}, which is not public"


def test_the_core_never_names_a_plugin():
    names = [path.name for path in (ROOT / "plugins").glob("turnrl-*")]
    assert names
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for name in names:
            assert name not in text, f"{path} names {name}"
            assert name.replace("-", "_") not in text, f"{path} names {name}"


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


def test_importing_turnrl_takes_less_than_a_fifth_of_a_second():
    code = "import time; t = time.perf_counter(); import turnrl; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.2
