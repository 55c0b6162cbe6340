"""`turnrl plugin new`: a package that passes its own tests and trains, with the kinds asked for."""

import csv
import gc
import importlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from nursery import command
from turnrl.cli import main
from turnrl.commands.scaffold.command import COMPONENTS, TEMPLATE
from turnrl.plugin import hooks
from turnrl.plugin.hooks import KINDS
from turnrl_atlas import places

HOOKS = {
    "tool": "turnrl_tools",
    "segmenter": "turnrl_segmenters",
    "player": "turnrl_players",
    "turn-reward": "turnrl_rewards",
    "outcome-reward": "turnrl_rewards",
    "source": "turnrl_datasets",
    "estimator": "turnrl_estimators",
    "objective": "turnrl_objectives",
    "engine": "turnrl_engines",
}
EVERY = list(COMPONENTS)
# what is shared, files and lists and imports, is shared by two kinds: so pairs, and all but pairs
SUBSETS = [list(s) for n in (1, 2, 7, 8, 9) for s in itertools.combinations(EVERY, n)]
# a tool comes with questions that it knows the answers to
SUBSETS = [[k for k in EVERY if k in s or (k == "source" and "tool" in s)] for s in SUBSETS]
SOME = [[kind] for kind in EVERY] + [[k for k in EVERY if k != kind] for kind in EVERY]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to write in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("turnrl_", "test_contracts")):
            del sys.modules[name]
    gc.collect()  # and its classes, which messages of other tests would list


def new(*arguments):
    assert main(["plugin", "new", *arguments]) == 0


def files(folder):
    paths = [p for p in Path(folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(folder)): p.read_text() for p in paths}


# ----------------------------------------------------------------- what is written


def test_a_package_called_example_is_the_template_itself(here):
    new("example")
    assert files("turnrl-example") == files(TEMPLATE)


def test_a_tool_comes_with_questions_that_it_knows_the_answers_to(here, capsys):
    new("sun", "--with", "tool", "source")
    assert "the source asks what the tool knows" not in capsys.readouterr().out
    new("weather", "--with", "tool", "outcome-reward")
    assert "the source asks what the tool knows: without it" in capsys.readouterr().out
    written = files("turnrl-weather")
    data = yaml.safe_load(written["recipe.yaml"])["data"]
    assert (data["train"], data["val"]) == ("WeatherQuestions", "WeatherQuestions")
    tests = written["tests/test_contracts.py"]
    assert "test_the_tool_knows_the_answer_to_every_question_of_the_source" in tests


def test_a_player_is_checked_with_the_tool_if_there_is_one(here):
    new("sun", "--with", "player")
    new("rain", "--with", "player", "tool")
    alone, both = (files(f"turnrl-{name}")["tests/test_contracts.py"] for name in ("sun", "rain"))
    assert "check_player(SunDesk(), replies)" in alone
    assert "tools=" not in alone
    assert "check_player(RainDesk(), replies, tools=[RainLookup()])" in both


def test_a_package_has_its_own_name_everywhere(here):
    new("turnrl-my_own")
    written = files("turnrl-my-own")
    assert "turnrl_my_own/tool.py" in written
    for path, text in written.items():
        assert not re.search(r"example(?!s)", path + text, re.IGNORECASE), path
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == "turnrl-my-own"
    assert project["entry-points"]["turnrl"] == {"my-own": "turnrl_my_own"}
    assert "class MyOwnLookup(Tool)" in written["turnrl_my_own/tool.py"]


def test_only_the_kinds_asked_for_are_written(here):
    new("weather", "--with", "source", "--with", "outcome-reward", "--folder", "into/this")
    assert set(files("into/this")) == {
        "README.md",
        "pyproject.toml",
        "recipe.yaml",
        "tests/test_contracts.py",
        "turnrl_weather/__init__.py",
        "turnrl_weather/countries.csv",
        "turnrl_weather/facts.py",
        "turnrl_weather/outcome_reward.py",
        "turnrl_weather/source.py",
    }


def test_any_mix_of_kinds_scaffolds_exactly_those_with_every_name_defined(here, monkeypatch):
    for number, kinds in enumerate(SUBSETS):
        new(f"p{number}", "--with", *kinds)
        folder = here / f"turnrl-p{number}"
        monkeypatch.syspath_prepend(str(folder))
        package = importlib.import_module(f"turnrl_p{number}")
        wanted = {}
        for kind in kinds:
            name = COMPONENTS[kind][0].replace("Example", f"P{number}")
            wanted.setdefault(HOOKS[kind], []).append(name)
        brought = {hook: getattr(package, hook)() for hook in KINDS if hasattr(package, hook)}
        assert {
            hook: [cls.__name__ for cls in classes] for hook, classes in brought.items()
        } == wanted
        text = (folder / "README.md").read_text() + (folder / "recipe.yaml").read_text()
        assert set(re.findall(rf"\bP{number}\w+", text)) == set(itertools.chain(*wanted.values()))
    # names that are not there, imports that nothing needs, empty lines
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "F,W", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kinds", [EVERY, *([kind] for kind in EVERY)], ids="-".join)
def test_the_tests_that_are_written_pass(here, monkeypatch, kinds):
    new("weather", "--with", *kinds)
    monkeypatch.syspath_prepend(str(here / "turnrl-weather"))
    monkeypatch.syspath_prepend(str(here / "turnrl-weather" / "tests"))
    tests = vars(importlib.import_module("test_contracts"))
    ran = [test() for name, test in tests.items() if name.startswith("test_")]
    assert len(ran) >= len(kinds)


def test_the_template_table_agrees_with_the_bundled_world():
    """So questions of the package can be looked up in Atlas, where the tool is the bundled one."""
    facts = {place.name: place.facts for place in places() if place.kind == "country"}
    held_out = {place.name for place in places() if place.split != "train"}
    with (TEMPLATE / "turnrl_example" / "countries.csv").open() as file:
        for row in csv.DictReader(file):
            known = facts[row["country"]]
            assert (row["capital"], row["continent"]) == (known["capital"], known["continent"])
            # what is held out is what the starter policy never saw
            assert (row["split"] == "val") == (row["country"] in held_out)


def test_the_next_steps_are_printed_to_be_pasted(here, capsys, monkeypatch):
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    new("weather", "--folder", "a place")
    steps = capsys.readouterr().out.splitlines()
    assert steps == [
        f"a place: a plugin with {', '.join(EVERY)}. Next:",
        "",
        "    pip install -e 'a place[dev]'",
        "    python -m pytest 'a place'",
        "    turnrl fit 'a place/recipe.yaml'",
    ]
    # another environment's pip is of no use
    monkeypatch.setenv("PATH", os.defpath)
    new("weather")
    assert f"    {folder}/pip install -e 'turnrl-weather[dev]'" in capsys.readouterr().out


# ----------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My Plugin"], "'My Plugin' cannot be the name of a plugin. Take lower-case letters"),
        (["turnrl-"], "'turnrl-' cannot be the name of a plugin"),
        (["7up"], "'7up' cannot be the name of a plugin"),
        (["../up"], "'../up' cannot be the name of a plugin"),
        (["turnrl_atlas"], "a plugin 'atlas' is installed already, from turnrl "),
        (["wiki_search"], "a plugin 'wiki-search' is installed already, from turnrl "),
        (["turnrl-core"], "a plugin 'core' is installed already, from turnrl itself."),
        (["new", "--with", "tol"], "--with: no kind 'tol'. Did you mean tool? Kinds: tool, segm"),
        (["new", "--with", "tool", "xyz"], "--with: no kind 'xyz'. Kinds: tool, segmenter, player"),
        (["new", "--folder", "full"], "'full' is a folder that is not empty. Name another with"),
        (["new", "--folder", "full/file"], "'full/file' is a file. Name another with --folder"),
    ],
)
def test_a_mistake_prints_one_line_and_writes_nothing(here, capsys, arguments, message):
    (here / "full").mkdir()
    (here / "full" / "file").write_text("mine")
    assert main(["plugin", "new", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("turnrl: RecipeError: ")
    assert message in printed
    assert printed.count("\n") == 1
    assert files(here) == {"full/file": "mine"}


def test_an_empty_folder_is_written_into(here):
    (here / "empty").mkdir()
    new("weather", "--folder", "empty", "--with", "tool")
    assert "turnrl_weather/tool.py" in files("empty")


# ----------------------------------------------------------------------- for real


def write_and_install(nursery, folder, *arguments):
    """Have the package written, and installed by pip beside what is installed; the environment of
    a process that has it."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    target = folder / "site"
    environment = {**os.environ, **nursery.environment}
    run(folder, environment, "turnrl", "plugin", "new", "weather", *arguments)
    run(folder, environment, "pip", "install", *options, "--target", target, "./turnrl-weather")
    return {**environment, "PYTHONPATH": str(target)}


def run(folder, environment, module, *arguments):
    program = command() if module == "turnrl" else [sys.executable, "-m", module]
    done = subprocess.run(
        [*program, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory, nursery):
    """The package with everything, installed like any third party's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    return folder, write_and_install(nursery, folder)


@pytest.mark.slow
def test_an_installed_package_works_like_a_bundled_one(installed):
    folder, environment = installed
    listing = run(folder, environment, "turnrl", "plugins")
    block = listing[listing.index("weather  (turnrl-weather 0.1.0)\n") :].split("\n")[1:8]
    assert [line.split(maxsplit=1) for line in block] == [
        ["turnrl_datasets", "WeatherQuestions"],
        ["turnrl_engines", "WeatherEngine"],
        ["turnrl_estimators", "WeatherToGo"],
        ["turnrl_players", "WeatherDesk"],
        ["turnrl_rewards", "WeatherNewlyFound, WeatherLookedUp"],
        ["turnrl_segmenters", "WeatherTurns"],
        ["turnrl_tools", "WeatherLookup"],
    ]
    asked = ("fit", "--model.rewards.help", "WeatherLookedUp")
    printed = run(folder, environment, "turnrl", *asked)
    assert "Reward of a right answer that was looked up." in printed
    # and it is gone where it is not installed
    assert "WeatherLookup" not in hooks.installed("turnrl_tools")


@pytest.mark.slow
def test_the_plugins_that_are_installed_cost_a_command_no_torch(installed):
    _, environment = installed
    code = (
        "import sys; from turnrl.plugin import hooks; hooks.installed('turnrl_tools'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_an_installed_package_trains(installed):
    trains(*installed, EVERY, "--data.val_limit", "2", "--model.group_size", "4")


@pytest.mark.slow
def test_an_installed_package_passes_its_tests_and_its_recipe_trains(installed):
    passes(*installed)
    trains(*installed, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", SOME, ids="-".join)
def test_a_package_of_some_kinds_passes_its_tests_and_trains(nursery, tmp_path, kinds):
    environment = write_and_install(nursery, tmp_path, "--with", *kinds)
    passes(tmp_path, environment)
    trains(tmp_path, environment, kinds)


def passes(folder, environment):
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "turnrl-weather")
    run(folder, environment, "pytest", *options)


def trains(folder, environment, kinds, *smaller):
    run(folder, environment, "turnrl", "fit", "turnrl-weather/recipe.yaml", *smaller)
    done = max((folder / "runs" / "recipe").iterdir(), key=lambda run: run.stat().st_mtime)
    used = (done / "config.yaml").read_text()
    for kind in EVERY:
        name = COMPONENTS[kind][0].replace("Example", "Weather")
        wanted = kind in kinds or (kind == "source" and "tool" in kinds)
        stands_by = kind == "player" and "segmenter" in kinds  # one of the two drives
        assert (name in used) == (wanted and not stands_by)
    with (done / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {float(row["epoch"]) for row in rows} == {0, 1, 2}
    grads = [float(row["train/grad_norm"]) for row in rows if row["train/grad_norm"]]
    assert len(grads) >= 3
    assert all(grads)
