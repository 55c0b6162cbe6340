"""The documentation as a site: built once, with warnings as errors, then read as HTML."""

import contextlib
import csv
import inspect
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sphinx.errors import ExtensionError

import turnrl
import turnrl.engines
import turnrl.runs
import turnrl.testing
from nursery import command as started
from nursery import python
from turnrl.cli import main
from turnrl.plugin.hooks import KINDS, load_classes

ROOT = Path(__file__).parents[1]
EXTENSION = ROOT / "docs" / "_ext"


@pytest.fixture(scope="module")
def facts():
    """What the site's extension knows of the program."""
    sys.path.insert(0, str(EXTENSION))
    from turnrl_site import facts

    yield facts
    sys.path.remove(str(EXTENSION))


def bare(text: str) -> str:
    """A text without spaces and backticks, which pages and files set differently."""
    return re.sub(r"[\s`]", "", text)


class Text(HTMLParser):
    """The text of a page, the ids on it, and the addresses that a browser asks for by itself."""

    ASKED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.feed(file.read_text("utf-8"))
        self.text = bare("".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        loaded = tag == "link" and (values.get("rel") or "") in ("stylesheet", "preload", "icon")
        for name, value in attrs:
            if (tag, name) in self.ASKED or (loaded and name == "href"):
                self.loads.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def sphinx(nursery, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the documentation in a process."""
    environment = {**os.environ, **nursery.environment, **environment}
    command = python("-m", "sphinx", *options)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def build(nursery, site: Path, *options: str) -> None:
    """Build the site by the command that `contributing.md` gives, with more options."""
    (line,) = re.findall(
        r"`\.venv/bin/(sphinx-build .*?)`", (ROOT / "docs/contributing.md").read_text()
    )
    *own, source, folder = line.split()[1:]
    assert (source, folder) == ("docs", "site")
    done = sphinx(nursery, *own, *options, "-q", "-d", f"{site}-cache", source, str(site))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory, nursery) -> Path:
    """The site, but for the pages with source code, which take a third of the time."""
    site = tmp_path_factory.mktemp("site")
    extensions = runpy.run_path(str(ROOT / "docs" / "conf.py"))["extensions"]
    extensions.remove("sphinx.ext.viewcode")
    # nor every object in the contents of its page
    build(nursery, site, "-D", f"extensions={','.join(extensions)}", "-D", "toc_object_entries=0")
    return site


@pytest.fixture(scope="module")
def pages(built) -> dict[str, Text]:
    by_name = {file.relative_to(built).as_posix(): Text(file) for file in built.rglob("*.html")}
    assert len(by_name) > 30
    return by_name


@pytest.mark.slow
def test_every_page_of_the_folder_is_a_page_of_the_site(pages):
    written = [p for kind in ("md", "rst") for p in (ROOT / "docs").rglob(f"*.{kind}")]
    names = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in written}
    assert names <= set(pages)


@pytest.mark.slow
def test_every_public_name_is_described(pages):
    doors = (turnrl, turnrl.engines, turnrl.runs, turnrl.testing)
    ids = {found for page in pages.values() for found in page.ids}
    for name, module in {name: door for door in doors[::-1] for name in door.__all__}.items():
        is_module = inspect.ismodule(getattr(module, name))
        assert is_module or f"{module.__name__}.{name}" in ids, name


@pytest.mark.slow
def test_every_command_is_there_with_its_help(pages, capsys, facts):
    commands = list(facts.commands())
    assert {("fit",), ("eval",), ("plugin", "new"), ("index", "build")} <= set(commands)
    shown = pages["reference/commands.html"].text
    for command in [(), *commands]:
        with contextlib.suppress(SystemExit):
            main([*command, "--help"])
        usage, _, more = capsys.readouterr().out.partition("\n\n")
        assert bare(usage) in shown, command
        assert bare(more.split("\n\n")[0]) in shown, command


@pytest.mark.slow
def test_every_component_of_every_hook_is_there_with_its_arguments(pages, facts):
    assert set(facts.hooks()) >= {hook for hook in KINDS if load_classes(hook)}
    shown = {name: page for name, page in pages.items() if "components/" in name}
    for hook in KINDS:
        for name, cls in load_classes(hook).items():
            own = f"class_path:{name},ofthepackage"
            (page,) = [page for page in shown.values() if own in page.text]
            for argument in facts.arguments(cls):
                row = f"{argument.name}{argument.type}{argument.default}{argument.text}"
                assert bare(row) in page.text, (name, argument)


@pytest.mark.slow
def test_every_metric_is_there_with_its_unit_and_meaning(pages, facts):
    shown = pages["reference/metrics.html"].text
    for *_, group in facts.metrics():
        for metric in group:
            assert bare(metric.name + metric.unit + metric.text) in shown, metric


@pytest.mark.slow
def test_a_page_asks_for_nothing_from_elsewhere(built, pages):
    for name, page in pages.items():
        assert [address for address in page.loads if "//" in address] == [], name
    for style in built.rglob("*.css"):
        pattern = r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]*)"
        assert re.findall(pattern, style.read_text()) == [], style.name


# ---------------------------------------------------------------- gaps


def test_what_has_no_description_is_named(facts):
    from turnrl_site import directives

    class Undescribed(turnrl.OutcomeReward):
        """Pays always.

        Args:
            weight: The reward.
        """

        def __init__(self, weight: float = 1.0, bonus: float = 0.0) -> None:
            self.weight = weight

        def score(self, trajectory):
            return self.weight

    assert facts.prose(Undescribed) == "Pays always."
    with pytest.raises(ExtensionError, match=r"bonus.* has no meaning"):
        directives.argument_table(facts.arguments(Undescribed))


# ---------------------------------------------------------------- columns of metrics.csv

SMALL = [
    *("--model.group_size=2", "--model.steps_per_pass=1", "--data.questions_per_iteration=2"),
    *("--data.val_limit=2", "--data.val_batch_size=2", "--trainer.max_epochs=1"),
]
RUNS = {
    "critic": [
        "--model.estimator=TurnCritic",
        "--model.objective.importance_cap=2",
        "--model.objective.kl_coef=0.1",
        "--model.policy.lora.r=2",
        "--model.rewards+=worlds.note",
    ],
    "ahead": [
        *("--model.engine=worlds.Kept", "--model.max_staleness=1", "--data.val=null"),
        "--model.objective.importance_cap=2",
        # enough attempts for the standard error of what those that act earn
        *("--model.group_size=16", "--data.questions_per_iteration=8"),
        "--model.rewards+=SearchCost",
    ],
    "probes": ["--model.estimator=Branched", "--model.redraws=1", "--data.val=null"],
}


@pytest.fixture(scope="module")
def columns(tmp_path_factory, nursery) -> dict[str, list[str]]:
    """The columns that real runs write, by run."""
    folder, by_run = tmp_path_factory.mktemp("runs"), {}
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    last = ["--ckpt_path", "runs/quickstart/version_0"]
    commands = [["fit", recipe, *SMALL, *options] for options in RUNS.values()]
    commands.append(["eval", recipe, *SMALL[:-1], *last, *RUNS["critic"]])
    environment = {**os.environ, **nursery.environment}
    for words in commands:
        ran = subprocess.run(
            started(*words), cwd=folder, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
    for file in sorted(folder.rglob("metrics.csv")):
        with file.open(newline="") as opened:
            by_run[file.parent.parent.name + file.parent.name] = next(csv.reader(opened))
    assert len(by_run) == len(RUNS) + 1
    return by_run


@pytest.mark.slow
def test_every_run_column_is_listed_and_every_listed_column_occurs(columns, facts):
    listed = [metric for *_, group in facts.metrics() for metric in group]
    written = {column for run in columns.values() for column in run}
    assert {c for c in written if not any(m.matches(c) for m in listed)} == set()
    assert [m.name for m in listed if not any(m.matches(c) for c in written)] == []
    assert any(metric.when for metric in listed)
    for metric in listed:
        if not metric.when:  # then it is in every run that does such a thing
            fits = [run for name, run in columns.items() if fits_in(metric.name, name)]
            assert all(any(metric.matches(c) for c in run) for run in fits), metric.name


def fits_in(metric: str, run: str) -> bool:
    """Tell if a run of that name can have a metric: training in `fit`, validation where it is."""
    if metric.startswith("val/"):
        return run not in ("quickstartversion_1", "quickstartversion_2")  # without validation
    return "/" not in metric or "eval" not in run
