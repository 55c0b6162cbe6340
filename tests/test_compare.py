"""`turnrl compare`: runs on the questions that all of them answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from scipy import stats

import trajectories
from commands import fails
from turnrl import DataError
from turnrl.cli import main
from turnrl.commands.compare import to_text
from turnrl.runs import record
from turnrl.runs.compare import compare, open_sides
from turnrl.runs.statistics import difference_over_seeds, paired_difference
from turnrl.watch import recorder as recording


def row(number, right, **more):
    """An answer to the question of a number: right or not, for a reward of the same weight."""
    columns = {
        **{"iteration": 1, "policy_version": 4, "group": number, "answers": ["yes"]},
        **{"question_id": f"q{number}", "question": f"Number {number}?"},
        **{"answer": "yes" if right else "no", "outcome": 0.3 * right, "f1": None},
        **{"exact_match": float(right), "tool_execution": 0.5 * (number % 3), "format": 1.0},
        "answer_in_results": None if number % 2 else float(right),
        "rewards": [
            {"name": "outcome/right", "value": 0.3 * right},
            {"name": "turn/x", "value": 0.1},
        ],
    }
    return trajectories.row(1 + right, **columns | more)


def saved(place, rows, file="val-000004-0.parquet", **settings):
    """A run's folder with an evaluation, and settings by dotted keys."""
    folder = Path(place)
    recording.write_rows(list(rows), folder / "record" / file)
    config = {"seed_everything": 0, "model.estimator": folder.name.rstrip("0123456789")} | {
        name.replace("__", "."): value for name, value in settings.items()
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text("iteration,step\n1,4\n")
    return str(folder)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


RIGHT = {"a": [1, 1, 0, 0, 1, 0, 0, 0, 0, 1], "b": [1, 1, 1, 1, 0, 1, 0, 0, 1, 1]}


def two(**more):
    return [saved(name, [row(n, r) for n, r in enumerate(RIGHT[name])], **more) for name in "ab"]


# ---------------------------------------------------------------------------------- two runs


def test_every_figure_is_paired_by_question_with_its_interval():
    (comparison,) = compare(open_sides(two()))
    assert comparison.figures["exact_match"] == paired_difference(
        *([float(r) for r in RIGHT[n]] for n in "ab")
    )
    # 4 won and 1 lost: 2 (1 + 5) / 2^5
    assert comparison.figures["exact_match"].p == pytest.approx(0.375)
    sizes = ["turns", "calls", "sampled_tokens"]
    assert list(comparison.figures) == [*record.CURVES, "reward/total", *sizes]
    means = [(comparison.figures[name].first, comparison.figures[name].second) for name in sizes]
    assert means == [(1.4, 1.7), (0, 0), (2.8, 3.4)]
    # only even questions can be found in results
    assert comparison.figures["answer_in_results"].pairs == 5
    total = comparison.figures["reward/total"]
    assert (total.first, total.second) == (pytest.approx(0.22), pytest.approx(0.31))
    assert (total.p, total.gained, total.lost) == (None, 4, 1)
    assert (comparison.won, comparison.lost) == (["q2", "q3", "q5", "q8"], ["q4"])
    assert comparison.asked == (10, 10)


def test_the_output_fits_into_80_columns(capsys):
    assert main(["compare", *two()]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "val: 10 questions in common, 100% of 10 and 100% of 10" in lines
    assert "   model.estimator: a -> b" in lines
    place = next(n for n, line in enumerate(lines) if line.startswith("exact_match  "))
    a, b = (line.split() for line in lines[place : place + 2])
    low, high = stats.binomtest(4, 10).proportion_ci(method="wilson")
    assert a == ["exact_match", "A", "0.400", f"[{low:.3f},", f"{high:.3f}]"]
    assert (b[:2], b[4], b[-1]) == (["B", "0.700"], "+0.300", "0.375")
    assert "exact_match: no significant difference: the interval includes 0." in lines
    place = lines.index("  Number 4?")
    assert lines[place + 1] == "    accepted  yes"
    assert lines[place + 2].split() == ["A", "yes"]
    assert lines[place + 3].split() == ["B", "no"]
    assert "    and 1 more: --all" in lines
    assert main(["compare", "a", "b", "--all"]) == 0
    every = capsys.readouterr().out
    assert all(f"  Number {n}?" in every for n in (2, 3, 4, 5, 8))
    assert "--all" not in every


def test_json_output_has_one_object_per_comparison(capsys):
    a, b = two()
    c = saved("c", [row(n, True) for n in range(10)])
    assert main(["compare", a, b, c, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["second"] == [{"run": "b", "folder": "b", "iteration": 1}]
    assert (first["questions"], first["won"]) == (10, ["q2", "q3", "q5", "q8"])
    assert first["lost"] == ["q4"]
    assert second["figures"]["exact_match"]["second"] == 1
    assert second["figures"]["exact_match"]["p"] == pytest.approx(2 / 2**6)


def test_several_attempts_at_a_question_are_averaged_first():
    first = [row(n, r, member=m) for n in range(4) for m, r in enumerate((1, 0, 0, 0))]
    second = [row(n, r, member=m) for n in range(4) for m, r in enumerate((1, 1, 0, n % 2))]
    (comparison,) = compare(open_sides([saved("a", first), saved("b", second)]))
    wanted = paired_difference([0.25] * 4, [0.5, 0.75, 0.5, 0.75])
    assert comparison.figures["exact_match"] == wanted
    assert wanted.p is None
    # 0.3 if right, and 0.1 always: of all attempts, and not of the first
    total = comparison.figures["reward/total"]
    assert total.first == pytest.approx(0.25 * 0.3 + 0.1)
    assert total.second == pytest.approx(0.625 * 0.3 + 0.1)
    lines = list(to_text(comparison, "val"))
    place = lines.index("  Number 1?")
    assert " ".join(lines[place + 2].split()) == "A exact_match 0.250"
    assert " ".join(lines[place + 3].split()) == "B exact_match 0.750"


def test_no_text_of_a_run_can_control_the_terminal():
    hostile = "\x1b[2J\u202eNumber\n\r\x07?" + "x" * 200
    rows = [[row(1, r, question=hostile, answer=hostile, answers=[hostile])] for r in (0, 1)]
    (comparison,) = compare(open_sides([saved(n, r) for n, r in zip("ab", rows, strict=True)]))
    lines = list(to_text(comparison, "val"))
    assert all(
        line.isprintable() and len(line) <= 80 for part in lines for line in part.split("\n")
    )
    assert any("Number" in line for line in lines)


# ------------------------------------------------------------------------ policies of one run


def policies(place="a"):
    for iteration in (0, 10, 20):
        rows = [
            row(n, n < iteration / 4, iteration=iteration, policy_version=4 * iteration)
            for n in range(6)
        ]
        saved(place, rows, f"val-{4 * iteration:06d}-0.parquet")
    return place


def test_two_policies_of_one_run_are_compared():
    policies()
    (comparison,) = compare(open_sides(["a@0", "a"]))
    assert [side.name for side in (comparison.first, comparison.second)] == ["a@0", "a@20"]
    assert (comparison.figures["exact_match"].gained, comparison.figures["exact_match"].pairs) == (
        5,
        6,
    )


def test_the_newest_of_two_evaluations_in_one_iteration_is_used():
    for version, right in ((10, 0), (12, 1)):
        for rank in (0, 1):
            rows = [row(n, right, iteration=3, policy_version=version) for n in range(rank, 6, 2)]
            saved("a", rows, f"val-{version:06d}-{rank}.parquet")
    saved("b", [row(n, 0) for n in range(6)])
    for place in ("a", "a@3"):
        (comparison,) = compare(open_sides([place, "b"]))
        # no average of the two, as of attempts
        assert (comparison.figures["exact_match"].first, comparison.first.one.iteration) == (1, 3)
        assert {len(rows) for rows in comparison.first.one.questions.values()} == {1}
        assert len(comparison.questions) == 6  # of both processes


def test_the_last_iteration_is_compared_unless_another_is_named():
    policies()
    saved("b", [row(n, 1, iteration=10) for n in range(6)])
    (comparison,) = compare(open_sides(["a", "b"]))
    assert [comparison.first.one.iteration, comparison.second.one.iteration] == [20, 10]
    assert comparison.notes == [
        "the iterations differ (20, 10). To compare at one iteration, add --iteration N."
    ]
    (comparison,) = compare(open_sides(["a", "b"], iteration=10))
    assert [comparison.first.one.iteration, comparison.second.one.iteration] == [10, 10]
    assert comparison.notes == []
    with pytest.raises(
        DataError, match=r"a has no evaluation of 'val' after iteration 7.*these: 0, 10, 20"
    ):
        open_sides(["a@7", "b"])


# ----------------------------------------------------------------------------------- several seeds


def seeds(name, rights, first=0, **more):
    rows = [[row(i, r) for i, r in enumerate(right)] for right in rights]
    seed = "seed_everything"
    return [saved(f"{name}{n}", r, **{seed: first + n}, **more) for n, r in enumerate(rows)]


SEEDS = {
    "a": [[1, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 1, 1]],
    "b": [[1, 1, 0, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
}


def test_runs_that_differ_only_by_seed_form_one_side_with_an_interval_over_seeds(capsys):
    places = [*seeds("a", SEEDS["a"]), *seeds("b", SEEDS["b"])]
    (comparison,) = compare(open_sides(places))
    assert comparison.figures["exact_match"] == difference_over_seeds(
        [0.4, 0.2, 0.6], [0.8, 0.4, 1.0]
    )
    # question 0 is right in 2 and 3 of the seeds; 4 in all
    assert (comparison.won, comparison.lost) == (["q0", "q1", "q2", "q3"], [])
    assert main(["compare", *places]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Student's t over 3 seeds" in printed
    assert "model.estimator: a -> b" in printed
    # a seed in which the question was won: for question 0 the second
    assert "Number 0? accepted yes A no B yes" in printed
    assert "format A 1.000 all alike B 1.000 all alike +0.000 all alike" in printed


def test_evaluations_of_the_checkpoints_of_several_seeds_are_compared_over_seeds():
    places = []
    for name in "ab":
        for n, right in enumerate(SEEDS[name]):
            path = f"runs/{name}/version_{n}/checkpoints/best.ckpt"
            settings = {"command": "eval", "ckpt_path": path, "seed_everything": n}
            rows = [row(i, r) for i, r in enumerate(right)]
            places.append(saved(f"{name}{n}", rows, **settings))
    (comparison,) = compare(open_sides(places))
    assert comparison.figures["exact_match"] == difference_over_seeds(
        [0.4, 0.2, 0.6], [0.8, 0.4, 1.0]
    )
    assert "undecided" not in comparison.figures["exact_match"].verdict


def test_runs_are_paired_by_seed_and_unpaired_runs_are_named():
    a = seeds("a", SEEDS["a"])
    b = seeds("b", SEEDS["b"][::-1], first=1)  # seeds 1, 2, 3
    (comparison,) = compare(open_sides([*a, *b]))
    assert comparison.figures["exact_match"] == difference_over_seeds([0.2, 0.6], [1.0, 0.4])
    assert comparison.notes == [
        "a0 is left out: the other side has no run of its seed.",
        "b2 is left out: the other side has no run of its seed.",
    ]
    with pytest.raises(DataError, match=r"no seed in common.*Name runs of the same seeds"):
        compare(open_sides([*a, *seeds("c", SEEDS["b"], first=7)]))


def test_two_seeds_of_one_recipe_are_compared_with_each_other():
    (comparison,) = compare(open_sides(seeds("a", SEEDS["a"][:2])))
    assert (comparison.first.name, comparison.second.name) == ("a0", "a1")
    assert comparison.figures["exact_match"].pairs == 5


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([row(n, 1) for n in range(20, 30)], {}, "a and other have no question in common"),
        ([row(3, 1, question="Which?")], {}, "differ in the question of .*q3: 'Number 3[?]'"),
        ([row(3, 1, answers=["yes", "ja"])], {}, r"differ in the answers .*\['yes', 'ja'\]"),
        ([row(3, 1)], {"data__answers": "number"}, "by two rules"),
    ],
)
def test_runs_on_different_questions_are_refused_with_the_difference(rows, settings, message):
    a, _ = two()
    sides = open_sides([a, saved("other", rows, **settings)])
    with pytest.raises(DataError, match=f"{message}.*turnrl eval RECIPE --ckpt_path RUN"):
        compare(sides)


def test_questions_that_only_one_run_answered_are_left_out_and_counted(capsys):
    a, _ = two()
    b = saved("b", [row(n, 1) for n in range(5, 30)])
    assert main(["compare", a, b]) == 0
    assert "val: 5 questions in common, 50% of 10 and 20% of 25" in capsys.readouterr().out


def test_a_figure_that_only_one_run_has_is_left_out():
    other = [{"name": "outcome/other", "value": 0.5}, {"name": "turn/x", "value": 0.1}]
    a, b = saved("a", [row(0, 1, f1=0.5)]), saved("b", [row(0, 1, rewards=other)])
    (comparison,) = compare(open_sides([a, b]))
    shown = [*record.CURVES, "turns", "calls", "sampled_tokens"]
    assert list(comparison.figures) == shown
    assert comparison.notes == ["reward/total is left out: the rewards of the runs differ."]
    both = [saved(n, [row(1, 1, f1=0.5)]) for n in "ab"]
    (comparison,) = compare(open_sides(both))
    assert comparison.figures["f1"].first == 0.5
    assert comparison.notes == ["answer_in_results is left out: no question in common has it."]
    weights = [saved(n, [row(0, 1)], model__rewards=[w]) for n, w in (("a", 1), ("b", 2))]
    (comparison,) = compare(open_sides(weights))
    assert "reward/total" not in comparison.figures


# -------------------------------------------------------------------------------------- bad input


def test_a_word_that_names_no_run_is_refused_with_the_next_step(capsys):
    a, b = two()
    assert "there is one evaluation. Name two" in fails(capsys, ["compare", a])
    message = fails(capsys, ["compare", a, b, "a@1"])
    assert "'a' and 'a@1' both mean a after iteration 1" in message
    assert "no record of a run at 'nowhere'" in fails(capsys, ["compare", a, "nowhere"])
    assert "has no split 'test'. Take val." in fails(capsys, ["compare", a, b, "--split", "test"])


def test_the_name_of_a_run_may_look_like_an_iteration(capsys):
    saved("runs/mine@0/version_0", [row(0, 1)])
    saved("runs/mine@0/version_1", [row(0, 0)])
    (first, other) = open_sides(["mine@0", "runs/mine@0/version_0@1"])
    assert [side.one.run.folder.name for side in (first, other)] == ["version_1", "version_0"]


def test_a_run_without_its_settings_is_compared_and_says_so(capsys):
    a, b = two()
    Path(b, "config.yaml").unlink()
    assert main(["compare", a, b]) == 0
    assert "b: no config.yaml: its settings are not known" in capsys.readouterr().out


def test_each_run_after_the_baseline_has_its_own_letter(capsys):
    policies()
    assert main(["compare", "a@0", "a@10", "a@20"]) == 0
    first, second = capsys.readouterr().out.split("\n\nval: ")
    assert "A  a@0, iteration 0, the baseline\nB  a@10, iteration 10\n" in first
    assert "A  a@0, iteration 0, the baseline\nC  a@20, iteration 20\n" in second
    assert "exact_match: C is better than A." in second
    assert "won by C in exact match: 5" in second
    assert "\n    C  " in second
    assert not re.search(r"\bB\b", second)
