"""The study of docs/does-turn-credit-help: its figures by an independent reading of its lines, and
its tables are those of the lines."""

import importlib.util
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats
from turnrl_atlas import Atlas
from turnrl_qa_rewards import AnswerRetrieved
from turnrl_sweep.matrix import read_cells
from turnrl_sweep.results import Result

from turnrl import Question, Reading, ToolCall, ToolResult, Trajectory, Turn, TurnRLError
from turnrl.cli import main

HERE = Path(__file__).parents[1] / "docs" / "does-turn-credit-help"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("study", HERE / "study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["study"] = module
    spec.loader.exec_module(module)
    return module


def a_run(matches, calls, tokens=None, seed=0, estimator="TurnLevel", digest="d"):
    count = len(matches)
    curves = {
        "iteration": [*range(count)],
        "sampled_tokens": tokens or [100 * n for n in range(count)],
        "seconds": [60 * n for n in range(count)],
        "val/exact_match": matches,
        "train/tool_execution": [None, *calls[1:]],
        "famous/exact_match": [0.7] * count,
    }
    settings = {"model.estimator": estimator}
    return Result(digest, seed, settings, "quickstart", "0.0", 1, "", curves)


def test_the_figures_of_a_run(study):
    run = a_run([0.1, 0.6, 0.7, 0.65, 0.9], [0, 0.3, 0.6, 0.2, 0.7])
    assert study.until_good(run) == (2, True)
    assert study.until_good(a_run([0.1, 0.6], [0, 1])) == (1, False)
    assert study.collapsed(run)
    assert not study.collapsed(a_run([0] * 4, [0, 0.2, 0.4, 0.1]))  # it never called
    assert not study.collapsed(a_run([0] * 4, [0, 0.2, 0.6, 0.26]))
    assert study.lowest(run) == 0.2
    assert study.last(run) == 0.9
    trapezoids = (0.1 + 0.6) / 2 + (0.6 + 0.7) / 2 + (0.7 + 0.65) / 2 + (0.65 + 0.9) / 2
    assert study.by_iteration(run) == pytest.approx(trapezoids / 4)


def test_the_area_ends_where_the_shortest_run_does_and_gains_are_paired(study, tmp_path):
    lines = tmp_path / "lines"
    lines.mkdir()
    runs = [
        a_run([0.0, 0.5, 1.0], [0, 1, 1], [0, 100, 200], 0),
        a_run([0.0, 0.3, 1.0], [0, 1, 1], [0, 100, 200], 1),
        a_run([0.0, 0.2, 0.4], [0, 1, 1], [0, 50, 150], 0, "OutcomeOnly", "e"),
        a_run([0.0, 0.0, 0.4], [0, 1, 1], [0, 100, 200], 1, "OutcomeOnly", "e"),
    ]
    text = "".join(json.dumps(vars(run)) + "\n" for run in runs)
    (lines / "one-hop.jsonl").write_text(text)
    one = study.part("one-hop", tmp_path)
    ours, other = one.runs
    assert (str(ours), str(other)) == ("MT-GRPO", "GRPO-OR")
    assert one.tokens == 150
    # by hand: 25 + 0.5 * (0.5 + 0.75) * 50 of 150
    assert one.area(one.runs[ours][0]) == pytest.approx((25 + 31.25) / 150)
    gain = one.gain(other, ours, study.last)
    assert (gain.first, gain.second, gain.pairs) == (0.4, 1.0, 2)
    rows = [*study.gains(one)]
    assert rows[2].startswith("| GRPO-OR | +")
    assert "+0.600 [+0.600, +0.600]" in rows[2]
    (lines / "one-hop.jsonl").write_text(text + json.dumps(vars(runs[0]) | {"digest": "f"}) + "\n")
    with pytest.raises(TurnRLError, match="two recipes"):
        study.part("one-hop", tmp_path)


def test_the_page_is_made_of_the_lines_that_are_there(study, tmp_path, capsys):
    (tmp_path / "lines").mkdir()
    runs = [
        a_run([0.1, 0.5 + seed / 10], [0, 0.3], seed=seed, estimator=name, digest=name)
        for name in ("TurnLevel", "OutcomeOnly")
        for seed in (0, 1)
    ]
    text = "".join(json.dumps(vars(run)) + "\n" for run in runs)
    (tmp_path / "lines" / "one-hop.jsonl").write_text(text)
    assert study.main(["--folder", str(tmp_path), "--draw"]) == 0
    table = _of_page("one-hop: figures", tmp_path)
    assert {name: row["at the end"] for name, row in table.items()} == {
        "MT-GRPO": "0.550",
        "GRPO-OR": "0.550",
    }
    assert "sampled tool execution" in (tmp_path / "one-hop.svg").read_text()
    # an estimator of one's own has its own name, after the others
    own = a_run([0.1, 0.2], [0, 0.3], estimator="mine.Own", digest="o")
    with (tmp_path / "lines" / "one-hop.jsonl").open("a") as file:
        file.write(json.dumps(vars(own)) + "\n")
    assert study.main(["--folder", str(tmp_path), "--draw"]) == 0
    assert [*_of_page("one-hop: figures", tmp_path)] == ["MT-GRPO", "GRPO-OR", "mine.Own"]
    with (tmp_path / "lines" / "one-hop.jsonl").open("a") as file:
        file.write(json.dumps(vars(own) | {"digest": "p"}) + "\n")
    assert study.main(["--folder", str(tmp_path), "--draw"]) == 1
    assert "runs of two recipes for mine.Own" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.main(["three-hop"])
    assert "no part 'three-hop'" in capsys.readouterr().err


SMALL = (
    f"{HERE.parents[1]}/recipes/quickstart.yaml {HERE}/one-hop.yaml --seeds 0..1 "
    "--set model.estimator=TurnLevel,OutcomeOnly --model.group_size 2 --model.steps_per_update 1 "
    "--data.questions_per_iteration 2 --data.val_limit 4 --trainer.max_epochs 2"
)


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_to_the_same_tables(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        *(sys.executable, "-c"),
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import study; "
        f"study.PARTS = {{'one-hop': {SMALL!r}}}; sys.exit(study.main())",
        *("--folder", "mine", "--jobs", "2"),
    ]
    monkeypatch.setattr(study, "PARTS", {"one-hop": SMALL})
    assert study.main(["--folder", "whole", "--jobs", "2"]) == 0
    lines = (tmp_path / "whole" / "lines" / "one-hop.jsonl").read_text()
    assert lines.count("\n") == 4
    assert study.main(["--folder", "whole"]) == 0  # which trains nothing
    assert (tmp_path / "whole" / "lines" / "one-hop.jsonl").read_text() == lines
    for seconds in (16, 16):  # within runs, or between them
        with subprocess.Popen(command, start_new_session=True) as process:
            time.sleep(seconds)
            process.kill()
    assert subprocess.run(command, check=False).returncode == 0
    for name in ("figures", "differences", "habits"):
        once, again = (_of_page(f"one-hop: {name}", tmp_path / of) for of in ("whole", "mine"))
        for row in (*once.values(), *again.values()):
            row.pop("minutes", None)  # a run that went on took others
        assert once == again
        assert once


@pytest.fixture
def conditions(study, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("conditions")


def _searched(number, found):
    call = ToolCall("search", {"query": f"query {number}"})
    text = f"a search for {number}"
    result = ToolResult("It is Rome." if found else "Nothing.")
    turn = Turn(text, (), (), Reading((call,)), (result,))
    return Trajectory(Question("q", "Which city is it?", ("Rome",)), (), (turn,), "answer")


def test_the_noisy_reward_says_the_opposite_of_one_call_in_five(conditions):
    noisy, true = conditions.Noisy(), AnswerRetrieved()
    found = [
        (noisy.score(one, 0), true.score(one, 0))
        for one in (_searched(n, n % 2 == 0) for n in range(2000))
    ]
    assert {*found} == {(0.0, 0.0), (0.0, 0.5), (0.5, 0.0), (0.5, 0.5)}
    for paid in (0.0, 0.5):
        wrong = [one != other for one, other in found if other == paid]
        assert statistics.mean(wrong) == pytest.approx(0.2, abs=0.04)
    assert noisy.score(_searched(7, True), 0) == noisy.score(_searched(7, True), 0)
    silent = [replace(_searched(n, True).turns[0], results=()) for n in range(50)]
    assert {noisy.score(replace(_searched(0, True), turns=(one,)), 0) for one in silent} == {0.0}


def test_tempting_and_untempting_questions_share_out_those_of_atlas(conditions):
    every = {one.id for one in Atlas().questions("train")}
    tempting, untempting = (
        {one.id for one in source().questions("train")}
        for source in (conditions.Tempting, conditions.Untempting)
    )
    assert tempting | untempting == every
    assert not tempting & untempting
    assert len(tempting) == 4 * len(untempting)
    assert [*conditions.Tempting().questions("val")] == [*Atlas().questions("val")]


def _of_page(name, folder=HERE):
    text = (folder / "index.md").read_text()
    table = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def _naive_area(tokens, matches, end):
    """The average over the tokens 0 to `end`, a token at a time."""
    total, place = 0.0, 0
    for token in range(int(end)):
        while tokens[place + 1] < token + 0.5:
            place += 1
        share = (token + 0.5 - tokens[place]) / (tokens[place + 1] - tokens[place])
        total += matches[place] + share * (matches[place + 1] - matches[place])
    return total / int(end)


@pytest.mark.parametrize("world", ["one-hop", "two-hop"])
def test_the_tables_of_the_page_are_those_of_the_lines(study, world):
    file = HERE / "lines" / f"{world}.jsonl"
    if not file.exists():
        pytest.skip(f"{world} was not run")
    runs = {}
    for line in map(json.loads, file.read_text().splitlines()):
        name = study.NAMES[line["settings"]["model.estimator"]]
        runs.setdefault(name, {})[line["seed"]] = line["curves"]
    end = min(curves["sampled_tokens"][-1] for some in runs.values() for curves in some.values())
    areas = {
        name: {
            seed: _naive_area(c["sampled_tokens"], c["val/exact_match"], end)
            for seed, c in some.items()
        }
        for name, some in runs.items()
    }
    table = _of_page(f"{world}: figures")
    assert {*table} == {*runs}
    for name, row in table.items():
        assert int(row["seeds"]) == len(runs[name])
        assert float(row["area"]) == pytest.approx(statistics.mean(areas[name].values()), abs=6e-4)
        ends = [curves["val/exact_match"][-1] for curves in runs[name].values()]
        assert float(row["at the end"]) == pytest.approx(statistics.mean(ends), abs=6e-4)
    for other, row in _of_page(f"{world}: differences").items():
        gains = [areas["MT-GRPO"][s] - areas[other][s] for s in areas[other]]
        mean, error = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
        half = stats.t.ppf(0.975, len(gains) - 1) * error
        shown = [float(number) for number in re.findall(r"[-+][\d.]+", row["area"])]
        assert shown == pytest.approx([mean, mean - half, mean + half], abs=1.1e-3)


def _cells(of_part):
    words, seeds, sets = [], None, []
    given = iter(shlex.split(of_part))
    for word in given:
        if word == "--seeds":
            seeds = next(given)
        elif word == "--set":
            sets.append(next(given))
        else:
            words.append(word)
    return read_cells(words, seeds, sets)[1]


def test_every_committed_line_is_of_a_run_that_the_study_still_has(study):
    """A changed recipe would leave lines behind that no command counts as done."""
    for name, of_part in study.PARTS.items():
        known = {(cell.digest, cell.seed) for cell in _cells(of_part)}
        file = HERE / "lines" / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        for line in map(json.loads, lines):
            assert (line["digest"], line["seed"]) in known, name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_every_part_is_a_sweep_that_can_begin(study, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.syspath_prepend(HERE)
    words = shlex.split([*study.PARTS.values()][number])
    assert main(["sweep", *words, "-o", "runs", "--list"]) == 0
