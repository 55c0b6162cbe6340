"""Earnings: what turn rewards pay to attempts that act and to the others, in lines and metrics."""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import replace

import pytest

from runs import Printed, data, make_module, trainer
from trajectories import sampled_turn, trajectory
from turnrl import (
    AdvantageEstimator,
    Merged,
    OutcomeOnly,
    OutcomeReward,
    Question,
    Reading,
    ToolCall,
    ToolResult,
    TurnLevel,
    TurnReward,
)
from turnrl.credit.earnings import ENOUGH, earning_tallies, earnings
from turnrl.rewards.scoring import Tally, score_group
from turnrl.runs import record
from turnrl.watch import recorder as recording
from turnrl_estimators import CostsAmongRight, Tree
from turnrl_rewards import Repetition, SearchCost
from worlds import Answered

FOUND, MISSED, FAILED = ToolResult("Paris"), ToolResult("Rome"), ToolResult("no", ok=False)


class Finds(TurnReward):
    """0.5 for a turn that finds Paris."""

    def score(self, trajectory, turn):
        return 0.5 * any(result.content == "Paris" for result in trajectory.turns[turn].results)


class Says(OutcomeReward):
    """1 for the answer Paris."""

    def score(self, trajectory):
        return float(trajectory.answer == "Paris")


PAID = (Finds(), SearchCost(), Says())


def attempt(answer, *results, question="q", begins=0):
    """An attempt that calls once a turn, and answers."""
    call = Reading((ToolCall("search", {"query": "capital"}),))
    turns = [sampled_turn("", (7,), (-0.5,), call, [result]) for result in results]
    turns.append(sampled_turn("", (8,), (-0.5,), Reading(answer=answer)))
    asked = Question(question, f"The capital {question}?", ("Paris",))
    return trajectory(asked, (1,), turns, "answer", begins)


def group(*attempts, rewards=PAID):
    return score_group(attempts, rewards)


FIVE = group(
    attempt("Paris", FOUND),
    attempt("Rome", MISSED),
    attempt("Rome", FAILED, FOUND),
    attempt("Rome"),
    attempt("Paris"),
)


def test_turn_rewards_are_compared_between_attempts_that_act_and_the_others():
    earned = earnings([FIVE] * 7)
    finds, cost = earned.parts
    assert (earned.acted, earned.attempts, earned.paid) == (21, 35, 14)
    # calls cost 0.1, 0.1, and 0.1 + 0.2 for two; what failed is a call too
    assert earned.cost == pytest.approx(0.5 / 3)
    assert earned.pays == 0.5
    assert (finds.name, finds.acted, finds.idle) == ("turn/finds", pytest.approx(1 / 3), 0)
    assert (cost.acted, cost.idle) == (pytest.approx(-0.5 / 3), 0)
    assert str(finds) == "turn/finds pays 0.333 with a call, 0.000 without"
    assert earned.lines == [str(finds), str(cost), earned.verdict]
    assert earned.verdict == (
        "an attempt that calls loses 0.17 to costs on average, and a paid attempt gains 0.5, "
        "so calls pay off if 1 attempt in 3 is paid: here 14 of 21 were"
    )


def test_a_cost_that_pays_is_reported():
    class Wrong(TurnReward):
        is_cost = True

        def score(self, trajectory, turn):
            return 0.1 * len(trajectory.turns[turn].reading.calls)

    *_, warning = earnings([group(attempt("Paris", FOUND), rewards=[Wrong(), Says()])]).lines
    assert warning.startswith("turn/wrong is marked as a cost and pays attempts that call: return")


def test_the_verdict_names_how_many_have_to_be_paid():
    earned = earnings([group(attempt("Rome", MISSED), attempt("Rome"))])
    assert (earned.paid, earned.pays) == (0, None)
    assert earned.verdict.endswith("and none was paid by another turn reward yet")
    dear = earnings([group(attempt("Rome", FOUND), rewards=[Finds(), SearchCost(0.6)])])
    assert dear.verdict.endswith("so calls never pay off")
    close = earnings([group(attempt("Rome", FOUND), rewards=[Finds(), SearchCost(0.49)])])
    assert "if every attempt is paid" in close.verdict


def test_a_recorded_group_gives_the_same_verdict_as_the_run(tmp_path):
    scored = group(attempt("Rome", MISSED), attempt("Rome"))
    rows = [*recording.rows([scored], [None], "train", 0, 0)]
    assert earnings([record.group(rows)]).verdict == earnings([scored]).verdict


def test_there_are_no_lines_without_costs():
    assert earnings([group(attempt("Rome", FOUND), rewards=[Finds(), Says()])]).lines == []
    assert earnings([]).lines == []
    # Repetition is a cost, but no call was repeated
    assert earnings([group(attempt("Rome", FOUND), rewards=[Repetition(), Says()])]).lines == []


def many(questions, rewards=PAID):
    """Groups of two attempts that call, and one that does not. Every third finds something."""
    return [
        group(
            *(attempt("Rome", (MISSED, FOUND)[k % 3 == 0], question=f"{k}") for _ in range(2)),
            attempt("Paris", question=f"{k}"),
            rewards=rewards,
        )
        for k in range(questions)
    ]


def test_an_iteration_logs_acting_and_idle_earnings_and_the_error_of_the_difference():
    groups = many(ENOUGH // 2)
    tallies = earning_tallies(groups, charged=True)
    assert tallies["rollout/acted"] == Tally(20, 30)
    # 4 of 10 groups find something
    assert tallies["reward/acted"] == Tally(pytest.approx(8 * 0.5 - 20 * 0.1), 20)
    assert tallies["reward/idle"] == Tally(0.0, 10)
    # groups of one size: the error of the mean over groups
    means = [0.4 if k % 3 == 0 else -0.1 for k in range(10)]
    error = statistics.stdev(means) / math.sqrt(10)
    assert tallies["reward/acting_error"] == Tally(pytest.approx(error), 1)
    four = earning_tallies(groups, charged=True, processes=4)
    assert four["reward/acting_error"] == Tally(pytest.approx(error / 2), 1)


def test_the_error_includes_idle_earnings_and_groups_of_any_size():
    class Waits(TurnReward):
        """Pays for a turn without a call, by its question."""

        def score(self, trajectory, turn):
            calls = any(turn.reading.calls for turn in trajectory.turns)
            return 0.0 if calls else int(trajectory.question.id) % 4 / 10

    rewards = [Finds(), Waits(), SearchCost(), Says()]
    groups = []
    for k in range(12):
        asked = {"question": f"{k}"}
        acting = [attempt("Rome", (MISSED, FOUND)[k % 3 == 0], **asked) for _ in range(1 + k % 3)]
        others = [attempt("Paris", **asked) for _ in range(1 + k % 2)]
        groups.append(group(*acting, *others, rewards=rewards))
    paid = [scored.turn_rewards.sum(1).tolist() for scored in groups]
    sides = [[attempts[: 1 + k % 3], attempts[1 + k % 3 :]] for k, attempts in enumerate(paid)]
    counts = [sum(len(side[n]) for side in sides) for n in (0, 1)]
    means = [sum(sum(side[n]) for side in sides) / counts[n] for n in (0, 1)]
    # how far the difference of both means moves with each group
    moves = [
        sum(value - means[0] for value in acted) / counts[0]
        - sum(value - means[1] for value in idle) / counts[1]
        for acted, idle in sides
    ]
    expected = math.sqrt(12 / 11 * sum(move**2 for move in moves))
    error = earning_tallies(groups, charged=True)["reward/acting_error"]
    assert error == Tally(pytest.approx(expected, rel=1e-5), 1)


@pytest.mark.parametrize(
    ("groups", "charged"),
    [
        (many(10), False),
        (many(9), True),
        (many(10, [Finds(), Says()]), True),
        ([group(*[attempt("Rome", MISSED)] * 30, attempt("Rome"))], True),
        ([], True),
    ],
    ids=["not charged", "too few", "no cost", "one group", "none"],
)
def test_there_is_no_error_without_costs_or_with_too_few_groups(groups, charged):
    tallies = earning_tallies(groups, charged)
    assert tallies["reward/acting_error"].count == 0
    assert tallies.keys() == earning_tallies(many(10), True).keys()  # processes add them up


def test_an_outcome_that_costs_is_not_a_cost_of_a_turn():
    class Fine(OutcomeReward):
        is_cost = True

        def score(self, trajectory):
            return -0.1

    groups = many(10, [Finds(), Fine()])
    assert earning_tallies(groups, True)["reward/acting_error"].count == 0
    assert earnings(groups).lines == []


def test_branches_are_left_out():
    whole = attempt("Paris", FOUND)
    with_branch = score_group([whole, attempt("Rome"), attempt("Rome", FOUND, begins=1)], [Finds()])
    with_branch = replace(with_branch, parents=(0, 1, 0))
    assert earning_tallies([with_branch])["rollout/acted"] == Tally(1, 2)
    assert earnings([with_branch]).attempts == 2


def test_estimators_say_whether_they_charge_costs_to_every_attempt():
    assert TurnLevel().charges_costs
    assert Merged().charges_costs
    assert Tree(probes=1).charges_costs
    assert AdvantageEstimator.charges_costs
    assert not TurnLevel(turn_coef=0.0).charges_costs
    assert not OutcomeOnly().charges_costs
    assert not CostsAmongRight().charges_costs


# ---------------------------------------------------------------------------------- in a run


def earning(tiny_model, folder, *bars, epochs=1):
    """A run in which searches cost, and no other reward pays turns."""
    module = make_module(tiny_model)
    module.rewards = [SearchCost(), Answered()]
    run = trainer(folder, epochs, bars, enable_progress_bar=bool(bars), limit_val_batches=0)
    run.fit(module, data())


def test_a_run_says_once_whether_calls_pay_off(tiny_model, tmp_path, caplog):
    bar = Printed()
    earning(tiny_model, tmp_path / "bar", bar, epochs=2)
    pay, verdict = (line for line in bar.lines if " pays " in line or " to costs " in line)
    assert pay.startswith("turn/search_cost pays")
    assert verdict.endswith("to costs on average, and none was paid by another turn reward yet")
    with caplog.at_level(logging.INFO, "turnrl"):
        earning(tiny_model, tmp_path / "no bar")
    (logged,) = [r for r in caplog.records if "to costs on average" in r.getMessage()]
    assert logged.levelno == logging.INFO
