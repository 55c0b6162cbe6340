"""What the documents promise: whatever can be copied from a page is run, as it stands there.

`CLAIMS`, in `claims`, says of every command and block how it is tested, or why it is not. The
commands of a page are typed one after the other in a terminal, in a folder with `recipes/` in it,
because the later ones use what the earlier ones leave. The recipe there is small (`SMALL`); what is
typed is not changed.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

from claims import CLAIMS, FINISHED, LAST, Claim, Elsewhere, Fits, Lists, Printed, Runs, Saved
from nursery import Nursery, command
from pages import ROOT, Done, Piece, Terminal, pieces, snippet_of
from turnrl import (
    Fields,
    OutcomeOnly,
    Policy,
    Reading,
    ToolCall,
    Trajectory,
    Turn,
    TurnLevel,
    build,
    load_questions,
)
from turnrl.cli import main
from turnrl.testing import check_tool
from turnrl_atlas import Atlas

PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
    "recipes/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/README.md")),
]


SMALL = {
    "model": {"group_size": 4, "steps_per_pass": 1},
    "data": {"questions_per_iteration": 2, "val_limit": 8, "val_batch_size": 8},
    # with a step per iteration, and at most 4 of them whatever number of epochs is asked for
    "trainer": {"max_epochs": 2, "max_steps": 4, "check_val_every_n_epoch": 1},
}


def claim_of(piece: Piece) -> Claim | None:
    claims = CLAIMS.get(piece.page, {})
    snippet = snippet_of(piece, list(claims))
    return None if snippet is None else claims[snippet]


def claimed(*kinds: type[Claim]) -> list[tuple[Piece, Claim]]:
    """What is claimed in such a way, of all pages."""
    everything = [(piece, claim_of(piece)) for page in PAGES for piece in pieces(page)]
    return [(piece, claim) for piece, claim in everything if isinstance(claim, kinds)]


def each(*kinds: type[Claim]) -> list[object]:
    """The same, for a test of each."""
    params = []
    for piece, claim in claimed(*kinds):
        marks = []
        if isinstance(claim, Runs | Printed) and claim.slow:
            marks.append(pytest.mark.slow)
        if isinstance(claim, Runs) and claim.server:
            marks.append(pytest.mark.elasticsearch)
        params.append(pytest.param(piece, claim, id=str(piece), marks=marks))
    return params


# ------------------------------------------------------------------ every page, all of it


def needs_no_claim(piece: Piece) -> bool:
    """The name of a command or an option in a sentence, of which the help pages know."""
    name = r"turnrl( [a-z]+)+( --source)?" if piece.kind == "mention" else r"--[\w.]+"
    return piece.kind in ("mention", "option") and re.fullmatch(name, piece.text) is not None


@pytest.mark.parametrize("page", PAGES)
def test_everything_that_a_page_shows_is_claimed_and_every_claim_is_about_something(page):
    shown = pieces(page)
    unclaimed = [p for p in shown if claim_of(p) is None and not needs_no_claim(p)]
    assert unclaimed == [], "say in CLAIMS, in claims.py, how it is tested"
    claims = CLAIMS.get(page, {})
    about = {snippet_of(piece, list(claims)) for piece in shown}
    assert set(claims) - about == set(), "nothing on the page says so any more"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_paragraph_is_read_as_a_list(page):
    lines = (ROOT / page).read_text().splitlines()
    assert read_as_lists(lines) == []


def read_as_lists(lines: list[str]) -> list[str]:
    """Lines that begin a list in Markdown without an empty line before: `1)` or `-`, where a line
    of a sentence happened to break."""
    tokens = MarkdownIt().parse("\n".join(lines))
    outer = [token for token in tokens if token.map and token.level == 0]
    ends = {token.map[1] for token in outer if token.type == "paragraph_open"}
    begins = (token.map[0] for token in outer if token.type.endswith("list_open"))
    return [lines[number] for number in begins if number in ends]


def test_a_line_that_breaks_before_a_number_is_read_as_a_list():
    assert read_as_lists(["the average (0 to", "1) over the tokens."]) == ["1) over the tokens."]
    assert read_as_lists(["some", "", "1. first", "2. second", "", "more"]) == []


def test_the_tests_that_claims_name_are_there():
    for piece, claim in claimed(Elsewhere):
        module, _, name = claim.by.partition(".")
        assert f"def {name}" in (ROOT / "tests" / f"{module}.py").read_text(), piece


def help_of(*command: str, capsys) -> str:
    try:
        code = main([*command, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0, command
    return capsys.readouterr().out


def test_commands_and_options_in_sentences_appear_in_the_help_pages(capsys):
    unclaimed = [p for page in PAGES for p in pieces(page) if claim_of(p) is None]
    named = {p.text.split(" --")[0] for p in unclaimed if p.kind == "mention"}
    assert named >= {"turnrl fit", "turnrl eval", "turnrl plugin new", "turnrl index build"}
    pages = {command: help_of(*command.split()[1:], capsys=capsys) for command in named}
    help_pages = "".join(pages.values())
    options = {p.text for p in unclaimed if p.kind == "option"}
    assert {
        option for option in options if not re.search(rf"{option}(?![\w.])", help_pages)
    } == set()


# ------------------------------------------------------------------ typed in a terminal


def merged(base: dict, more: dict) -> dict:
    base = copy.deepcopy(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = merged(base[key], value) if both else value
    return base


def put_recipes(folder: Path, **more: object) -> None:
    """`recipes/` as in a clone, with small settings where something is trained."""
    shutil.copytree(ROOT / "recipes", folder / "recipes", dirs_exist_ok=True)
    quickstart = folder / "recipes" / "quickstart.yaml"
    recipe = merged(merged(yaml.safe_load(quickstart.read_text()), SMALL), more)
    quickstart.write_text(yaml.safe_dump(recipe))


def lines(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_data(folder: Path) -> None:
    """The files that pages speak of as the reader's own, and a data set in place of the hub's."""
    questions = [
        {"id": q.id, "question": q.text, "answers": list(q.answers)}
        for q in islice(Atlas().questions("train"), 500)
    ]
    lines(questions, folder / "questions.jsonl")
    lines(questions[:16], folder / "held_out.jsonl")
    tower = "The Dom Tower of Utrecht was begun in 1321. It stands in the middle of the city. "
    passages = [{"id": "tower", "title": "Dom Tower", "text": tower}] + [
        {"id": p.id, "title": p.title, "text": p.text} for p in islice(Atlas().passages(), 299)
    ]
    lines(passages, folder / "corpus.jsonl")
    (folder / "mine.yaml").write_text("model: {optimizer: {init_args: {lr: 1.0e-4}}}\n")
    articles = [
        {"id": "1", "title": "Dom Tower", "text": tower * 20},
        {"id": "2", "title": "Paris", "text": "Paris is the capital of France."},
    ]
    hub = folder / "wikimedia" / "wikipedia"
    lines(articles, hub / "articles.jsonl")
    configs = [{"config_name": f"20231101.{c}", "data_files": "*.jsonl"} for c in ("en", "simple")]
    (hub / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def put_gsm8k(folder: Path) -> dict[str, str]:
    """The files of the page about GSM8K, with a few rows in its format; the page's blocks."""
    words = {"json": "Tom has 6", "python": "class Calculator", "yaml": "arithmetic.Calculator"}
    blocks = {
        kind: next(
            p.text for p in pieces("docs/howto/gsm8k.md") if p.kind == kind and word in p.text
        )
        for kind, word in words.items()
    }
    rows = [json.loads(blocks["json"])]
    for a, b in [(2, 3), (40, 25), (7, 9)]:
        solution = f"There are {a} * {b} = <<{a}*{b}={a * b}>>{a * b} of them.\n#### {a * b:,}"
        rows.append({"question": f"How many are {a} times {b} hens?", "answer": solution})
    lines(rows, folder / "train.jsonl")
    lines(rows, folder / "test.jsonl")
    (folder / "arithmetic.py").write_text(blocks["python"])
    (folder / "gsm8k.yaml").write_text(blocks["yaml"])
    return blocks


ON_QUICKSTART = ("calculator", "functions", "coming-from")
"""Pages whose recipes override the quickstart by its name."""

MY_TOOL = '''
import turnrl

class MyTool(turnrl.Tool):
    """One that is not packaged."""

    name, description, parameters = "mine", "Does nothing.", {"type": "object"}

    def run(self, calls):
        return [turnrl.ToolResult("nothing") for _ in calls]
'''


class Page:
    """A page that is followed in a folder, from its first line to its last."""

    def __init__(self, name: str, folder: Path, nursery: Nursery | None) -> None:
        self.name, self.folder = name, folder
        self._nursery = nursery
        self.terminal = Terminal(folder, nursery)
        self.leaving = False
        self._done: dict[Piece, Future[Done]] = {
            piece: Future()
            for piece, claim in claimed(Runs)
            if piece.page == name and claim.at_once
        }

    def follow(self) -> None:
        """Run what the page shows."""
        try:
            self.prepare()
            for piece, future in self._done.items():
                if not self.leaving:
                    future.set_result(self.run(piece))
        except BaseException as error:
            for future in self._done.values():
                if not future.done():
                    future.set_exception(error)

    def prepare(self) -> None:
        """What the page takes for granted."""
        put_recipes(self.folder)
        put_data(self.folder)
        if self.name in ("README.md", "docs/howto/index.md"):  # what README's first line does
            # as a new user types it, once
            begun = Terminal(self.folder, None) if self.name == "README.md" else self.terminal
            self.check(begun.type("turnrl fit recipes/quickstart.yaml"), Runs((FINISHED,)))
        for piece, claim in claimed(Saved):
            if piece.page == self.name:
                (self.folder / claim.name).write_text(piece.text)
        if self.name in ("docs/tutorial.md", *(f"docs/howto/{n}.md" for n in ON_QUICKSTART)):
            shutil.copy(self.folder / "recipes" / "quickstart.yaml", self.folder)
        if self.name == "docs/howto/gsm8k.md":
            put_gsm8k(self.folder)
        if self.name == "docs/howto/runs.md":
            put_recipes(
                self.folder,
                trainer={"max_epochs": 50},
                model={"optimizer": {"init_args": {"lr": 0.001}}},
            )
            done = self.terminal.type(
                "turnrl fit recipes/quickstart.yaml --trainer.max_steps 100", "iteration   1/50"
            )
            assert done.code == 130, done.text
            assert f"--ckpt_path {LAST}" in done.text

    def run(self, piece: Piece) -> Done:
        claim = claim_of(piece)
        if isinstance(claim, Printed):
            typed = [done for piece, done in self._done.items() if claim.by in piece.text]
            return typed[0].result() if typed else self.terminal.type(claim.by)
        assert isinstance(claim, Runs)
        command = piece.text
        if piece.kind == "python":
            (self.folder / "block.py").write_text(piece.text)
            command = "python block.py"
        if piece.kind == "yaml":
            (self.folder / "block.yaml").write_text(piece.text)
            command = "turnrl fit recipes/quickstart.yaml block.yaml --print_config"
        terminal = self.terminal
        if claim.alone:
            folder = self.folder / "alone"
            folder.mkdir()
            put_recipes(folder)
            terminal = Terminal(folder, self._nursery)
        return terminal.type(f"{claim.before}{command.strip()}{claim.after}", timeout_s=1500)

    def result(self, piece: Piece) -> Done:
        """How a command ended; those that are not run with the page come after it."""
        for future in [self._done[piece]] if piece in self._done else self._done.values():
            future.result()
        return self._done[piece].result() if piece in self._done else self.run(piece)

    def check(self, done: Done, claim: Runs) -> None:
        assert done.code == 0, done.text
        assert "Traceback (most recent call last)" not in done.text
        assert "Warning" not in done.text
        shown = f"{done.text}\n{' '.join(done.text.split())}"  # and without the terminal's wrapping
        assert [text for text in claim.says if text not in shown] == [], done.text
        folder = self.folder / "alone" if claim.alone else self.folder
        assert [path for path in claim.leaves if not list(folder.glob(path))] == []
        # a line that is drawn again and again, or that is turnrl's own, fits the terminal
        own = [line for line in done.lines if re.match("before|iteration|validation", line)]
        drawn = [part for line in done.plain.split("\n") for part in line.split("\r")[1:]]
        assert [line for line in [*own, *drawn] if len(line) > 80] == []


@pytest.fixture(scope="module")
def following(request, tmp_path_factory, nursery) -> Iterator[dict[str, Page]]:
    """The pages that are asked about, followed two at a time."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {p["piece"].page for p in params if "piece" in p}
    folders = {name: tmp_path_factory.mktemp("page") for name in PAGES if name in asked}
    pages = {name: Page(name, folder, nursery) for name, folder in folders.items()}
    if any("elasticsearch" in item.keywords for item in request.session.items):
        with contextlib.suppress(pytest.skip.Exception):  # which `server` will say again
            request.getfixturevalue("open_node")  # it starts in the background
    with ThreadPoolExecutor(2) as pool:
        for page in pages.values():
            pool.submit(page.follow)
        yield pages
        for page in pages.values():
            page.leaving = True


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Page:
    """A copy of the repository with a small recipe, and none of what is installed here."""
    folder = tmp_path_factory.mktemp("clone") / "turnrl"
    unwanted = (".git", ".venv", "runs", "indexes", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*unwanted))
    page = Page("README.md", folder, None)
    page.terminal.environment.pop("PYTHONPATH", None)
    put_recipes(folder)
    return page


@pytest.fixture(scope="module")
def server(request) -> Iterator[str]:
    """The address of a search server that has no index 'wikipedia', and has none afterwards."""
    own = os.environ.get("TURNRL_TEST_ES_URL")
    address = own or request.getfixturevalue("open_node").url

    def ask(method: str) -> None:
        request = urllib.request.Request(f"{address}/wikipedia", method=method)
        urllib.request.urlopen(request).close()

    try:
        ask("HEAD")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
    else:
        pytest.skip(f"{address} has an index 'wikipedia' already")
    yield address
    ask("DELETE")


@pytest.mark.parametrize(("piece", "claim"), each(Runs))
def test_a_command_does_what_its_page_says(piece, claim, request):
    if claim.clone:
        page = request.getfixturevalue("clone")
        done = page.run(piece)
    else:
        page = request.getfixturevalue("following")[piece.page]
        if claim.server:
            address = request.getfixturevalue("server")
            page.terminal.environment["TURNRL_ES_URL"] = address
            text = piece.text.replace("http://localhost:9200", address)
            piece = Piece(piece.page, piece.kind, text)
        done = page.result(piece)
    page.check(done, claim)


NOTEBOOKS = [param for param in each(Runs) if param.values[1].notebook]


@pytest.mark.slow
@pytest.mark.parametrize(("piece", "claim"), NOTEBOOKS)
def test_a_block_for_a_notebook_runs_in_one(piece, claim, following):
    page = following[piece.page]
    page.result(piece)
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    book = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": [cell]}
    path = page.folder / "block.ipynb"
    path.write_text(json.dumps(merged(book, {"cells": [{**cell, "source": piece.text}]})))
    done = page.terminal.type(f"jupyter execute --inplace {path.name}")
    assert done.code == 0, done.text
    (cell,) = json.loads(path.read_text())["cells"]
    shown = "".join("".join(output.get("text", ())) for output in cell["outputs"])
    assert [text for text in claim.says if text not in shown] == []


@pytest.mark.parametrize(("piece", "claim"), each(Printed))
def test_lines_shown_on_a_page_are_printed(piece, claim, following):
    done = following[piece.page].result(piece)
    assert done.code == 0, done.text
    assert piece.text.strip() in done.text


def without_figures(text: str) -> set[str]:
    """The lines of a text, with times as dots and numbers as zeros: other machines have others."""
    times = re.sub(r"\d+:\d\d(\s+(\d+[hms]\s*)+)?", "... ", text)
    figures = re.sub(r"\d[\d.]*", "0", times)
    return {" ".join(line.split()) for line in figures.splitlines()}


def follow_at_full_size(page: str, folder: Path, nursery: Nursery) -> int:
    """Type what a page shows, as it stands there, and compare all that it says is printed: so many
    blocks."""
    terminal, shown, compared = Terminal(folder, nursery), "", 0
    for piece in pieces(page):
        claim = claim_of(piece)
        if isinstance(claim, Saved):
            (folder / claim.name).write_text(piece.text)
        elif isinstance(claim, Runs):
            if piece.kind == "python":
                (folder / "block.py").write_text(piece.text)
            command = "python block.py" if piece.kind == "python" else piece.text.strip()
            done = terminal.type(command, timeout_s=1500)
            assert done.code == 0, done.text
            shown = done.text
        elif piece.kind == "text":
            assert without_figures(piece.text) - without_figures(shown) == set(), shown
            compared += 1
    return compared


@pytest.mark.slow
def test_the_full_size_tutorial_prints_the_output_it_shows(tmp_path, nursery):
    assert follow_at_full_size("docs/tutorial.md", tmp_path, nursery) > 8


@pytest.mark.slow
def test_the_policy_learns_the_calculator_as_the_page_shows(tmp_path, nursery):
    assert follow_at_full_size("docs/howto/calculator.md", tmp_path, nursery) == 3
    with (tmp_path / "runs/calculator/version_0/metrics.csv").open() as file:
        curve = [float(x) for row in csv.DictReader(file) if (x := row["val/exact_match"])]
    assert curve[0] < 0.2
    assert curve[-1] >= 0.6


@pytest.mark.parametrize(("piece", "claim"), each(Lists))
def test_the_files_that_a_page_lists_are_there(piece, claim, following):
    page = following[piece.page]
    for before in page._done:
        page.result(before)
    folder = page.folder / claim.folder
    for line in piece.text.splitlines():
        name = line.split()[0]
        assert (folder / name).exists(), name
        for file in re.findall(r"\b\w+\.py\b", line.partition(name)[2]):
            assert (folder / name).with_name(file).is_file(), file


# ------------------------------------------------------------------ in a recipe


def put_plugin(folder: Path, name: str) -> str:
    """Make the template of `turnrl plugin new` an installed package, for processes that have this
    `PYTHONPATH`."""
    templates = ROOT / "turnrl/commands/scaffold/templates"
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[turnrl]\nexample = {name}\n")
    return os.pathsep.join([str(templates / name.replace("_", "-")), str(folder)])


def scalars(value: object) -> Iterator[object]:
    """The words and numbers of YAML, but for its keys."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, str | int | float | None):
        yield value
    else:
        for part in parts:
            yield from scalars(part)


def plain(value: object) -> object:
    """A number as a number, and of the path of a class its name."""
    try:
        return float(str(value))
    except ValueError:
        return str(value).rpartition(".")[2]


@pytest.mark.parametrize(("piece", "claim"), each(Fits))
def test_settings_that_a_page_shows_are_accepted(
    piece, claim, tmp_path, monkeypatch, capsys, nursery
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = (ROOT / "tests" / "players" / "plain_agent" / "__init__.py").read_text()
    (tmp_path / "my_module.py").write_text(f"{agent}{MY_TOOL}\nfrom worlds import Echo\n")
    put_recipes(tmp_path)
    put_data(tmp_path)
    options: list[str] = []
    if piece.kind == "option":
        options = shlex.split(piece.text)
        wanted = [yaml.safe_load(value) for value in options[1::2]]
    else:
        block = yaml.safe_load(piece.text)
        wanted = [block]
        for section in reversed(claim.under.split(".") if claim.under else []):
            block = {section: block}
        recipe = Path("recipes", "quickstart.yaml")
        recipe.write_text(yaml.safe_dump(merged(yaml.safe_load(recipe.read_text()), block)))
    asked = ["fit", "recipes/quickstart.yaml", *options, "--print_config"]
    if claim.plugin:  # in a process of its own: classes that were once there are listed for ever
        path = {"PYTHONPATH": put_plugin(tmp_path, claim.plugin)}
        environment = {**os.environ, **nursery.environment, **path}
        program = command(*asked)
        ran = subprocess.run(
            program, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        printed = ran.stdout
    else:
        assert main(asked) == 0
        printed = capsys.readouterr().out
    resolved = [plain(value) for value in scalars(yaml.safe_load(printed))]
    assert [value for value in scalars(wanted) if plain(value) not in resolved] == []


# ------------------------------------------------------------------ single promises


@pytest.mark.filterwarnings("default")  # a script of one's own shows Lightning's warnings
def test_the_script_that_trains_by_hand_runs(tmp_path, monkeypatch):
    script = (ROOT / "docs" / "by_hand.py").read_text()
    assert len(script.splitlines()) <= 34
    # as it stands but for its size, which is that of a demonstration
    small = script.replace("questions_per_iteration=8, val_limit=64", SMALLER)
    assert SMALLER in small
    monkeypatch.chdir(tmp_path)
    exec(compile(small, "docs/by_hand.py", "exec"), {"__name__": "__main__"})
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *rows = metrics.read_text().splitlines()
    assert "val/exact_match" in header
    assert "train/tool_execution" in header
    assert len(rows) == 3  # untrained, and after each of two iterations


def test_the_loop_of_the_page_trains_without_lightning(capsys):
    script = (ROOT / "docs" / "your_loop.py").read_text()
    assert len([line for line in script.splitlines() if line]) <= 36
    short = {"range(40)": "range(2)", "* 8 : step * 8 + 8], 8,": "* 2 : step * 2 + 2], 4,"}
    for whole, cut in short.items():
        assert whole in script
        script = script.replace(whole, cut)
    names = {"__name__": "__main__"}
    exec(compile(script, "docs/your_loop.py", "exec"), names)
    assert re.findall(r"^step (\d): reward \d\.\d{3}$", capsys.readouterr().out, re.M) == ["0", "1"]
    began = Policy("package://turnrl_atlas/starter")
    began.load()
    new, old = (p.trainable_state() for p in (names["policy"], began))
    assert any(not torch.equal(new[name], old[name]) for name in old)


SMALLER = "questions_per_iteration=2, val_limit=8"


def test_the_calculator_and_the_rows_of_the_page_fit_together(tmp_path):
    blocks = put_gsm8k(tmp_path)
    space = {"__name__": "arithmetic"}
    exec(compile(blocks["python"], "arithmetic.py", "exec"), space)
    tool, reward = space["Calculator"](), space["NumberGiven"]()
    wrong = ["1 +", "'a' * 3", "2 ** 9", "1 / 0", "x", "", "(" * 100, "-" * 99, "\0"]
    calls = [{"expression": text} for text in ("(3 + 4) * 6", "-1/4", " 1e300 * 1e300")]
    check_tool(tool, calls, [{"expression": text} for text in wrong])
    results = tool.run([ToolCall("calculate", call) for call in calls])
    assert [result.content for result in results] == ["42", "-0.25", "inf"]
    settings = yaml.safe_load(blocks["yaml"])["data"]
    questions = load_questions(str(tmp_path / "train.jsonl"), fields=Fields(**settings["fields"]))
    assert [q.answers for q in questions] == [("42",), ("6",), ("1,000",), ("63",)]

    turns = [Turn("", Reading(answer=a)) for a in ("1,000", "-4.5", "42 pens", None)]
    tried = [Trajectory(questions[0], (turn,), "answer") for turn in turns]
    assert [reward.score(trajectory) for trajectory in tried] == [0.1, 0.1, 0, 0]
    space.clear()  # a message of another test lists the tools that there are
    del tool, reward
    gc.collect()


@pytest.fixture
def calculator() -> Iterator[dict[str, Any]]:
    """What the page about a calculator puts into `calculator.py`, by name."""
    (file,) = (p.text for p in pieces("docs/howto/calculator.md") if "class Sums" in p.text)
    space: dict[str, Any] = {"__name__": "calculator"}
    exec(compile(file, "calculator.py", "exec"), space)
    yield space
    space.clear()  # a message of another test lists the tools that there are
    gc.collect()


def test_the_held_out_questions_for_the_calculator_have_numbers_that_training_never_has(calculator):
    asked = {split: calculator["Sums"]().questions(split) for split in ("train", "val")}
    assert [len(questions) // 500 for questions in asked.values()] == [7, 1]
    sets = [
        {tuple(sorted(re.findall(r"\d+", question.text))) for question in questions}
        for questions in asked.values()
    ]
    assert sets[0] & sets[1] == set()
    for question in (*asked["train"], *asked["val"]):
        sum_ = re.fullmatch(
            r"What is ([0-9]+(?: (?:plus|minus|times) [0-9]+){1,2})\?", question.text
        )
        signs = {"plus": "+", "minus": "-", "times": "*"}
        computed = eval(" ".join(signs.get(word, word) for word in sum_[1].split()))
        assert question.answers == (str(computed),)


def test_the_example_calculator_refuses_invalid_expressions_without_raising(calculator):
    right = {
        "52 minus 62 minus 76": "-86",
        "2 plus 3 times 4 minus 5": "9",
        "3 times 4 minus 2 times 5": "2",
        "-7+ 6*2": "5",
        " 2  times 99 ": "198",
    }
    wrong = (
        "|62 minus|minus|5|1 2 plus 3|1 / 0|2 ** 9|2 * -3|(1 + 2)|1e3 + 2|1.5 + 2|\u00b2 + 1|x|\0"
    )
    wrong = [*wrong.split("|"), "9" * 10 + " + 1", "(" * 100, "__import__('os').getcwd()"]
    calls = [{"expression": text} for text in (*right, *wrong)]
    tool = calculator["Calculator"]()
    check_tool(tool, calls[: len(right)], calls[len(right) :])
    results = tool.run([ToolCall("calculator", call) for call in calls])
    assert [result.content for result in results if result.ok] == [*right.values()]
    assert [result.ok for result in results] == [True] * len(right) + [False] * len(wrong)


def test_readme_has_one_line_to_train_and_one_to_test():
    readme = (ROOT / "README.md").read_text()
    for name, word in [("quickstart", "fit recipes/quickstart.yaml"), ("test", "pytest")]:
        block = re.search(rf"<!-- {name} line -->\n```bash\n(.*?)\n```", readme, re.DOTALL)
        assert block, name
        assert "\n" not in block.group(1)
        assert word in block.group(1)


# of the page on turns: four attempts; the first and the third find the answer in turn 2
REACHED = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
FOUND = torch.tensor([[0, 0.5, 0], [0, 0, 0], [0, 0.5, 0], [0, 0, 0]])
RIGHT = torch.tensor([1.0, 0.0, 0.0, 1.0])
THIRD_FIRST = [2, 0, 1, 3]


WORKED_OUT = "docs/explanation/turns.md"


def advantages_that_are_worked_out():
    """(turns, 2): those of `TurnLevel`, and one for all."""
    (block,) = (p.text for p in pieces(WORKED_OUT) if "turn 3   answer" in p.text)
    lines = block.splitlines()[2:]
    return [[float(x) for x in re.findall(r"[+-]\d\.\d\d", line)] for line in lines]


def how_they_come_about() -> str:
    """The paragraph below them, as one line."""
    text = (ROOT / WORKED_OUT).read_text()
    (paragraph,) = re.findall(r"^Each advantage is .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    return " ".join(paragraph.split())


def test_the_worked_out_advantages_match_the_computed_ones():
    rules = TurnLevel(), OutcomeOnly()
    third = torch.stack([rule.advantages(FOUND, RIGHT, REACHED)[2] for rule in rules], dim=1)
    assert torch.allclose(torch.tensor(advantages_that_are_worked_out()), third, atol=0.005)


def test_the_advantages_that_are_worked_out_are_in_the_table_above_them():
    page = (ROOT / "docs" / "explanation" / "turns.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([+-]\d.*) \|$", page, re.MULTILINE))
    third = [rows[rule].split(" | ")[2].split() for rule in ("TurnLevel", "OutcomeOnly")]
    turns = zip(*third, strict=True)
    assert [[float(x) for x in turn] for turn in turns] == advantages_that_are_worked_out()


def test_the_parts_of_each_advantage_are_computed_as_the_page_says():
    text = how_they_come_about()
    lists = re.findall(r"[\d.]+(?:, [\d.]+)* and [\d.]+", text)
    compared = [[float(x) for x in re.split(", | and ", values)] for values in lists]
    returns = FOUND.flip(1).cumsum(1).flip(1)  # of a turn's own reward and the later ones
    outcomes, *turns = (
        column[THIRD_FIRST][took[THIRD_FIRST]].tolist()
        for column, took in zip(
            (RIGHT, *returns.T), (torch.ones(4).bool(), *REACHED.T), strict=True
        )
    )
    assert compared == [outcomes, turns[0], turns[1]]
    assert turns[2] == [0, 0]  # from turn 3 on none earned any
    sums = re.findall(r"\((\S+) - (\S+)\) / (\S+) = ([+-]\d\.\d\d)", text)
    for (value, mean, deviation, part), values in zip(sums, compared, strict=True):
        assert float(value) == values[0]
        assert float(mean) == pytest.approx(statistics.mean(values), abs=5e-4)
        assert float(deviation) == pytest.approx(statistics.stdev(values), abs=5e-4)
        assert part == f"{(float(value) - float(mean)) / float(deviation):+.2f}"
    outcome, *own = (float(part) for *_, part in sums)
    shown = [advantage for advantage, _ in advantages_that_are_worked_out()]
    assert shown == pytest.approx([outcome + part for part in (*own, 0)], abs=1e-9)


def test_a_tool_that_a_cell_writes_is_named_by_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = (p.text for p in pieces("docs/howto/notebook.md") if "%%writefile" in p.text)
    magic, text = block.split("\n", 1)
    Path(magic.removeprefix("%%writefile ")).write_text(text)
    run = build(["quickstart", "--model.rollout.tools", "[almanac.population]"])
    (spec,) = run.module.rollout.specs
    assert (spec.name, spec.description) == ("population", "How many people live in a city.")


def test_the_picture_of_readme_is_of_the_recorded_attempt():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        attempt = importlib.import_module("attempt")
    record = json.loads((attempt.HERE / "attempt.json").read_text())
    own = attempt.advantages(record)
    assert own["MT-GRPO"] == pytest.approx(record["recorded"], abs=1e-5)
    outcomes = [row["outcome"] for row in record["attempts"]]
    sums = [row["outcome"] + sum(row["turn_rewards"]) for row in record["attempts"]]
    for name, values in (("GRPO-OR", outcomes), ("GRPO-MR", sums)):
        z = (values[record["member"]] - statistics.mean(values)) / statistics.stdev(values)
        assert own[name] == pytest.approx([z] * 3, abs=1e-4)
    for theme in attempt.THEMES:
        drawn = (attempt.HERE / f"attempt-{theme}.svg").read_text()
        assert drawn == attempt.picture(record, theme)


def test_everything_shown_on_the_sites_first_page_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    shown = [piece.text.strip() for piece in pieces("docs/index.md")]
    assert shown
    assert [text for text in shown if text not in readme] == []


@pytest.mark.parametrize("page", PAGES)
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
    for recipe in (ROOT / "recipes").rglob("*.yaml"):
        assert f"[{recipe.name}]({recipe.relative_to(ROOT / 'recipes')})" in table
