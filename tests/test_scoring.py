"""Scoring: rewards on trajectories, credit on groups, and the four curves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trajectories import Calls, attempt, turn
from turnrl import (
    AdvantageEstimator,
    DataError,
    OutcomeOnly,
    OutcomeReward,
    Question,
    ToolResult,
    TurnLevel,
    TurnReward,
)
from turnrl.credit.estimators import assign_credit
from turnrl.plugin.errors import ArgumentTypeError, PluginError
from turnrl.rewards.scoring import (
    Tally,
    compute_curves,
    score_group,
    tally_groups,
)
from turnrl.training.experience import Collected, Experience

GOOD, BAD = ToolResult("Paris is large."), ToolResult("no index Paris", ok=False)
SEARCHED = attempt(turn(1, [GOOD]), turn(answer="Paris"), stop="answer")
GUESSED = attempt(turn(answer="Rome"), stop="answer")
FAILED = attempt(turn(1, [BAD]), turn(error="no answer"))


class Answers(OutcomeReward):
    """1 for an answer."""

    name = "says"

    def score(self, trajectory):
        return float(trajectory.answer is not None)


def test_rewards_of_a_kind_are_summed_and_kept_apart_by_component():
    group = score_group([SEARCHED, GUESSED, FAILED], [Calls(), Calls(), Answers()], 3)
    # Calls twice: turn 0 with a call 0.2, without 0; turn 1 without a call 2
    expected = torch.tensor([[0.2, 2, 0], [0, 0, 0], [0.2, 2, 0]])
    assert torch.allclose(group.turn_rewards, expected)
    assert group.outcome.tolist() == [1, 1, 0]
    assert group.reached.tolist() == [
        [True, True, False],
        [True, False, False],
        [True, True, False],
    ]
    assert torch.allclose(group.totals, torch.tensor([3.2, 1, 2.2]))
    assert {name: part.values.tolist() for name, part in group.components.items()} == {
        "turn/calls": [[0.2, 2, 0], [0, 0, 0], [0.2, 2, 0]],
        "outcome/says": [1, 1, 0],
    }
    totals = {name: part.tolist() for name, part in group.component_totals.items()}
    assert totals == {"turn/calls": [2.2, 0, 2.2], "outcome/says": [1, 1, 0]}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), None, "1", pytest.param(10**400, id="10**400")]
)
def test_a_reward_that_is_not_a_finite_number_is_the_plugins_fault(value):
    class Odd(OutcomeReward):
        def score(self, trajectory):
            return value

    with pytest.raises(PluginError, match=r"reward Odd on question 'q' gave .*not a finite number"):
        score_group([GUESSED], [Odd()], 2)


def test_a_reward_that_is_too_large_is_said_to_be_too_large():
    for value, written in [(1e12, r"1e\+12"), (-(10**10), r"-1e\+10")]:
        reward = type("Huge", (OutcomeReward,), {"score": lambda self, _, value=value: value})()
        message = rf"Huge on question 'q' gave {written} .* from -1e\+09 to 1e\+09\. Divide it"
        with pytest.raises(PluginError, match=message):
            score_group([GUESSED], [reward], 2)


def test_a_reward_that_raises_is_the_plugins_fault():
    class Raises(TurnReward):
        def score(self, trajectory, turn):
            return 1 / turn

    with pytest.raises(PluginError, match=r"reward Raises on question 'q' raised ZeroDivision"):
        score_group([SEARCHED], [Raises()], 2)


def test_an_estimator_that_breaks_its_contract_is_the_plugins_fault():
    group = score_group([SEARCHED, GUESSED], [Calls()], 2)

    class Gives(AdvantageEstimator):
        def __init__(self, value):
            self.value = value

        def __call__(self, group):
            return self.value

    with pytest.raises(
        PluginError, match=r"Gives on a group of 2 with 2 turns gave .*\(3,\), \(3,\)"
    ):
        assign_credit(group, Gives(torch.zeros(2, 3)))
    with pytest.raises(PluginError, match=r"\(finite: False\)"):
        assign_credit(group, Gives(torch.full((2, 2), math.nan)))
    with pytest.raises(
        PluginError, match=r"^Gives on a group of 2 with 2 turns gave None\. Return a"
    ):
        assign_credit(group, Gives(None))


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        # exact_match, tool_execution, answer_in_results, format
        (SEARCHED, (1, 1, 1, 1)),
        (GUESSED, (0, 0, 0, 1)),
        # the answer stands in an error only; the last turn did not answer
        (FAILED, (0, 0, 0, 0)),
        # two calls, one of which worked
        (attempt(turn(2, [GOOD, BAD]), turn(answer=" the PARIS.")), (1, 0.5, 1, 1)),
        # one turn without form
        (attempt(turn(error="?"), turn(answer="Paris")), (1, 0, 0, 0)),
        # two calls answered, and two of the last turn, which nothing ran
        (attempt(turn(2, [GOOD, GOOD]), turn(2)), (0, 0.5, 1, 0)),
        # a call that was cut, so that it was never run
        (attempt(turn(1), stop="length"), (0, 0, 0, 0)),
    ],
)
def test_the_four_curves_of_a_trajectory(whole, expected):
    assert tuple(compute_curves(whole).values()) == expected
    assert [*compute_curves(whole)] == [
        "exact_match",
        "tool_execution",
        "answer_in_results",
        "format",
    ]


def test_a_collection_is_watched_by_sums_over_its_trajectories():
    rewards = [Calls(), Answers()]
    groups = (
        score_group([SEARCHED, GUESSED, FAILED], rewards, 2),
        score_group([GUESSED] * 3, rewards, 2),
    )
    experience = Experience(
        Collected(
            groups=groups, seconds=1.0, scoring_seconds=3.0, sampled=0, probe_tokens=0, restarted=2
        ),
        tuple(assign_credit(g, TurnLevel()) for g in groups),
    )
    figures = tally_groups(groups, rewards)
    assert {name: figure.total for name, figure in figures.items()} == {
        "exact_match": 1,
        "tool_execution": 1,
        "answer_in_results": 1,
        "format": 5,
        "findable": 6,
        # 0.1 + 1, and the same of the failed one
        "reward/turn/calls": pytest.approx(2.2),
        "reward/outcome/says": 5,
        "reward/turn": pytest.approx(2.2),
        "reward/outcome": 5,
        "reward/total": pytest.approx(7.2),
    }
    assert {figure.count for figure in figures.values()} == {6}
    # a process without a question has the same names, as the others wait for its sums
    assert tally_groups([], rewards).keys() == figures.keys()
    tallies = experience.tallies(rewards)
    assert tallies["train/format"] == figures["format"]
    assert tallies["reward/total"] == figures["reward/total"]
    assert tallies["rollout/seconds"] == Tally(1.0, 1)
    assert tallies["rollout/scoring_seconds"] == Tally(3.0, 1)
    assert {k: v.total for k, v in tallies.items() if v.count == 6 and k[:8] == "rollout/"} == {
        "rollout/turns": 2 + 1 + 2 + 3,
        "rollout/histories": 6,
        # prompts of 3, turns of 2
        "rollout/tokens": 6 * 3 + 8 * 2,
        "rollout/sampled_tokens": 8 * 2,
        "rollout/truncated": 0,
        # all three of the second group, in which all are alike
        "rollout/degenerate_groups": 3,
        "rollout/probe_tokens": 0,
        "rollout/redrawn_groups": 0,
        "rollout/restarted": 2,
    }
    assert tallies["train/degenerate_groups"] == tallies["rollout/degenerate_groups"]


def test_behavior_metrics_use_the_first_draw_and_learning_metrics_the_last():
    rewards, sampled = [Calls(), Answers()], [SEARCHED, GUESSED, FAILED]
    draws = [[[GUESSED] * 3, sampled], [[FAILED] * 3], [[SEARCHED, SEARCHED, FAILED]]]
    first, second, third = (
        Experience(
            Collected(
                groups=groups,
                seconds=1.0,
                scoring_seconds=3.0,
                sampled=10,
                probe_tokens=2,
                restarted=1,
            ),
            tuple(assign_credit(group, OutcomeOnly()) for group in groups),
        )
        for groups in (
            tuple(score_group(attempts, rewards, 2) for attempts in draw) for draw in draws
        )
    )
    once = first.with_redrawn([0], second)
    twice = once.with_redrawn([0], third)
    alone, redrawn = first.tallies(rewards), twice.tallies(rewards)
    assert redrawn.keys() == alone.keys()  # of a process in which no group was sampled anew
    changed = {
        # the last draw, in which one of three answered nothing
        "train/degenerate_groups": Tally(0, 6),
        "rollout/sampled_tokens": Tally(2 * (2 + 2 + 2) + 2 * (2 + 1 + 2), 6),
        # every draw
        "rollout/redrawn_groups": Tally(3 + 3, 6),
        "rollout/probe_tokens": Tally(3 * 2, 6),
        "rollout/restarted": Tally(3, 6),
        "rollout/seconds": Tally(3 * 1.0, 1),
        "rollout/scoring_seconds": Tally(3 * 3.0, 1),
    }
    assert redrawn == alone | changed
    assert alone["rollout/degenerate_groups"] == Tally(3, 6)
    assert once.tallies(rewards)["train/degenerate_groups"] == Tally(3, 6)


def test_a_group_must_have_one_question_and_at_least_one_attempt():
    other = replace(SEARCHED, question=Question("r", "The river?", ("Seine",)))
    with pytest.raises(DataError, match="has 3 attempts, not all at one question"):
        score_group([SEARCHED, GUESSED, other], [Calls()])
    with pytest.raises(DataError, match="has 0 attempts"):
        score_group([], [Calls()], turns=2)
    wrong = {"is a Trajectory": SEARCHED, "is the string 'x'": "x", "holds an int": [SEARCHED, 1]}
    for value, attempts in wrong.items():
        with pytest.raises(ArgumentTypeError, match=f"to score {value}. Give a list of the att"):
            score_group(attempts, [Calls()])
    # texts that were asked one by one all have the number 0
    asked = [replace(SEARCHED, question=Question("0", text, ("x",))) for text in ("A?", "B?")]
    with pytest.raises(DataError, match="has 2 attempts, not all at one"):
        score_group(asked, [Calls()])
