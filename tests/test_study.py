"""The study of docs/does-turn-credit-help: its figures by an independent reading of its lines, and
its tables are those of the lines."""

import importlib.util
import json
import math
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
from turnrl_sweep.matrix import read_cells
from turnrl_sweep.results import Result

from turnrl import TurnRLError

HERE = Path(__file__).parents[1] / "docs" / "does-turn-credit-help"
T = {5: 2.776445, 8: 2.364624}
"""The 97.5 % quantile of Student's t, by the number of seeds."""


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
    one = study.part("one-hop", lines)
    assert [*one.runs] == ["MT-GRPO", "GRPO-OR"]
    assert one.tokens == 150
    # by hand: 25 + 0.5 * (0.5 + 0.75) * 50 of 150
    assert one.area(one.runs["MT-GRPO"][0]) == pytest.approx((25 + 31.25) / 150)
    gain = one.gain("GRPO-OR", "MT-GRPO", study.last)
    assert (gain.first, gain.second, gain.pairs) == (0.4, 1.0, 2)
    rows = [*study.gains(one)]
    assert rows[2].startswith("| GRPO-OR | +")
    assert "+0.600 [+0.600, +0.600]" in rows[2]
    (lines / "one-hop.jsonl").write_text(text + json.dumps(vars(runs[0]) | {"digest": "f"}) + "\n")
    with pytest.raises(TurnRLError, match="two recipes"):
        study.part("one-hop", lines)


def _of_page(name):
    text = (HERE / "index.md").read_text()
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
        half = T[len(gains)] * error
        shown = [float(number) for number in re.findall(r"[-+][\d.]+", row["area"])]
        assert shown == pytest.approx([mean, mean - half, mean + half], abs=1.1e-3)


def test_every_committed_line_is_of_a_run_that_the_study_still_has(study):
    """A changed recipe would leave lines behind that no command counts as done."""
    for name, of_part in study.PARTS.items():
        file = HERE / "lines" / f"{name}.jsonl"
        if not file.exists():
            continue
        words, seeds, sets = [], None, []
        given = iter(shlex.split(of_part))
        for word in given:
            if word == "--seeds":
                seeds = next(given)
            elif word == "--set":
                sets.append(next(given))
            else:
                words.append(word)
        _, cells = read_cells(words, seeds, sets)
        known = {(cell.digest, cell.seed) for cell in cells}
        for line in map(json.loads, file.read_text().splitlines()):
            assert (line["digest"], line["seed"]) in known, name
