"""Metrics of what turn rewards pay to attempts that act, and to the others."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

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
from turnrl.credit.earnings import ENOUGH, tally_earnings
from turnrl.rewards.scoring import Tally, score_group
from turnrl_estimators import CostsAmongRight, Tree
from turnrl_rewards import SearchCost

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
    tallies = tally_earnings(groups, charged=True)
    assert tallies["rollout/acted"] == Tally(20, 30)
    # 4 of 10 groups find something
    assert tallies["reward/acted"] == Tally(pytest.approx(8 * 0.5 - 20 * 0.1), 20)
    assert tallies["reward/idle"] == Tally(0.0, 10)
    # groups of one size: the error of the mean over groups
    means = [0.4 if k % 3 == 0 else -0.1 for k in range(10)]
    error = statistics.stdev(means) / math.sqrt(10)
    assert tallies["reward/acting_error"] == Tally(pytest.approx(error), 1)
    four = tally_earnings(groups, charged=True, processes=4)
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
    error = tally_earnings(groups, charged=True)["reward/acting_error"]
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
    tallies = tally_earnings(groups, charged)
    assert tallies["reward/acting_error"].count == 0
    assert tallies.keys() == tally_earnings(many(10), True).keys()  # processes add them up


def test_an_outcome_that_costs_is_not_a_cost_of_a_turn():
    class Fine(OutcomeReward):
        is_cost = True

        def score(self, trajectory):
            return -0.1

    groups = many(10, [Finds(), Fine()])
    assert tally_earnings(groups, True)["reward/acting_error"].count == 0


def test_branches_are_left_out():
    whole = attempt("Paris", FOUND)
    with_branch = score_group([whole, attempt("Rome"), attempt("Rome", FOUND, begins=1)], [Finds()])
    with_branch = replace(with_branch, parents=(0, 1, 0))
    assert tally_earnings([with_branch])["rollout/acted"] == Tally(1, 2)


def test_estimators_say_whether_they_charge_costs_to_every_attempt():
    assert TurnLevel().charges_costs
    assert Merged().charges_costs
    assert Tree(probes=1).charges_costs
    assert AdvantageEstimator.charges_costs
    assert not TurnLevel(turn_coef=0.0).charges_costs
    assert not OutcomeOnly().charges_costs
    assert not CostsAmongRight().charges_costs
