"""The report shows what the record says, and no text of a trajectory runs as code in the page."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import InitVar, dataclass
from pathlib import Path

import pytest
import yaml
from matplotlib.axes import Axes

import trajectories
from equations import Obscure, Raises
from runs import data, make_module, trainer
from trajectories import RULES
from turnrl import AdvantageEstimator, DataError, Merged, OutcomeOnly, TurnLevel
from turnrl.cli import main
from turnrl.commands.report.command import write_report as report
from turnrl.credit.why import Contrast, compares
from turnrl.runs import record
from turnrl.runs.compare import compare, open_sides
from turnrl.runs.load import Run, differing_settings, group_experiments, open_runs
from turnrl.watch.curves import draw_curves
from turnrl.watch.recorder import Recorder, write_rows
from turnrl_estimators import Tree

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")

# ------------------------------------------------------------------------------------ the runs


def evaluates(seed, number, name="best", **more):
    """The settings of an evaluation of a checkpoint of a run."""
    path = f"runs/recipe/version_{number}/checkpoints/{name}.ckpt"
    return {"seed_everything": seed, "command": "eval", "ckpt_path": path, **more}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        # what a run resumed and how it logs is no difference
        (
            [
                {"seed_everything": 0, "ckpt_path": "runs/x/version_9/checkpoints/last.ckpt"},
                {"seed_everything": 1, "command": "fit", "trainer.logger": "CSVLogger"},
                {"seed_everything": 2, "model.group_size": 8},
            ],
            [[0, 1], [2]],
        ),
        # no two runs of one experiment have the same seed
        ([{"seed_everything": 0}, {"seed_everything": 1}, {"seed_everything": 1}], [[0], [1], [2]]),
        # best and last of the same runs, and training
        (
            [
                *[evaluates(seed, seed, name) for name in ("best", "last") for seed in (0, 1)],
                {"seed_everything": 0, "command": "fit"},
            ],
            [[0, 1], [2, 3], [4]],
        ),
        # samples of one policy are no seeds, and one seed shows nothing about others
        ([evaluates(0, 0), evaluates(1, 0)], [[0], [1]]),
        ([evaluates(0, 0), evaluates(0, 1)], [[0], [1]]),
    ],
)
def test_runs_of_one_experiment_differ_only_in_seed(tmp_path, settings, parts):
    folders = [tmp_path / "recipe" / f"version_{n}" for n in range(len(settings))]
    for folder, recipe in zip(folders, settings, strict=True):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(recipe | {"model.estimator": "Merged"}))
    runs = [Run(f, f.name, yaml.safe_load((f / "config.yaml").read_text())) for f in folders]
    assert group_experiments(runs) == parts
    if len(parts) == 1:
        assert {*differing_settings(runs)} <= {"seed_everything", "ckpt_path"}


def test_the_report_shows_what_remains_of_a_damaged_run(tmp_path, capsys):
    folder = trajectories.run(tmp_path / "run")
    torn = folder / "record" / "train-000001-0.parquet"
    torn.write_bytes(torn.read_bytes()[:100])
    (folder / "config.yaml").unlink()
    (folder / "metrics.csv").write_text("iteration,train/exact_match\n1,0.5\n2,\n3,0.")
    assert main(["report", str(folder), "-o", str(tmp_path / "out.html")]) == 0
    printed = capsys.readouterr().out
    assert "no config.yaml" in printed
    assert "train-000001-0.parquet' cannot be read" in printed
    assert (tmp_path / "out.html").stat().st_size > 50_000


def test_a_record_without_valid_json_is_reported(tmp_path):
    folder = trajectories.run(tmp_path / "run", iterations=1, turns=(2, 2))
    (file,) = record.list_files(folder)
    read = record.read(file)
    texts = iter(('{"query": ', "[1]", "[" * 100_000, '"a text"'))
    for row, text in zip(read, texts, strict=False):
        row["turns"][0]["reading"]["calls"][0]["arguments"] = text
        row["turns"][0]["results"][0]["metadata"] = "{"
        row["estimator"] = "TurnLevel()"
    write_rows(read, file)
    calls = [t.turns[0].reading.calls[0] for t in record.restore_group(read[:4]).trajectories]
    assert [call.arguments for call in calls] == [{}] * 4
    report([folder], tmp_path / "out.html")
    first = unpacked(tmp_path / "out.html", "d0")[0]
    assert first["rows"][0]["turns"][0]["reading"]["calls"][0]["arguments"] == '{"query": '
    lost = "cannot be rebuilt: the record has no JSON of it, but 'TurnLevel()'"
    assert first["why"][0]["unexplained"] == lost
    assert "Merged" in [credit["name"] for credit in first["why"]]


def test_the_report_accepts_a_group_whose_attempts_took_no_turn(tmp_path):
    report([trajectories.run(tmp_path / "run", turns=(0, 0))], tmp_path / "out.html")
    (first, *_) = unpacked(tmp_path / "out.html", "d0")
    assert [row["turns"] for row in first["rows"]] == [[]] * 4


def test_a_folder_that_is_not_a_run_is_an_error_with_the_next_step(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "nothing"]) == 2
    assert "no record of a run at 'nothing'" in capsys.readouterr().err
    folder = trajectories.run(tmp_path / "run")
    with pytest.raises(DataError, match="named twice"):
        report([folder, folder], tmp_path / "out.html")
    assert main(["report", str(folder), "--trajectories", "0"]) == 2
    for place, why in ((".", "is a folder"), ("run/config.yaml/x.html", "cannot write")):
        assert main(["report", str(folder), "-o", place]) == 2
        message = capsys.readouterr().err
        assert why in message
        assert "Error:" in message.split()[1]
    (folder / "metrics.csv").write_text("")
    assert main(["report", str(folder), "-o", "empty.htm"]) == 0
    assert "metrics.csv has no row: there are no curves" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.html"))


def test_runs_are_reported_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart/version_0", "quickstart/version_1", "turn_level/version_0"):
        trajectories.run(tmp_path / "runs" / name)
    trajectories.run(tmp_path / "runs" / "outcome_only" / "version_0", estimator=OutcomeOnly())
    assert main(["report", "quickstart"]) == 0
    assert "written to report.html" in capsys.readouterr().out
    assert (
        str(Path("quickstart/version_1")) in unpacked(tmp_path / "report.html")["runs"][0]["folder"]
    )
    several = ["runs/turn_level", "runs/outcome_only", "-o", "comparison.html"]
    assert main(["report", *several, "--trajectories", "9"]) == 0
    shown = unpacked(tmp_path / "comparison.html")
    assert [run["name"] for run in shown["runs"]] == ["turn_level", "outcome_only"]
    # 9 of each, a group of 4 of each of three files
    assert len(shown["trajectories"]["run"]) == 24
    rows = record.read("runs/quickstart/version_1")
    wanted = [r["outcome"] + sum(t["turn_reward"] for t in r["turns"]) for r in rows]
    shown = unpacked(tmp_path / "report.html")["trajectories"]["total"]
    assert shown == pytest.approx(wanted)


def test_alarms_are_computed_for_a_run_without_the_callback(tmp_path):
    (tmp_path / "run").mkdir()
    rows = Path(__file__).parent / "data" / "metrics" / "learning_rate_x30_0.csv"
    shutil.copy(rows, tmp_path / "run" / "metrics.csv")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "out.html")]) == 0
    (shown,) = unpacked(tmp_path / "out.html")["runs"]
    raised = {alarm["name"]: alarm["began"] for alarm in shown["alarms"]}
    assert raised == {"tool use": 3, "groups": 3}


def unpacked(file, block="summary"):
    """The data in a page."""
    (packed,) = re.findall(f'id="{block}">([^<]*)<', file.read_text())
    return json.loads(gzip.decompress(base64.b64decode(packed)))


class Scaled(AdvantageEstimator):
    """An estimator that no package installs."""

    def __init__(self, coef=1.0):
        self.coef = coef

    def __call__(self, group):
        return self.coef * (group.outcome - group.outcome.mean())[:, None] * group.reached


@compares.register
def _(estimator: Scaled, group):
    return [Contrast("outcome", group.outcome[:, None], weight=estimator.coef)]


class Doubled(Scaled):
    """Not found by its name or its path: it is removed from its module."""

    def __init__(self):
        super().__init__(2.0)


def uninstalled_estimator(monkeypatch, kind=Doubled):
    """An estimator of a class that is missing when the report is written."""
    monkeypatch.delattr(sys.modules[__name__], kind.__name__)
    return kind()


@dataclass
class Forgetful(AdvantageEstimator):
    """Keeps its argument under another name, so that the record lacks it."""

    coef: InitVar[float | None] = None

    def __post_init__(self, coef):
        self._coef = coef or 1.0

    def __call__(self, group):
        return self._coef * (group.outcome - group.outcome.mean())[:, None] * group.reached


def test_credit_is_not_explained_if_the_recorded_settings_do_not_reproduce_it(
    tmp_path, monkeypatch
):
    installed = {"Forgetful": Forgetful, "Merged": Merged}
    monkeypatch.setattr("turnrl.commands.report.page.load_classes", lambda hook: installed)
    for name, rule in (("lost", Forgetful(3.0)), ("kept", Forgetful())):
        report([trajectories.run(tmp_path / name, estimator=rule)], tmp_path / f"{name}.html")
    lost, kept = (unpacked(tmp_path / f"{name}.html", "d0")[0] for name in ("lost", "kept"))
    own, (was, *_) = lost["why"][0], lost["rows"][0]["turns"]
    reason = f"its recorded settings give {was['advantage'] / 3:.4g} where {was['advantage']:.4g}"
    assert own["unexplained"] == f"cannot be rebuilt: {reason} was recorded"
    assert (own["terms"], own["advantages"][0][0]) == (None, pytest.approx(was["advantage"]))
    assert kept["why"][0]["unexplained"] == "does not say what it compares"


def test_a_record_cannot_import_code_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("malicious.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr(Doubled, "__module__", "malicious")
    report([trajectories.run(tmp_path / "run", estimator=Doubled())], tmp_path / "out.html")
    own = unpacked(tmp_path / "out.html", "d0")[0]["why"][0]
    assert own["unexplained"] == "cannot be rebuilt: it is not installed here"


def test_branches_do_not_count_as_attempts(tiny_model, tmp_path):
    module = make_module(tiny_model, estimator=Tree(probes=2))
    trainer(tmp_path, 2, [Recorder(None)]).fit(module, data())
    folder = tmp_path / "version_0"
    kept = [row for row in record.read(folder, split="train") if row["iteration"] == 1]
    assert {row["begins"] == 0 for row in kept if row["parent"] is not None} == {True, False}
    with (folder / "metrics.csv").open() as file:
        logged = next(row for row in csv.DictReader(file) if row["iteration"] == "1")
    figures = record.compute_metrics(kept)
    for name, other in (
        *[(name, f"train/{name}") for name in ("exact_match", "tool_execution", "format")],
        *[("turns", "rollout/turns"), ("reward/total", "reward/total")],
        ("reward/turn/called", "reward/turn/called"),
    ):
        assert figures[name].mean == pytest.approx(float(logged[other]), abs=1e-6), name
    report([folder], tmp_path / "out.html")
    own, *others = unpacked(tmp_path / "out.html", "d0")[0]["why"]
    assert own["unexplained"] == "cannot be rebuilt: it needs probes"
    (merged,) = [credit for credit in others if credit["name"] == "Merged"]
    for row, turns in zip(record.groups(kept)[0], merged["terms"], strict=True):
        assert (turns is None) == (row["parent"] is not None)
    for members in record.groups(kept):
        for row, reached in zip(
            members, record.restore_group(members).reached.tolist(), strict=True
        ):
            turns = len(row["turns"])
            assert reached[:turns] == [k >= row["begins"] for k in range(turns)]


def test_an_advantage_is_not_explained_by_another_estimator(tmp_path, monkeypatch):
    folder = trajectories.run(tmp_path / "run", estimator=uninstalled_estimator(monkeypatch))
    name, reason = "Doubled", "it is not installed here"
    report([folder], tmp_path / "out.html")
    detail = unpacked(tmp_path / "out.html", "d0")[0]
    own, *others = detail["why"]
    assert (own["name"], own["own"], own["terms"]) == (name, True, None)
    assert own["unexplained"] == f"cannot be rebuilt: {reason}"
    recorded_advantages = [[turn["advantage"] for turn in row["turns"]] for row in detail["rows"]]
    assert own["advantages"] == [pytest.approx(row, rel=1e-8) for row in recorded_advantages]
    assert "TurnLevel" in [other["name"] for other in others]


def test_the_picture_of_the_curves_has_the_values_of_the_metrics(tmp_path, monkeypatch):
    lines, plot = [], Axes.plot

    def noted(axes, x, y, *rest, **more):
        lines.append((axes.get_title(), x, y, more["linewidth"]))
        return plot(axes, x, y, *rest, **more)

    monkeypatch.setattr(Axes, "plot", noted)
    (run,) = open_runs([trajectories.run(tmp_path / "run")])
    draw_curves(run, tmp_path / "curves.svg")
    assert [line for line in lines if line[1]] == [
        ("exact match", [1, 2, 3], [0.0, pytest.approx(1 / 9), pytest.approx(2 / 9)], 1.8),
        ("exact match", [1, 2, 3], [0.0, 0.1, 0.2], 0.7),
    ]
    order = ["tool execution", "answer in results", "exact match", "format"]
    assert [*dict.fromkeys(title for title, *_ in lines)] == order  # the report's
    picture = (tmp_path / "curves.svg").read_text()
    assert "thick: greedy answers" in picture  # as text
    assert "fill: #ffffff" not in picture  # on no background


# ------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a page from disk, or the report of runs; fails on a request, an error or a dialog."""
    pages, faults = [], []

    def open_page(shown, route="#/", **options):
        file = tmp_path / "out.html"
        if isinstance(shown, list):
            report(shown, file)
        else:
            file = shown
        page = browser.new_page(**options)
        pages.append(page)
        page.on(
            "console",
            lambda message: faults.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append("dialog"), dialog.dismiss()))
        page.on(
            "request", lambda r: None if r.url.startswith("file:") else faults.append(r.url[:200])
        )
        page.goto(f"file://{file}{route}")
        page.wait_for_selector("h1")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not faults


def show_route(page, route):
    """Go to another view of the page, and wait until it is drawn."""
    page.evaluate("to => { location.hash = to }", route)
    page.wait_for_function(
        "to => document.documentElement.dataset.ready === to", arg=route[1:].split("?")[0]
    )


@browser_only
def test_the_card_of_a_turn_shows_the_numbers_behind_its_advantage(tmp_path, open_page):
    folders = [
        trajectories.run(tmp_path / f"run{n}", estimator=rule, iterations=1, size=21, seed=n)
        for n, rule in enumerate(RULES)
    ]
    page = open_page(folders)
    for n, folder in enumerate(folders):
        show_route(page, f"#/t/{n}/train/0/1/2")
        row = next(r for r in record.read(folder) if (r["group"], r["member"]) == (1, 2))
        assert page.inner_text("h1") == row["question"]
        cards = page.locator("section.turn")
        assert cards.count() == len(row["turns"])
        for k, turn in enumerate(row["turns"]):
            card = cards.nth(k)
            shown = f"{round(turn['advantage'], 3) + 0.0:+.3f}"  # no -0.000
            assert shown == card.locator(".big .adv").inner_text()
            card.get_by_text("digits", exact=True).click()
            own = f"What {type(RULES[n]).__name__} compares"
            card.get_by_role("table", name=own, exact=True).wait_for()
            assert card.get_by_role("table", name=own, exact=True).count() == 1
            printed = card.locator("p.equation").first.inner_text()
            whole, shown = re.fullmatch(r"advantage = (.*) = (\S+)", printed).groups()
            value = sum(
                eval(term.replace("×", "*"), {"__builtins__": {}}) for term in whole.split("  +  ")
            )
            # advantages are float32: 6e-8 of a few units, and sums of 21 rewards
            assert value == pytest.approx(turn["advantage"], abs=1e-6), RULES[n]
            assert float(shown) == pytest.approx(turn["advantage"], rel=1e-8), RULES[n]


@browser_only
def test_a_link_opens_the_trajectory_and_the_group_that_it_names(tmp_path, open_page):
    folder, split = trajectories.run(tmp_path / "run", iterations=1), "100% (é) [a]/b?#'c'"
    (file,) = record.list_files(folder)
    write_rows([row | {"split": split} for row in record.read(folder)], file)
    row = record.read(folder)[-2]
    page = open_page([folder], "#/list")
    page.locator(f"table.list a[href$='/{row['group']}/{row['member']}']").first.click()
    page.wait_for_selector("section.turn")
    assert page.locator("h1").inner_text() == row["question"]
    assert row["turns"][0]["text"] in page.locator("section.turn").first.inner_text()
    assert page.get_by_label("Opening").inner_text() == row["opening"]
    again = open_page(
        tmp_path / "out.html",
        re.sub(r"#/t/(.*)/[^/]*$", r"#/g/\1", page.evaluate("location.hash")),
    )
    attempts = again.get_by_role("table", name="Attempts").locator("tbody th a")
    assert attempts.count() == 4
    assert again.get_by_label("Opening").count() == 1  # the same for all


@browser_only
def test_the_card_of_a_turn_shows_its_tokens(tmp_path, open_page):
    folder = trajectories.run(tmp_path / "run", tokens=True)
    read = record.read(folder, split="train")
    for row in read:
        row["token_texts"] = [f" w{token}" for token in row["token_ids"]]
        # from certain to unlikely, so that not all have one tint
        row["learner_logprobs"] = [
            None if logprob is None else -0.5 * n
            for n, logprob in enumerate(row["learner_logprobs"])
        ]
    replace_record(folder, read)
    page = open_page([folder], "#/t/0/train/0/1/2")
    row = next(r for r in read if (r["iteration"], r["group"], r["member"]) == (1, 1, 2))
    for k, turn in enumerate(row["turns"]):
        card = page.locator("section.turn").nth(k)
        places = [t for t, number in enumerate(row["turn_index"]) if number == k]
        card.get_by_text(f"{turn['tokens']} tokens", exact=True).click()
        table = card.get_by_role("table", name="Probability and entropy")
        table.wait_for()
        likely = [f"{math.exp(row['learner_logprobs'][t]):.4f}" for t in places]
        assert table.locator("tbody td:nth-last-child(2)").all_inner_texts() == likely
        tinted = card.locator(".tinted span")
        words = tinted.evaluate_all("all => all.map(one => one.textContent)")
        assert words == [row["token_texts"][t] for t in places]
        tints = [f"p{min(4, int(5 * math.exp(row['learner_logprobs'][t])))}" for t in places]
        assert tinted.evaluate_all("all => all.map(one => one.className)") == tints


@browser_only
def test_the_card_says_why_another_estimator_has_no_numbers(tmp_path, monkeypatch, open_page):
    installed = {kind.__name__: kind for kind in (Raises, Forgetful, Obscure, Merged)}
    monkeypatch.setattr("turnrl.credit.apply.load_classes", lambda hook: installed)
    page = open_page([trajectories.run(tmp_path / "run")], "#/t/0/train/0/0/0")
    rows = page.get_by_role("table", name="Estimators", exact=True).locator("tbody tr")
    own, merged = (row.split("\t") for row in rows.all_inner_texts())
    assert (own[0], merged[0]) == ("TurnLevel, this run", "Merged")
    page.get_by_text("3 more estimators").click()
    others = page.get_by_role("table", name="More estimators").locator("tbody tr")
    others.first.wait_for()
    raises, forgetful, obscure = (row.split("\t") for row in others.all_inner_texts())
    turns = len(record.read(tmp_path / "run")[0]["turns"])
    assert raises[1:-1] == ["-"] * turns
    assert raises[-1].startswith("Raises on a group of 4 with")
    assert forgetful[-1] == "does not say what it compares"
    assert obscure[-1].startswith("failed to say what it compares (ZeroDivisionError")
    rows.nth(1).get_by_text("digits").click()
    equation = rows.nth(1).locator("p.equation").first
    equation.wait_for()
    assert equation.inner_text().startswith("turn 1: outcome and turn rewards: 1 ×")


@browser_only
def test_metrics_are_drawn_with_alarms_where_they_began(tmp_path, open_page):
    (tmp_path / "run").mkdir()
    rows = Path(__file__).parent / "data" / "metrics" / "learning_rate_x30_0.csv"
    shutil.copy(rows, tmp_path / "run" / "metrics.csv")
    page = open_page([tmp_path / "run"], color_scheme="light")
    shown = page.locator("p.problem").all_inner_texts()
    alarm = "run, alarm: tool use fell from iteration 3 on: train/tool_execution 0.41 -> 0.00"
    assert alarm in shown
    plot = page.get_by_role("img", name="tool execution by iteration")
    assert "Alarm from iteration 3 on." in plot.get_attribute("aria-label")
    assert "Alarm" not in page.get_by_role("img", name="exact match by").get_attribute("aria-label")
    captions = page.evaluate("[...document.querySelectorAll('figcaption')].map(x => x.textContent)")
    assert "rollout/degenerate_groups" in captions  # every metric is drawn


@browser_only
def test_a_run_counts_once_in_the_mean_over_seeds(tmp_path, open_page):
    # the first run validates twice in its second iteration, and is longer
    metrics = ("1,0.2\n2,0.0\n2,0.4\n3,0.5\n", "1,0.4\n2,0.8\n")
    folders = [trajectories.run(tmp_path / f"run{seed}", seed=seed) for seed in (0, 1)]
    for folder, lines in zip(folders, metrics, strict=True):
        (folder / "metrics.csv").write_text("iteration,val/exact_match\n" + lines)
    page = open_page(folders)
    page.get_by_text("Numbers").click()
    rows = page.get_by_role("table", name="exact match by iteration").locator("tbody tr")
    rows.first.wait_for()
    assert rows.all_inner_texts() == [
        "1\t0.3000 (0.200 to 0.400)",
        "2\t0.6000 (0.400 to 0.800)",
        "3\t0.5000 (0.500 to 0.500) (1 of 2 runs)",
    ]
    assert "to 0.500 (1 of 2 runs)" in page.locator(".plot").get_attribute("aria-label")


@browser_only
def test_a_list_is_filtered_sorted_and_searched(tmp_path, open_page):
    folder = trajectories.run(tmp_path / "run", iterations=4, groups=20)
    report([folder], tmp_path / "out.html")
    kept = record.read(folder)
    page = open_page(tmp_path / "out.html", "#/list")
    assert f"{len(kept)} of {len(kept)}" in page.inner_text("main")
    show_route(page, "#/list?iteration=2&sort=total reward")
    assert "80 of 320" in page.inner_text("main")
    shown = page.locator("table.list tbody tr td.num:nth-last-child(2)").all_inner_texts()
    totals = sorted(
        (
            r["outcome"] + sum(t["turn_reward"] for t in r["turns"])
            for r in kept
            if r["iteration"] == 2
        ),
        reverse=True,
    )
    assert [float(text) for text in shown] == pytest.approx(totals[:50], abs=1e-3)
    word = kept[7]["turns"][0]["text"].split(": ")[1]
    show_route(page, f"#/list?q={word}")
    assert "0 of 320" in page.inner_text("main")
    show_route(page, f"#/list?q={word}&in=all")
    page.wait_for_selector("table.list")
    assert "1 of 320" in page.inner_text("main")
    show_route(page, "#/list")
    page.locator("table.list tbody a").first.click()
    page.wait_for_selector("section.turn")
    page.keyboard.press("j")
    page.wait_for_function("location.hash === '#/t/0/train/0/0/1'")
    page.keyboard.press("g")
    page.wait_for_selector("table.group")
    assert page.locator("table.group tbody th a").count() == 4


def replace_record(folder, kept):
    """Give a run the record of these trajectories."""
    for file in record.list_files(folder):
        file.unlink()
    write_rows(kept, folder / "record" / "train-000000-0.parquet")


def attempt_kind(row):
    """What an attempt did, in the words of the page."""
    end = "right" if row["exact_match"] == 1 else "wrong"
    if row["tool_execution"] == 0:
        return f"guessed, {end}"
    if row["answer_in_results"] is None:
        return f"searched, {end}"
    if row["answer_in_results"] == 1:
        return "found it, right" if end == "right" else "found it, answered wrong"
    return "searched, not found"


@browser_only
def test_the_list_counts_and_filters_attempts_by_kind_of_outcome(tmp_path, open_page):
    folder = trajectories.run(tmp_path / "run", iterations=3, groups=20)
    kept = record.read(folder)
    draw = random.Random(5)
    for row in kept:
        row["tool_execution"] = draw.choice((0.0, 0.5, 1.0))
        row["answer_in_results"] = draw.choice((0.0, 1.0, None))
        row["exact_match"] = draw.choice((0.0, 1.0))
    replace_record(folder, kept)
    report([folder], tmp_path / "out.html")
    counts = Counter(map(attempt_kind, kept))
    assert len(counts) == 7
    page = open_page(tmp_path / "out.html", "#/list")
    chips = page.locator("ul.kinds li").all_inner_texts()
    assert {text.strip() for text in chips} == {f"all {len(kept)}"} | {
        f"{kind} {count}" for kind, count in counts.items()
    }
    page.get_by_text(f"found it, answered wrong {counts['found it, answered wrong']}").click()
    page.wait_for_function("location.hash.includes('kind=found')")
    page.wait_for_selector("ul.kinds [aria-current]")
    assert f"{counts['found it, answered wrong']} of {len(kept)}" in page.inner_text("main")
    page.get_by_text("More filters").click()
    page.locator("select[name=iteration]").select_option("2")  # which keeps what was chosen
    page.wait_for_function("location.hash.includes('iteration=2')")
    among = Counter(attempt_kind(row) for row in kept if row["iteration"] == 2)
    assert f"{among['found it, answered wrong']} of {len(kept)}" in page.inner_text("main")
    show_route(page, "#/")
    bars = page.locator("figure.did title").evaluate_all("all => all.map(one => one.textContent)")
    for iteration in {row["iteration"] for row in kept}:
        kinds = Counter(attempt_kind(row) for row in kept if row["iteration"] == iteration)
        own = [text for text in bars if text.startswith(f"iteration {iteration}: ")]
        assert {*own} == {
            f"iteration {iteration}: {kind}, {count} of {kinds.total()}"
            for kind, count in kinds.items()
        }
    page.locator("figure.did rect").first.click()
    page.wait_for_function("location.hash.startsWith('#/list?split=train&iteration=')")


@browser_only
def test_identical_attempts_share_a_row(tmp_path, open_page):
    folder = trajectories.run(tmp_path / "run", iterations=1, groups=2, size=6)
    kept = record.read(folder)
    same = {1: 0, 4: 0, 5: 3}  # member: what it repeats
    by_place = {(row["group"], row["member"]): row for row in kept}
    for (group, member), row in by_place.items():
        if member in same:
            row |= {**by_place[group, same[member]], "member": member}
    # an attempt that differs only in its text has a row of its own in the group
    by_place[1, 4]["turns"] = [{**turn, "text": "other"} for turn in by_place[1, 4]["turns"]]
    replace_record(folder, kept)
    page = open_page([folder], "#/list")
    assert "12 of 12 attempts, in 6 rows" in page.inner_text("main")
    shown = page.locator("table.list tbody th").all_inner_texts()
    assert [text.rpartition("?")[2].strip() for text in shown] == ["×3", "", "×2"] * 2
    for group, sets in enumerate((["1, 2, 5", "3", "4, 6"], ["1, 2", "3", "4, 6", "5"])):
        show_route(page, f"#/g/0/train/0/{group}")
        rows = page.get_by_role("table", name="Attempts").locator("tbody tr")
        cells = [row.split("\t") for row in rows.all_inner_texts()]
        assert sorted(row[0] for row in cells) == sets
        totals = [float(row[3]) for row in cells]
        assert totals == sorted(totals, reverse=True)
        assert f"6 attempts at one question, best first, in {len(sets)} rows" in page.inner_text(
            "main"
        )


@browser_only
def test_the_overview_shows_the_same_verdict_as_compare(tmp_path, open_page):
    folders = [evaluated(tmp_path / name, right) for name, right in (("a", 3), ("b", 17))]
    report(folders, tmp_path / "out.html")
    (comparison,) = compare(open_sides([str(folder) for folder in folders]))
    figure = comparison.figures["exact_match"]
    page = open_page(tmp_path / "out.html")
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith(
        "b is better than a: exact match 0.850 against 0.150 after 1 iteration "
    )
    interval = f"{figure.low:+.3f} to {figure.high:+.3f}"
    assert f"(difference +0.700, 95 % interval {interval}). Of 20 questions" in verdict
    assert "b alone is right in 14, a alone is right in 0." in verdict
    page.get_by_role("link", name="right in 14").click()
    page.wait_for_selector("table.list")
    assert "28 of 80" in page.inner_text("main")  # attempts of both runs, question by question
    assert "Questions in which b did better" in page.inner_text("main")
    rows = page.locator("table.list tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == ["a", "b"] * 14
    names = {text.split("?")[0] for text in page.locator("table.list tbody th").all_inner_texts()}
    assert names == {f"question {n}" for n in range(3, 17)}
    # runs that cannot be compared say why
    other = evaluated(tmp_path / "c", 5, first=100)
    report([folders[0], other], tmp_path / "other.html")
    overview = open_page(tmp_path / "other.html").inner_text("main")
    assert "Not compared: a and c have no question in common" in overview


def evaluated(folder, right, first=0):
    """A run whose evaluation answered so many of 20 questions rightly. Its training questions have
    the same ids, as rows of two files do that name none."""
    trajectories.run(folder, iterations=1, groups=20, size=1)
    kept = record.read(folder)
    replace_record(folder, [{**row, "question_id": f"q{n}"} for n, row in enumerate(kept, first)])
    asked = [
        {"question_id": f"q{n}", "question": f"question {n}?"} for n in range(first, first + 20)
    ]
    rows = zip(kept, asked, range(20), strict=True)
    scored = [{**row, **q, "split": "val", "exact_match": float(n < right)} for row, q, n in rows]
    write_rows(scored, folder / "record" / "val-000001-0.parquet")
    return folder


FOUND = "Utrecht is in the Netherlands. NETHERLANDS, not netherlandish."
CALL = 'search("Utrecht, \\"nl\\"")'
TURNS = {
    '<think>I look it up.</think><tool_call>{"name": "search"}</tool_call>': [
        "I look it up.",
        CALL,
        FOUND,
    ],
    'I look it up.</think><tool_call>{"name": "search"}</tool_call>': [
        "I look it up.",
        CALL,
        FOUND,
    ],
    "Let me see. <search>Utrecht</search> done": ["Let me see.", "done", CALL, FOUND],
    "call search": ["call search", CALL, FOUND],
    "<b>bold</b> Action: search": ["<b>bold</b>", "Action: search", CALL, FOUND],
    "<a>one</a> and <b>two</b>": ["<a>one</a>", "and", "<b>two</b>", CALL, FOUND],
    "<think>cut": ["<think>cut", CALL, FOUND],
}
"""What a turn with one call wrote, and what the page shows of it."""


@browser_only
def test_a_turn_shows_its_thought_calls_and_results(tmp_path, open_page):
    folder = trajectories.run(
        tmp_path / "run", iterations=1, groups=1, size=len(TURNS), turns=(2, 2)
    )
    kept = record.read(folder)
    for row, text in zip(kept, TURNS, strict=True):
        row |= {"answers": ["Netherlands", "nether"], "exact_match": 0.0}
        call = row["turns"][0]["reading"]["calls"][0] | {
            "arguments": '{"query": "Utrecht, \\"nl\\""}'
        }
        read = row["turns"][0]["results"][0] | {"content": FOUND, "ok": True}
        row["turns"][0] |= {"text": text, "results": [read]}
        row["turns"][0]["reading"]["calls"] = [call]
        row["turns"][1]["text"] = "<think>so</think><answer>Holland</answer>"
    replace_record(folder, kept)
    page = open_page([folder])
    for n, (text, wanted) in enumerate(TURNS.items()):
        show_route(page, f"#/t/0/train/0/0/{n}")
        first, last = page.locator(".did-say").all()
        shown = first.locator("[role=group]").evaluate_all("all => all.map(e => e.textContent)")
        assert shown == wanted, text
        assert first.locator("mark").all_inner_texts() == ["Netherlands", "NETHERLANDS"]
        assert "answer Holland ✗ wrong" in last.inner_text().replace("\n", " ")
        if text not in wanted:
            first.get_by_text("as written").click()
            raw = first.get_by_label("Turn 1, as written")
            raw.wait_for()
            assert raw.evaluate("one => one.textContent") == text
        else:
            assert first.get_by_text("as written").count() == 0


@browser_only
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_is_accessible(tmp_path, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for n, rule in enumerate((TurnLevel(), OutcomeOnly())):
        trajectories.run(tmp_path / f"run{n}", estimator=rule, tokens=not n)
    report([tmp_path / "run0", tmp_path / "run1"], tmp_path / "out.html")
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    page = open_page(tmp_path / "out.html", **options, bypass_csp=True)  # axe is a script
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
    for route in ("#/", "#/list", "#/g/0/train/0/0", "#/t/0/train/0/0/0"):
        show_route(page, route)
        report_of_axe = axe.run(page, options={"runOnly": {"type": "tag", "values": tags}}).response
        assert report_of_axe["passes"]
        assert report_of_axe["violations"] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


PAYLOADS = [
    "<script>window.ran = 1; alert(1)</script>",
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'><a href='javascript:window.ran=1'>x</a></svg>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "<link rel=stylesheet href='http://example.com/x.css'><style>* { display: none }</style>",
    "\u202e\u2066abc\u2069 right to left \u200f \u061c",
    "<|im_end|><|endoftext|>\x00\x07\x1b[31m\x7f\ufeff\u2028\u2029",
    "-->]]></style></textarea></title></template><plaintext>",
    "{{constructor.constructor('window.ran=1')()}} ${window.ran=1}",
    "javascript:window.ran=1//<base href='http://example.com/'>",
    "<form action='http://example.com'><input autofocus onfocus='window.ran=1'></form>",
    "\U000e0041\U000e007f e\u0301" + "\u0301" * 300,
    "<meta http-equiv=refresh content='0;url=http://example.com'>",
    "\\u003cscript\\u003e window.ran=1",
    "a" * 1_000_000,
]


@browser_only
def test_no_text_of_a_trajectory_runs_or_leaves_its_element(tmp_path, open_page):
    draw, count = random.Random(0), 0

    def text():
        nonlocal count
        count += 1
        # a long line only now and then: they are 1 MB each
        own = PAYLOADS[-1] if count % 97 == 0 else draw.choice(PAYLOADS[:-1])
        return f"{own}{draw.choice(PAYLOADS[:-1])}{count}"

    folder = trajectories.run(
        tmp_path / "<img src=x onerror=window.ran=1>", iterations=1, groups=10, text=text
    )
    assert count > 200
    report([folder], tmp_path / "out.html")
    page = open_page(tmp_path / "out.html")
    names = {"SCRIPT", "IFRAME", "IMG", "LINK", "STYLE", "META", "BASE", "FORM", "SVG"}
    for route in ("#/list", *(f"#/g/0/train/0/{n}" for n in range(10)), "#/list?q=script&in=all"):
        show_route(page, route)
        assert page.evaluate("window.ran") is None
        inside = page.evaluate(
            "[...document.querySelectorAll('main *')].map(e => e.tagName.toUpperCase())"
        )
        assert not names & {*inside} - {"FORM"}
        wider = "e => e.scrollWidth > e.clientWidth + 1"
        outside = page.evaluate(f"[...document.querySelectorAll('.text')].filter({wider}).length")
        assert outside == 0
    for member in range(4):
        show_route(page, f"#/t/0/train/0/3/{member}")
        assert page.evaluate("window.ran") is None
        shown = page.evaluate("document.querySelector('main').textContent")
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", shown)
