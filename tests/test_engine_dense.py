"""Sampling with dense weights: the policy stays the same, and the learner stays as it was."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engines import GREEDY, PROMPTS, Watched, adapted, move, run, started
from turnrl import Policy, Sampling
from turnrl.policy.layout import lay_out
from turnrl.policy.settings import Lora

__all__ = ["adapted"]  # fixtures


FORCED = Sampling(20, forced_ids=tuple(range(50, 70)))


def logprobs_of(policy, decode_weights):
    """The log-probabilities of `FORCED` under freshly started weights of that kind."""
    engine = started(policy, decode_weights=decode_weights)
    return run(engine.open(PROMPTS[3]).generate([], FORCED)).logprobs


def learner(policy):
    """What learning relies on: modules and their attributes, weights, gradients."""
    modules = [(id(m), m.training, sorted(vars(m))) for m in policy.load().modules()]
    weights = [(id(w), w.requires_grad, w.detach().clone()) for w in policy.parameters()]
    gradients = [w.grad is not None and (id(w.grad), w.grad.clone()) for w in policy.parameters()]
    return modules, weights, gradients


def assert_same(first, second):
    """Compare two answers of `learner`, to the last bit."""
    assert first[0] == second[0]
    for before, after in zip(first[1] + first[2], second[1] + second[2], strict=True):
        if before is False or after is False:
            assert before is after
        else:
            assert before[:-1] == after[:-1]
            assert torch.equal(before[-1], after[-1])


def test_dense_weights_give_the_log_probabilities_of_base_and_adapter(adapted):
    dense, separate = logprobs_of(adapted, "dense"), logprobs_of(adapted, "adapter")
    assert dense == pytest.approx(separate, rel=1e-4)
    assert dense != separate  # another order of sums: it is not the same path
    move(adapted, 2)
    assert logprobs_of(adapted, "adapter") != pytest.approx(separate, abs=0.1)


def test_dense_weights_follow_the_adapter_at_each_sync_and_are_freed_on_drain(adapted):
    engine = started(adapted, decode_weights="dense")
    # adapters under which float32 rounds these tokens by less than 2e-5; with seed 2, three ways to
    # compute one of them differ by 2e-4, as the processor's kernels have it
    seeds_and_drains = [(5, True), (3, False), (6, True)]

    async def sample():
        assert engine.passes.dense is None  # the start was checked with it, and gave it back
        for version, (seed, drains) in enumerate(seeds_and_drains):
            move(adapted, seed)
            engine.sync(version)
            sample = await engine.open(PROMPTS[3]).generate([], FORCED)
            assert engine.passes.dense is not None
            if drains:
                await engine.drain()
                assert engine.passes.dense is None
            yield sample.logprobs

    async def collect():
        return [logprobs async for logprobs in sample()]

    for (seed, _), logprobs in zip(seeds_and_drains, run(collect()), strict=True):
        move(adapted, seed)
        assert logprobs == pytest.approx(logprobs_of(adapted, "adapter"), rel=1e-4)


@pytest.mark.parametrize("end", ["drained", "failed", "cancelled"])
def test_the_learner_is_unchanged_however_sampling_with_dense_weights_ends(adapted, end):
    rows = [([5, 9, 33, 71], [False, False, True, True])]
    adapted.train()
    adapted(lay_out(rows))[0].sum().backward()
    before = learner(adapted)
    policy = Watched(adapted)
    engine = started(policy, decode_weights="dense")
    assert_same(before, learner(adapted))
    policy.read.clear()

    def fails_later(hidden):
        if len(policy.read) > 3:
            raise RuntimeError("out of memory")
        return adapted.logits(hidden)

    async def scenario():
        session = engine.open(PROMPTS[0])
        if end == "failed":
            policy.logits = fails_later
            with pytest.raises(RuntimeError, match="out of memory"):
                await session.generate([], GREEDY)
        elif end == "cancelled":
            task = asyncio.create_task(session.generate([], Sampling(50)))
            while len(policy.read) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
        else:
            await session.generate([], GREEDY)
        await engine.drain()

    run(scenario())
    assert len(policy.read) >= 3
    assert_same(before, learner(adapted))
    adapted.zero_grad()
    adapted(lay_out(rows))[0].sum().backward()
    for kept, weight in zip(before[2], adapted.parameters(), strict=True):
        assert (kept is False) == (weight.grad is None)
        assert kept is False or torch.allclose(kept[1], weight.grad, atol=1e-6)


def test_between_passes_the_network_uses_the_adapter_not_the_dense_weights(adapted):
    engine = started(adapted, decode_weights="dense")

    async def scenario():
        await engine.open(PROMPTS[0]).generate([], GREEDY)
        with torch.no_grad():
            ids = torch.tensor([PROMPTS[0]])
            with adapted.reference():  # turns the adapter off, which dense weights would ignore
                off = adapted.load()(input_ids=ids).logits
            on = adapted.load()(input_ids=ids).logits
        await engine.drain()
        return off, on

    off, on = run(scenario())
    assert not torch.allclose(off, on, atol=0.1)


def test_pages_are_tried_with_the_weights_that_sample(tiny_model):
    policy = Policy(str(tiny_model), "nf4", Lora(r=4), dtype="bfloat16").build()
    policy.load()
    move(policy, 1)
    assert started(policy, 256, decode_weights="dense").capacity


def test_dense_weights_without_an_adapter_are_the_policys_own(tiny_policy):
    assert not started(tiny_policy, decode_weights="dense").passes.samples_dense
