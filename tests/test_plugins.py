import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import turnrl
from turnrl import PluginError
from turnrl.plugins import Hooks, load_plugins

ROOT = Path(__file__).parents[1]
CALCULATOR = ROOT / "docs/examples/turnrl-calculator"
HOOKS = [name for name in vars(Hooks) if name.startswith("turnrl_")]

TOOL = """
import turnrl

class Nothing(turnrl.Tool):
    def run(self, calls):
        return []
"""
GOOD = TOOL + "@turnrl.hookimpl\ndef turnrl_tools():\n    return [Nothing]\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts distributions of one module beside the installed ones, until the test is over."""
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins.cache_clear()
    modules = []

    def put(name, source, module=None):
        module = module or f"plugin_of_{name.replace('-', '_')}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-4.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.2\n")
        entry = name.removesuffix("-again")
        (info / "entry_points.txt").write_text(f"[turnrl]\n{entry} = {module}\n")
        importlib.invalidate_caches()

    yield put
    load_plugins.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


# ------------------------------------------------------------------- installed


def test_the_bundled_plugins_bring_their_classes():
    names = {hook: set(turnrl.installed(hook)) for hook in HOOKS}
    assert "TwoTurn" in names["turnrl_segmenters"]
    assert "WikiSearch" in names["turnrl_tools"]
    assert "Atlas" in names["turnrl_datasets"]
    assert names["turnrl_rewards"] >= {
        "ToolExecuted",
        "AnswerRetrieved",
        "AnswerPresent",
        "ExactMatch",
        "WellFormed",
    }


def test_the_bundled_entry_points_are_those_of_the_folders():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        p.parent: tomllib.loads(p.read_text()) for p in ROOT.glob("plugins/*/pyproject.toml")
    }
    union = {}
    for folder in folders.values():
        union |= folder["project"]["entry-points"]["turnrl"]
    assert root["project"]["entry-points"]["turnrl"] == union
    wheel = root["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {f"{path.relative_to(ROOT)}/{path.name.replace('-', '_')}" for path in folders}
    assert set(wheel["packages"]) == packages | {"turnrl"}
    found_in = {str(path.relative_to(ROOT)) for path in folders}
    assert set(wheel["dev-mode-dirs"]) == found_in | {"."}


def test_what_the_folders_depend_on_comes_with_the_root():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[<>=~ ]", line)[0] for line in root}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        for line in tomllib.loads(path.read_text())["project"]["dependencies"]:
            name = re.split(r"[\[<>=~ ]", line)[0]
            assert name in names or name.startswith("turnrl"), f"{path} needs {name}"


def test_a_plugin_is_found_with_its_distribution_and_version(install):
    install("nothing", GOOD)
    (plugin,) = [p for p in load_plugins() if p.name == "nothing"]
    assert (plugin.distribution, plugin.version) == ("nothing", "4.2")
    assert turnrl.installed("turnrl_tools")["Nothing"] is plugin.components["turnrl_tools"][0]


def test_plugins_come_in_the_order_of_their_names(install):
    install("zzz", GOOD)
    install("aaa", GOOD.replace("Nothing", "Other"))
    names = [plugin.name for plugin in load_plugins()]
    assert names == sorted(names)
    assert (names[0], names[-1]) == ("aaa", "zzz")


def test_commands_are_kept_as_functions(install):
    install(
        "commands", "import turnrl\n@turnrl.hookimpl\ndef turnrl_commands():\n    return [print]\n"
    )
    (plugin,) = [p for p in load_plugins() if p.name == "commands"]
    assert plugin.commands == (print,)


# -------------------------------------------------------------- broken plugins


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", r"cannot be imported \(ModuleNotFoundError: .*no_such_module"),
        ("1 / 0", r"cannot be imported \(ZeroDivisionError"),
        ("def (", r"cannot be imported \(SyntaxError"),
        (
            GOOD.replace("turnrl_tools", "turnrl_tool"),
            r"defines 'turnrl_tool', which is no hook of turnrl; did you mean 'turnrl_tools'\?",
        ),
        (
            "def turnrl_qqqqqqqqqqqqqqqq():\n    return []\n",
            r"'turnrl_qqqqqqqqqqqqqqqq', which is no hook of turnrl\. Hooks: turnrl_commands, ",
        ),
        (GOOD.replace("turnrl_tools", "tools"), r"does not fit turnrl's hooks \(.*'tools'"),
        (GOOD.replace("tools()", "tools(first)"), r"does not fit turnrl's hooks \(.*first"),
        (
            GOOD.replace("@turnrl.hookimpl", ""),
            r"defines 'turnrl_tools' without '@turnrl.hookimpl'",
        ),
        (
            GOOD.replace("[Nothing]", "[7]"),
            r"turnrl_tools returned 7, which is not a subclass of Tool",
        ),
        (GOOD.replace("[Nothing]", "[Nothing()]"), r"returned .*Nothing.* not a subclass of Tool"),
        (GOOD.replace("[Nothing]", "Nothing"), r"turnrl_tools does not return a list \(TypeError"),
        (GOOD.replace("[Nothing]", "1 / 0"), r"turnrl_tools does not return a list \(ZeroDivision"),
    ],
)
def test_a_broken_plugin_is_named_with_the_cause_and_the_way_round(install, source, message):
    install("broken", source)
    with pytest.raises(PluginError, match=message) as caught:
        load_plugins()
    assert str(caught.value).startswith("plugin 'broken' of broken 4.2")
    assert "set TURNRL_LOAD_PLUGINS to the comma-separated plugins to load" in str(caught.value)


def test_the_variable_leaves_out_what_it_does_not_name(install, monkeypatch):
    install("broken", "1 / 0")
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "two-turn, qa-rewards")
    assert [plugin.name for plugin in load_plugins()] == ["qa-rewards", "two-turn"]
    assert turnrl.installed("turnrl_tools") == {}


def test_an_empty_variable_loads_nothing(install, monkeypatch):
    install("broken", "1 / 0")
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "")
    assert load_plugins() == ()


def test_the_variable_cannot_ask_for_what_is_not_installed(install, monkeypatch):
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "two-turn,react")
    with pytest.raises(PluginError, match=r"asks for react, .*Installed: .*two-turn"):
        load_plugins()


def test_two_plugins_cannot_have_one_name(install):
    install("same", GOOD)
    install("same-again", GOOD)
    with pytest.raises(PluginError, match="two plugins are called 'same': plugin_of_same"):
        load_plugins()


def test_two_installed_classes_cannot_have_one_name(install):
    install("one", GOOD)
    install("two", GOOD)
    with pytest.raises(PluginError, match="two installed classes are called 'Nothing'"):
        turnrl.installed("turnrl_tools")


# ----------------------------------------------------------------- third party


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """The calculator of the docs, copied out of the repository and installed by pip."""
    folder = tmp_path_factory.mktemp("elsewhere") / "turnrl-calculator"
    shutil.copytree(CALCULATOR, folder)
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", target, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, {**os.environ, "PYTHONPATH": str(target)}


def test_an_installed_third_party_plugin_works_like_a_bundled_one(third_party):
    _, environment = third_party
    code = """
import turnrl
from turnrl.plugins import load_plugins

tools = turnrl.installed("turnrl_tools")
calculator = tools["Calculator"](digits=3)
call = turnrl.ToolCall("calculate", {"expression": "2 / 3"})
print(sorted(tools), calculator.run([call])[0].content)
print([(p.distribution, p.version) for p in load_plugins() if p.name == "calculator"])
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['Calculator', 'WikiSearch'] 0.667",
        "[('turnrl-calculator', '0.1.0')]",
    ]
    # and it is gone where it is not installed
    assert "Calculator" not in turnrl.installed("turnrl_tools")


def test_the_tests_of_the_third_party_plugin_pass(third_party):
    folder, environment = third_party
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------ docs


def documented(language):
    text = (ROOT / "docs/plugins.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_hook_is_documented():
    text = (ROOT / "docs/plugins.md").read_text()
    assert [hook for hook in HOOKS if f"| `{hook}` |" not in text] == []


def test_the_example_in_the_docs_is_the_one_in_the_folder():
    assert documented("python")[0] == (CALCULATOR / "turnrl_calculator.py").read_text()
    entry = tomllib.loads(documented("toml")[0])["project"]
    project = tomllib.loads((CALCULATOR / "pyproject.toml").read_text())["project"]
    assert entry["entry-points"] == project["entry-points"]


def test_the_examples_in_the_docs_run():
    space = {"__name__": "docs"}
    for example in documented("python"):
        exec(compile(example, "docs/plugins.md", "exec"), space)
    space["test_the_contracts_are_kept"]()
