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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from turnrl import Group, Policy, Question, Reading, ToolCall, ToolResult, Trajectory, Turn
from turnrl.commands.sweep.matrix import check
from turnrl.types import RewardComponent
from turnrl_atlas import Atlas, AtlasTwoHop, load_places
from turnrl_rewards.qa import AnswerRetrieved

HERE = Path(__file__).parents[1] / "docs" / "does-turn-credit-help"


def _module(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        return importlib.import_module(name)


atlas_starter = _module("atlas_starter")
parts, measures, rows, page, study = map(_module, ("parts", "measures", "rows", "page", "study"))


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


def test_the_split_leaves_out_the_noise_of_earlier_doors():
    """By hand, without outcomes: a turn's advantage has the variance of the rewards that it holds,
    K without the split, and K - k + 1 with it."""
    horizon = _module("horizon")
    doors, right, size, groups = 2, 0.3, 8, 3000

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


def test_demonstrations_name_no_held_out_place():
    # whole titles: "Guinea" is in "Guinea-Bissau"
    held_out = {place.name for place in load_places() if place.split != "train"}
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
    shipped = Policy("package://turnrl_atlas/starter").build().tokenizer
    assert training.chat.tokenizer.get_vocab() == shipped.get_vocab()
    batches = atlas_starter.Batches(atlas_starter.phases_with())
    assert len(batches) == 3700
    rows = [training.rows(batches[number]) for number in (0, 2200, 2600, 3100, 3699)]
    # of the training that made the shipped policy, checked to the last byte of its weights
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "1c20a9661c74bb17"


PAGES = [HERE / "index.md", HERE / "more.md", HERE / "tables.md"]


def _of_page(name):
    text = "\n".join(file.read_text() for file in PAGES)
    table = text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]
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
    ends = [c["sampled_tokens"][-1] for by_seed in runs.values() for c in by_seed.values()]
    if part.world is not None:  # the world has more iterations than some parts
        world = [lines.get((c.digest, c.seed)) for _, c in part.world.cells()]
        shortest = min(curves["sampled_tokens"][-1] for curves in world if curves)
        ends.append(shortest)
    end, match = min(ends), part.measure.curve
    areas = {
        row: {seed: _naive_area(c["sampled_tokens"], c[match], end) for seed, c in by_seed.items()}
        for row, by_seed in runs.items()
    }
    called = {name + f" ({label})" * bool(label): (name, label) for name, label in runs}
    heading = f"area to {end:,.0f} tokens"
    for of, row in _of_page(f"{name}: figures").items():
        by_seed = areas[called[of]]
        assert int(row["seeds"]) == len(by_seed)
        assert float(row[heading]) == pytest.approx(statistics.mean(by_seed.values()), abs=6e-4)
    for pair, row in _of_page(f"{name}: differences").items():
        ours, others = (areas[called[label]] for label in pair)
        gains = [ours[seed] - others[seed] for seed in ours.keys() & others.keys()]
        assert _numbers(row[heading]) == pytest.approx(_over_seeds(gains, part.level), abs=1.1e-3)


def _numbers(text):
    return [float(number) for number in re.findall(r"[-+][\d.]+", text)]


def _over_seeds(values, level=0.95):
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * error
    return [mean, mean - half, mean + half]


@pytest.mark.slow
def test_drawing_from_the_recorded_lines_reproduces_the_pages(tmp_path):
    shutil.copytree(HERE / "lines", tmp_path / "lines")
    for file in PAGES:
        shutil.copy(file, tmp_path)
    study.draw(tmp_path, parts.PARTS)
    text = "".join(file.read_text() for file in PAGES)
    assert "".join((tmp_path / file.name).read_text() for file in PAGES) == text
    for picture in tmp_path.glob("*.svg"):
        assert re.search(rf"[( ]{re.escape(picture.name)}\b", text)
        old, new = ((folder / picture.name).read_text() for folder in (HERE, tmp_path))
        made_by = re.search(r"Matplotlib v[\d.]+", new)[0]
        assert old == new or made_by not in old, "draw it again"


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


def test_every_committed_line_belongs_to_a_run_that_the_study_still_has():
    """A changed recipe would leave lines behind that no command counts as done."""
    for file in (HERE / "lines").glob("*.jsonl"):
        part = parts.PARTS[file.stem]
        known = {(c.digest, c.seed) for swept in part.sweeps.values() for _, c in swept.cells()}
        for line in map(json.loads, file.read_text().splitlines()):
            assert (line["digest"], line["seed"]) in known, file
            assert "/" not in str(line["settings"])  # no path of a machine


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
