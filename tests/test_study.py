"""The study in docs/does-turn-credit-help: its tables show what its lines say, by an independent
reading of them."""

import csv
import functools
import hashlib
import importlib
import itertools
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from turnrl import (
    Group,
    Policy,
    Question,
    Reading,
    RewardComponent,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnRLError,
)
from turnrl.commands.sweep.matrix import check
from turnrl.commands.sweep.results import Result
from turnrl.recipe.invocation import read_invocation
from turnrl_atlas import Atlas, AtlasTwoHop, places
from turnrl_rewards.calls import SearchCost
from turnrl_rewards.qa import AnswerRetrieved

HERE = Path(__file__).parents[1] / "docs" / "does-turn-credit-help"


def _module(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        return importlib.import_module(name)


parts, measures, rows, page, study = map(_module, ("parts", "measures", "rows", "page", "study"))
atlas_starter = _module("atlas_starter")
Part, Row, Sweep = parts.Part, rows.Row, parts.Sweep


def a_run(matches, calls=None, tokens=None, famous=None, cell=None):
    count = len(matches)
    curves = {
        "iteration": [*range(count)],
        "sampled_tokens": tokens or [100 * n for n in range(count)],
        "seconds": [60 * n for n in range(count)],
        "val/exact_match": matches,
        "train/tool_execution": [None, *(calls or matches)[1:]],
        "famous/exact_match": famous or [0.7] * count,
    }
    digest, seed = (cell.digest, cell.seed) if cell else ("d", 0)
    return Result(digest, seed, {}, "quickstart", "0.0", 1, "", curves)


def write(folder, name, runs):
    (folder / "lines").mkdir(exist_ok=True)
    text = "".join(json.dumps(vars(run)) + "\n" for run in runs)
    (folder / "lines" / f"{name}.jsonl").write_text(text)


def read_back(folder, part, runs):
    """Write the lines of these runs, and read the rows of their part."""
    write(folder, "small", runs)
    return rows.rows(part, rows.done(folder, {"small": part}))


@pytest.fixture
def commands(monkeypatch):
    """The commands that the study would run; each ends well."""
    asked = []
    monkeypatch.setattr(study, "turnrl", lambda words: asked.append(words) or 0)
    return asked


def sweep(estimators=("MT-GRPO", "GRPO-OR"), seeds="0..1"):
    return Sweep((f"{parts.RECIPES}/quickstart.yaml",), seeds, estimators)


def test_the_figures_of_a_run():
    run = a_run([0.1, 0.6, 0.7, 0.65, 0.9], [0, 0.3, 0.6, 0.2, 0.7])
    assert measures.until_good(run) == 2
    assert measures.until_good(run, "sampled_tokens") == 200
    assert not measures.never_good(run)
    assert measures.until_good(a_run([0.1, 0.6])) == 1
    assert measures.never_good(a_run([0.1, 0.6]))
    assert measures.collapsed(run)
    assert not measures.collapsed(a_run([0] * 4, [0, 0.2, 0.4, 0.1]))  # it never called
    assert not measures.collapsed(a_run([0] * 4, [0, 0.2, 0.6, 0.26]))
    assert measures.lowest(run) == 0.2
    assert measures.last(run) == 0.9
    assert measures.at(run, 150) == pytest.approx(0.65)
    trapezoids = (0.1 + 0.6) / 2 + (0.6 + 0.7) / 2 + (0.7 + 0.65) / 2 + (0.65 + 0.9) / 2
    assert measures.by_iteration(run) == pytest.approx(trapezoids / 4)


def test_a_figure_that_a_run_lacks_is_not_counted_as_zero():
    run = a_run([0.1, 0.6], famous=[0.7, None])
    assert math.isnan(measures.last(run, "famous/exact_match"))
    assert math.isnan(measures.last(run, "val/f1"))
    assert math.isnan(measures.lowest(run, "val/f1"))
    part = rows.Rows(Part({}), {Row("MT-GRPO"): {0: a_run([0.1, 0.6]), 1: run}})
    assert "| 0.70 (1 of 2 seeds) |" in [*page.habits(part)][2]
    part = rows.Rows(Part({}), {Row("MT-GRPO"): {1: run}})
    assert "| not scored |" in [*page.habits(part)][2]


def test_the_area_ends_where_the_shortest_run_does_and_differences_are_paired(tmp_path, capsys):
    part = Part({"": sweep()})
    curves = {
        ("MT-GRPO", 0): ([0.0, 0.5, 1.0], [0, 100, 200]),
        ("MT-GRPO", 1): ([0.0, 0.3, 1.0], [0, 100, 200]),
        ("GRPO-OR", 0): ([0.0, 0.2, 0.4], [0, 50, 150]),
        ("GRPO-OR", 1): ([0.0, 0.0, 0.4], [0, 100, 200]),
    }
    runs = [
        a_run(curves[name, cell.seed][0], tokens=curves[name, cell.seed][1], cell=cell)
        for name, cell in part.sweeps[""].cells()
    ]
    old = replace(runs[0], digest="of an older recipe")
    part_rows = read_back(tmp_path, part, [old, *runs])
    assert (
        "lines of no run that the study has now: 1. Their recipe or seeds"
        in capsys.readouterr().out
    )
    ours, other = part_rows.runs
    assert (str(ours), str(other)) == ("MT-GRPO", "GRPO-OR")
    assert part_rows.tokens == 150
    # by hand: 25 + 0.5 * (0.5 + 0.75) * 50 of 150
    assert measures.area(part_rows.runs[ours][0], part_rows.tokens) == pytest.approx(
        (25 + 31.25) / 150
    )
    assert part_rows.pairs == [(ours, other)]
    gain = part_rows.minus(ours, other, measures.last)
    assert (gain.first, gain.second, gain.pairs) == (0.4, 1.0, 2)
    table = [*page.differences(part_rows)]
    assert table[0].startswith("|  | minus | area to 150 tokens |")
    assert table[2].startswith("| MT-GRPO | GRPO-OR | +")
    assert "+0.600 [+0.600, +0.600]" in table[2]
    assert len(table) == 3
    # to 75: 0.1875 - 0.1417 and 0.1125 - 0; to 150: 0.375 - 0.2333 and 0.2583 - 0.0333
    (ends,) = [*page.ends(part_rows)][2:]
    shown = re.findall(r"\+(\d\.\d+) \[", ends)
    assert [*map(float, shown)] == pytest.approx([0.0792, 0.1833], abs=6e-4)
    assert ends.endswith("] to 150 |")


def test_rows_of_another_part_are_shown_beside_and_a_change_is_paired_by_seed():
    base, changed = sweep(seeds="0..2"), sweep().having("--model.group_size", "8")
    part = Part({"groups of 8": changed}, {"groups of 16": base})
    ends = {("groups of 16", "MT-GRPO"): 0.9, ("groups of 16", "GRPO-OR"): 0.3}
    ends |= {("groups of 8", "MT-GRPO"): 0.6, ("groups of 8", "GRPO-OR"): 0.5}
    runs = {
        (cell.digest, cell.seed): a_run(
            # a seed that the changed sweep lacks is in no mean
            [0.0, 1.0 if cell.seed == 2 else ends[label, name] + cell.seed / 100],
            cell=cell,
        )
        for label, swept in (part.sweeps | part.beside).items()
        for name, cell in swept.cells()
    }
    both = rows.rows(part, runs)
    assert [*map(str, both.runs)] == [
        *("MT-GRPO (groups of 16)", "GRPO-OR (groups of 16)"),
        *("MT-GRPO (groups of 8)", "GRPO-OR (groups of 8)"),
    ]
    change = both.change(Row("GRPO-OR", "groups of 16"), Row("GRPO-OR", "groups of 8"))
    assert (change.first, change.second, change.pairs) == pytest.approx((0.3, 0.05, 2))
    assert [*page.changes({"groups": both})][2:] == [
        "| groups of 8 | GRPO-OR | 2 | +0.300 | +0.050 | -0.250 [-0.250, -0.250] |"
    ]
    digests = {cell.digest for _, cell in base.cells()}
    assert both.begun
    assert not rows.rows(part, {key: runs[key] for key in runs if key[0] in digests}).begun
    part_rows = rows.rows(replace(part, base="groups of 16"), runs)
    assert [*map(str, part_rows.pairs[1])] == ["MT-GRPO (groups of 16)", "MT-GRPO (groups of 8)"]
    part_rows = rows.rows(replace(part, pairs=(("GRPO-OR", "MT-GRPO"),)), runs)
    assert [*map(str, part_rows.pairs[1])] == ["GRPO-OR (groups of 8)", "MT-GRPO (groups of 8)"]
    assert len(part_rows.pairs) == 2


def test_a_folder_of_your_own_has_only_your_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(parts.ESTIMATORS, "mine", "turnrl_estimators.PaperExact")
    part = Part({"": sweep((*("MT-GRPO", "GRPO-OR"), "mine"))})
    mine = {"one-hop": part, "two-hop": Part({"": sweep(seeds="9")})}
    runs = [a_run([0.1, 0.5 + cell.seed / 10], cell=cell) for _, cell in part.sweeps[""].cells()]
    write(tmp_path, "one-hop", runs)
    assert study.main(["--folder", str(tmp_path), "--draw"], mine) == 0
    table = _of_page("one-hop: figures", tmp_path / "tables.md")
    assert {name: row["final exact match"] for name, row in table.items()} == dict.fromkeys(
        ("MT-GRPO", "GRPO-OR", "mine"), "0.550"
    )
    assert "sampled tool execution" in (tmp_path / "one-hop.svg").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"lines", "one-hop.svg", "tables.md"}
    assert "two-hop" not in (tmp_path / "tables.md").read_text()
    with pytest.raises(SystemExit):
        study.main(["three-hop"])
    assert "no part 'three-hop'" in capsys.readouterr().err


def test_a_line_without_the_measure_is_reported_and_counts_for_no_run(tmp_path, capsys):
    part = Part({"": sweep(seeds="0")})
    first, second = (a_run([0.1, 0.5], cell=cell) for _, cell in part.sweeps[""].cells())
    bare = {name: c for name, c in first.curves.items() if name != "val/exact_match"}
    write(tmp_path, "small", [replace(first, curves=bare), second])
    assert {*rows.done(tmp_path, {"small": part})} == {(second.digest, 0)}
    assert "seed 0 has no val/exact_match" in capsys.readouterr().out


def test_a_mark_for_a_table_that_does_not_exist_is_an_error(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("<!-- one-hop: figurs -->\n<!-- end -->\n")
    with pytest.raises(TurnRLError, match="<!-- one-hop: figurs -->, and there is no such"):
        page.fill(file, {"one-hop: figures": []})
    file.write_text("a\n<!-- one-hop: figures -->\n<!-- end -->\nb\n")
    page.fill(file, {"one-hop: figures": []})
    assert "\nNot run yet.\n<!-- end -->\nb\n" in file.read_text()
    page.fill(file, {"one-hop: figures": ["| new |"]})
    assert file.read_text() == "a\n<!-- one-hop: figures -->\n| new |\n<!-- end -->\nb\n"


SMALL = Sweep(
    (f"{parts.RECIPES}/quickstart.yaml", f"{HERE}/curves.yaml"),
    "0..1",
    ("MT-GRPO", "GRPO-OR"),
    (
        *("--model.group_size", "2", "--model.steps_per_pass", "1", "--data.val_limit", "4"),
        *("--data.questions_per_iteration", "2", "--trainer.max_epochs", "2"),
    ),
)


@pytest.mark.slow
def test_a_study_that_is_killed_resumes_and_ends_with_the_same_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        *(sys.executable, "-c"),
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from parts import Part, Sweep; "
        f"import study; sys.exit(study.main(parts={{'one-hop': Part({{'': {SMALL!r}}})}}))",
        *("--folder", "mine", "--jobs", "2"),
    ]
    small = {"one-hop": Part({"": SMALL})}
    assert study.main(["--folder", "whole", "--jobs", "2"], small) == 0
    lines = (tmp_path / "whole" / "lines" / "one-hop.jsonl").read_text()
    assert lines.count("\n") == 4
    assert study.main(["--folder", "whole"], small) == 0  # which trains nothing
    assert (tmp_path / "whole" / "lines" / "one-hop.jsonl").read_text() == lines
    mine = tmp_path / "mine" / "lines" / "one-hop.jsonl"
    home = tmp_path / "mine" / "runs"
    within = [  # in the middle of the first runs, and between runs
        lambda: any(home.rglob("last.ckpt")),
        lambda: mine.exists() and mine.read_text().count("\n") >= 2,
    ]
    for there in within:
        with subprocess.Popen(command, start_new_session=True) as process:
            until = time.monotonic() + 120
            while not there() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            assert process.poll() is None
            process.kill()
    assert mine.read_text().count("\n") < 4
    assert subprocess.run(command, check=False).returncode == 0
    for name in ("figures", "differences", "habits"):
        once, again = (
            _of_page(f"one-hop: {name}", tmp_path / of / "tables.md") for of in ("whole", "mine")
        )
        for row in (*once.values(), *again.values()):
            row.pop("minutes", None)  # a run that went on took others
        assert once == again
        assert once


@pytest.fixture
def conditions():
    return _module("conditions")


def _searched(number, has_answer):
    call = ToolCall("search", {"query": f"query {number}"})
    text = f"a search for {number}"
    result = ToolResult("It is Rome." if has_answer else "Nothing.")
    turn = Turn(text, Reading((call,)), (result,))
    return Trajectory(Question("q", "Which city is it?", ("Rome",)), (turn,), "answer")


def test_the_noisy_reward_is_wrong_for_one_call_in_five(conditions):
    noisy, true = conditions.Noisy(), AnswerRetrieved()
    pays = [
        (noisy.score(searched, 0), true.score(searched, 0))
        for searched in (_searched(n, n % 2 == 0) for n in range(2000))
    ]
    assert {*pays} == {(0.0, 0.0), (0.0, 0.5), (0.5, 0.0), (0.5, 0.5)}
    for paid in (0.0, 0.5):
        wrong = [noisy_pay != true_pay for noisy_pay, true_pay in pays if true_pay == paid]
        assert statistics.mean(wrong) == pytest.approx(0.2, abs=0.04)
    assert {conditions.Noisy(1.0, 0.3).score(_searched(n, n > 1), 0) for n in (1, 2)} == {0.0, 0.3}
    assert noisy.score(_searched(7, True), 0) == noisy.score(_searched(7, True), 0)
    silent = [replace(_searched(n, True).turns[0], results=()) for n in range(50)]
    assert {noisy.score(replace(_searched(0, True), turns=(turn,)), 0) for turn in silent} == {0.0}


def test_the_apart_estimator_normalizes_turn_sums_and_outcomes_separately(
    conditions,
):
    turns = torch.tensor([[0.3, 0.5, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0], [0.3, 0.0, 0.5]])
    outcome = torch.tensor([1.0, 0.0, 0.1, 0.4])
    reached = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()
    advantages = conditions.Apart().advantages(turns * reached, outcome, reached)
    sums = [sum(row) for row in (turns * reached).tolist()]
    for i, row in enumerate(advantages.tolist()):
        both = [
            (values[i] - statistics.mean(values)) / statistics.stdev(values)
            for values in (sums, outcome.tolist())
        ]
        assert row == pytest.approx([sum(both) * there for there in reached[i].tolist()], abs=1e-5)


def _z(values):
    spread = max(statistics.stdev(values), 0.1) if len(values) > 1 else 1.0
    return [(value - statistics.mean(values)) / spread for value in values]


def test_other_treatments_of_costs_equal_their_equations_written_as_loops(conditions):
    draw, options = random.Random(0), []
    for _ in range(20):
        lengths = [draw.randint(1, 3) for _ in range(4)]
        gains, costs = (
            [[draw.randint(0, 4) * unit for _ in range(n)] for n in lengths] for unit in (0.3, -0.1)
        )
        outcome = [draw.randint(0, 4) * 0.5 for _ in lengths]
        pad = [[0.0] * (3 - n) for n in lengths]
        of_gains, of_costs = (
            torch.tensor([row + rest for row, rest in zip(rows, pad, strict=True)]).double()
            for rows in (gains, costs)
        )
        reached = torch.arange(3) < torch.tensor(lengths)[:, None]
        group = Group(
            Question("q", "?", ("x",)), (None,) * 4, of_gains + of_costs,
            torch.tensor(outcome).double(), reached,
            {
                "turn/a": RewardComponent(of_gains),
                "turn/b": RewardComponent(of_costs, is_cost=True),
            },
        )  # fmt: skip
        first, kept, apart = (
            rule()(group)
            for rule in (conditions.AddedFirst, conditions.SignKept, conditions.CostsApart)
        )
        for k in range(max(lengths)):
            there = [i for i, n in enumerate(lengths) if n > k]
            gain, cost = ([sum(rows[i][k:]) for i in there] for rows in (gains, costs))
            rho = [a + b for a, b in zip(gain, cost, strict=True)]
            added = _z([outcome[i] + value for i, value in zip(there, rho, strict=True)])
            by_gain = _z(gain)
            width = max(rho) - min(rho)
            for n, i in enumerate(there):
                own = _z(outcome)[i]
                q = (rho[n] - min(rho)) / width if width > 1e-6 else 0.0
                options.append(q)
                assert float(first[i, k]) == pytest.approx(added[n], abs=1e-6)
                assert float(kept[i, k]) == pytest.approx(own * (1 - q * (own < 0)), abs=1e-6)
                wanted = own + by_gain[n] + cost[n] - statistics.mean(cost)
                assert float(apart[i, k]) == pytest.approx(wanted, abs=1e-6)
        assert not any(rule[~reached].any() for rule in (first, kept, apart))
    assert {0.0, 1.0} < set(options)


def test_a_cost_that_begins_later_costs_nothing_before_then(conditions):
    cost = SearchCost(0.2)
    module = SimpleNamespace(rewards=[AnswerRetrieved(), cost])
    later = conditions.CostsLater(free=2)
    later.setup(None, module, "fit")
    seen = []
    for epoch in (0, 1, 2, 3):
        later.on_train_epoch_start(SimpleNamespace(current_epoch=epoch), module)
        seen.append(cost.score(_searched(1, True), 0))
    later.setup(None, module, "validate")  # a run asks more than once
    later.on_train_epoch_start(SimpleNamespace(current_epoch=4), module)
    assert [*seen, cost.score(_searched(1, True), 0)] == [0.0, 0.0, -0.2, -0.2, -0.2]


def test_turn_rewards_of_all_groups_are_divided_by_one_scale(conditions):
    turns = [[[0.5, 0.0], [0.0, 0.0], [-0.1, 0.5]], [[-0.1, 0.0], [-0.1, -0.2], [0.0, 0.0]]]
    taken = [[2, 1, 2], [1, 2, 1]]
    outcomes = [[1.0, 0.0, 0.4], [0.2, 0.2, 1.0]]
    groups = [
        Group(
            Question("q", "Which?", ("a",)),
            (None,) * 3,
            torch.tensor(turns[g]),
            torch.tensor(outcomes[g]),
            torch.tensor([[k < n for k in range(2)] for n in taken[g]]),
        )
        for g in range(2)
    ]
    together = conditions.Together(0.01)
    scorer = SimpleNamespace(score=lambda trajectories: groups)
    assert together.prepare(SimpleNamespace(trajectories=()), scorer) is groups
    less, rest = {}, {}
    for g, i in itertools.product(range(2), range(3)):
        others = [outcomes[g][j] for j in range(3) if j != i]
        less[g, i] = outcomes[g][i] - statistics.mean(others)
        for k in range(taken[g][i]):
            peers = [sum(turns[g][j][k:]) for j in range(3) if j != i and taken[g][j] > k]
            rest[g, i, k] = sum(turns[g][i][k:]) - (statistics.mean(peers) if peers else 0)
    scales = [math.sqrt(statistics.mean(v * v for v in of.values())) for of in (less, rest)]
    for g, group in enumerate(groups):
        advantages = together(group)
        for i, k in itertools.product(range(3), range(2)):
            wanted = less[g, i] / scales[0] + rest[g, i, k] / scales[1] if k < taken[g][i] else 0
            assert float(advantages[i, k]) == pytest.approx(wanted, abs=1e-5)


def test_every_question_of_atlas_is_either_tempting_or_untempting(conditions):
    every = {question.id for question in Atlas().questions("train")}
    tempting, untempting = (
        {question.id for question in source().questions("train")}
        for source in (conditions.Tempting, conditions.Untempting)
    )
    assert tempting | untempting == every
    assert not tempting & untempting
    assert len(tempting) == 4 * len(untempting)
    assert [*conditions.Tempting().questions("val")] == [*Atlas().questions("val")]


def test_each_door_pays_at_once_and_the_attempt_continues_to_the_end():
    doors = _module("doors")
    corridor = doors.Doors(3)
    seen, ways = corridor.reset(7), []
    for number in range(3):
        sign = seen.removeprefix("door ")
        right = doors.SIGNS[sign]
        ways.append(right if number != 1 else next(w for w in doors.SIGNS.values() if w != right))
        result = corridor.step(ways[-1])
        assert result.reward == (0 if number == 1 else pytest.approx(1 / 3))
        assert result.done == (number == 2)
        seen = result.content
    assert corridor.get_reward() == 0
    seen = corridor.reset(7)
    while seen != "the end":
        assert corridor.get_reward() == 0
        seen = corridor.step(doors.SIGNS[seen.removeprefix("door ")]).content
    assert corridor.get_reward() == 1
    first = [doors.Doors(1).reset(seed) for seed in range(400)]
    assert {*first} == {f"door {sign}" for sign in doors.SIGNS}
    assert sorted(Counter(doors.SIGNS.values()).values()) == [2] * 4


@pytest.mark.parametrize("doors", [2, 4])
def test_the_split_leaves_out_the_noise_of_earlier_doors(doors):
    """By hand, without outcomes: a turn's advantage has the variance of the rewards that it holds,
    K without the split, and K - k + 1 with it."""
    horizon = _module("horizon")
    right, size, groups = 0.3, 8, 3000

    class Rewards(horizon.TurnLevel):
        def advantages(self, turn_rewards, outcome, reached):
            return super().advantages(turn_rewards, torch.zeros_like(outcome), reached)

    class Whole(horizon.Apart):
        def advantages(self, turn_rewards, outcome, reached):
            return super().advantages(turn_rewards, torch.zeros_like(outcome), reached)

    # a turn's own reward gives the sample variance of x (1 if right), another's their covariance
    variance = right * (1 - right)
    fourth = right * (1 - right) ** 4 + (1 - right) * right**4
    own = fourth - (size - 3) / (size - 1) * variance**2
    other = variance**2 * size / (size - 1)
    for rule, held in (
        (Rewards(**horizon.UNSCALED), [doors - k for k in range(doors)]),
        (Whole(**horizon.UNSCALED), [doors] * doors),
    ):
        expected = sum(own + (count - 1) * other for count in held)
        expected /= doors * variance**2
        measured = horizon.noise(rule, doors, size, groups, right)
        assert measured == pytest.approx(expected, rel=0.05)


def test_other_starter_policies_differ_from_the_bundled_one_only_as_set():
    skills, *facts, habits = atlas_starter.phases_with()
    same, *fewer, changed = atlas_starter.phases_with(facts=0.3, vague=0.0)
    assert same == skills
    assert [phase.steps for phase in facts] == [400, 500]
    assert fewer == [replace(phase, steps=round(phase.steps * 0.3)) for phase in facts]
    assert changed == replace(habits, habits=replace(habits.habits, vague=0.0))


def test_demonstrations_name_no_held_out_place():
    # whole titles: "Guinea" is in "Guinea-Bissau"
    held_out = {place.name for place in places() if place.split != "train"}
    splits = itertools.product((Atlas(), AtlasTwoHop()), ("val", "test"))
    asked = {q.text for world, split in splits for q in world.questions(split)}
    rng = random.Random(1)
    for phase in atlas_starter.phases_with():
        for _ in range(1000):
            trace = phase.trace(rng)
            assert trace.prompt[-1]["content"] not in asked
            for _, seen in trace.turns:
                titles = {m["content"].removeprefix("<result>").split("\n")[0] for m in seen}
                assert not titles & held_out


@pytest.mark.slow
def test_the_training_of_the_starter_begins_with_its_tokenizer_and_its_batches():
    training = atlas_starter.Training(atlas_starter.SKILLS)
    shipped = Policy("package://turnrl_atlas/starter").tokenizer
    assert training.chat.tokenizer.get_vocab() == shipped.get_vocab()
    batches = atlas_starter.Batches(atlas_starter.phases_with())
    assert len(batches) == 3700
    rows = [training.rows(batches[number]) for number in (0, 2200, 2600, 3100, 3699)]
    # of the training that made the shipped policy, checked to the last byte of its weights
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "1c20a9661c74bb17"


def test_a_part_is_measured_by_its_own_curve(tmp_path, capsys):
    goal = measures.Measure("val/reward/outcome", "share at the goal")
    part = Part({"": sweep()}, measure=goal)
    runs = [
        replace(run := a_run([0.9, 0.9], cell=cell), curves={**run.curves, goal.curve: [0.2, 0.8]})
        for _, cell in part.sweeps[""].cells()
    ]
    part_rows = read_back(tmp_path, part, [*runs, replace(runs[0], seed=9, digest="of no run")])
    (row, *_) = [*page.figures(part_rows)][2:]
    assert row == "| MT-GRPO | 2 | 0.500 | 0.000 | 0.800 | 1.0 | 0.500 | 0 |"
    assert "final share at the goal" in next(page.figures(part_rows))
    assert "+0.000 [+0.000, +0.000] to 100" in [*page.ends(part_rows)][2]
    lacking = replace(runs[0], curves={k: v for k, v in runs[0].curves.items() if k != goal.curve})
    write(tmp_path, "small", [lacking, *runs[1:]])
    rows.done(tmp_path, {"small": part})
    assert "has no val/reward/outcome. It counts as not done." in capsys.readouterr().out


def test_across_labels_each_starter_counts_once_and_a_lead_may_grow(tmp_path):
    first, second = sweep(), sweep(seeds="0..2").having("--model.group_size", "8")
    part = Part({"a": first, "b": second}, pairs=(("MT-GRPO", "GRPO-OR"),))
    gains = {"a": [0.1, 0.3], "b": [0.4, 0.5, 0.9]}
    runs = [
        a_run([0.0, 0.05 + gains[label][cell.seed] * (name == "MT-GRPO")], cell=cell)
        for label, swept in part.sweeps.items()
        for name, cell in swept.cells()
    ]
    part_rows = read_back(tmp_path, part, runs)
    lead = part_rows.over_labels("MT-GRPO", "GRPO-OR", measures.last)
    means = [0.2, 0.6]
    half = stats.t.ppf(0.975, 1) * statistics.stdev(means) / math.sqrt(2)
    assert (lead.pairs, lead.change) == (2, pytest.approx(0.4))
    assert (lead.low, lead.high) == pytest.approx((0.4 - half, 0.4 + half))
    assert [*page.labels(part_rows)][2].startswith("| MT-GRPO | GRPO-OR | 2 | +0.200 [")
    # from the first label to the last, in the seeds that both have
    grown = part_rows.growth("MT-GRPO", "GRPO-OR", measures.last)
    half = stats.t.ppf(0.975, 1) * 0.05
    assert (grown.pairs, grown.change) == (2, pytest.approx(0.25))
    assert (grown.low, grown.high) == pytest.approx((0.25 - half, 0.25 + half))
    assert [*page.growth(part_rows)][2].startswith("| MT-GRPO | GRPO-OR | 2 | +0.125 [")


def test_a_starter_policy_is_made_once_and_a_part_begins_with_it(tmp_path, commands, monkeypatch):
    monkeypatch.setattr(study, "HERE", tmp_path)
    ice = Part({"": sweep().begun_with("ice")})
    assert study.train("one", ice, tmp_path, []) == 0
    (made, swept) = commands
    assert made[0] == "warmup"
    assert made[-2:] == ["--to", study.os.path.relpath(tmp_path / "starters" / "ice")]
    assert "package://starters/ice" in swept
    (tmp_path / "starters" / "ice").mkdir(parents=True)
    (tmp_path / "starters" / "ice" / "config.json").touch()
    assert study.train("one", ice, tmp_path, []) == 0
    assert [words[0] for words in commands] == ["warmup", "sweep", "sweep"]
    with pytest.raises(TurnRLError, match="there is no starter 'snow' here"):
        sweep().begun_with("snow")
    monkeypatch.setattr(study, "turnrl", lambda words: commands.append(words) or 130)
    (tmp_path / "starters" / "ice" / "config.json").unlink()
    assert study.train("one", ice, tmp_path, []) == 130
    assert commands[-1][0] == "warmup"


PAGES = [HERE / "index.md", HERE / "more.md", HERE / "tables.md"]


def _of_page(name, *files):
    text = "\n".join(file.read_text() for file in files or PAGES)
    bare = text.partition(f"## {name}\n\n")[2].partition("\n\n")[0]
    table = text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0] or bare
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {
        (row[0], row[1]) if "minus" in cells[0][1] else row[0]: dict(
            zip(cells[0], row, strict=True)
        )
        for row in cells[2:]
    }


def _naive_area(tokens, matches, end):
    """The average over the tokens 0 to `end`, with every tenth token sampled."""
    total, place = 0.0, 0
    middles = range(5, int(end), 10)
    for token in middles:
        while tokens[place + 1] < token:
            place += 1
        share = (token - tokens[place]) / (tokens[place + 1] - tokens[place])
        total += matches[place] + share * (matches[place + 1] - matches[place])
    return total / len(middles)


@functools.cache
def _all_lines():
    """The curves of every run, by the digest of its settings and its seed."""
    return {
        (line["digest"], line["seed"]): line["curves"]
        for file in (HERE / "lines").glob("*.jsonl")
        for line in map(json.loads, file.read_text().splitlines())
    }


@pytest.mark.parametrize("name", parts.PARTS)
def test_the_tables_on_the_page_match_the_recorded_lines(name):
    """By an independent reading: rows by `--set` and options, areas by sums over tokens."""
    part, lines = parts.PARTS[name], _all_lines()
    runs = {}
    for label, swept in (*part.beside.items(), *part.sweeps.items()):
        for estimator, cell in swept.cells():
            if curves := lines.get((cell.digest, cell.seed)):
                runs.setdefault((estimator, label), {})[cell.seed] = curves
    if not (HERE / "lines" / f"{name}.jsonl").exists():
        pytest.skip(f"{name} was not run")
    ends = [c["sampled_tokens"][-1] for by_seed in runs.values() for c in by_seed.values()]
    if part.world is not None:  # the world has more iterations than some parts
        world = [lines.get((c.digest, c.seed)) for _, c in part.world.cells()]
        shortest = min(curves["sampled_tokens"][-1] for curves in world if curves)
        assert shortest in (98_501, 70_674, 77_056)  # one hop, two hops, and two hops again
        ends.append(shortest)
    end, match = min(ends), part.measure.curve
    areas = {
        row: {seed: _naive_area(c["sampled_tokens"], c[match], end) for seed, c in by_seed.items()}
        for row, by_seed in runs.items()
    }
    called = {name + f" ({label})" * bool(label): (name, label) for name, label in runs}
    table, heading = _of_page(f"{name}: figures"), f"area to {end:,.0f} tokens"
    text = "".join(page.read_text() for page in PAGES)
    assert {*table} == ({*called} if f"<!-- {name}: figures -->" in text else set())
    assert f"<!-- {name}: " in text
    for of, row in table.items():
        key = called[of]
        assert int(row["seeds"]) == len(runs[key])
        assert float(row[heading]) == pytest.approx(statistics.mean(areas[key].values()), abs=6e-4)
        if part.columns is not measures.learned_by_tokens:
            ends = [curves[match][-1] for curves in runs[key].values()]
            assert float(row[f"final {part.measure.title}"]) == pytest.approx(
                statistics.mean(ends), abs=6e-4
            )
            matches = [
                [*zip(curves["iteration"], curves[match], strict=True)]  # not every one is scored
                for curves in runs[key].values()
            ]
            good = [next((n for n, v in curve if v >= 0.7), curve[-1][0]) for curve in matches]
            assert float(row["iterations to 0.7"]) == pytest.approx(statistics.mean(good), abs=0.06)
            means = [
                statistics.mean((a + b) / 2 for (_, a), (_, b) in itertools.pairwise(curve))
                for curve in matches
            ]
            per_iteration = float(row["area per iteration"])
            assert per_iteration == pytest.approx(statistics.mean(means), abs=6e-4)
    for pair, row in _of_page(f"{name}: differences").items():
        ours, others = (areas[called[label]] for label in pair)
        gains = [ours[seed] - others[seed] for seed in ours.keys() & others.keys()]
        assert _numbers(row[heading]) == pytest.approx(_over_seeds(gains, part.level), abs=1.1e-3)
    for of, row in _of_page(f"{name}: leads").items():
        own = areas[called[of]]
        assert float(row[heading]) == pytest.approx(statistics.mean(own.values()), abs=6e-4)
        (lead,) = (cell for column, cell in row.items() if column.endswith(" minus it"))
        (ours,) = (called[c.removesuffix(" minus it")] for c in row if c.endswith(" minus it"))
        gains = [areas[ours][seed] - own[seed] for seed in areas[ours].keys() & own.keys()]
        if called[of] == ours:
            assert lead == ""
        else:
            assert _numbers(lead) == pytest.approx(_over_seeds(gains, part.level), abs=1.1e-3)
        curves_of = [curves[match] for curves in runs[called[of]].values()]
        good = [next((n for n, v in enumerate(c) if v >= 0.7), math.inf) for c in curves_of]
        assert int(row["never"]) == good.count(math.inf)
        last = f"> {len(curves_of[0]) - 1}"
        middle = statistics.median(good)
        assert row["median iterations to 0.7"] == (last if middle == math.inf else f"{middle:g}")
    if name in parts.CONDITIONS:
        (before,) = part.beside
        table = _of_page("when: changes")
        for after, other in itertools.product(part.sweeps, ("GRPO-MR", "GRPO-OR")):
            row = table[after, other]
            old, new = (
                [areas["MT-GRPO", label][seed] - areas[other, label][seed] for seed in range(5)]
                for label in (before, after)
            )
            changes = [late - early for early, late in zip(old, new, strict=True)]
            assert float(row["before"]) == pytest.approx(statistics.mean(old), abs=6e-4)
            assert float(row["after"]) == pytest.approx(statistics.mean(new), abs=6e-4)
            assert _numbers(row["change"]) == pytest.approx(_over_seeds(changes), abs=1.1e-3)


def _numbers(text):
    return [float(number) for number in re.findall(r"[-+][\d.]+", text)]


def _over_seeds(values, level=0.95):
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * error
    return [mean, mean - half, mean + half]


def test_drawing_from_the_recorded_lines_reproduces_the_pages(tmp_path, monkeypatch):
    shutil.copytree(HERE / "lines", tmp_path / "lines")
    for file in (*PAGES, HERE / "pretrained.csv"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(study, "HERE", tmp_path)
    study.draw(tmp_path, parts.PARTS)
    text = "".join(file.read_text() for file in PAGES)
    assert "".join((tmp_path / file.name).read_text() for file in PAGES) == text
    for picture in tmp_path.glob("*.svg"):
        assert re.search(rf"[( ]{re.escape(picture.name)}\b", text)
        old, new = ((folder / picture.name).read_text() for folder in (HERE, tmp_path))
        made_by = re.search(r"Matplotlib v[\d.]+", new)[0]
        assert old == new or made_by not in old, "draw it again"


def test_a_world_that_was_run_with_a_few_of_its_rules_has_a_picture(tmp_path):
    pictures = _module("pictures")
    names = pictures.WORLDS
    every = {
        name: rows.Rows(
            Part({}), {Row(parts.OUTCOMES, ""): {seed: a_run([0.1, 0.2, 0.3]) for seed in (0, 1)}}
        )
        for name in names
    }
    pictures.first_look(every, "dark", tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn.count("GRPO-OR") == 2  # the third has rows of another label
    assert "MT-GRPO" not in drawn


def test_the_table_in_the_recipes_has_the_figures_of_the_pretrained_runs():
    with (HERE / "pretrained.csv").open() as text:
        recorded = {
            (row["estimator"], int(row["seed"]), int(row["iteration"])): row
            for row in csv.DictReader(text)
            if row["rewards"] == "paid calls"
        }
    table = (HERE.parents[1] / "recipes" / "README.md").read_text()
    table = table[table.index("| estimator | | warmed up") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    titles = {
        "exact match": "exact_match",
        "answer found": "answer_in_results",
        "tool execution": "tool_execution",
    }
    for number, line in enumerate(table):
        _, _, title, first, *cells, _ = (cell.strip() for cell in line.split("|"))
        name, column = ("MT-GRPO", "GRPO-OR")[number // 3], titles[title]
        assert first == f"{float(recorded[name, 1, 0][column]):.2f}"
        for iteration, cell in zip((10, 40, 90), cells, strict=True):
            seeds = (float(recorded[name, seed, iteration][column]) for seed in (1, 2, 3))
            assert cell == ", ".join(f"{value:.2f}" for value in seeds)


def test_a_row_that_no_page_shows_and_a_table_that_lost_its_lines_are_reported(
    tmp_path, monkeypatch, capsys
):
    part = Part({"": sweep()})
    runs = [a_run([0.1, 0.5], cell=cell) for _, cell in part.sweeps[""].cells()]
    write(tmp_path, "hot", runs)
    monkeypatch.setattr(study, "HERE", tmp_path)
    file = tmp_path / "index.md"
    file.write_text("<!-- cold: figures -->\n<!-- end -->\n")
    two = {"hot": part, "cold": Part({"": sweep(seeds="9")})}
    assert study.main(["--draw"], two) == 0
    assert (
        "hot has runs, and no page has a table of it. Put <!-- hot: fi" in capsys.readouterr().out
    )
    file.write_text("<!-- hot: figures -->\n<!-- end -->\n")
    assert study.main(["--draw"], two) == 0
    assert (table := file.read_text()).count("\n") == 6
    changed = Part({"": sweep().having("--model.group_size", "8")})
    assert study.main(["--draw"], {"hot": changed}) == 1
    assert "has a table at <!-- hot: figures -->, and no line is left" in capsys.readouterr().err
    assert file.read_text() == table


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(TurnRLError, match=r"no estimator 'MT-GPRO' here\. There are 'MT-GRPO',"):
        sweep(("MT-GPRO",))
    with pytest.raises(TurnRLError, match=r"no estimator 'MT-PPO' here\. There are 'MT-GRPO',"):
        Part({"": sweep()}, pairs=(("MT-GRPO", "MT-PPO"),))
    with pytest.raises(TurnRLError, match=r"no label 'lr 1' here\. There are 'lr 2'"):
        Part({"lr 2": sweep()}, base="lr 1")
    with pytest.raises(TurnRLError, match=r"two rows are called \('MT-GRPO', ''\)"):
        Part({"": sweep()}, {"": sweep(("MT-GRPO",))})


def test_a_part_can_be_run_for_a_few_of_its_seeds(tmp_path, commands, monkeypatch, capsys):
    study_parts = {"one-hop": Part({"": sweep(seeds="0..3")})}
    folder = ["--folder", str(tmp_path / "mine")]
    assert study.main([*folder, "--seeds", "1..2"], study_parts) == 0
    assert commands[0][commands[0].index("--seeds") + 1] == "1..2"
    place = Path(commands[0][commands[0].index("-o") + 1])
    assert place.resolve().parent == tmp_path / "mine" / "runs"
    assert study.main([*folder, "--seeds", "3..5"], study_parts) == 1
    assert "one-hop has the seeds 0..3, and not 4" in capsys.readouterr().err
    monkeypatch.setattr(study, "HERE", tmp_path / "docs" / "study")
    assert study.main(["--seeds", "1"], study_parts) == 0
    place = Path(commands[1][commands[1].index("-o") + 1])
    assert place.resolve().parent == tmp_path / "runs" / "study"  # not among the docs


def test_a_typing_error_is_reported_before_anything_is_trained(
    tmp_path, commands, monkeypatch, capsys
):
    two = {"low": Part({"": sweep(seeds="0..3")}), "high": Part({"": sweep(seeds="8..9")})}
    folder = tmp_path / "mine"
    assert study.main(["--folder", str(folder), "--seeds", "0..1"], two) == 1
    assert "high has the seeds 8..9, and not 0" in capsys.readouterr().err
    assert study.main(["--folder", str(folder), "--draw"], two) == 1
    assert "there is no folder" in capsys.readouterr().err
    for words in (["--jobs", "two"], ["--jobs", "0"], ["--draw", "--seeds", "0"]):
        with pytest.raises(SystemExit):
            study.main(["--folder", str(folder), *words], two)
    errors = capsys.readouterr().err
    assert "two is no number of 1 or more" in errors
    assert "0 is no number of 1 or more" in errors
    assert "--draw trains nothing, and draws all parts" in errors
    assert not folder.exists()
    (file := tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        study.main(["--folder", str(file)], two)
    assert f"--folder {file} is a file" in capsys.readouterr().err
    assert not commands
    monkeypatch.setattr(study, "turnrl", lambda words: TurnRLError.exit_code)
    assert study.main(["low", "--folder", str(folder)], two) == 2
    assert "Where it says -o, give --folder here." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (parts.PARTS["two-hop"].sweeps[""], parts.CONDITIONS["no-search-cost"].sweeps.values()),
        (parts.PARTS["one-hop"].sweeps[""], parts.CONDITIONS["noise"].sweeps.values()),
        (parts.PARTS["one-hop"].sweeps[""], parts.PARTS["longer"].sweeps.values()),
    ],
)
def test_settings_irrelevant_to_an_estimator_leave_its_runs_unchanged(first, others):
    """GRPO-OR sees no turn reward, and no run sees its end. So its runs, trained again, are the
    same."""
    runs = rows.done(HERE, parts.PARTS)

    def curves(sweep):
        cells = sweep.of("GRPO-OR").cells()
        by_seed = {cell.seed: runs.get((cell.digest, cell.seed)) for _, cell in cells}
        shown = ("val/exact_match", "famous/exact_match", "train/tool_execution", "sampled_tokens")
        return {seed: [run.curves[name] for name in shown] for seed, run in by_seed.items() if run}

    (again,) = map(curves, others)
    if not again:
        pytest.skip("not run yet")
    for seed, curve in curves(first).items():
        if seed in again:
            assert curve == [values[: len(curve[0])] for values in again[seed]]


def test_the_short_answers_have_the_figures_of_the_tables():
    one_hop, two_hop = (_of_page(f"{name}: figures") for name in ("one-hop", "two-hop"))
    never = "never reached 0.7"

    def area(part, *pair):
        row = _of_page(f"{part}: differences")[pair]
        return next(value for name, value in row.items() if name.startswith("area to"))

    def unsigned(value):
        return re.sub(r"\+(?=[\d.])", "", value)

    new = " (seeds 8 to 15)"
    split = unsigned(area("split-again", f"MT-GRPO{new}", f"GRPO-MR, apart{new}"))
    paid = unsigned(area("paid-hops-again", f"MT-GRPO{new}", f"GRPO-MR, apart{new}"))
    bare = unsigned(area("split", "MT-GRPO, unscaled", "GRPO-MR, unscaled"))
    cost = " (no search cost)"
    gain = unsigned(area("no-search-cost", f"MT-GRPO{cost}", f"GRPO-OR{cost}"))
    other, small = " (other places only)", " (groups of 4)"
    calm = [
        unsigned(area("temptation", f"MT-GRPO{other}", f"{name}{other}"))
        for name in ("GRPO-OR", "GRPO-MR")
    ]
    tempted = [
        float(area(part, f"MT-GRPO{label}", f"GRPO-OR{label}").split()[0])
        for part, label in (
            ("groups", small),
            ("groups", " (groups of 8)"),
            ("noise", " (1 in 5 rewards wrong)"),
            ("temptation", " (famous places only)"),
            ("updates", " (two updates)"),
            ("updates", " (one update)"),
        )
    ]
    alone = " (famous places only)"
    famous = unsigned(area("temptation", f"MT-GRPO{alone}", f"GRPO-MR{alone}"))
    every = " (all 16 seeds)"
    sixteen = unsigned(area("split-again", f"MT-GRPO{every}", f"GRPO-MR, apart{every}"))
    gained = {
        "GRPO-MR minus GRPO-OR": unsigned(area("one-hop", "GRPO-MR", "GRPO-OR")),
        "GRPO-MR, apart, minus GRPO-MR": unsigned(area("split", "GRPO-MR, apart", "GRPO-MR")),
    }
    labels = _of_page("starters: labels")
    starters = [
        unsigned(next(v for k, v in labels["costs among right", other].items() if "area to" in k))
        for other in ("GRPO-OR", "MT-GRPO")
    ]
    forms = _of_page("outcomes-at-best: figures")
    forms = {name: row for name, row in forms.items() if name.startswith("GRPO-OR")}
    reached = {
        name: next(float(v) for k, v in row.items() if k.startswith("area to"))
        for name, row in forms.items()
    }
    top = max(reached, key=reached.__getitem__)
    assert top == "GRPO-OR (lr 4e-4)"
    best = unsigned(area("outcomes-at-best", "costs among right", top))
    doors = _of_page("horizon: differences")["MT-GRPO (12 doors)", "GRPO-MR, apart (12 doors)"]
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
    assert two_hop["GRPO-OR"][never] == "0"
    long = _of_page("longer: figures")["GRPO-OR (60 iterations)"]
    index, readme = (
        " ".join(file.read_text().split())
        for file in (HERE / "index.md", HERE.parents[1] / "README.md")
    )
    leads = _of_page("one-hop: leads")
    middle = "median iterations to 0.7"
    lines, total = _all_lines(), {}
    for name, cell in parts.PARTS["two-hop"].sweeps[""].cells():
        rewards = lines[cell.digest, cell.seed]["val/reward/total"]
        total.setdefault(name, []).append(next(v for v in reversed(rewards) if v is not None))
    total = {name: statistics.mean(totals) for name, totals in total.items()}
    for sentence in (
        f"**With one hop, the test detects the split:** {split}.",
        f"**Here we detected no difference:** {paid} over the new seeds",
        *(f"{what} | {gained[what]}" for what in gained),
        f"MT-GRPO minus GRPO-MR, apart | {sixteen} over sixteen seeds (eight in",
        f"{sixteen}, and that is the size to quote",
        f"Its area is {gain} larger over five seeds",
        f"areas no longer differ significantly: {calm[0]} over five seeds",
        f"to {calm[0]}. So by area",
        f"Its lead over GRPO-MR is {calm[1]}.",
        f"area is {min(tempted):.2f} to {max(tempted):.2f} above GRPO-OR's in each condition",
        f"by area, {unsigned(area('groups', f'MT-GRPO{small}', f'GRPO-MR{small}'))} and {famous}.",
        f"exact match after {leads['MT-GRPO'][middle]} iterations (the median of eight runs)",
        f"needs {leads['GRPO-MR'][middle]}.",
        "all eight runs unlearn the search. "
        f"{words[int(one_hop['GRPO-OR'][never])].capitalize()} of them do not reach 0.7 within 30 "
        f"iterations, and {words[int(long[never])]} not within 60.",
        f"do not differ, {unsigned(area('two-hop', 'MT-GRPO, unscaled', 'GRPO-OR'))}",
        f"costs included ({total['GRPO-OR']:.3f}), than MT-GRPO ({total['MT-GRPO']:.3f}) and "
        f"GRPO-MR ({total['GRPO-MR']:.3f})",
        f"no visible effect** with one hop, {bare}",
        f"`CostsAmongRight` is {starters[0]} above GRPO-OR and {starters[1]} above MT-GRPO",
        f"with twice the rate, is {best} below `CostsAmongRight`",
        f"With twelve it adds {unsigned(doors['area per iteration'])} by area per iteration",
    ):
        assert sentence in index
    hurt = area("two-hop", "MT-GRPO", "GRPO-OR")  # README says how far it is behind
    less, low, high = (float(number) for number in re.findall(r"[-+][\d.]+", hurt))
    for figure in (
        unsigned(area("one-hop", "MT-GRPO", "GRPO-OR")),
        unsigned(area("one-hop", "MT-GRPO", "GRPO-MR")),
        f"{sixteen} over sixteen seeds",
        f"{-less:.3f} [{-high:.3f}, {-low:.3f}]",
        unsigned(area("harm-two-hop", "costs among right", "GRPO-OR")),
    ):
        assert figure in readme


@pytest.mark.parametrize("name", parts.PARTS)
def test_all_runs_of_a_part_sample_and_learn_as_much(name):
    part = parts.PARTS[name]
    sizes = set()
    for label, swept in part.every():
        for estimator, cell in dict(swept.cells()).items():  # one of its seeds
            recipe = read_invocation("fit", cell.arguments).contents
            model, data, trainer = (recipe[key] for key in ("model", "data", "trainer"))
            attempts = int(model["group_size"]) * int(data["questions_per_iteration"])
            # a trunk of two turns has two branches of two turns, and two of one
            turns = attempts * (8 if estimator in ("Branched", "Tree") else 2)
            steps = int(trainer["max_epochs"]) * model["steps_per_pass"]
            sizes.add((turns, steps, trainer["check_val_every_n_epoch"], data.get("val_limit")))
            updates = 2 if label == "two updates" else 1
            assert int(model.get("passes_per_iteration", 1)) == updates
    (turns, steps, every, limit), *others = sizes
    assert not others
    moves = {"horizon": (64, 3, None), "lake": (256, 5, None)}
    assert (turns, every, limit) == moves.get(name, (512, 1, 256))
    recipes = {Path(swept.recipes[0]).stem for swept in part.sweeps.values()}
    short = "atlas_react" in recipes or "learning-rate.yaml" in str(part.sweeps.values())
    assert (
        steps == {"longer": 60, "cost-of-use": 60, "horizon": 48}.get(name, 20 if short else 30) * 4
    )


def test_every_committed_line_belongs_to_a_run_that_the_study_still_has():
    """A changed recipe would leave lines behind that no command counts as done."""
    for file in (HERE / "lines").glob("*.jsonl"):
        part = parts.PARTS[file.stem]
        known = {(c.digest, c.seed) for swept in part.sweeps.values() for _, c in swept.cells()}
        for line in map(json.loads, file.read_text().splitlines()):
            assert (line["digest"], line["seed"]) in known, file
            assert "/" not in str(line["settings"])  # no path of a machine


def test_no_run_is_trained_by_two_parts_and_every_row_shown_beside_is_trained_by_one():
    trained = [
        (cell.digest, cell.seed)
        for part in parts.PARTS.values()
        for swept in part.sweeps.values()
        for _, cell in swept.cells()
    ]
    assert len(trained) == len({*trained})
    for name, part in parts.PARTS.items():
        for swept in part.beside.values():
            assert {(c.digest, c.seed) for _, c in swept.cells()} <= {*trained}, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label"),
    [(name, label) for name, part in parts.PARTS.items() for label in part.sweeps],
)
def test_every_part_is_a_sweep_that_can_start(name, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.syspath_prepend(HERE)
    swept = parts.PARTS[name].sweeps[label]
    if swept.starter and not (HERE / "starters" / swept.starter).is_dir():
        pytest.skip(f"study.py makes the starter {swept.starter!r} first")
    check([cell for _, cell in swept.cells()], Path("runs"))
