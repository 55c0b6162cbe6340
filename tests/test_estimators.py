"""The further estimators, against their equations written as loops; the toy, against what it should
sum up to; and the command that prints both."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import trajectories
import turnrl
import turnrl.testing
from commands import save
from equations import BOTH, UNBIASED, VALUE, naive_turn_level, naive_z, padded
from turnrl import (
    AdvantageEstimator,
    Group,
    Merged,
    OutcomeOnly,
    OutcomeReward,
    Question,
    Reading,
    RecipeError,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnLevel,
)
from turnrl.cli import main
from turnrl.credit.estimators import Credit
from turnrl.plugin.hooks import load_classes
from turnrl.testing import check_estimator
from turnrl.types import Critic, RewardComponent, Sample
from turnrl_estimators import (
    Branched,
    CostsAmongRight,
    DiscountedReturn,
    GroupInGroup,
    PaperExact,
    PerTurnIndex,
    Tree,
    TurnCritic,
    exact,
)
from turnrl_estimators.exact import Skipped, measure, measure_all
from turnrl_estimators.toy import Toy

QUESTION = Question("q", "What?", ("x",))
RESULT = st.sampled_from(["", "error", "a", "b", "ab"])


@dataclasses.dataclass
class Drawn:
    """A group, as plain lists: by member its turn rewards, its outcome, for each turn what its call
    brought, how many tokens it has, and what its beginning is worth."""

    rewards: list[list[float]]
    outcome: list[float]
    brought: list[list[str]]
    tokens: list[list[int]]
    values: list[list[float]]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rewards]

    def group(self, order=None) -> Group:
        order = range(len(self.outcome)) if order is None else order

        def table(rows):
            return padded([rows[i] for i in order])

        reached = table([[1.0] * n for n in self.lengths]).bool()
        attempts = tuple(self._attempt(i) for i in order)
        outcome = torch.tensor([self.outcome[i] for i in order], dtype=torch.float64)
        tokens = tuple(torch.tensor(self.of_tokens(i), dtype=torch.float64) for i in order)
        values = table(self.values)
        return Group(
            QUESTION,
            attempts,
            table(self.rewards),
            outcome,
            reached,
            state_values=values,
            token_values=tokens,
        )

    def of_tokens(self, i: int) -> list[float]:
        """What a critic says: of a turn's tokens its value, a bit more with each."""
        pairs = zip(self.values[i], self.tokens[i], strict=True)
        return [value + 0.25 * n for value, count in pairs for n in range(count)]

    def _attempt(self, i: int) -> Trajectory:
        turns = []
        for brought, count in zip(self.brought[i], self.tokens[i], strict=True):
            results = {
                "": (),
                "error": (ToolResult("no such page", ok=False),),
                "a": (ToolResult("page a", metadata={"passage_ids": ["a"]}),),
                "b": (ToolResult("b"),),
                "ab": (ToolResult("pages", metadata={"passage_ids": ["b", "a"]}),),
            }[brought]
            reading = Reading(calls=(ToolCall("search"),) * len(results))
            turns.append(
                trajectories.sampled_turn(
                    "t", (1,) * count, (-0.1,) * count, reading, results, (2, 3)
                )
            )
        return trajectories.trajectory(QUESTION, (5, 6), turns, "turns")


@st.composite
def groups(draw, least=2):
    lengths = draw(st.lists(st.integers(1, 4), min_size=least, max_size=6))

    def rows(of):
        return [draw(st.lists(of, min_size=n, max_size=n)) for n in lengths]

    outcome = draw(st.lists(VALUE, min_size=len(lengths), max_size=len(lengths)))
    return Drawn(rows(VALUE), outcome, rows(RESULT), rows(st.integers(1, 3)), rows(VALUE))


def close(tensor, rows, tolerance=1e-9):
    return torch.allclose(tensor, padded(rows), rtol=0, atol=tolerance)


def return_from(drawn, i, k, gamma):
    """The discounted return of member i from turn k on, its outcome earned in its last turn."""
    last = drawn.lengths[i] - 1
    earned = [r + (drawn.outcome[i] if n == last else 0) for n, r in enumerate(drawn.rewards[i])]
    return sum(gamma ** (n - k) * earned[n] for n in range(k, last + 1))


# ------------------------------------------------------------------ equations, as loops


@given(groups(), st.sampled_from(BOTH))
@settings(deadline=None)
def test_per_turn_index_equals_its_equation_written_as_loops(drawn, options):
    lengths = drawn.lengths
    credit = PerTurnIndex(*options)(drawn.group())
    outcome = naive_z(drawn.outcome, *options, 0.1)
    wanted = [[outcome[i]] * n for i, n in enumerate(lengths)]
    for k in range(max(lengths)):
        there = [i for i, n in enumerate(lengths) if n > k]
        own = naive_z([drawn.rewards[i][k] for i in there], *options, 0.1)
        for i, z in zip(there, own, strict=True):
            wanted[i][k] += z
    assert close(credit, wanted)
    again = naive_turn_level(drawn.rewards, drawn.outcome, lengths, 1, 1, 0.0, *options, 0.1)
    assert torch.allclose(credit, again)


@given(groups(), st.sampled_from([0.5, 1.0]))
@settings(deadline=None)
def test_paper_exact_equals_a_second_reading_of_the_released_rule(drawn, coef):
    def z(values):
        middle, spread = statistics.fmean(values), statistics.stdev(values)
        return [(value - middle) / (spread + 1e-4) for value in values]

    turn = z([sum(row) for row in drawn.rewards])
    outcome = z(drawn.outcome)
    merged = z([r + sum(row) for r, row in zip(drawn.outcome, drawn.rewards, strict=True)])
    wanted = []
    for i, brought in enumerate(drawn.brought):
        if not any(brought):  # no `<result>` in the conversation
            wanted.append([merged[i]] * len(brought))
            continue
        row, before = [], True
        for result in brought:
            row.append(outcome[i] + coef * turn[i] * before)
            before = before and not result
        wanted.append(row)
    assert close(PaperExact(coef)(drawn.group()), wanted, 1e-7)


@given(groups(), st.sampled_from(BOTH), st.sampled_from([0.0, 0.4, 1.0]))
@settings(deadline=None)
def test_discounted_return_equals_its_equation_written_as_loops(drawn, options, gamma):
    cells = [(i, k) for i, n in enumerate(drawn.lengths) for k in range(n)]
    rho = [return_from(drawn, i, k, gamma) for i, k in cells]
    wanted = [[0.0] * n for n in drawn.lengths]
    for (i, k), z in zip(cells, naive_z(rho, *options, 0.1), strict=True):
        wanted[i][k] = z
    assert close(DiscountedReturn(*options, gamma=gamma)(drawn.group()), wanted)


@given(groups(), st.sampled_from(BOTH), st.sampled_from([0.5, 0.95]))
@settings(deadline=None)
def test_group_in_group_equals_its_equation_written_as_loops(drawn, options, gamma):
    totals = [r + sum(row) for r, row in zip(drawn.outcome, drawn.rewards, strict=True)]
    whole = naive_z(totals, *options, 0.1)
    wanted = [[whole[i]] * n for i, n in enumerate(drawn.lengths)]
    passages = {"": "", "error": "", "a": "a", "b": "b", "ab": "ab"}
    states: dict[frozenset[str], list[tuple[int, int]]] = {}
    for i, brought in enumerate(drawn.brought):
        for k in range(len(brought)):
            known = frozenset("".join(passages[what] for what in brought[:k]))
            states.setdefault(known, []).append((i, k))
    for cells in states.values():
        z = naive_z([return_from(drawn, i, k, gamma) for i, k in cells], *options, 0.1)
        for (i, k), value in zip(cells, z, strict=True):
            wanted[i][k] += 0.7 * value
    assert close(GroupInGroup(*options, omega=0.7, gamma=gamma)(drawn.group()), wanted)


@given(groups(least=1))
@settings(deadline=None)
def test_branched_equals_its_equation_written_as_loops(drawn):
    wanted = []
    for rewards, outcome, values in zip(drawn.rewards, drawn.outcome, drawn.values, strict=True):
        after = [*values[1:], outcome]
        wanted.append([r + b - a for r, a, b in zip(rewards, values, after, strict=True)])
    assert close(Branched()(drawn.group()), wanted)


def drawn_tree(drawn, branches):
    """A group in which each trajectory has branches at each of its turns, which continue like
    another trajectory."""
    group = drawn.group()
    members = [(i, i, 0) for i in range(len(group.trajectories))]
    for i, trajectory in enumerate(group.trajectories):
        for k, n in itertools.product(range(len(trajectory.turns)), range(branches)):
            other = (i + n + 1) % len(group.trajectories)
            if len(group.trajectories[other].turns) > k:
                members.append((other, i, k))
            else:
                members.append((i, i, k))
    at = [source for source, _, _ in members]
    attempts = tuple(
        dataclasses.replace(group.trajectories[source], begins=k) for source, _, k in members
    )
    reached = group.reached[at].clone()
    for row, (_, _, k) in zip(reached, members, strict=True):
        row[:k] = False
    return dataclasses.replace(
        group,
        trajectories=attempts,
        turn_rewards=group.turn_rewards[at],
        outcome=group.outcome[at],
        reached=reached,
        parents=tuple(trunk for _, trunk, _ in members),
        components={},
    )


@given(groups(least=1), st.integers(1, 2))
@settings(deadline=None)
def test_tree_equals_its_equation_written_as_loops(drawn, branches):
    group = drawn_tree(drawn, branches)
    rewards, outcome = group.turn_rewards.tolist(), group.outcome.tolist()

    def earned(member, k):
        return sum(rewards[member][k:]) + outcome[member]

    trunks = len(drawn.lengths)
    wanted = []
    places = [(p, t.begins) for p, t in zip(group.parents, group.trajectories, strict=True)]
    for member, (trunk, k) in enumerate(places):
        row = []
        for turn in range(len(group.trajectories[member].turns)):
            at = (member, turn) if member < trunks else (trunk, k)
            there = [at[0], *(c for c, o in enumerate(places) if c >= trunks and o == at)]
            others = [earned(c, at[1]) for c in there if c != member]
            weight = 1 / (1 + branches * (turn + 1))
            gain = earned(member, at[1]) - sum(others) / len(others)
            row.append(weight * gain if turn >= k else 0.0)
        wanted.append(row)
    assert close(Tree(branches)(group), wanted, 1e-6)


@given(groups(least=1), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.7, 0.0]))
@settings(deadline=None)
def test_turn_critic_equals_gae_as_a_sum_of_residuals(drawn, gamma, lam):
    credit = TurnCritic(gamma=gamma, lam=lam)(drawn.group())
    for i, row in enumerate(credit):
        rewards = []
        for reward, count in zip(drawn.rewards[i], drawn.tokens[i], strict=True):
            rewards += [0.0] * (count - 1) + [reward]
        rewards[-1] += drawn.outcome[i]
        values = [*drawn.of_tokens(i), 0.0]
        residuals = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        wanted = [
            sum((gamma * lam) ** (n - t) * residuals[n] for n in range(t, len(residuals)))
            for t in range(len(residuals))
        ]
        assert row.tolist() == pytest.approx(wanted, abs=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), VALUE, VALUE), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.7, 0.0]),
)
@settings(deadline=None)
def test_turn_critic_follows_time_when_an_agent_switches_between_histories(taken, gamma, lam):
    """Each turn has the history that it was sampled in, its number of tokens, its reward, and the
    critic's value of its first token."""
    samples = [Sample().read((5,)) for _ in range(3)]
    for k, (which, count, *_) in enumerate(taken):
        samples[which] = samples[which].wrote(k, (1,) * count, (-0.1,) * count).read((2,))
    whole = Trajectory(QUESTION, (Turn("t"),) * len(taken), "turns", tuple(samples))
    # the tokens in time, by hand: (turn, value, reward), with an outcome of 2 on the very last
    tokens = [
        (k, value + 0.25 * n, reward if n == count - 1 else 0.0)
        for k, (_, count, reward, value) in enumerate(taken)
        for n in range(count)
    ]
    values, rewards = [v for _, v, _ in tokens] + [0.0], [r for *_, r in tokens]
    rewards[-1] += 2.0
    residuals = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    wanted = [
        sum((gamma * lam) ** (n - t) * residuals[n] for n in range(t, len(residuals)))
        for t in range(len(residuals))
    ]
    # history by history, as the trajectory has them
    places = [t for which in range(3) for t, (k, *_) in enumerate(tokens) if taken[k][0] == which]
    assert whole.sampled_turns == tuple(tokens[t][0] for t in places)
    group = Group(
        QUESTION,
        (whole,),
        torch.tensor([[reward for _, _, reward, _ in taken]], dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.float64),
        torch.ones(1, len(taken), dtype=torch.bool),
        token_values=(torch.tensor([values[t] for t in places], dtype=torch.float64),),
    )
    (row,) = TurnCritic(gamma=gamma, lam=lam)(group)
    assert row.tolist() == pytest.approx([wanted[t] for t in places], abs=1e-9)


def test_without_discounting_a_critics_advantage_is_return_minus_value():
    drawn = Drawn([[0.5, 0.2]], [1.0], [["a", ""]], [[2, 1]], [[0.4, 0.9]])
    # to go: 1.7 from both tokens of the first turn, 1.2 from the second; expected .4, .65, .9
    (row,) = TurnCritic()(drawn.group())
    assert row.tolist() == pytest.approx([1.3, 1.05, 0.3])


# ------------------------------------------------------------------ properties

EVERY = [
    PerTurnIndex(), PerTurnIndex(**UNBIASED), PaperExact(), DiscountedReturn(),
    DiscountedReturn(**UNBIASED), GroupInGroup(), GroupInGroup(**UNBIASED), Branched(),
    TurnCritic(), TurnCritic(gamma=0.99, lam=0.9),
]  # fmt: skip
NAMES = [str(estimator).partition(", critic")[0] for estimator in EVERY]


@pytest.mark.parametrize("estimator", [*EVERY, Tree()], ids=[*NAMES, "Tree"])
def test_an_estimator_keeps_to_its_contract(estimator):
    check_estimator(estimator)


@pytest.mark.parametrize("estimator", EVERY[:-2], ids=NAMES[:-2])
@given(drawn=groups())
@settings(deadline=None, max_examples=30)
def test_a_turn_that_was_not_taken_gets_no_credit_and_changes_no_other(estimator, drawn):
    group = drawn.group()
    credit = estimator(group)
    assert not credit[~group.reached].any()
    stray = torch.where(group.reached, group.turn_rewards, 7.0)
    values = torch.where(group.reached, group.state_values, 7.0)
    stray_group = dataclasses.replace(group, turn_rewards=stray, state_values=values)
    assert torch.allclose(estimator(stray_group), credit, atol=1e-9)


@given(groups())
@settings(deadline=None, max_examples=30)
def test_group_in_group_without_omega_is_merged(drawn):
    assert torch.allclose(GroupInGroup(omega=0)(drawn.group()), Merged()(drawn.group()))


@given(st.lists(st.tuples(VALUE, VALUE), min_size=2, max_size=7))
@settings(deadline=None)
def test_three_estimators_agree_with_the_papers_formulas_on_two_turns_that_all_call(pairs):
    turn, outcome = map(list, zip(*pairs, strict=True))
    drawn = Drawn(
        [[r, 0.0] for r in turn],
        outcome,
        [["a", ""]] * len(pairs),
        [[1, 1]] * len(pairs),
        [[0.0, 0.0]] * len(pairs),
    )
    turn_z, outcome_z = (naive_z(values, "mean", "std", 1e-3) for values in (turn, outcome))
    wanted = [[t + o, o] for t, o in zip(turn_z, outcome_z, strict=True)]
    for estimator in (TurnLevel(min_std=1e-3), PerTurnIndex(min_std=1e-3)):
        assert close(estimator(drawn.group()), wanted, 1e-6)
    # which adds 1e-4 to the deviation, and so is smaller by that part of it
    if min(statistics.stdev(turn), statistics.stdev(outcome)) > 0.1:
        assert close(PaperExact()(drawn.group()), wanted, 1e-4 / 0.1 * 6)


def test_the_released_code_uses_another_formula_for_an_attempt_without_a_call():
    drawn = Drawn(
        [[0.2, 0], [0.2, 0], [0]],
        [1, 0, 0],
        [["a", ""], ["error", ""], [""]],
        [[1, 1], [1, 1], [1]],
        [[0.0, 0.0], [0.0, 0.0], [0.0]],
    )
    credit = PaperExact()(drawn.group())
    # R + T: 1.2, .2, 0, with a mean of .4667 and a deviation of .6429
    assert float(credit[2, 0]) == pytest.approx(-0.4667 / 0.6430, abs=1e-3)
    # and -0.577 - 1.155 like any other
    assert float(TurnLevel()(drawn.group())[2, 0]) == pytest.approx(-1.732, abs=1e-3)


def test_passages_are_distinguished_by_id_or_else_by_text():
    brought = [["a", ""], ["a", ""], ["b", ""], ["error", ""]]
    drawn = Drawn([[0.0, 0.0]] * 4, [1.0, 0.0, 1.0, 0.0], brought, [[1, 1]] * 4, [[0.0, 0.0]] * 4)
    steps = GroupInGroup(gamma=1, scale="none")(drawn.group()) - Merged(scale="none")(drawn.group())
    # in the beginning all four are in one state, and so is the last one after its failed call
    assert steps[:, 0].tolist() == pytest.approx([0.6, -0.4, 0.6, -0.4])
    assert steps[:, 1].tolist() == pytest.approx([0.5, -0.5, 0.0, -0.4])


def test_missing_inputs_and_impossible_settings_are_refused():
    group = Group(QUESTION, (None,), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1).bool())
    with pytest.raises(RecipeError, match="Branched needs a group with state_values"):
        Branched()(group)
    with pytest.raises(RecipeError, match="Tree needs a group with parents"):
        Tree()(group)
    for probes in (0, 1000):
        with pytest.raises(RecipeError, match=f"probes is {probes}; it must be at least 1 and at"):
            Tree(probes=probes)
    with pytest.raises(RecipeError, match="TurnCritic needs a group with token_values"):
        TurnCritic()(group)
    with pytest.raises(RecipeError, match="probes is 0; it must be at least 1"):
        Branched(probes=0)
    with pytest.raises(RecipeError, match=r"lam is 1\.5; it must be from 0 to 1"):
        TurnCritic(lam=1.5)
    with pytest.raises(RecipeError, match=r"gamma is -1; it must be from 0 to 1"):
        DiscountedReturn(gamma=-1)
    with pytest.raises(RecipeError, match=r"omega is -1; it must be at least 0"):
        GroupInGroup(omega=-1)


def test_options_set_an_estimators_probes_critic_and_group_size():
    assert (Branched().probes, Branched(probes=2).probes, PaperExact().probes) == (4, 2, 0)
    assert TurnCritic().critic == Critic()
    assert TurnCritic(critic=Critic(lr=1e-4)).critic.lr == 1e-4
    assert (Branched().min_group_size, TurnCritic().min_group_size) == (1, 1)
    assert (PaperExact().min_group_size, GroupInGroup().min_group_size) == (2, 2)


# ------------------------------------------------------------------ the toy


def expected_return(toy):
    return sum(fate.chance * fate.earned for fate in toy.fates)


def test_the_toys_gradient_is_the_slope_of_its_expected_return():
    toy, step = Toy(), 1e-6
    assert sum(fate.chance for fate in toy.fates) == pytest.approx(1)
    for k in range(3):
        up, down = (
            Toy(logits=tuple(x + d * (n == k) for n, x in enumerate(toy.logits)))
            for d in (step, -step)
        )
        slope = (expected_return(up) - expected_return(down)) / (2 * step)
        assert float(toy.gradient[k]) == pytest.approx(slope, abs=1e-9)


def test_the_toys_values_follow_from_its_equations():
    toy = Toy()
    stop = [1 / (1 + math.exp(-x)) for x in toy.logits]
    value, wanted = 0.0, []
    for k in (2, 1, 0):
        earned = statistics.fmean(toy.search_rewards[k])
        value = stop[k] * toy.outcomes[k] + (1 - stop[k]) * (earned + value)
        wanted.append(value)
    assert toy.values == pytest.approx(wanted[::-1])
    assert expected_return(toy) == pytest.approx(wanted[-1])


def test_a_toys_trajectories_are_consistent():
    for fate in Toy().fates:
        whole = fate.trajectory
        assert max(whole.sampled_turns) + 1 == len(whole.turns) == len(fate.turn_rewards)
        assert (whole.answer is None) == (whole.ended_by == "turns")
        passages = [p for r in whole.results for p in r.metadata["passage_ids"]]
        assert passages == [f"page-{k}" for k in range(len(passages))]


@pytest.mark.parametrize("estimator", [
    TurnLevel(**UNBIASED), Merged(**UNBIASED), TurnCritic(), TurnCritic(lam=0.5),
    *(Branched(probes=n) for n in (1, 2, 4)),
    Tree(probes=1), pytest.param(Tree(probes=2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_unbiased_estimators_have_no_bias(estimator):
    row = measure("", estimator, Toy())
    assert row.bias < 1e-6
    assert abs(row.along) < 1e-6
    assert row.angle < 1e-3


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_baseline_shrinks_the_gradient_by_one_over_the_group_size(size):
    assert measure("", Merged(scale="none"), Toy(), size).along == pytest.approx(-1 / size)


@pytest.mark.parametrize("size", [2, 3])
def test_turn_level_is_unbiased_in_any_group_and_varies_less_than_merged(size):
    turn, merged = (measure("", kind(**UNBIASED), Toy(), size) for kind in (TurnLevel, Merged))
    assert max(turn.bias, merged.bias) < 1e-6
    assert turn.variance < 0.85 * merged.variance


def test_the_naive_port_loses_more_than_half_of_the_gradient():
    row = measure("", PerTurnIndex(**UNBIASED), Toy())
    # as its docstring says
    assert row.along == pytest.approx(-0.602, abs=1e-3)
    assert row.angle == pytest.approx(46.3, abs=0.1)
    assert row == measure("", TurnLevel(gamma=0, **UNBIASED), Toy())


class Counted(AdvantageEstimator):
    """Looks only at the trajectories."""

    min_group_size = 2

    def __call__(self, group):
        calls = torch.tensor([float(len(t.results)) for t in group.trajectories])
        return (calls - calls.mean())[:, None] * group.reached


@pytest.mark.parametrize("estimator", [
    TurnLevel(), Counted(), Branched(2),
    *(pytest.param(rule, marks=pytest.mark.slow) for rule in (Merged(**UNBIASED), GroupInGroup())),
], ids=lambda rule: type(rule).__name__)  # fmt: skip
def test_the_exact_figures_match_sampled_groups(estimator):
    """The same by playing: groups are sampled turn by turn, and their probes are."""
    toy, draw, rounds = Toy(), random.Random(0), 4000
    size = 1 if estimator.probes else 3
    stop = [1 / (1 + math.exp(-x)) for x in toy.logits]
    known = {(f.turn_rewards, f.outcome): f for f in toy.fates}

    def play(k):
        """From turn k on: turn rewards and outcome."""
        rewards = []
        for turn in range(k, 3):
            if draw.random() < stop[turn]:
                return [*rewards, 0.0], toy.outcomes[turn]
            rewards.append(draw.choice(toy.search_rewards[turn]))
        return rewards, 0.0

    def to_go(k):
        rewards, outcome = play(k)
        return sum(rewards) + outcome

    estimates = []
    for _ in range(rounds):
        members = [
            known[tuple(rewards), outcome] for rewards, outcome in (play(0) for _ in range(size))
        ]
        values = [
            [statistics.fmean(to_go(k) for _ in range(2)) for k in range(len(m.scores))]
            for m in members
        ]
        group = Group(
            QUESTION,
            tuple(m.trajectory for m in members),
            padded([m.turn_rewards for m in members], 3),
            torch.tensor([m.outcome for m in members]).double(),
            padded([[1.0] * len(m.scores) for m in members], 3).bool(),
            state_values=padded(values, 3),
        )
        scores = padded([m.scores for m in members], 3)
        estimates.append((estimator(group) * scores).sum(0) / size)
    drawn = torch.stack(estimates)
    exact_row = measure("", estimator, toy, size)
    mean, variance = drawn.mean(0), float(drawn.var(0).sum())
    bias = float((mean - toy.gradient).norm() / toy.gradient.norm())
    error = math.sqrt(variance / rounds) / float(toy.gradient.norm())
    assert bias == pytest.approx(exact_row.bias, abs=4 * error)
    assert size * variance == pytest.approx(exact_row.variance, rel=0.1)


class NineBranched(AdvantageEstimator):
    """Needs a larger group with probes than can be tried."""

    probes, min_group_size = 4, 9

    def __call__(self, group):
        return group.turn_rewards


class Compares(Counted):
    """Needs a larger group than can be tried."""

    min_group_size = 16


class Needy(Counted):
    """Cannot be made without an argument."""

    def __init__(self, judge):
        self.judge = judge


class Broken(Counted):
    """Returns advantages of a wrong shape."""

    def __call__(self, group):
        return torch.zeros(1)


def test_every_estimator_gets_a_row_or_the_reason_why_it_cannot_be_tried():
    classes = [TurnLevel, Counted, Branched, NineBranched, Compares, Needy, Broken]
    rows = {row.estimator: row for row in measure_all({c.__name__: c for c in classes})}
    assert list(rows) == [
        "TurnLevel",
        "TurnLevel(leave_one_out, none)",
        *(c.__name__ for c in classes[1:]),
    ]
    reasons = {name: row.reason for name, row in rows.items() if isinstance(row, Skipped)}
    assert sorted(reasons) == ["Broken", "Compares", "Needy", "NineBranched"]
    assert reasons["Compares"] == "there are more than 10,000 groups of 16"
    assert "missing 1 required positional argument: 'judge'" in reasons["Needy"]
    assert "Broken on a group of 4 with 3 turns gave advantages of shape" in reasons["Broken"]
    assert (rows["Branched"].note, rows["Branched"].group_size) == ("4 probes", 1)


def test_a_zero_gradient_has_no_angle_and_no_noise():
    class Nothing(Counted):
        """Gives every turn no advantage."""

        def __call__(self, group):
            return group.turn_rewards * 0

    row = measure("", Nothing(), Toy())
    assert (row.bias, row.along, row.angle, row.noise) == (1.0, -1.0, None, None)


# ------------------------------------------------------------------ the command


@functools.cache
def figures_of(classes, process):
    return measure_all(dict(classes), process)


@pytest.fixture(autouse=True)
def table_is_computed_once(monkeypatch, request):
    """Every group of every estimator takes ten seconds, and four commands below print the same. For
    those that are about other things it has two estimators."""
    few = None if request.node.get_closest_marker("slow") else ("OutcomeOnly", "TurnLevel")

    def computed(classes, process):
        return figures_of(tuple((name, classes[name]) for name in few or classes), process)

    monkeypatch.setattr(exact, "measure_all", computed)


def printed(capsys, *arguments):
    assert main(["credit-check", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_table_has_every_installed_estimator_within_80_columns(capsys):
    table = printed(capsys)
    assert max(map(len, table.splitlines())) <= 80
    for name in load_classes("turnrl_estimators"):
        assert f"\n{name} " in table
    assert "\nTurnLevel(leave_one_out, none)          0.000  +0.000     0.0" in table


@pytest.mark.slow
def test_a_recipe_trains_with_each_estimator(recipe, capsys):
    for name, init_args in (
        ("GroupInGroup", {"omega": 0.5}),
        ("Branched", {"probes": 1}),
        ("Tree", {"probes": 1}),
        ("TurnCritic", {"critic": {"lr": 1e-2, "trains_policy": False}, "lam": 0.95}),
    ):
        estimator = {"class_path": name, "init_args": init_args}
        save({**recipe, "model": {**recipe["model"], "estimator": estimator}})
        options = ["--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0"]
        assert main(["fit", "recipe.yaml", *options]) == 0
    saved = yaml.safe_load(Path("runs/recipe/version_3/config.yaml").read_text())["model"]
    assert saved["estimator"]["init_args"]["critic"] == {
        "lr": 0.01,
        "trains_policy": False,
    }


def test_outcome_only_does_not_see_turn_rewards():
    seeing = measure("", OutcomeOnly(**UNBIASED), Toy())
    blind = Toy(search_rewards=((0.0,), (0.0,), (0.0,)))
    assert measure("", OutcomeOnly(**UNBIASED), blind).bias < 1e-6
    assert seeing.bias > 0.5


# ------------------------------------------------------------------------------- equal groups


def _group_of(turn_rewards, outcome):
    """A scored group of attempts with these rewards, each turn with a result of its own."""
    rows = [*zip(turn_rewards, outcome, strict=True)]
    turns = tuple(Turn("t", Reading((CALL,)), (ToolResult(f"page {k}"),)) for k in range(3))
    sample = Sample().read((1,))
    for k in range(3):
        sample = sample.wrote(k, (2,), (-0.1,))
    attempts = (Trajectory(QUESTION, turns, "turns", (sample,)),) * len(rows)
    rewards, out = torch.tensor(turn_rewards), torch.tensor(outcome)
    to_go = rewards.flip(1).cumsum(1).flip(1) + out[:, None]
    parts = {
        "turn/paid": RewardComponent(rewards.double() + 0.1),
        "turn/cost": RewardComponent(torch.full(rewards.shape, -0.1).double(), is_cost=True),
        "outcome/right": RewardComponent(out.double(), right_at=-1e9),
    }
    return Group(
        QUESTION,
        attempts,
        rewards,
        out,
        torch.ones_like(rewards).bool(),
        parts,
        state_values=to_go[:1].expand(len(rows), -1).clone(),
        parents=(0,) * len(rows),
    )


CALL = ToolCall("search", {"query": "x"})
EVERY = [
    *(TurnLevel(*options) for options in BOTH),
    *(Merged(*options) for options in BOTH),
    *(OutcomeOnly(), PerTurnIndex(), PaperExact(), GroupInGroup(), CostsAmongRight(), Branched()),
]
EQUAL = {
    "paper": ([[0.2, 0.7, 0.0]], [1.9]),
    "quickstart": ([[0.7, 0.0, 0.0]], [2.4]),
    "a million": ([[0.7, 1e6, 0.1]], [1e6 + 0.3]),
}
SUMS = [[0.1, 0.2, 0.4], [0.7, 0.0, 0.0], [0.4, 0.1, 0.2], [0.9, -0.1, -0.1]]
"""Equal sums, which float32 rounds to three different numbers."""


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_a_group_of_equal_rewards_of_any_size_teaches_nothing(estimator):
    for (name, (turn_rewards, outcome)), size in itertools.product(EQUAL.items(), range(2, 33)):
        credit = turnrl.assign_credit(_group_of(turn_rewards * size, outcome * size), estimator)
        assert not credit.turns.any(), (name, size)
        assert credit.is_degenerate


@pytest.mark.parametrize("estimator", [Merged(), PaperExact(), GroupInGroup(omega=0)], ids=repr)
def test_totals_that_only_rounding_tells_apart_are_equal(estimator):
    for size, factor in itertools.product(range(2, 9), (1, 1e-3, 1e6)):
        rows = [[factor * paid for paid in row] for row in (SUMS * 2)[:size]]
        group = _group_of(rows, [-0.7 * factor] * size)
        assert not turnrl.assign_credit(group, estimator).turns.any(), (size, factor)


@pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out"}])
def test_terms_that_cancel_out_up_to_rounding_teach_nothing(options):
    draw = random.Random(0)
    for _ in range(300):
        paid, out = (sorted(draw.sample(range(1, 400), 2)) for _ in range(2))
        # the attempt with the better turns has the worse outcome
        rows = [[paid[1] / 7, 0.0, 0.0], [paid[0] / 7, 0.0, 0.0]]
        credit = turnrl.assign_credit(
            _group_of(rows, [out[0] / 7, out[1] / 7]), TurnLevel(**options)
        )
        assert float(credit.turns[:, 0].abs().max()) < 2.5e-7
        only_first = Credit(credit.turns[:, :1], (*credit.turns[:, :1],))
        assert only_first.is_degenerate


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_rewards_that_nearly_agree_are_still_compared(estimator):
    for size, (least, gap) in itertools.product((2, 8, 16), ((1.9, 1e-4), (1e6, 1.0), (0.0, 1e-6))):
        group = _group_of([[0.0, 0.0, 0.0]] * size, [least + gap, *[least] * (size - 1)])
        credit = turnrl.assign_credit(group, estimator)
        assert not credit.is_degenerate, (size, least)
        assert float(credit.turns[0, -1]) > float(credit.turns[1, -1])


def test_values_that_differ_by_the_rounding_of_what_was_summed_are_equal_in_branches_too():
    # -1e6 and 1e6 are rounded to 1/16 each, so what is left of them says nothing
    group = _group_of([[-1e6, 0.0, 0.0], [0.0, 0.0, 0.0]], [1e6 + 0.0625, 0.03])
    values = torch.tensor([[0.02, 1e6, 1e6], [0.02, 0.02, 0.03]])
    changes = Branched()(dataclasses.replace(group, state_values=values))
    assert (changes[0, 0], changes[1, 0]) == (0.0, 0.0)
    assert Tree(probes=1)(group)[:, 0].tolist() == [0.0, 0.0]


def test_rewards_are_added_in_double_precision_so_their_order_does_not_matter():
    class Pays(OutcomeReward):
        def __init__(self, *weights):
            self.weights = weights

        def score(self, trajectory):
            return self.weights[len(trajectory.turns) - 1]

    examples = turnrl.testing.example_trajectories()
    attempts = [examples["right without a search"], examples["right without a search"]]
    attempts[1] = dataclasses.replace(attempts[1], turns=attempts[1].turns * 2)
    # 0.1 + 0.7 + 0.2 and 0.7 + 0.2 + 0.1 differ in float32
    rewards = [Pays(0.1, 0.7), Pays(0.7, 0.2), Pays(0.2, 0.1)]
    assert len(set(turnrl.score_group(attempts, rewards).outcome.tolist())) == 1


def test_the_orders_of_a_group_are_counted_so_the_groups_chances_add_up_to_one():
    assert [exact._orders(row) for row in ([0, 0], [0, 1], [0, 0, 1], [0, 1, 2], [2, 2, 1, 1])] == [
        *(1, 2, 3, 6, 6)
    ]
    for size, probes in ((2, 0), (3, 0), (2, 1)):
        _, _, chances = exact._groups(Toy(), size, probes, critic=False)
        assert float(chances.sum()) == pytest.approx(1, abs=1e-9)
