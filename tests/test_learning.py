"""What a step learns from: streams of tokens, minibatches, and the loss, all by other means too."""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from engines import move
from runs import adamw, column, data, make_module, trainer, weights
from turnrl import ClippedSurrogate, Policy, Question, Trajectory, Turn
from turnrl.engines import Engine, Session
from turnrl.policy.layout import forward_passes, lay_out
from turnrl.policy.settings import Lora
from turnrl.training.learning import (
    LearningSettings,
    OldLogprobs,
    TokenColumns,
    _spread,
    iteration_steps,
)
from turnrl.types import Sample
from turnrl_slots import Slots

# ----------------------------------------------------------------------------------- streams


def one_trajectory(module):
    """A two-turn trajectory that the policy itself sampled."""
    module.policy.load()
    engine = Slots().build()
    engine.start(module.policy, module.rollout.max_tokens)
    for seed in range(50):
        ((trajectory,),) = module.rollout.play(
            engine, module.chat, [Question("q", "What?", ("x",))], 1, (seed,)
        )
        if len(trajectory.turns) == 2:
            return trajectory
    raise AssertionError("no trajectory of two turns in 50 seeds")


def spread(trajectory, *advantages):
    """The advantages of a trajectory's turns, given to its sampled tokens."""
    return torch.tensor([advantages[k] for k in trajectory.sampled_turns])


@pytest.mark.parametrize("share", [True, False])
def test_attention_sees_tool_results_but_the_loss_skips_them(tiny_model, share):
    module = make_module(tiny_model)
    trajectory = one_trajectory(module)
    ((ids, asked),) = trajectory.token_rows
    prompt = len(trajectory.sample.prompt_ids)
    result = [i for i, k in enumerate(trajectory.sample.turn_index) if k == -1 and i > prompt]
    assert result
    assert not any(asked[i] for i in result)
    # a policy that could not attend to results would not notice that they changed
    changed = [(i + 1) % 300 if n == result[1] else i for n, i in enumerate(ids)]
    with torch.no_grad():
        before, after = (module.policy(lay_out([(row, asked)], share))[0] for row in (ids, changed))
    first = trajectory.sampled_turns.count(0)
    assert torch.equal(before[:first], after[:first])
    assert (before[first:] - after[first:]).abs().min() > 1e-4


def made_up(number, sampled, rng, apart=False):
    """A trajectory of one or two turns, each in a history of its own if they are apart. The first
    token of each history names the trajectory."""
    samples = [Sample().read((1000 + number, 5))]
    for k, count in enumerate(sampled):
        ids = tuple(rng.randrange(3, 300) for _ in range(count))
        logprobs = tuple(-rng.random() for _ in ids)
        seen = tuple(rng.randrange(3, 300) for _ in range(rng.randrange(4)))
        if apart and k:
            samples.append(Sample().read((1000 + number, 6)))
        samples[-1] = samples[-1].wrote(k, ids, logprobs).read(seen)
    question = Question(str(number), "?", ("x",))
    return Trajectory(question, (Turn(""),) * len(sampled), "turns", tuple(samples))


def made_up_iteration():
    """Nine trajectories, of 1 to 12 sampled tokens each and in no order, two of them of several
    histories and two with a history in which nothing was sampled, with their advantages."""
    rng = random.Random(0)
    shapes = [(3,), (12,), (1, 1), (5, 2), (1,), (7,), (2, 9), (4,), (2,)]
    trajectories = [made_up(i, shape, rng, i in (3, 6)) for i, shape in enumerate(shapes)]
    for i, before in ((5, True), (6, False)):
        own, opened = trajectories[i].samples, (Sample().read((1000 + i, 7, 8)),)
        trajectories[i] = replace(trajectories[i], samples=opened + own if before else own + opened)
    by_turn = torch.tensor([[rng.uniform(-2, 2) for _ in "12"] for _ in shapes])
    advantages = [
        spread(t, *values) for t, values in zip(trajectories, by_turn.tolist(), strict=True)
    ]
    return trajectories, by_turn, advantages


def number_of(trajectory):
    """The number of a made-up trajectory."""
    return trajectory.samples[0].token_ids[0] - 1000


def test_attempts_at_one_prompt_stay_together_despite_extra_histories():
    trajectories = [made_up(0, (2,), random.Random(i)) for i in range(4)]
    opened = Sample().read((1000, 9, 9))
    trajectories[2] = replace(trajectories[2], samples=(opened, *trajectories[2].samples))
    columns = TokenColumns(trajectories, [torch.zeros(2)] * 4)
    assert columns.prompts == [(1000, 5)] * 4


def naive_weight(aggregation, trajectory, step):
    """A token's share of the loss of a step, which is a list of trajectories."""
    own = [len(t.sampled_turns) for t in (trajectory, *step)]
    if aggregation == "token":
        return 1 / sum(own[1:])
    if aggregation == "trajectory":
        return 1 / len(step) / own[0]
    return 1 / len(step) / 100


def divided_at(budget, share):
    """Divides rows, each with its owner's number, among minibatches of so many tokens."""
    return lambda rows, owners: forward_passes(rows, budget, share, owners=owners)


class Learner:
    """Gives log-probabilities like the policy that learns, and notes of which trajectories.

    Args:
        values: The log-probabilities of the trajectory with this number; by default 50 and the
            number, for each sampled token.
    """

    def __init__(self, values=None):
        self.asked: list[int] = []
        self._values = values

    def logprobs_now(self, attempts):
        numbers = [number_of(attempt) for attempt in attempts]
        self.asked.extend(numbers)
        if self._values is not None:
            return [self._values(number) for number in numbers]
        return [
            torch.full((len(attempt.sampled_turns),), 50.0 + number)
            for attempt, number in zip(attempts, numbers, strict=True)
        ]


def steps_of(
    trajectories,
    advantages,
    logprobs_now=None,
    mean_over_processes=lambda total: total,
    shuffle=None,
    **options,
):
    """The steps of an iteration of padded minibatches, with any log-probabilities."""
    read = logprobs_now or (lambda attempts: [torch.zeros(len(t.sampled_turns)) for t in attempts])
    columns = TokenColumns(trajectories, advantages)
    objective = options.pop("objective", ClippedSurrogate())
    divided = options.pop("forward_passes", divided_at(10_000, share=False))
    settings = LearningSettings(**options)
    old = OldLogprobs(columns, read, settings)
    shuffle = shuffle or torch.Generator().manual_seed(3)
    return iteration_steps(columns, old, objective, settings, divided, shuffle, mean_over_processes)


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_processes_weigh_their_tokens_by_the_whole_step(aggregation):
    # two processes, of five and of four trajectories with other lengths
    trajectories, _, advantages = made_up_iteration()
    members = [list(range(5)), list(range(5, 9))]
    both, totals = threading.Barrier(2, timeout=10), [None, None]

    def mean(rank, total):
        totals[rank] = total
        both.wait()
        average = (totals[0] + totals[1]) / 2
        both.wait()  # nobody begins the next step before both have read
        return average

    def steps(rank):
        own = [[column[i] for i in members[rank]] for column in (trajectories, advantages)]
        return list(
            steps_of(
                *own,
                objective=ClippedSurrogate(aggregation=aggregation, constant_tokens=100),
                steps_per_pass=2,
                mean_over_processes=partial(mean, rank),
            )
        )

    with ThreadPoolExecutor(2) as pool:
        each = list(pool.map(steps, range(2)))
    for parts in zip(*each, strict=True):
        numbers = [[members[r][i] for i in learned_from(part)] for r, part in enumerate(parts)]
        whole = [trajectories[i] for members_of_step in numbers for i in members_of_step]
        for rank, part in enumerate(parts):
            for batch in part:
                for i, weight in zip(batch.trajectory.tolist(), batch.weights, strict=True):
                    share = naive_weight(aggregation, trajectories[members[rank][i]], whole)
                    # Lightning averages over the processes what should be summed
                    assert float(weight) == pytest.approx(2 * share, rel=1e-6)


def test_the_trajectories_compared_with_the_sampler_come_from_the_whole_iteration():
    assert [*_spread(range(100), 8)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert [*_spread(range(17), 8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [*_spread(range(9), 8)] == [*range(8)]
    assert [*_spread([3, 5], 8)] == [3, 5]


def test_log_probabilities_of_the_first_step_are_not_read_ahead():
    trajectories, _, advantages = made_up_iteration()
    learner = Learner()
    steps = steps_of(trajectories, advantages, learner.logprobs_now, passes=2, steps_per_pass=2)
    for number, step in enumerate(steps):
        if number == 0:
            first = learned_from(step)
            assert sorted(learner.asked) == sorted({*range(9)} - {*first})
            assert not any(batch.old_logprobs is not None for batch in step)
            for batch in step:
                batch.keep(batch.trajectory.float())
            continue
        assert all(batch.keep is None for batch in step)
        for batch in step:
            wanted = [i if i in first else 50 + i for i in batch.trajectory.tolist()]
            assert batch.old_logprobs.tolist() == wanted


@pytest.mark.parametrize("facts", [{"dropout": True}, {"steps_per_pass": 3}])
def test_for_an_objective_without_old_logprobs_none_are_read_or_kept(facts):
    trajectories, _, advantages = made_up_iteration()
    learner, needs = Learner(), {"sampler", "reference"}
    steps = steps_of(trajectories, advantages, learner.logprobs_now, passes=2, needs=needs, **facts)
    batches = [batch for step in steps for batch in step]
    assert not learner.asked
    assert all(batch.old_logprobs is None and batch.keep is None for batch in batches)
    assert [batch.first_step for batch in batches] == [i == 0 for i in range(len(batches))]


COMPARES = {"old", "sampler"}
"""What an objective needs that corrects for the sampler."""


@pytest.mark.parametrize(
    ("passes", "facts", "read_ahead", "first_step"),
    [
        (1, {}, 0, "nothing"),
        (1, {"dropout": True}, 0, "nothing"),
        (1, {"needs": COMPARES}, 0, "nothing"),
        (1, {"dropout": True, "needs": COMPARES}, 9, "has them"),
        (2, {}, 0, "keeps them"),
        (2, {"dropout": True}, 9, "nothing"),
        (2, {"needs": COMPARES}, 0, "keeps them"),
        (2, {"dropout": True, "needs": COMPARES}, 9, "has them"),
    ],
)
def test_passes_dropout_and_the_cap_decide_what_is_read_ahead(
    passes, facts, read_ahead, first_step
):
    trajectories, _, advantages = made_up_iteration()
    learner = Learner()
    steps = steps_of(trajectories, advantages, learner.logprobs_now, passes=passes, **facts)
    (batch,) = next(steps)
    assert sorted(learner.asked) == list(range(read_ahead))
    assert batch.old_logprobs is None  # its own pass gives the ratio's
    in_batch = {"has them": batch.exact_logprobs is not None, "keeps them": batch.keep is not None}
    assert [name for name, is_so in in_batch.items() if is_so] == [first_step] * (
        first_step != "nothing"
    )
    if batch.keep is not None:
        batch.keep(50.0 + batch.trajectory)
    for (later,) in steps:
        assert later.keep is None
        assert later.old_logprobs.tolist() == (50.0 + later.trajectory).tolist()


def learned_from(step):
    """Numbers of the trajectories of a step, in order."""
    return [int(i) for batch in step for i in batch.trajectory.unique_consecutive()]


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
@pytest.mark.parametrize("budget", [1, 25, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_a_step_gives_each_trajectory_its_own_tokens_weights_and_advantages(
    aggregation, budget, share
):
    trajectories, advantages, by_token = made_up_iteration()
    old = [torch.rand(len(t.sampled_turns)) for t in trajectories]
    learner = Learner(old.__getitem__)
    steps = list(
        steps_of(
            trajectories,
            by_token,
            learner.logprobs_now,
            objective=ClippedSurrogate(aggregation=aggregation, constant_tokens=100),
            passes=2,
            dropout=True,
            steps_per_pass=2,
            forward_passes=divided_at(budget, share),
        )
    )
    assert len(steps) == 4
    assert sorted(learner.asked) == list(range(9))  # each is learned from in the second pass
    if budget == 1:
        assert {len(set(batch.trajectory.tolist())) for step in steps for batch in step} == {1}
    if budget == 10_000:
        assert [len(step) for step in steps] == [1] * 4
    for number, step in enumerate(steps):
        members = [trajectories[i] for i in learned_from(step)]
        for batch in step:
            ids = batch.layout.input_ids.flatten()
            n = 0
            for i in learned_from([batch]):
                trajectory, sampled = trajectories[i], 0
                weight = naive_weight(aggregation, trajectory, members)
                places = (
                    (history, t, k)
                    for history in trajectory.samples
                    for t, k in enumerate(history.turn_index)
                )
                for sample, t, k in places:
                    if k < 0:
                        continue
                    pair = batch.layout.wanted[n]
                    assert int(batch.layout.targets[pair]) == sample.token_ids[t]
                    assert int(ids[batch.layout.before[pair]]) == sample.token_ids[t - 1]
                    assert (int(batch.trajectory[n]), int(batch.turn[n])) == (i, k)
                    assert float(batch.weights[n]) == pytest.approx(weight)
                    assert float(batch.advantages[n]) == pytest.approx(float(advantages[i, k]))
                    sampler = sample.sampler_logprobs[t]
                    assert float(batch.sampler_logprobs[n]) == pytest.approx(sampler)
                    if number > 0:
                        assert batch.old_logprobs[n] == old[i][sampled]
                    sampled, n = sampled + 1, n + 1
            assert n == len(batch) == len(batch.layout.wanted)
            assert (batch.old_logprobs is None) == (number == 0)
    learned = list(map(learned_from, steps))
    for one_pass in (learned[:2], learned[2:]):
        assert sorted(i for names in one_pass for i in names) == list(range(9))
    assert set(learned[0]) != set(learned[2])  # each pass has its own order


def asked_with(prompt, trajectory):
    """The same attempt after another prompt."""
    first, *others = (sample for sample in trajectory.samples if max(sample.turn_index) >= 0)
    held = len(first.prompt_ids)
    columns = (first.turn_index, first.sampler_logprobs, first.versions)
    begun = Sample().read(prompt)
    rest = [first.token_ids[held:], *(column[held:] for column in columns)]
    head = (begun.token_ids, begun.turn_index, begun.sampler_logprobs, begun.versions)
    first = Sample(*((*a, *b) for a, b in zip(head, rest, strict=True)))
    return replace(trajectory, samples=(first, *others))


def test_trajectories_of_one_prompt_share_a_learning_step():
    trajectories, _, advantages = made_up_iteration()
    groups = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    prompts = [groups[i % 3] for i in range(9)]  # those of a group do not lie side by side
    alike = [asked_with(p, t) for p, t in zip(prompts, trajectories, strict=True)]
    orders = set()
    for seed in range(20):
        shuffle = torch.Generator().manual_seed(seed)
        steps = list(steps_of(alike, advantages, steps_per_pass=3, shuffle=shuffle))
        groups_of_steps = [{i % 3 for i in learned_from(step)} for step in steps]
        assert sorted(map(len, groups_of_steps)) == [1, 1, 1]
        orders.add(tuple(tuple(names) for names in groups_of_steps))
    assert len(orders) > 3
    # steps are of equal size all the same
    sizes = [len(learned_from(step)) for step in steps_of(alike, advantages, steps_per_pass=2)]
    assert sizes == [5, 4]


def test_sampler_log_probabilities_are_reused_only_if_they_equal_the_learners():
    rng = random.Random(1)
    trajectories = [made_up(i, (3,), rng) for i in range(20)]
    sampler = [torch.tensor(t.sampler_logprobs) for t in trajectories]
    advantages = [torch.zeros(3)] * 20
    for apart, read in ((0.0, 8), (9e-6, 8), (2e-5, 20), (float("nan"), 20)):
        calls = itertools.count()

        def values(number, apart=apart, calls=calls):
            # all but one token are the same: the first of the sixth trajectory that is read
            return sampler[number] + apart * torch.eye(3)[0] * (next(calls) == 5)

        learner = Learner(values)
        _, step = steps_of(trajectories, advantages, learner.logprobs_now, passes=2, dropout=True)
        assert len(learner.asked) == read
        if apart == 0.0:
            again = Learner(values)
            twice = {"passes": 2, "dropout": True, "sampler_differs": True}
            list(steps_of(trajectories, advantages, again.logprobs_now, **twice))
            assert len(again.asked) == 20
        assert len(step[0].old_logprobs) == 60
        wanted = torch.cat([sampler[i] for i in learned_from(step)])
        differ = (step[0].old_logprobs - wanted).abs() > 1e-7
        assert int(differ.sum()) == (apart != 0.0) or torch.isnan(step[0].old_logprobs).any()


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
    seen, module = Steps(), make_module(model, **options)
    trainer(folder, 1, [seen], limit_val_batches=0).fit(module, data())
    return module, seen


@pytest.mark.parametrize(
    "aggregation",
    ["token", *(pytest.param(n, marks=pytest.mark.slow) for n in ("trajectory", "constant"))],
)
def test_the_budget_of_a_minibatch_does_not_change_a_step(tiny_model, tmp_path, aggregation):
    seen, after = [], []
    for budget in (1, 70, 100_000):
        module, steps = trained(
            tiny_model,
            tmp_path / str(budget),
            policy={"minibatch_tokens": budget},
            passes_per_iteration=2,
            objective=ClippedSurrogate(aggregation=aggregation),
        )
        seen.append(steps)
        after.append(weights(module.policy))
    assert [len(step) for step in seen[0].batches] == [8] * 4
    assert 1 < len(seen[1].batches[0]) < 8
    assert [len(step) for step in seen[2].batches] == [1] * 4
    alone, several, together = (steps.gradients[0] for steps in seen)
    for name, gradient in together.items():
        size = float(gradient.abs().max())
        assert torch.allclose(alone[name], gradient, atol=1e-4 * size)
        assert torch.allclose(several[name], gradient, atol=1e-4 * size)
    start = Policy(str(tiny_model)).build()
    start.load()
    moved = (after[2] - weights(start)).abs()
    assert moved.max() > 1e-3
    # Adam divides by the gradient's size, so rounding moves weights whose gradient is
    # next to nothing
    for other in after[:2]:
        assert (other - after[2]).abs().mean() < 0.02 * moved.mean()


def naive_logprobs(network, trajectory, temperature):
    """Of one trajectory's sampled tokens: one row, no padding, all logits."""
    ids = trajectory.sample.token_ids
    logits = network(input_ids=torch.tensor([ids])).logits[0] / temperature
    log_p = logits.log_softmax(-1)
    return [log_p[t - 1, ids[t]] for t, k in enumerate(trajectory.sample.turn_index) if k >= 0]


def naive_loss(module, states, members, advantages, objective, temperature):
    """The loss of a step from the equations, a trajectory, turn and token at a time.

    The policy has its weights of that step; `states` are those of before the first update.
    """
    network = module.policy.network
    first = copy.deepcopy(network)
    first.load_state_dict(states)
    sampled = [sum(k >= 0 for k in t.sample.turn_index) for t in members]
    total = torch.tensor(0.0)
    for trajectory, credit, count in zip(members, advantages, sampled, strict=True):
        now = naive_logprobs(network, trajectory, temperature)
        with torch.no_grad():
            old = naive_logprobs(first, trajectory, temperature)
            with network.disable_adapter():
                reference = naive_logprobs(network, trajectory, temperature)
        turns = [k for k in trajectory.sample.turn_index if k >= 0]
        for new, before, base, k in zip(now, old, reference, turns, strict=True):
            ratio = (new - before).exp()
            low, high = 1 - objective.clips[0], 1 + objective.clips[1]
            advantage = float(credit[k])
            # the lesser of the two: the bound, which is a constant, where the ratio has gone beyond
            # it and would gain by it
            gain = ratio * advantage
            if advantage > 0 and ratio > high:
                gain = torch.tensor(high * advantage)
            if advantage < 0 and ratio < low:
                gain = torch.tensor(low * advantage)
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
    torch.manual_seed(0)  # of the adapter; if it went far, exp in the KL would blow rounding up
    objective = ClippedSurrogate(0.1, 0.15, kl_coef=0.3, aggregation=aggregation)
    temperature = 0.7
    module, seen = trained(
        tiny_model,
        tmp_path,
        policy={"lora": Lora(r=4), "minibatch_tokens": 70},
        rollout={"temperature": temperature},
        objective=objective,
        passes_per_iteration=2,
        optimizer=adamw(3e-3),
    )
    advantages = torch.cat([credit.turns for credit in module.experience.credit])
    losses = []
    for step, states, gradient in zip(seen.batches, seen.states, seen.gradients, strict=True):
        assert len(step) > 1
        chosen = learned_from(step)
        assert len(chosen) == 8
        module.policy.network.load_state_dict(states)
        module.policy.zero_grad()
        members = [module.experience.trajectories[i] for i in chosen]
        loss = naive_loss(
            module, seen.states[0], members, advantages[chosen], objective, temperature
        )
        loss.backward()
        losses.append(float(loss.detach()))
        naive = {n: p.grad for n, p in module.policy.named_parameters() if p.grad is not None}
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


def test_old_log_probabilities_are_the_learners_before_the_first_step(tiny_model, tmp_path):
    module, seen = trained(
        tiny_model, tmp_path, rollout={"temperature": 1.3}, passes_per_iteration=2
    )
    trajectories = module.experience.trajectories
    assert [batch.old_logprobs is None for step in seen.batches for batch in step] == [
        *[True, False, False, False]
    ]
    module.policy.network.load_state_dict(seen.states[0])
    for batch in (batch for step in seen.batches[1:] for batch in step):
        with torch.no_grad():
            own = [
                logprob
                for i in learned_from([batch])
                for logprob in naive_logprobs(module.policy.network, trajectories[i], 1.3)
            ]
        assert torch.allclose(batch.old_logprobs, torch.stack(own), atol=1e-5)


class OffSession(Session):
    """A session of `Slots` whose log-probabilities are off by 0.3, up and down in turns."""

    def __init__(self, inner):
        self.inner = inner

    async def generate(self, new_ids, sampling):
        turn = await self.inner.generate(new_ids, sampling)
        off = (p + (0.3 if n % 2 else -0.3) for n, p in enumerate(turn.logprobs))
        return replace(turn, logprobs=tuple(off))

    def fork(self):
        return OffSession(self.inner.fork())

    def close(self):
        self.inner.close()


class Off(Engine):
    """`Slots` that computes other probabilities than the learner."""

    def __init__(self):
        self.slots = Slots().build()
        self.start, self.sync = self.slots.start, self.slots.sync
        self.drain, self.close = self.slots.drain, self.slots.close

    def start(self, policy, max_tokens): ...

    def sync(self, version): ...

    async def drain(self): ...

    def close(self): ...

    def open(self, prompt_ids):
        return OffSession(self.slots.open(prompt_ids))


class Dice(Steps):
    """Also keeps the state of the random numbers that each step drops by."""

    def __init__(self):
        super().__init__()
        self.chance = []

    def on_train_batch_start(self, *args):
        super().on_train_batch_start(*args)
        self.chance.append(torch.get_rng_state())


@pytest.mark.parametrize("cap", [None, 1.2])
def test_the_samplers_mismatch_is_corrected_without_the_noise_of_dropout(tiny_model, tmp_path, cap):
    objective, dice = ClippedSurrogate(0.1, 0.15, importance_cap=cap), Dice()
    options = {"policy": {"lora": Lora(r=4, dropout=0.5)}, "engine": Off(), "objective": objective}
    module = make_module(tiny_model, passes_per_iteration=2, **options)
    module.policy.load()
    move(module.policy, 1)  # where LoRA's B is zero, nothing that is dropped shows
    trainer(tmp_path, 1, [dice], limit_val_batches=0).fit(module, data())
    network, trusts, noise = module.policy.network, [], []
    for number, ((batch,), states) in enumerate(zip(dice.batches, dice.states, strict=True)):
        network.load_state_dict(dice.states[0])
        network.eval()
        with torch.no_grad():
            rows = [module.experience.trajectories[i] for i in learned_from([batch])]
            exact = [logprob for row in rows for logprob in naive_logprobs(network, row, 1.0)]
        read = batch.old_logprobs if number else batch.exact_logprobs
        if number or cap:
            assert torch.allclose(read, torch.stack(exact), atol=1e-5)
        else:
            assert read is None  # nothing needs them
        network.load_state_dict(states)
        network.train()
        module.policy.zero_grad()
        torch.set_rng_state(dice.chance[number])
        now = module.policy(batch.layout).logprobs
        total = torch.zeros(())
        for n, a in enumerate(batch.advantages.tolist()):
            ratio = (now[n] - (exact[n] if number else now[n].detach())).exp()
            trust = 1.0 if cap is None else min(math.exp(exact[n] - batch.sampler_logprobs[n]), cap)
            gain = torch.min(ratio * a, ratio.clamp(0.9, 1.15) * a)
            total = total - batch.weights[n] * trust * gain
            trusts.append(trust)
        total.backward()
        noise.append(float((now.detach() - torch.stack(exact)).abs().mean()))
        for name, parameter in module.policy.named_parameters():
            if (wanted := parameter.grad) is not None:
                tolerance = 1e-4 * float(wanted.abs().max()) + 1e-8
                assert torch.allclose(dice.gradients[number][name], wanted, atol=tolerance), name
    assert len(noise) == 4
    assert min(noise) > 0.05
    if cap:  # exp(0.3) is cut
        assert {round(trust, 3) for trust in trusts} == {cap, round(math.exp(-0.3), 3)}
