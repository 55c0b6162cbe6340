"""Everything that a page of the documentation shows runs, and every number on it has a source.

`pages` has the marks that say what is special about a block.

A comment below a paragraph or table, `<!-- numbers from FILE -->`, says where its numbers are: each
stands in that file as well, or the script or test that measures them has this name.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

from nursery import Nursery
from pages import FENCE, ROOT, Block, blocks
from turnrl import OutcomeOnly, Policy, TurnLevel
from turnrl.cli import main
from turnrl_atlas import Atlas

FRONT = ROOT / "docs" / "index.md"
PAGES = [
    "README.md",  # and the site's first page shows the same
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md") if p != FRONT),
    "recipes/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/README.md")),
]
SMALL = {
    "model": {"group_size": 4, "steps_per_pass": 1},
    "data": {"questions_per_iteration": 2, "val_limit": 8, "val_batch_size": 8},
    # with a step per iteration, and at most 4 of them whatever number of epochs is asked for
    "trainer": {"max_epochs": 2, "max_steps": 4, "check_val_every_n_epoch": 1},
}


# ------------------------------------------------------------------ a folder to follow a page in


def merged(base: dict, more: dict) -> dict:
    base = copy.deepcopy(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = merged(base[key], value) if both else value
    return base


def put_recipes(folder: Path) -> None:
    """`recipes/` as in a clone, with small settings where something is trained."""
    shutil.copytree(ROOT / "recipes", folder / "recipes", dirs_exist_ok=True)
    quickstart = folder / "recipes" / "quickstart.yaml"
    quickstart.write_text(yaml.safe_dump(merged(yaml.safe_load(quickstart.read_text()), SMALL)))
    shutil.copy(quickstart, folder)


def write_lines(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_data(folder: Path) -> None:
    """The files that pages speak of as the reader's own, and a data set in place of the hub's."""
    questions = [
        {"id": q.id, "question": q.text, "answers": list(q.answers)}
        for q in islice(Atlas().questions("train"), 500)
    ]
    write_lines(questions, folder / "questions.jsonl")
    write_lines(questions[:16], folder / "held_out.jsonl")
    tower = "The Dom Tower of Utrecht was begun in 1321. It stands in the middle of the city. "
    passages = [{"id": "tower", "title": "Dom Tower", "text": tower}] + [
        {"id": p.id, "title": p.title, "text": p.text} for p in islice(Atlas().passages(), 299)
    ]
    write_lines(passages, folder / "corpus.jsonl")
    (folder / "mine.yaml").write_text("model: {optimizer: {init_args: {lr: 1.0e-4}}}\n")
    articles = [{"id": "1", "title": "Dom Tower", "text": tower * 20}]
    hub = folder / "wikimedia" / "wikipedia"
    write_lines(articles, hub / "articles.jsonl")
    configs = [{"config_name": "20231101.en", "data_files": "*.jsonl"}]
    (hub / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    shutil.copytree(ROOT / "tests/players/plain_agent", folder / "my_module")
    with (folder / "my_module" / "__init__.py").open("a") as module:
        module.write("\nfrom worlds import Echo\n")
    sums = [(2, 3), (40, 25), (7, 9), (6, 7)]
    gsm8k = [
        {"question": f"How many are {a} times {b} hens?", "answer": f"{a} * {b}.\n#### {a * b:,}"}
        for a, b in sums
    ]
    for split in ("train", "test"):
        write_lines(gsm8k, folder / f"{split}.jsonl")


class Shell:
    """A folder in which commands are typed, where `turnrl` and `python` start in a moment."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder = folder
        path = f"{nursery.bin}{os.pathsep}{os.environ['PATH']}"
        hub = {"HF_HOME": str(folder / ".cache"), "HF_HUB_OFFLINE": "1"}
        self.environment = {**os.environ, **nursery.environment, **hub, "PATH": path}
        self.environment |= {
            "COLUMNS": "80",
            "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parent}",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "Traceback (most recent call last)" not in done.stdout, command
        assert "Warning" not in done.stdout, f"{command}\n{done.stdout}"
        return done.stdout


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


def check_settings(shell: Shell, block: Block, own_modules: bool) -> None:
    """Every word and number of a piece of a recipe is in the recipe with all settings resolved."""
    recipe = yaml.safe_load(block.text)
    for section in reversed((block.mark("in ") or "").split(".")):
        recipe = {section: recipe} if section else recipe
    (shell.folder / "block.yaml").write_text(yaml.safe_dump(recipe))
    words = ["fit", "recipes/quickstart.yaml", "block.yaml", "--print_config"]
    if own_modules:
        printed = shell.run(f"turnrl {' '.join(words)} 2>errors.txt")
    else:
        with contextlib.chdir(shell.folder), contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(words) == 0, block.text
        printed = output.getvalue()
    resolved = [plain(value) for value in scalars(yaml.safe_load(printed))]
    assert [value for value in scalars(recipe) if plain(value) not in resolved] == []


FOLLOWED = {"README.md", "docs/tutorial.md"}
"""Pages whose commands run in each test run; of the others, only pieces of recipes are checked."""


def follow(page: str, shell: Shell, slow: bool) -> None:
    """Do what a page shows, from its first line to its last."""
    shown, own_modules, whole = "", False, slow or page in FOLLOWED
    for block in blocks(page):
        if whole and (first := block.mark("run first:")):
            shell.run(first)
        if block.file:
            (shell.folder / block.file).write_text(block.small)
            own_modules |= block.file.endswith(".py")
        elif not block.runs:
            assert "printed" not in block.marks or not whole or block.text.strip() in shown
        elif block.language == "yaml":
            if slow or block.mark("slow") is None:
                check_settings(shell, block, own_modules)
        elif block.language == "python":
            if slow or (whole and block.mark("slow") is None):
                (shell.folder / "block.py").write_text(block.small)
                shown += shell.run("python block.py")
        elif whole:
            shown += "".join(shell.run(command) for command in block.commands(slow))


def has(page: str, *languages: str) -> bool:
    return any(b.runs and not b.file and b.language in languages for b in blocks(page))


def has_quick_recipe(page: str) -> bool:
    recipes = (b for b in blocks(page) if b.runs and not b.file and b.language == "yaml")
    return any(block.mark("slow") is None for block in recipes)


@pytest.mark.parametrize("page", [p for p in PAGES if p in FOLLOWED or has_quick_recipe(p)])
def test_a_page_does_what_it_shows(page, tmp_path, nursery):
    put_recipes(tmp_path)
    put_data(tmp_path)
    follow(page, Shell(tmp_path, nursery), slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if has(p, "bash", "sh", "python", "yaml")])
def test_a_page_does_what_it_shows_where_that_takes_long(page, tmp_path, nursery):
    put_recipes(tmp_path)
    put_data(tmp_path)
    follow(page, Shell(tmp_path, nursery), slow=True)


def without_numbers(text: str) -> set[str]:
    """The lines of a text, with times as dots and numbers as zeros: other machines have others."""
    times = re.sub(r"\d+:\d\d(\s+(\d+[hms]\s*)+)?", "... ", text)
    numbers = re.sub(r"\d[\d.]*", "0", times)
    return {" ".join(line.split()) for line in numbers.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/howto/calculator.md"])
def test_a_page_that_is_followed_at_full_size_prints_what_it_shows(page, tmp_path, nursery):
    shell, shown = Shell(tmp_path, nursery), ""
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "bash" and block.runs:
            shown = "".join(shell.run(command) for command in block.text.strip().splitlines())
        elif block.language == "python" and block.runs:
            (tmp_path / "block.py").write_text(block.text)
            shown = shell.run("python block.py")
        elif "printed at full size" in block.marks:
            assert without_numbers(block.text) - without_numbers(shown) == set(), shown
    if page.endswith("calculator.md"):
        with (tmp_path / "runs/calculator/version_0/metrics.csv").open() as file:
            curve = [float(x) for row in csv.DictReader(file) if (x := row["val/exact_match"])]
        assert curve[0] < 0.2
        assert curve[-1] >= 0.6


def test_the_tests_that_marks_name_are_there():
    for page in PAGES:
        for block in blocks(page):
            for name in (block.mark("tested by") or "").split():
                assert (ROOT / "tests" / f"{name}.py").is_file(), (page, name)


def test_everything_shown_on_the_sites_first_page_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    shown = [block for block in blocks("docs/index.md") if block.language in ("bash", "python")]
    assert shown
    assert [block for block in shown if block.text not in readme] == []


# ------------------------------------------------------------------ numbers


NUMBER = r"(?<![\w./])\d+\.\d{2,}(?![\w.]*\d)"
INTERVAL = r"(\d+\.\d+)\s\[([-+]?\d+\.\d+),\s([-+]?\d+\.\d+)\]"
GENERATED = r"^<!-- [\w-]+: [\w -]+ -->\n.*?^<!-- end -->"
"""A table that a script writes into its page."""


def numbers_with_sources() -> Iterator[object]:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        written = re.sub(GENERATED, "", text, flags=re.M | re.S)
        parts = re.split(r"^<!-- numbers from (.*?)(?:, but not (.*?))? -->$", written, flags=re.M)
        for above, sources, but in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
            section = re.split(r"^#+ ", above, flags=re.M)[-1]
            bare = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", FENCE.sub("", section))
            name = f"{page}: {section.splitlines()[0]}"
            yield pytest.param(bare, sources.split(), (but or "").split(), id=name)


def intervals(text: str, but: Sequence[str] = ()) -> set[tuple[float, ...]]:
    """The numbers of each `a [b, c]`, whichever of two things was subtracted from the other."""
    found = (numbers for numbers in re.findall(INTERVAL, text) if numbers[0] not in but)
    return {tuple(sorted(abs(float(n)) for n in numbers)) for numbers in found}


@pytest.mark.parametrize(("text", "sources", "but"), [*numbers_with_sources()])
def test_the_numbers_of_a_section_stand_in_their_source(text, sources, but):
    files = [ROOT / name for name in sources]
    assert [file for file in files if not file.is_file()] == []
    tables = (re.findall(GENERATED, f.read_text(), re.M | re.S) for f in files if f.suffix == ".md")
    if recorded := "\n".join(table for found in tables for table in found):
        assert intervals(text, but) - intervals(recorded) == set()
        known = {*re.findall(NUMBER, recorded), *but}
        assert [n for n in re.findall(NUMBER, text) if n not in known] == []


# ------------------------------------------------------------------ sentences


NOT_THERE = {"--model.rollout.tools '[my_module.MyTool]'"}


def test_commands_in_sentences_exist_and_options_in_sentences_are_accepted(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    put_recipes(tmp_path)
    commands, options = set(), set()
    for page in PAGES:
        if page in ("docs/changelog.md", "docs/howto/plugins.md"):  # earlier and invented names
            continue
        text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for span in re.findall(r"`([^`]+)`", text):
            commands |= set(re.findall(r"^turnrl ([a-z]\w+(?:-\w+)?)", span))
            if re.match(r"--(model|data|trainer)\.[\w.]+ [^-\s]", span):
                options.add(span)
    for command in commands:
        with contextlib.suppress(SystemExit):  # of argparse
            assert main([command, "--help"]) == 0, command
    assert "no command" not in capsys.readouterr().err
    # together, because each takes a second
    words = shlex.split(" ".join(sorted(options - NOT_THERE)))
    assert main(["fit", "recipes/quickstart.yaml", *words, "--print_config"]) == 0


# ------------------------------------------------------------------ scripts and pictures

SMALLER = "questions_per_iteration=2, val_limit=8"


@pytest.mark.filterwarnings("default")  # a script of one's own shows Lightning's warnings
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("by_hand", {"questions_per_iteration=8, val_limit=64": SMALLER}),
        (
            "your_loop",
            {"range(40)": "range(2)", "* 8 : step * 8 + 8], 8,": "* 2 : step * 2 + 2], 4,"},
        ),
    ],
)
def test_a_script_that_a_page_includes_trains(name, sizes, tmp_path, monkeypatch):
    script = (ROOT / "docs" / f"{name}.py").read_text()
    for shown, small in sizes.items():
        assert shown in script
        script = script.replace(shown, small)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    exec(compile(script, f"{name}.py", "exec"), names)
    if name == "by_hand":
        (metrics,) = tmp_path.rglob("metrics.csv")
        assert len(metrics.read_text().splitlines()) == 4  # untrained, and after two iterations
    else:
        began = Policy("package://turnrl_atlas/starter").build()
        began.load()
        new, old = (p.trainable_state() for p in (names["policy"], began))
        assert any(not torch.equal(new[name], old[name]) for name in old)


def test_the_worked_out_advantages_match_the_computed_ones():
    # of the page on turns: four attempts; the first and the third find the answer in turn 2
    reached = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    found = torch.tensor([[0, 0.5, 0], [0, 0, 0], [0, 0.5, 0], [0, 0, 0]])
    right = torch.tensor([1.0, 0.0, 0.0, 1.0])
    (block,) = (b for b in blocks("docs/explanation/turns.md") if "turn 3   answer" in b.text)
    shown = [re.findall(r"[+-]\d\.\d\d", line) for line in block.text.splitlines()[2:]]
    rules = TurnLevel(), OutcomeOnly()
    third = torch.stack([rule.advantages(found, right, reached)[2] for rule in rules], dim=1)
    assert torch.allclose(
        torch.tensor([[float(x) for x in row] for row in shown]), third, atol=0.005
    )


def test_the_picture_of_readme_is_of_the_recorded_attempt():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        attempt = importlib.import_module("attempt")
    record = json.loads((attempt.HERE / "attempt.json").read_text())
    assert attempt.advantages(record)["MT-GRPO"] == pytest.approx(record["recorded"], abs=1e-5)
    for theme in attempt.THEMES:
        drawn = (attempt.HERE / f"attempt-{theme}.svg").read_text()
        assert drawn == attempt.picture(record, theme)


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_of_a_page_lead_somewhere(page):
    file = ROOT / page
    text = FENCE.sub("", file.read_text())
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (file.parent / target).exists(), target
    named = re.findall(r"recipes/[a-z][\w.]+\.yaml", file.read_text())
    gone = [recipe for recipe in named if not (ROOT / recipe).is_file()]
    assert gone == [] or page == "docs/changelog.md"  # which names what earlier versions had
