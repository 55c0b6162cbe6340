"""Probes, trees, critics and redraws: what an estimator may ask for beside a group's rewards."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import compress

import pytest
import torch

from rollouts import CALL, Brackets, Look, say
from runs import column, data, last, make_module, rows, trainer, weights
from trajectories import Calls, attempt, ids_of, turn
from turnrl import (
    AdvantageEstimator,
    ClippedSurrogate,
    OutcomeReward,
    Policy,
    Question,
    RecipeError,
    Rollout,
    Stateful,
    ToolError,
    ToolResult,
    TurnReward,
    assign_credit,
    score_group,
)
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import CheckpointError, PluginError, TrajectoryLost
from turnrl.policy.head import ValueHead
from turnrl.policy.layout import lay_out
from turnrl.policy.scoring import score_trajectories
from turnrl.runs import record
from turnrl.testing import ScriptedEngine
from turnrl.training import learning
from turnrl.training.experience import Collected, Experience
from turnrl.types import Critic, ForkableToolSession, Probe
from turnrl.watch.recorder import Recorder
from turnrl_estimators.valued import estimate_state_values, make_trees, with_state_values

QUESTIONS = [Question(f"q{i}", f"Number {i}?", ("x",)) for i in range(2)]


class Copied(ForkableToolSession):
    """Takes its time to be copied, and knows how often it was."""

    def __init__(self, depth=0):
        self.depth = depth

    async def fork(self):
        await asyncio.sleep(0.001 * random.random())
        return Copied(self.depth + 1)


class Remembers(Stateful, Look):
    async def open(self, question):  # in no thread: all have begun before the first is copied
        return Copied()


def explore(chat, says, probes, group_size=2, **options):
    tool = Remembers()
    rollout = Rollout(Brackets(), [tool], **options)
    engine = ScriptedEngine(chat.tokenizer, says)
    groups, tried, _ = rollout.begin(engine, chat, QUESTIONS, group_size, (0,), probes).result()
    return groups, tried, engine, tool


@pytest.mark.parametrize("lockstep", [True, False])
def test_probes_start_at_the_beginning_of_each_turn_of_each_trajectory(chat, lockstep):
    # sessions 0 to 3 are the four trajectories, which call twice and answer; whatever was forked
    # after them is a probe, and answers at once
    says = lambda session, k: (CALL, CALL, "=yes")[k] if session < 4 else "=no"  # noqa: E731
    random.seed(0)
    groups, tried, engine, tool = explore(chat, says, probes=3, lockstep=lockstep)
    assert [[t.answer for t in group] for group in groups] == [["yes", "yes"]] * 2
    for group, probes in zip(groups, tried, strict=True):
        places = sorted((probe.member, probe.trajectory.begins) for probe in probes)
        assert places == sorted((i, k) for i in range(2) for k in range(3) for _ in range(3))
        for probe in probes:
            whole, branch = group[probe.member], probe.trajectory
            turn = branch.begins
            assert branch.question == whole.question
            assert branch.answer == "no"
            assert len(branch.turns) == turn + 1
            # exactly what the trajectory had read by then, and nothing of what it did afterwards
            assert branch.turns[:turn] == whole.turns[:turn]
            assert branch.history(turn) == whole.history(turn)
            before = len(branch.history(turn))
            for name in ("token_ids", "turn_index", "sampler_logprobs", "versions"):
                theirs, own = (getattr(t.sample, name)[:before] for t in (whole, branch))
                assert own == theirs
            assert branch.sample.token_ids == branch.history(turn) + ids_of(branch, turn)
            assert {*branch.sampled_turns} == {turn}
    assert sum(map(len, tool.batches)) == 8  # probes repeat no call of before
    assert not engine.open_sessions


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("place", ["run", "fork", "close"])
def test_an_attempt_and_its_probes_restart_if_one_of_them_is_lost(chat, lockstep, place):
    """The world may answer differently the second time. So the new attempt's probes branch off what
    it does itself."""

    class Frail(Copied):
        async def fork(self):
            if place == "fork":
                frail.lose()
            return Frail(self.depth + 1)

        def close(self):
            if place == "close" and self.depth:
                frail.lose()

    class World(Stateful, Look):
        opened, times, lost = 0, 0, 0

        def lose(self):
            """Lose the second batch, or the fifth session."""
            self.times += 1
            if self.times == (2 if place == "run" else 5):
                self.lost += 1
                raise TrajectoryLost("gone")

        async def open(self, question):
            self.opened += 1
            return Frail()

        def run(self, calls):
            if place == "run":
                self.lose()
            return [ToolResult(f"world {self.opened}") for _ in calls]

    frail = World()
    # probes call, too; each attempt takes two calls and answers
    says = lambda session, k: (CALL, CALL, "=yes")[k]  # noqa: E731
    rollout = Rollout(Brackets(), [frail], lockstep=lockstep)
    engine = ScriptedEngine(chat.tokenizer, says)
    groups, tried, restarted = rollout.begin(engine, chat, QUESTIONS, 2, (0,), 2).result()
    assert frail.lost == 1
    assert restarted >= 1
    assert frail.opened == 4 + restarted
    for group, probes in zip(groups, tried, strict=True):
        places = sorted((probe.member, probe.trajectory.begins) for probe in probes)
        assert places == sorted((i, k) for i in range(2) for k in range(3) for _ in range(2))
        for probe in probes:
            whole, branch = group[probe.member], probe.trajectory
            assert branch.turns[: branch.begins] == whole.turns[: branch.begins]
            assert branch.history(branch.begins) == whole.history(branch.begins)
    assert not engine.open_sessions


def test_probes_change_nothing_for_the_trajectories(tiny_model):
    from turnrl_slots import Slots

    module = make_module(tiny_model)
    module.policy.load()
    engine, collections = Slots().build(), []
    engine.start(module.policy, module.rollout.max_tokens)
    for probes in (0, 2):
        engine.sync(probes)
        collections.append(
            module.rollout.begin(engine, module.chat, QUESTIONS, 3, (5,), probes).result()
        )
    (plain, none, _), (groups, branches, _) = collections
    assert texts(groups) == texts(plain)
    assert none == [[], []]
    first = [
        [p.trajectory.sample.token_ids for p in probes if not p.trajectory.begins]
        for probes in branches
    ]
    assert [len(probes) for probes in first] == [6, 6]
    assert len({ids for probes in first for ids in probes}) > 6
    # nor does a probe of a later turn say what its trajectory said
    later = [
        p.trajectory.sample.token_ids != groups[q][p.member].sample.token_ids
        for q, probes in enumerate(branches)
        for p in probes
        if p.trajectory.begins
    ]
    assert sum(later) > len(later) / 2 > 0


@pytest.mark.parametrize("lockstep", [True, False])
def test_each_turn_of_each_probe_has_its_own_random_stream(chat, lockstep):
    # nobody answers: three turns of four trajectories, and after 0, 1 and 2 turns two probes, each
    # of which takes the turns that are left
    groups, tried, engine, _ = explore(chat, lambda session, k: CALL, probes=2, lockstep=lockstep)
    assert [len(t.turns) for group in groups for t in group] == [3] * 4
    assert [len(probes) for probes in tried] == [12, 12]
    seeds = [sampling.seed for *_, sampling in engine.asked]
    assert len(seeds) == 4 * (3 + 2 * (3 + 2 + 1))
    assert len(set(seeds)) == len(seeds)


def test_state_values_average_what_probes_earn_from_that_state_on():
    class Paid(TurnReward):
        def score(self, trajectory, turn):
            return [1.0, 10.0, 100.0][turn]

    class Ended(OutcomeReward):
        def score(self, trajectory):
            return 0.25 * len(trajectory.turns)

    long, short = attempt(turn(), turn(), turn()), attempt(turn())
    group = score_group([long, short], [Paid(), Ended()], 3)
    probes = [  # of a member, at a turn, with so many turns in all
        Probe(member, replace(attempt(*[turn()] * turns), begins=at))
        for member, at, turns in (
            *((0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 0, 1)),
            *((0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 2, 3)),
        )
    ]
    scored = score_group([probe.trajectory for probe in probes], [Paid(), Ended()], 3)
    values = with_state_values(group, probes, scored).state_values
    # all four begin in one state: (1 + 11 + 1 + 1) / 4; then (10 + 110) / 2, and 100; and the
    # outcomes, (1 + 2 + 1 + 1) / 16, (2 + 3) / 8 and 3 / 4
    assert values.tolist() == [[3.8125, 60.625, 100.75], [3.8125, 0.0, 0.0]]


@dataclass
class ToGo(AdvantageEstimator):
    """Asks for whatever a test says, and keeps the groups that it is given."""

    probes: int = 0
    trains_probes: bool = False
    critic: Critic | None = None

    def __post_init__(self):
        self.seen = []

    def prepare(self, attempts, scorer):
        if self.probes:
            return (make_trees if self.trains_probes else estimate_state_values)(attempts, scorer)
        return super().prepare(attempts, scorer)

    def __call__(self, group):
        self.seen.append(group)
        to_go = group.turn_rewards.flip(1).cumsum(1).flip(1) + group.outcome[:, None]
        if self.critic is None:
            return (to_go - to_go.mean()) * group.reached
        pairs = zip(group.trajectories, to_go, group.token_values, strict=True)
        return tuple(row[[*t.sampled_turns]] - values for t, row, values in pairs)


def test_an_estimator_with_probes_gets_state_values_and_the_run_logs_their_tokens(
    tiny_model, tmp_path
):
    estimator = ToGo(probes=2)
    module = learn(tiny_model, tmp_path, estimator=estimator)
    assert len(estimator.seen) == 4
    for group in estimator.seen:
        assert group.state_values.shape == group.turn_rewards.shape
        assert not group.state_values[~group.reached].any()
        assert len(group.trajectories) == 4
    assert column(tmp_path, "rollout/probe_tokens")[0] > 4
    collected = module.experience.collected
    learned = sum(len(advantages) for advantages in module.experience.advantages)
    assert collected.probe_tokens == collected.sampled - learned
    assert {row["group"] for row in recorded(tmp_path)} == {0, 1, 2, 3}
    assert len(recorded(tmp_path)) == 16  # probes are no part of the record


def learn(model, folder, iterations=1, callbacks=(), **options):
    """A module after so many iterations."""
    module = make_module(model, **options)
    trainer(folder, iterations, callbacks, limit_val_batches=0).fit(module, data())
    return module


def recorded(folder):
    """The rows of the record of such a run."""
    return record.read(folder / "version_0", split="train")


def texts(groups):
    """What each member of each group sampled, as tokens."""
    return [[t.sample.token_ids for t in group] for group in groups]


def test_a_tree_trains_on_each_branch_and_once_on_their_shared_turns(tiny_model, tmp_path):
    estimator = ToGo(probes=1, trains_probes=True)
    module = learn(tiny_model, tmp_path, callbacks=[Recorder(None)], estimator=estimator)
    for group in estimator.seen:
        assert group.parents[:4] == (0, 1, 2, 3)
        assert len(group.parents) == len(group.trajectories) > 4
        assert group.state_values is None
        for trajectory, parent, reached in zip(
            group.trajectories, group.parents, group.reached, strict=True
        ):
            trunk, at = group.trajectories[parent], trajectory.begins
            assert trajectory.turns[:at] == trunk.turns[:at]
            assert reached.tolist() == [at <= k < len(trajectory.turns) for k in range(2)]
    assert column(tmp_path, "rollout/probe_tokens") == [0]  # nothing is sampled for values alone
    experience = module.experience
    assert experience.collected.sampled == sum(len(a) for a in experience.advantages)
    trained = sum(len(advantages) for advantages in experience.advantages)
    whole = [len(ids_of(t, k)) for t in experience.trajectories for k in range(len(t.turns))]
    own = [k >= t.begins for t in experience.trajectories for k in range(len(t.turns))]
    assert trained == sum(compress(whole, own)) < sum(whole)
    # what a run is watched by is what the policy does when it is asked
    trunks = [t for group in experience.groups for t in group.trajectories[:4]]
    assert [g.trunks for g in experience.groups] == [[0, 1, 2, 3]] * 4
    turns = sum(len(t.turns) for t in trunks) / 16
    assert column(tmp_path, "rollout/turns") == [pytest.approx(turns)]
    total = sum(float(g.totals[:4].sum()) for g in experience.groups) / 16
    assert column(tmp_path, "reward/total") == [pytest.approx(total)]
    for row in recorded(tmp_path):
        group = experience.groups[row["group"]]
        assert row["group_mean"] == pytest.approx(float(group.totals[:4].mean()), abs=1e-6)
        assert row["begins"] == group.trajectories[row["member"]].begins
    for row, trajectory in zip(recorded(tmp_path), experience.trajectories, strict=True):
        for k, turn_of_row in enumerate(row["turns"]):
            assert (turn_of_row["advantage"] is None) == (k < trajectory.begins)


def test_a_critic_learns_to_predict_returns_at_its_own_learning_rate(tiny_model, tmp_path):
    class Toll(TurnReward):
        """What is left to earn is 0 in the first turn and 1 in the second, whatever happens."""

        def score(self, trajectory, turn):
            return [-1.0, 1.0][turn] if len(trajectory.turns) > 1 else 0.0

    estimator = ToGo(critic=Critic(lr=0.5))
    module = make_module(
        tiny_model, estimator=estimator, objective=ClippedSurrogate(value_coef=0.5)
    )
    module.rewards[:] = [Toll()]
    run = trainer(tmp_path, 8, limit_val_batches=0)
    run.fit(module, data())
    policy, head = run.optimizers[0].param_groups
    assert (policy["lr"], head["lr"]) == (3e-3, 0.5)
    assert len(head["params"]) == 2
    explained = column(tmp_path, "critic/explained_variance")
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # it begins at zero
    assert max(explained[3:]) > 0.2
    assert column(tmp_path, "train/value_loss")[-1] < column(tmp_path, "train/value_loss")[0]
    # what it was given is what the head says of the hidden state before each token
    group = estimator.seen[0]
    assert [len(v) for v in group.token_values] == [
        *(len(t.sampled_turns) for t in group.trajectories)
    ]
    saved = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    assert "policy.value_head.weight" in saved


def test_the_values_of_a_critic_equal_its_head_on_the_hidden_states(tiny_model):
    module = make_module(tiny_model, estimator=ToGo(critic=Critic()))
    module.configure_model()
    torch.nn.init.normal_(module.policy.value_head.weight)
    groups = module.collector.score(module.collector.explore(QUESTIONS, 3, (1,)).trajectories)
    for group in groups:
        scores = score_trajectories(group.trajectories, module.score_tokens)
        for trajectory, values in zip(group.trajectories, (s.values for s in scores), strict=True):
            with torch.no_grad():
                network = module.policy.network
                states = network.model(input_ids=torch.tensor([trajectory.sample.token_ids]))[0][0]
                states = states / states.square().mean(-1, keepdim=True).sqrt() / 64
                naive = [
                    module.policy.value_head(states[t - 1])[0]
                    for t, k in enumerate(trajectory.sample.turn_index)
                    if k >= 0
                ]
            assert torch.allclose(values, torch.stack(naive), atol=1e-5)


def test_the_critic_reads_normalised_states_whatever_their_size():
    head = ValueHead(64, torch.device("cpu"))
    torch.nn.init.normal_(head.weight)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    values = head.values(states)
    normal = states / states.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(values, (normal @ head.weight[0] + head.bias * 64) / 64, atol=1e-6)
    assert torch.allclose(head.values(states * 100), values, atol=1e-6)
    assert torch.allclose(head.values((states / 10).bfloat16()), values, atol=1e-2)


@pytest.mark.parametrize("trains_policy", [True, False])
def test_the_value_loss_reaches_the_policy_if_the_recipe_says_so(tiny_model, trains_policy):
    policy = Policy(str(tiny_model)).build(Critic(trains_policy=trains_policy))
    policy.load()
    torch.nn.init.ones_(policy.value_head.weight)
    rows = [([5, 9, 33, 71], [False, False, True, True])]
    values = policy(lay_out(rows))[2]
    values.sum().backward()
    embedding = policy.network.get_input_embeddings().weight
    assert (embedding.grad is not None) == trains_policy
    assert policy.value_head.weight.grad.abs().sum() > 0


def naive_step(module, trajectories, streams, level):
    """The loss of a step, a token at a time: the surrogate with its segment's ratio, and half the
    square of what the critic missed, each with the token's weight."""
    total = 0.0
    for trajectory, (advantages, returns, old, weight) in zip(trajectories, streams, strict=True):
        network, head = module.policy.network, module.policy.value_head
        with torch.no_grad():
            ids = torch.tensor([trajectory.sample.token_ids])
            states = network.model(input_ids=ids)[0][0]
            log_p = network.lm_head(states).log_softmax(-1)
            states = states / states.square().mean(-1, keepdim=True).sqrt() / 64
        at = [t for t, k in enumerate(trajectory.sample.turn_index) if k >= 0]
        changes = [
            float(log_p[t - 1, trajectory.sample.token_ids[t]]) - o
            for t, o in zip(at, old, strict=True)
        ]
        for n, t in enumerate(at):
            turns = trajectory.sample.turn_index
            segment = [
                c
                for c, u in zip(changes, at, strict=True)
                if level == "trajectory" or turns[u] == turns[t]
            ]
            ratio = math.exp(sum(segment) / len(segment))
            low, high = module.objective.clips
            bounded = min(max(ratio, 1 - low), 1 + high)
            gain = min(ratio * advantages[n], bounded * advantages[n])
            missed = returns[n] - float(head(states[t - 1]).detach())
            total += weight * (-gain + module.objective.value_coef * missed**2 / 2)
    return total


@pytest.mark.parametrize("level", ["turn", "trajectory"])
def test_the_loss_of_a_step_with_a_critic_equals_its_equations(tiny_model, level):
    torch.manual_seed(0)
    objective = ClippedSurrogate(0.1, 0.1, ratio_level=level, value_coef=0.3)
    module = make_module(tiny_model, estimator=ToGo(critic=Critic()), objective=objective)
    module.configure_model()
    torch.nn.init.normal_(module.policy.value_head.weight)
    trajectories = [
        t for group in module.collector.explore(QUESTIONS, 3, (1,)).trajectories for t in group
    ]
    counts = [len(t.sampled_turns) for t in trajectories]
    assert max(len(t.turns) for t in trajectories) == 2
    advantages, returns = ([torch.randn(n) for n in counts] for _ in range(2))
    old = [torch.tensor(t.sampler_logprobs) for t in trajectories]
    old = [row + 0.2 * torch.randn(len(row)) for row in old]
    shares = torch.rand(len(counts)) / 10
    number = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    batch = learning.Minibatch(
        layout=lay_out([row for t in trajectories for row in t.token_rows]),
        trajectory=number,
        turn=torch.tensor([k for t in trajectories for k in t.sampled_turns]),
        advantages=torch.cat(advantages),
        weights=shares[number],
        sampler_logprobs=torch.cat(old),
        old_logprobs=torch.cat(old),
        returns=torch.cat(returns),
    )
    loss = module.loss(batch)[0]
    streams = zip(advantages, returns, old, shares, strict=True)
    wanted = naive_step(
        module, trajectories, [[*map(tuple, s[:3]), float(s[3])] for s in streams], level
    )
    assert float(loss.detach()) == pytest.approx(float(wanted), abs=1e-5)


def test_a_critics_checkpoint_can_be_evaluated_but_not_trained_without_a_critic(
    tiny_model, tmp_path
):
    module = learn(tiny_model, tmp_path / "first", estimator=ToGo(critic=Critic()))
    plain = make_module(tiny_model)
    done = {"ckpt_path": last(tmp_path / "first"), "weights_only": True}
    trainer(tmp_path / "eval", 1).validate(plain, data(), verbose=False, **done)
    assert torch.equal(weights(plain.policy), weights(module.policy)[: len(weights(plain.policy))])
    with pytest.raises(CheckpointError, match="value_head"):
        trainer(tmp_path / "fit", 2).fit(make_module(tiny_model), data(), **done)


def test_redraws_with_a_critic_are_refused(tiny_model):
    with pytest.raises(RecipeError, match=r"model\.redraws is 1, but with a critic \(ToGo\)"):
        make_module(tiny_model, estimator=ToGo(critic=Critic()), redraws=1)


@pytest.mark.slow
def test_a_run_with_a_critic_resumes_exactly(tiny_model, tmp_path):
    def estimator():
        return ToGo(critic=Critic(lr=0.1))

    whole = make_module(tiny_model, estimator=estimator())
    trainer(tmp_path / "whole", 3).fit(whole, data())
    trainer(tmp_path / "first", 2).fit(make_module(tiny_model, estimator=estimator()), data())
    later = make_module(tiny_model, estimator=estimator())
    trainer(tmp_path / "later", 3).fit(
        later, data(), ckpt_path=last(tmp_path / "first"), weights_only=True
    )
    assert torch.equal(weights(whole.policy), weights(later.policy))
    assert rows(tmp_path / "whole")[-1:] == rows(tmp_path / "later")


class Fussy(AdvantageEstimator):
    """Finds every group idle until it was asked so often. From then on two of a group's members
    teach something, in opposite directions, and the others nothing."""

    def __init__(self, patience):
        self.patience, self.asked = patience, 0

    def __call__(self, group):
        self.asked += 1
        weights = torch.tensor([0.0, 1.0, 0.0, -1.0])[:, None] * (self.asked > self.patience)
        return group.reached.float() * (weights / group.reached.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("redraws", "patience", "asked", "redrawn"),
    [(3, 6, 4 + 4 + 2, 6), (2, 99, 4 * 3, 8), (0, 2, 4, 0)],
)
def test_groups_that_teach_nothing_are_redrawn_within_a_bound(
    tiny_model, tmp_path, caplog, redraws, patience, asked, redrawn
):
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    estimator = Fussy(patience)
    learn(tiny_model, tmp_path, estimator=estimator, redraws=redraws)
    assert estimator.asked == asked
    assert column(tmp_path, "rollout/redrawn_groups") == [redrawn / 4]
    message = "resampled 4 groups; 2 still have zero advantages"
    assert (message in caplog.text) == (redraws == 3)


def test_a_redrawn_group_is_another_one(tiny_model, tmp_path, caplog):
    runs = [
        learn(tiny_model, tmp_path / str(n), estimator=Fussy(4 * n), redraws=n) for n in range(3)
    ]
    for drawn in zip(*(module.experience.groups for module in runs), strict=True):
        assert len({group.question.id for group in drawn}) == 1
        assert len({tuple(t.sample.token_ids for t in group.trajectories) for group in drawn}) == 3
    # all that was sampled counts, and what was thrown away is not learned from
    learned = [sum(len(a) for a in module.experience.advantages) for module in runs]
    assert runs[2].experience.collected.sampled == sum(learned)
    # every first draw taught nothing, and the run still learns
    assert column(tmp_path / "1", "rollout/degenerate_groups") == [1.0]
    assert column(tmp_path / "1", "train/degenerate_groups") == [0.0]
    assert "nothing to learn from" not in caplog.text


class Prepares(ToGo):
    """Prepares groups as a test says."""

    def __init__(self, how, **needs):
        super().__init__(**needs)
        self.how = how

    def prepare(self, attempts, scorer):
        return self.how(scorer.score(attempts.trajectories))


@pytest.mark.parametrize("estimator", [
    Prepares(lambda groups: groups[:2]), Prepares(lambda groups: []),
    Prepares(lambda groups: groups[::-1]), Prepares(lambda groups: groups, critic=Critic()),
    Prepares(lambda groups: [1, 2, 3, 4]),
], ids=["some", "none", "other order", "no values", "no groups"])  # fmt: skip
def test_the_groups_that_an_estimator_prepares_are_checked(tiny_model, tmp_path, estimator):
    with pytest.raises(PluginError, match=r"Prepares\.prepare "):
        learn(tiny_model, tmp_path, estimator=estimator)


def test_an_estimator_with_probes_must_define_prepare(tiny_model, tmp_path):
    class Wasteful(Fussy):
        probes = 1

    with pytest.raises(PluginError, match=r"Wasteful has probes\. Define prepare"):
        learn(tiny_model, tmp_path, estimator=Wasteful(0))


def test_the_event_loop_of_collections_does_not_wait_for_itself():
    async def nothing():
        return 1

    async def inside():
        return on_loop(nothing())

    assert on_loop(nothing()) == 1
    with pytest.raises(RuntimeError, match="Await the work"):
        on_loop(inside())


@dataclass
class Gives(AdvantageEstimator):
    """An estimator that gives what it was made with."""

    credit: torch.Tensor | tuple[torch.Tensor, ...]

    def __call__(self, group):
        return self.credit


def test_credit_by_turns_goes_to_the_sampled_tokens_of_each_turn():
    group = score_group([attempt(turn(tokens=3), turn(tokens=2)), attempt(turn(tokens=1))], [], 2)
    by_turns = Gives(torch.tensor([[2.0, -3.0], [5.0, 0.0]]))
    tokens = assign_credit(group, by_turns).tokens
    assert [row.tolist() for row in tokens] == [[2, 2, 2, -3, -3], [5]]


@pytest.mark.parametrize(
    ("size", "degenerate"), [(0, True), (1e-8, True), (2e-7, True), (4e-7, False), (1e-3, False)]
)
def test_a_group_is_degenerate_if_its_advantages_are_zero_but_for_rounding(size, degenerate):
    group = score_group([attempt(turn(tokens=2)), attempt(turn(tokens=1))], [], 1)
    credit = assign_credit(group, Gives(torch.tensor([[0.0], [size]])))
    assert credit.is_degenerate is degenerate


def test_credit_by_tokens_is_a_turns_mean_where_a_turn_is_asked_for():
    group = score_group([attempt(turn(tokens=3), turn(tokens=2)), attempt(turn(tokens=1))], [], 2)
    tokens = (torch.tensor([1.0, 2.0, 6.0, -1.0, -3.0]), torch.tensor([5.0]))
    credit = assign_credit(group, Gives(tokens))
    assert credit.turns.tolist() == [[3, -2], [5, 0]]
    assert credit.tokens == tokens


def test_explained_variance_compares_the_critic_with_the_actual_returns():
    group = score_group([attempt(turn(tokens=2)), attempt(turn(tokens=2))], [Calls()], 1)
    # returns 0, 1, 2, 3; expected 0, 1, 2, 1: what is left, 0, 0, 0, 2, has variance 1, of 5 / 3
    values = (torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0]))
    credit = assign_credit(group, Gives((torch.tensor([0.0, 0.0]), torch.tensor([0.0, 2.0]))))
    known = replace(group, token_values=values)
    figures = ("seconds", "scoring_seconds", "sampled", "probe_tokens", "restarted")
    costs = dict.fromkeys(figures, 1)
    experience = Experience(Collected(groups=(known,), **costs), (credit,))
    assert [row.tolist() for row in experience.returns] == [[0, 1], [2, 3]]  # value + advantage
    tallies = experience.tallies([Calls()])
    assert tallies["critic/explained_variance"].total / 2 == pytest.approx(1 - 1 / (5 / 3))
    assert tallies["critic/bias"].total / 2 == pytest.approx(-0.5)
    same = assign_credit(group, Gives((torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]))))
    nothing = replace(group, token_values=tuple(torch.zeros(2) for _ in same.tokens))
    tallies = Experience(Collected(groups=(nothing,), **costs), (same,)).tallies([Calls()])
    assert tallies["critic/explained_variance"].total == 0  # of nothing
    assert tallies["critic/bias"].total / 2 == -1


class Slow(ForkableToolSession):
    """Takes a while to be copied; its tool counts what is open."""

    def __init__(self, tool):
        self.tool = tool
        tool.made.append(self)

    def fork(self):
        self.tool.begins.release()
        time.sleep(0.15)
        return Slow(self.tool)

    def close(self):
        self.tool.closed.append(self)


class PatientlySlow(Slow):
    async def fork(self):
        self.tool.begins.release()
        copy = PatientlySlow(self.tool)
        await asyncio.sleep(0.15)
        return copy

    async def close(self):
        await asyncio.sleep(0.01)
        super().close()


class Keeps(Stateful, Look):
    """A tool with such sessions."""

    def __init__(self, kind=Slow, timeout_s=5.0):
        super().__init__()
        self.kind, self.timeout_s = kind, timeout_s
        self.made, self.closed, self.begins = [], [], threading.Semaphore(0)
        self.before = self.busy()  # of tools of other tests, which nobody waits for

    def busy(self):
        """Threads that run a tool's code; those of earlier calls wait under another name."""
        return {thread for thread in threading.enumerate() if thread.name == "turnrl-tool"}

    def open(self, question):
        return self.kind(self)

    def check_closed(self):
        """Every session was closed, once; of a copy that nobody waits for, soon after it comes."""
        until = time.monotonic() + 5
        while self.busy() - self.before:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(self.made) > 1
        while len(self.closed) < len(self.made) and time.monotonic() < until:
            time.sleep(0.01)
        assert Counter(map(id, self.closed)) == Counter(map(id, self.made))


class Down(Look):
    """Fails while the other tool's session is being copied."""

    name = "down"

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps

    def run(self, calls):
        assert self.keeps.begins.acquire(timeout=5)
        raise OSError("no route to host")


@pytest.mark.parametrize("kind", [Slow, PatientlySlow])
def test_a_copy_that_is_being_made_when_another_trajectory_fails_is_closed(chat, kind):
    keeps = Keeps(kind)
    rollout = Rollout(Brackets(), [keeps, Down(keeps)], lockstep=False)
    says = lambda session, k: CALL.replace("look", "down") if session == 3 else CALL  # noqa: E731
    engine = ScriptedEngine(chat.tokenizer, says)
    with pytest.raises(ToolError, match="no route to host"):
        rollout.begin(engine, chat, QUESTIONS, 2, (0,), probes=2).result()
    keeps.check_closed()
    assert not engine.open_sessions


@pytest.mark.parametrize("kind", [Slow, PatientlySlow])
def test_a_copy_that_takes_too_long_is_closed_when_it_comes(chat, kind):
    class Plain(kind):
        def fork(self):  # a thread, which cannot be stopped
            time.sleep(0.15)
            return type(self)(self.tool)

    keeps = Keeps(Plain, timeout_s=0.05)
    engine = ScriptedEngine(chat.tokenizer, say(CALL, CALL, CALL))
    with pytest.raises(ToolError, match=r"did not answer to fork within timeout_s = 0\.05"):
        Rollout(Brackets(), [keeps]).begin(engine, chat, QUESTIONS[:1], 1, (0,), probes=1).result()
    keeps.check_closed()
