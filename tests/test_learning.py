"""What a step learns from: streams of tokens, minibatches, and the loss, all by other means too."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from turnrl_slots import Slots

from runs import adamw, column, data, module, trainer, weights
from turnrl import ClippedSurrogate, Lora, Policy, Question, Reading, Trajectory, Turn
from turnrl.learning import by_tokens, pack, plan

# ----------------------------------------------------------------------------------- streams


def one_trajectory(it):
    """A two-turn trajectory that the policy itself sampled."""
    it.policy.load()
    engine = Slots()
    engine.start(it.policy, it.rollout.max_tokens)
    for seed in range(50):
        ((trajectory,),) = it.rollout.collect(
            engine, it.chat, [Question("q", "What?", ("x",))], 1, (seed,)
        )
        if len(trajectory.turns) == 2:
            return trajectory
    raise AssertionError("no trajectory of two turns in 50 seeds")


def tokens(trajectory, *advantages):
    """The advantages of a trajectory's turns, given to its sampled tokens."""
    by_turn = [advantages[k] for k in trajectory.turn_index if k >= 0]
    return [torch.tensor(by_turn)]


def test_attention_covers_tool_results_and_the_loss_does_not(tiny_model):
    it = module(tiny_model)
    trajectory = one_trajectory(it)
    batch = pack([trajectory], tokens(trajectory, 1.0, 2.0), torch.ones(1))
    prompt = len(trajectory.prompt_ids)
    result = [i for i, k in enumerate(trajectory.turn_index) if k == -1 and i > prompt]
    assert result
    assert batch.attention_mask.all()
    assert not batch.loss_mask[0, result].any()
    assert not batch.weights[0, result].any()
    assert not batch.advantages[0, result].any()
    # a policy that could not attend to results would not notice that they changed
    with torch.no_grad():
        before, *_ = it.policy.logprobs(batch.input_ids, batch.attention_mask, batch.loss_mask)
        changed = batch.input_ids.clone()
        changed[0, result[1]] = (changed[0, result[1]] + 1) % 300
        after, *_ = it.policy.logprobs(changed, batch.attention_mask, batch.loss_mask)
    first = len(trajectory.turns[0].token_ids)
    assert torch.equal(before[:first], after[:first])
    assert (before[first:] - after[first:]).abs().min() > 1e-4


def test_every_turn_with_credit_reaches_its_tokens(tiny_model):
    trajectory = one_trajectory(module(tiny_model))
    batch = pack([trajectory], tokens(trajectory, 1.5, -2.5), torch.ones(1))
    for k, advantage in [(0, 1.5), (1, -2.5)]:
        at = torch.tensor(trajectory.turn_index) == k
        assert at.any()
        assert (batch.advantages[0, at] == advantage).all()
    assert (batch.advantages != 0).sum() == batch.loss_mask.sum()


# ------------------------------------------------------------------------------- minibatches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200))
def test_minibatches_hold_every_row_once_and_keep_within_the_budget(lengths, budget):
    parts = list(by_tokens(lengths, budget))
    assert sorted(i for rows in parts for i in rows) == list(range(len(lengths)))
    for rows in parts:
        padded = len(rows) * max(lengths[i] for i in rows)
        assert padded <= budget or len(rows) == 1


def test_rows_of_like_length_come_together():
    # 8 rows of 10 and 8 of 30 in any order: with a budget of 80, one minibatch of short rows and
    # four of two long ones; in the order given it would be eight of two
    lengths = [10, 30] * 8
    parts = list(by_tokens(lengths, 80))
    assert sorted(map(len, parts)) == [2, 2, 2, 2, 8]
    assert {lengths[i] for rows in parts if len(rows) == 8 for i in rows} == {10}


def made_up(number, sampled, rng):
    """A trajectory of one or two turns, whose first token names it."""
    turns = []
    for count in sampled:
        ids = tuple(rng.randrange(3, 300) for _ in range(count))
        logprobs = tuple(-rng.random() for _ in ids)
        observed = tuple(rng.randrange(3, 300) for _ in range(rng.randrange(4)))
        turns.append(Turn("", ids, logprobs, Reading(), (), observed))
    question = Question(str(number), "?", ("x",))
    return Trajectory(question, (1000 + number, 5), tuple(turns), "turns")


def made_up_iteration():
    """Nine trajectories, of 1 to 12 sampled tokens each and in no order, with their advantages."""
    rng = random.Random(0)
    shapes = [(3,), (12,), (1, 1), (5, 2), (1,), (7,), (2, 9), (4,), (2,)]
    trajectories = [made_up(i, shape, rng) for i, shape in enumerate(shapes)]
    by_turn = torch.tensor([[rng.uniform(-2, 2) for _ in "12"] for _ in shapes])
    given = [tokens(t, *row)[0] for t, row in zip(trajectories, by_turn.tolist(), strict=True)]
    return trajectories, by_turn, given


def naive_weight(aggregation, trajectory, step):
    """A token's share of the loss of a step, which is a list of trajectories."""
    own = [sum(len(turn.token_ids) for turn in t.turns) for t in (trajectory, *step)]
    if aggregation == "token":
        return 1 / sum(own[1:])
    if aggregation == "trajectory":
        return 1 / len(step) / own[0]
    return 1 / len(step) / 100


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_a_plan_gives_each_trajectory_its_own_tokens_weights_and_advantages(aggregation, budget):
    trajectories, advantages, given = made_up_iteration()
    old = [torch.rand(sum(k >= 0 for k in t.turn_index)) for t in trajectories]
    asked = []

    def logprobs_now(batch):
        names = [int(i) - 1000 for i in batch.input_ids[:, 0]]
        asked.extend(names)
        return torch.cat([old[i] for i in names])

    steps = list(
        plan(
            trajectories,
            given,
            logprobs_now,
            ClippedSurrogate(aggregation=aggregation, constant_tokens=100),
            updates=2,
            steps_per_update=2,
            minibatch_tokens=budget,
            shuffle=torch.Generator().manual_seed(3),
            mean_over_processes=lambda total: total,
        )
    )
    assert len(steps) == 4
    assert sorted(asked) == list(range(9))  # each has its turn in the second update
    if budget == 1:
        assert {batch.input_ids.shape[0] for step in steps for batch in step} == {1}
    if budget == 10_000:
        assert [len(step) for step in steps] == [1] * 4
    learnt = []
    for number, step in enumerate(steps):
        rows = [(batch, row) for batch in step for row in range(batch.input_ids.shape[0])]
        names = [int(batch.input_ids[row, 0]) - 1000 for batch, row in rows]
        members = [trajectories[i] for i in names]
        learnt.append(names)
        for (batch, row), i in zip(rows, names, strict=True):
            trajectory, length = trajectories[i], len(trajectories[i].token_ids)
            weight = naive_weight(aggregation, trajectory, members)
            sampled = 0
            for t in range(batch.input_ids.shape[1]):
                k = trajectory.turn_index[t] if t < length else -1
                assert bool(batch.attention_mask[row, t]) == (t < length)
                assert bool(batch.loss_mask[row, t]) == (k >= 0)
                if t < length:
                    assert int(batch.input_ids[row, t]) == trajectory.token_ids[t]
                if k < 0:
                    assert not batch.weights[row, t]
                    continue
                assert float(batch.weights[row, t]) == pytest.approx(weight)
                assert float(batch.advantages[row, t]) == pytest.approx(float(advantages[i, k]))
                assert float(batch.sampler_logprobs[row, t]) == pytest.approx(
                    trajectory.sampler_logprobs[t]
                )
                if number > 0:
                    assert batch.old_logprobs[row, t] == old[i][sampled]
                sampled += 1
            assert (batch.old_logprobs is None) == (number == 0)
    for update in (learnt[:2], learnt[2:]):
        assert sorted(i for names in update for i in names) == list(range(9))
    assert set(learnt[0]) != set(learnt[2])  # each update in an order of its own


def test_log_probabilities_are_taken_before_the_first_step_and_only_of_what_a_later_one_needs():
    trajectories, _, given = made_up_iteration()
    events = []

    def logprobs_now(batch):
        events.extend(int(i) - 1000 for i in batch.input_ids[:, 0])
        return torch.zeros(int(batch.loss_mask.sum()))

    for steps in (1, 3):
        learnt = []
        shuffle, objective = torch.Generator().manual_seed(0), ClippedSurrogate()
        for step in plan(
            trajectories, given, logprobs_now, objective, 1, steps, 1000, shuffle, lambda x: x
        ):
            events.append("step")
            learnt.append([int(i) - 1000 for batch in step for i in batch.input_ids[:, 0]])
        later = sorted(i for names in learnt[1:] for i in names)
        assert sorted(events[: len(later)]) == later
        assert events[len(later) :] == ["step"] * steps
        events.clear()


# --------------------------------------------------------------------------------------- steps


class Steps(Callback):
    """Keeps what each step was computed from and the gradient that came of it."""

    def __init__(self):
        self.batches, self.states, self.gradients = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        self.states.append(copy.deepcopy(pl_module.policy.network.state_dict()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = dict(pl_module.policy.named_parameters())
        self.gradients.append(
            {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        )


def trained(model, folder, **options):
    """A module that was trained for one iteration, and what its steps saw."""
    seen, it = Steps(), module(model, **options)
    trainer(folder, 1, [seen], limit_val_batches=0).fit(it, data())
    return it, seen


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_the_budget_of_a_minibatch_does_not_change_a_step(tiny_model, tmp_path, aggregation):
    seen, after = [], []
    for budget in (1, 120, 100_000):
        it, steps = trained(
            tiny_model,
            tmp_path / str(budget),
            minibatch_tokens=budget,
            updates_per_iteration=2,
            objective=ClippedSurrogate(aggregation=aggregation),
        )
        seen.append(steps)
        after.append(weights(it.policy))
    assert [len(step) for step in seen[0].batches] == [8] * 4
    assert 1 < len(seen[1].batches[0]) < 8
    assert [len(step) for step in seen[2].batches] == [1] * 4
    alone, some, together = (steps.gradients[0] for steps in seen)
    for name, gradient in together.items():
        size = float(gradient.abs().max())
        assert torch.allclose(alone[name], gradient, atol=1e-4 * size)
        assert torch.allclose(some[name], gradient, atol=1e-4 * size)
    start = Policy(str(tiny_model))
    start.load()
    moved = (after[2] - weights(start)).abs()
    assert moved.max() > 1e-3
    # Adam divides by the gradient's size, so rounding moves weights whose gradient is
    # next to nothing
    for other in after[:2]:
        assert (other - after[2]).abs().mean() < 0.02 * moved.mean()


def naive_logprobs(network, trajectory, temperature):
    """Of one trajectory's sampled tokens: one row, no padding, all logits."""
    logits = network(input_ids=torch.tensor([trajectory.token_ids])).logits[0] / temperature
    log_p = logits.log_softmax(-1)
    return [
        log_p[t - 1, trajectory.token_ids[t]] for t, k in enumerate(trajectory.turn_index) if k >= 0
    ]


def naive_loss(it, states, members, advantages, objective, temperature):
    """The loss of a step from the equations, a trajectory, turn and token at a time.

    The policy has its weights of that step; `states` are those of before the first update.
    """
    network = it.policy.network
    first = copy.deepcopy(network)
    first.load_state_dict(states)
    sampled = [sum(len(turn.token_ids) for turn in t.turns) for t in members]
    total = torch.tensor(0.0)
    for trajectory, credit, count in zip(members, advantages, sampled, strict=True):
        now = naive_logprobs(network, trajectory, temperature)
        with torch.no_grad():
            old = naive_logprobs(first, trajectory, temperature)
            with network.disable_adapter():
                reference = naive_logprobs(network, trajectory, temperature)
        turns = [k for k, turn in enumerate(trajectory.turns) for _ in turn.token_ids]
        for new, before, base, k in zip(now, old, reference, turns, strict=True):
            ratio = (new - before).exp()
            low, high = 1 - objective.clips[0], 1 + objective.clips[1]
            bounded = min(max(float(ratio.detach()), low), high)
            advantage = float(credit[k])
            # the lesser of the two; the bound is a constant
            gain = ratio * advantage
            if bounded * advantage < float(gain.detach()):
                gain = torch.tensor(bounded * advantage)
            kl = (base - new).exp() - (base - new) - 1
            share = {
                "token": 1 / sum(sampled),
                "trajectory": 1 / len(members) / count,
                "constant": 1 / len(members) / objective.constant_tokens,
            }[objective.aggregation]
            total = total + share * (-gain + objective.kl_coef * kl)
    return total


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_the_loss_of_every_step_and_its_gradient_equal_the_equations_written_as_loops(
    tiny_model, tmp_path, aggregation
):
    objective = ClippedSurrogate(0.1, 0.15, kl_coef=0.3, aggregation=aggregation)
    temperature = 0.7
    it, seen = trained(
        tiny_model,
        tmp_path,
        policy={"lora": Lora(r=4)},
        rollout={"temperature": temperature},
        objective=objective,
        updates_per_iteration=2,
        minibatch_tokens=100,
        optimizer=adamw(1e-2),
    )
    rows = {t.token_ids: i for i, t in enumerate(it.experience.trajectories)}
    advantages = torch.cat(it.experience.credit)
    losses = []
    for step, states, gradient in zip(seen.batches, seen.states, seen.gradients, strict=True):
        assert len(step) > 1
        chosen = [
            rows[tuple(ids[mask].tolist())]
            for batch in step
            for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
        ]
        assert len(chosen) == 8
        it.policy.network.load_state_dict(states)
        it.policy.zero_grad()
        members = [it.experience.trajectories[i] for i in chosen]
        loss = naive_loss(it, seen.states[0], members, advantages[chosen], objective, temperature)
        loss.backward()
        losses.append(float(loss.detach()))
        naive = {n: p.grad for n, p in it.policy.named_parameters() if p.grad is not None}
        assert naive.keys() == gradient.keys()
        for name, value in naive.items():
            # at first LoRA's B is zero, and so is the gradient of A
            tolerance = 2e-4 * float(value.abs().max()) + 1e-8
            assert torch.allclose(gradient[name], value, atol=tolerance), name
    assert len(losses) == 4
    assert column(tmp_path, "train/loss") == [pytest.approx(sum(losses) / 4, rel=1e-4)]
    # the case is worth the trouble: tokens were clipped, and the adapter has moved
    assert 0.02 < column(tmp_path, "train/clip_fraction")[0] < 0.5
    assert column(tmp_path, "train/kl")[0] > 1e-3


def test_old_log_probabilities_are_the_learners_own_of_before_the_first_update(
    tiny_model, tmp_path
):
    it, seen = trained(tiny_model, tmp_path, rollout={"temperature": 1.3}, updates_per_iteration=2)
    rows = {t.token_ids: t for t in it.experience.trajectories}
    assert [batch.old_logprobs is None for step in seen.batches for batch in step] == [
        *[True, False, False, False]
    ]
    it.policy.network.load_state_dict(seen.states[0])
    for batch in (batch for step in seen.batches[1:] for batch in step):
        for row in range(batch.input_ids.shape[0]):
            ids = tuple(batch.input_ids[row, batch.attention_mask[row]].tolist())
            with torch.no_grad():
                own = torch.stack(naive_logprobs(it.policy.network, rows[ids], 1.3))
            assert torch.allclose(batch.old_logprobs[row, batch.loss_mask[row]], own, atol=1e-5)
