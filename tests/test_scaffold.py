"""`turnrl plugin new`: a package that passes its own tests and trains."""

import csv
import gc
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nursery import command
from turnrl.cli import main
from turnrl.commands.scaffold.command import TEMPLATE
from turnrl.plugin import hooks
from turnrl_atlas import load_places


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


def test_the_tests_that_are_written_pass(here, monkeypatch):
    new("weather")
    monkeypatch.syspath_prepend(str(here / "turnrl-weather"))
    monkeypatch.syspath_prepend(str(here / "turnrl-weather" / "tests"))
    tests = vars(importlib.import_module("test_contracts"))
    written = [name for name in tests if name.startswith("test_")]
    assert len(written) > 5
    for name in written:
        tests[name]()


def test_the_template_table_agrees_with_the_bundled_world():
    """So questions of the package can be looked up in Atlas, where the tool is the bundled one."""
    facts = {place.name: place.facts for place in load_places() if place.kind == "country"}
    held_out = {place.name for place in load_places() if place.split != "train"}
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
    assert capsys.readouterr().out.splitlines()[-3:] == [
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
    new("weather", "--folder", "empty")
    assert "turnrl_weather/tool.py" in files("empty")


# ----------------------------------------------------------------------- for real


@pytest.fixture(scope="module")
def installed(tmp_path_factory, nursery):
    """The package, written and installed by pip like any third party's, beside what is installed;
    and the environment of a process that has it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    target = folder / "site"
    environment = {**os.environ, **nursery.environment}
    run(folder, environment, "turnrl", "plugin", "new", "weather")
    run(folder, environment, "pip", "install", *options, "--target", target, "./turnrl-weather")
    return folder, {**environment, "PYTHONPATH": str(target)}


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


@pytest.mark.slow
def test_an_installed_package_works_like_a_bundled_one(installed):
    folder, environment = installed
    listing = run(folder, environment, "turnrl", "plugins")
    block = listing[listing.index("weather  (turnrl-weather 0.1.0)\n") :].split("\n")[1:9]
    assert [line.split(maxsplit=1) for line in block] == [
        ["turnrl_datasets", "WeatherQuestions"],
        ["turnrl_engines", "WeatherEngine"],
        ["turnrl_estimators", "WeatherToGo"],
        ["turnrl_objectives", "WeatherProximal"],
        ["turnrl_players", "WeatherDesk"],
        ["turnrl_rewards", "WeatherNewlyFound, WeatherLookedUp"],
        ["turnrl_segmenters", "WeatherTurns"],
        ["turnrl_tools", "WeatherLookup"],
    ]
    asked = ("fit", "--model.rewards.help", "WeatherLookedUp")
    printed = run(folder, environment, "turnrl", *asked)
    assert "Reward of a right answer that was looked up." in printed
    # and it is gone where it is not installed
    assert "WeatherLookup" not in hooks.load_classes("turnrl_tools")


def test_an_installed_package_trains_and_passes_its_tests(installed):
    folder, environment = installed
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "turnrl-weather")
    run(folder, environment, "pytest", *options)
    run(folder, environment, "turnrl", "fit", "turnrl-weather/recipe.yaml")
    done = folder / "runs" / "recipe" / "version_0"
    used = (done / "config.yaml").read_text()
    own = {"Turns", "Lookup", "NewlyFound", "LookedUp", "ToGo", "Proximal", "Engine", "Questions"}
    assert own <= {*re.findall(r"Weather(\w+)", used)}
    with (done / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    grads = [float(row["train/grad_norm"]) for row in rows if row["train/grad_norm"]]
    assert len(grads) >= 3
    assert all(grads)
