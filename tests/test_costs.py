"""Costs kept apart from what is paid: `CostsAmongRight` against its equation as loops, what it must
never do, what it optimises on a toy, and where it learns what costs and what is right."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trajectories
from commands import fails, save
from equations import UNBIASED, VALUE, naive_turn_level, naive_z, padded
from turnrl import (
    Group,
    OutcomeReward,
    Question,
    Reading,
    RecipeError,
    ToolCall,
    Trajectory,
    Turn,
    TurnLevel,
    TurnReward,
)
from turnrl.cli import main
from turnrl.credit.why import compute_terms
from turnrl.rewards.functions import FunctionReward
from turnrl.rewards.scoring import score_group
from turnrl.runs import record
from turnrl.testing import check_estimator
from turnrl.training.checks import check_rewards
from turnrl.types import RewardComponent
from turnrl_estimators import CostsAmongRight
from turnrl_estimators.exact import measure
from turnrl_estimators.toy import TOYS
from turnrl_rewards import ExactMatch, FirstHit, Repetition, SearchCost

QUESTION = Question("q", "What?", ("x",))


@dataclasses.dataclass
class Drawn:
    """A group as plain lists: gains and costs of turns, outcomes without their costs, what the
    outcome costs, and the least outcome of a right attempt."""

    gains: list[list[float]]
    costs: list[list[float]]
    outcome: list[float]
    outcome_costs: list[float]
    right_at: float

    @property
    def lengths(self):
        return list(map(len, self.gains))

    @property
    def right(self):
        return [outcome >= self.right_at for outcome in self.outcome]

    def group(self, order=None):
        order = list(range(len(self.outcome)) if order is None else order)
        gains, costs = (padded([rows[i] for i in order]) for rows in (self.gains, self.costs))
        paid, lost = (
            torch.tensor([row[i] for i in order], dtype=torch.float64)
            for row in (self.outcome, self.outcome_costs)
        )
        return Group(
            QUESTION,
            tuple(Trajectory(QUESTION, (Turn(""),) * self.lengths[i], "turns") for i in order),
            gains + costs,
            paid + lost,
            padded([[1.0] * self.lengths[i] for i in order]).bool(),
            {
                "turn/a": RewardComponent(gains),
                "turn/b": RewardComponent(costs, is_cost=True),
                "outcome/c": RewardComponent(paid, right_at=self.right_at),
                "outcome/d": RewardComponent(lost, is_cost=True),
            },
        )


@st.composite
def groups(draw):
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    outcomes = st.lists(VALUE, min_size=len(lengths), max_size=len(lengths))
    gains, costs = ([draw(st.lists(VALUE, min_size=n, max_size=n)) for n in lengths] for _ in "ab")
    # some groups have no right attempt, and in some all are right
    right_at = draw(st.sampled_from([-2.0, -1.0, 0.0, 0.7, 1.4, 2.5]))
    return Drawn(gains, costs, draw(outcomes), draw(outcomes), right_at)


OPTIONS = st.fixed_dictionaries({
    "baseline": st.sampled_from(["mean", "leave_one_out"]),
    "scale": st.sampled_from(["std", "none"]),
    "cost_scale": st.sampled_from(["outcome", "none"]),
    "min_std": st.sampled_from([0.05, 0.5]),
    "gamma": st.sampled_from([0.0, 0.5, 1.0]),
})  # fmt: skip
COEFS = {"outcome_coef": 0.7, "turn_coef": 1.3, "cost_coef": 0.9}


# ------------------------------------------------------------------ the equation, as loops


def naive(drawn, baseline, scale, cost_scale, min_std, gamma, outcome_coef, turn_coef, cost_coef):
    """A_{i,k}, one attempt and turn at a time."""
    advantages = naive_turn_level(
        drawn.gains, drawn.outcome, drawn.lengths, outcome_coef, turn_coef, gamma,
        baseline, scale, min_std,
    )  # fmt: skip
    unit = 1.0
    if scale == "std" and cost_scale == "outcome":
        unit = max(min_std, statistics.stdev(drawn.outcome))
        if all(drawn.right):
            unit = max(unit, drawn.right_at / 2)
    for k in range(max(drawn.lengths)):
        those = [i for i, n in enumerate(drawn.lengths) if n > k and drawn.right[i]]
        if len(those) < 2:
            continue
        costs = [
            sum(gamma ** (n - k) * drawn.costs[i][n] for n in range(k, drawn.lengths[i]))
            + drawn.outcome_costs[i]
            for i in those
        ]
        for i, difference in zip(those, naive_z(costs, baseline, "none", 1.0), strict=True):
            advantages[i, k] += cost_coef * difference / unit
    return advantages


@given(groups(), OPTIONS)
@settings(deadline=None)
def test_costs_among_right_equals_its_equation_written_as_loops(drawn, options):
    advantages = CostsAmongRight(**options, **COEFS)(drawn.group())
    assert torch.allclose(advantages, naive(drawn, **options, **COEFS), rtol=0, atol=1e-9)


# ------------------------------------------------------------------ properties


def test_costs_among_right_keeps_to_its_contract():
    for options in ({}, UNBIASED):
        check_estimator(CostsAmongRight(**options))


@given(groups())
@settings(deadline=None, max_examples=30)
def test_the_terms_of_a_turn_add_up_to_its_advantage_and_name_the_costs(drawn):
    for options in ({}, UNBIASED, {"cost_scale": "none", "min_std": 0.4}):
        rule, group = CostsAmongRight(**options), drawn.group()
        advantages = rule(group)
        for i, turns in enumerate(compute_terms(rule, group)):
            for k, summands in enumerate(turns):
                total = sum(t.weight * (t.value - t.baseline) / t.divisor for t in summands)
                assert total == pytest.approx(float(advantages[i, k]), abs=1e-9)
                named = [term for term in summands if term.name.startswith("costs")]
                assert len(named) == drawn.right[i]
                members = sum(drawn.right[j] for j, n in enumerate(drawn.lengths) if n > k)
                assert all(term.count == members for term in named)


# ------------------------------------------------------------------ by hand


def searched(calls, right, weight=1.0):
    """Attempts with `calls` calls, one per turn, and then an answer. Each call costs 0.1."""
    return Drawn(
        [[0.0] * (n + 1) for n in calls],
        [[-0.1] * n + [0.0] for n in calls],
        [weight * float(is_right) for is_right in right],
        [0.0] * len(calls),
        weight,
    )


def test_a_wrong_attempt_loses_nothing_by_searching():
    # two searched in vain and none is right: MT-GRPO penalises the search, this rule does not
    vain = searched([1, 1, 0, 0], [False] * 4).group()
    assert not CostsAmongRight()(vain).any()
    # .05 from the mean, by a deviation of .0577 that the floor of .1 replaces
    assert TurnLevel()(vain)[:, 0].tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_the_dearer_of_two_right_attempts_loses_in_units_of_the_outcomes_spread():
    credit = CostsAmongRight()(searched([2, 1, 1, 0], [True, True, False, False]).group())
    # outcomes 1, 1, 0, 0: their deviation is .577, and costs -.2 and -.1 lie .05 from their mean
    by_outcome, by_cost = 0.5 / 0.57735, 0.05 / 0.57735
    assert credit[:, 0].tolist() == pytest.approx(
        [by_outcome - by_cost, by_outcome + by_cost, -by_outcome, -by_outcome], abs=1e-4
    )
    # in the second turn, -.1 and 0; only the first attempt reached the third
    assert credit[:2, 1].tolist() == pytest.approx([by_outcome - by_cost, by_outcome + by_cost])
    assert float(credit[0, 2]) == pytest.approx(by_outcome)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_if_all_are_right_a_cost_weighs_in_proportion_to_the_outcome(weight):
    """The outcome's deviation is 0 there. Its floor would make 0.1 of cost as much as a success."""
    group = searched([1, 1, 0, 0], [True] * 4, weight).group()
    # .05 from the mean, by half of what a right answer pays
    per_unit = 0.05 / (weight / 2)
    wanted = [-per_unit, -per_unit, per_unit, per_unit]
    assert CostsAmongRight()(group)[:, 0].tolist() == pytest.approx(wanted)
    # the same as if half of the attempts were wrong, up to the factor n / (n - 1)
    mixed = searched([1, 1, 0, 0] + [0] * 4, [True] * 4 + [False] * 4, weight).group()
    part = CostsAmongRight()(mixed)[:4, 0] - CostsAmongRight(cost_coef=0)(mixed)[:4, 0]
    assert part.tolist() == pytest.approx([credit * (7 / 8) ** 0.5 for credit in wanted])


# ------------------------------------------------------------------ what it optimises


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_unscaled_it_estimates_the_gradient_that_its_page_gives(size):
    toy = TOYS["costs"]
    reach = [
        sum(f.chance for f in toy.fates if toy.is_right(f) and len(f.scores) > k) for k in range(3)
    ]
    # a right attempt without another right one is compared with nobody
    met = torch.tensor([1 - (1 - q) ** (size - 1) for q in reach], dtype=torch.float64)
    wanted = toy.gradient_among_right - toy.cost_part + met * toy.cost_part
    assert measure("", CostsAmongRight(**UNBIASED), toy, size, wanted).bias < 1e-6
    plain = dataclasses.replace(toy, search_costs=())
    assert torch.allclose(toy.gradient_among_right - toy.cost_part, plain.gradient)


def test_in_the_toy_with_costs_all_rewards_say_stop_and_right_answers_say_search():
    # as docs/explanation/credit.md says
    toy = TOYS["costs"]
    assert float(toy.gradient[0]) == pytest.approx(0.0108, abs=1e-4)
    assert float(toy.gradient_among_right[0]) == pytest.approx(-0.0591, abs=1e-4)
    assert sum(f.chance for f in toy.fates if toy.is_right(f)) == pytest.approx(0.042, abs=1e-3)
    sure = dataclasses.replace(toy, logits=(-30.0, 30.0, 0.0))
    assert sum(f.chance * f.earned for f in sure.fates) == pytest.approx(0.15)


# ------------------------------------------------------------------ marks


def attempt(calls, answer):
    turns = [Turn("", Reading((ToolCall("search", {"query": "x"}),)))] * calls
    return Trajectory(QUESTION, (*turns, Turn("", Reading(answer=answer))), "answer")


class Length(OutcomeReward):
    """A price of the whole attempt."""

    is_cost = True

    def score(self, trajectory):
        return -0.05 * len(trajectory.turns)


def late(trajectory, turn):
    return -0.5 * turn


def long_answer(trajectory):
    return float(len(trajectory.answer or ""))


def test_scoring_separates_costs_and_marks_the_right_attempts():
    rewards = [SearchCost(), Length(), FirstHit(), ExactMatch(2.0)]
    group = score_group([attempt(2, "x"), attempt(0, "y")], rewards)
    assert group.cost_names == ("turn/search_cost", "outcome/length")
    assert group.turn_costs.flatten().tolist() == pytest.approx([-0.1, -0.2, 0, 0, 0, 0])
    assert group.outcome_costs.tolist() == pytest.approx([-0.15, -0.05])
    assert group.outcome.tolist() == pytest.approx([1.85, -0.05])
    assert group.components["outcome/exact_match"].right_at == 2.0
    assert group.right.tolist() == [True, False]
    assert Repetition.is_cost
    assert not FirstHit.is_cost


def test_a_function_is_marked_by_its_settings():
    rewards = [FunctionReward(late, is_cost=True), FunctionReward(long_answer, 0.5, right_at=1.0)]
    group = score_group([attempt(1, "yes"), attempt(1, "y")], rewards)
    assert group.cost_names == ("turn/late",)
    assert group.turn_costs.tolist() == [[0, -0.5], [0, -0.5]]
    assert group.right.tolist() == [True, False]
    # right is what all say that say something
    group = score_group([attempt(1, "x"), attempt(1, "xyz")], [*rewards, ExactMatch()])
    assert group.right.tolist() == [False, False]


def test_no_attempt_is_right_or_wrong_unless_a_reward_says_so():
    group = score_group([attempt(1, "x"), attempt(0, "y")], [SearchCost(), ExactMatch(0.0)])
    assert group.right is None
    with pytest.raises(RecipeError, match="CostsAmongRight needs to know which attempts are right"):
        CostsAmongRight()(group)


class Strange(TurnReward):
    right_at = 1.0

    def score(self, trajectory, turn):
        return 0.0


class Graded(OutcomeReward):
    right_at = 0.0

    def score(self, trajectory):
        return -1.0


@pytest.mark.parametrize(("rewards", "message"), [
    (["SearchCost", "WellFormed"], "no reward says which are. Add ExactMatch to model.rewards"),
    (["ExactMatch", f"{__name__}.Strange"], "turn/strange has right_at = 1.0"),
])  # fmt: skip
def test_a_run_is_refused_before_it_begins(recipe, capsys, rewards, message):
    save(
        {**recipe, "model": {**recipe["model"], "estimator": "CostsAmongRight", "rewards": rewards}}
    )
    assert message in fails(capsys, ["fit", "recipe.yaml"])


def test_a_run_without_costs_is_warned_that_it_gets_turn_level(caplog):
    with caplog.at_level(logging.WARNING):
        CostsAmongRight().check([ExactMatch(), SearchCost()])
        assert not caplog.messages
        CostsAmongRight().check([ExactMatch()])
    assert "gives the credit of TurnLevel, because no reward is a cost" in caplog.text


def test_if_all_are_right_the_unit_is_everything_that_a_right_attempt_earns():
    outcomes = torch.full((2,), 0.7 + 0.1, dtype=torch.float64)  # a little below 0.8
    assert float(outcomes[0]) < 0.8
    turns = torch.tensor([[-0.1], [-0.3]], dtype=torch.float64)
    both = {
        "outcome/a": RewardComponent(outcomes, right_at=0.8),
        "outcome/b": RewardComponent(outcomes / 2, right_at=0.4),
    }
    group = Group(
        QUESTION,
        (Trajectory(QUESTION, (Turn(""),), "turns"),) * 2,
        turns,
        outcomes * 1.5,
        torch.ones(2, 1).bool(),
        {"turn/c": RewardComponent(turns, is_cost=True), **both},
    )
    # (0.8 + 0.4) / 2, and each cost is 0.1 off the mean
    advantages = CostsAmongRight()(group).flatten().tolist()
    assert advantages == pytest.approx([0.1 / 0.6, -0.1 / 0.6])
    assert compute_terms(CostsAmongRight(), group)[0][0][-1].divisor == pytest.approx(0.6)


def test_impossible_settings_are_refused():
    with pytest.raises(RecipeError, match=r"outcome/graded has right_at = inf"):
        check_rewards([SearchCost(), type("Graded", (Graded,), {"right_at": math.inf})()])
    both = type("Graded", (Graded,), {"right_at": 1.0, "is_cost": True})()
    with pytest.raises(RecipeError, match=r"right_at = 1.0"):
        check_rewards([both])
    with pytest.raises(RecipeError, match="cost_scale is 'std'"):
        CostsAmongRight(cost_scale="std")


# ------------------------------------------------------------------ the record


def test_a_recorded_group_gets_the_same_credit_again(tmp_path):
    rule = CostsAmongRight(gamma=0.9)
    run = trajectories.run(tmp_path / "run", estimator=rule)
    for rows in record.groups(record.read(run)):
        group = record.restore_group(rows)
        assert group.cost_names == ("turn/cost",)
        assert set(group.components) == {"turn/paid", "turn/cost", "outcome/right"}
        for row, again in zip(rows, rule(group), strict=True):
            written = [turn["advantage"] for turn in row["turns"]]
            assert again[: len(written)].tolist() == pytest.approx(written, abs=1e-5)
        assert json.loads(rows[0]["estimator"])["arguments"]["gamma"] == 0.9


def test_a_run_records_which_rewards_are_costs_and_what_counts_as_right(recipe, capsys):
    model = {**recipe["model"], "estimator": "CostsAmongRight"}
    rewards = [*model["rewards"], "SearchCost", "ExactMatch"]
    save({**recipe, "model": {**model, "rewards": rewards}})
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    rows = record.read("runs/recipe")
    assert rows[0]["costs"] == ["turn/search_cost"]
    assert rows[0]["right_at"] == [{"name": "outcome/exact_match", "value": 1.0}]
