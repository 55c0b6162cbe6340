"""Sampling with dense weights: the same policy, and a learner that is left as it was."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engines import GREEDY, PROMPTS, Watched, adapted, move, run, started
from turnrl import Lora, Policy, RecipeError, Sampling
from turnrl.policy.layout import lay_out

__all__ = ["adapted"]  # fixtures


def logprobs_of(policy, decode_weights):
    """Of the same forced tokens."""
    forced = Sampling(20, forced_ids=tuple(range(50, 70)))
    engine = started(policy, decode_weights=decode_weights)
    return run(engine.open(PROMPTS[3]).generate([], forced)).logprobs


def learner(policy):
    """What learning relies on, to be compared: modules, their attributes, weights, gradients."""
    modules = [(id(m), m.training, sorted(vars(m))) for m in policy.load().modules()]
    weights = [(id(w), w.requires_grad, w.detach().clone()) for w in policy.parameters()]
    gradients = [w.grad is not None and (id(w.grad), w.grad.clone()) for w in policy.parameters()]
    return modules, weights, gradients


def same(one, other):
    assert one[0] == other[0]
    for before, after in zip(one[1] + one[2], other[1] + other[2], strict=True):
        if before is False or after is False:
            assert before is after
        else:
            assert before[:-1] == after[:-1]
            assert torch.equal(before[-1], after[-1])


def test_dense_weights_give_the_log_probabilities_of_base_and_adapter(adapted):
    found, wanted = logprobs_of(adapted, "dense"), logprobs_of(adapted, "adapter")
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found != wanted  # another order of sums: it is not the same path
    move(adapted, 2)
    assert logprobs_of(adapted, "adapter") != pytest.approx(wanted, abs=0.1)


def test_dense_weights_follow_the_adapter_at_each_sync_and_are_given_back(adapted):
    engine = started(adapted, decode_weights="dense")
    forced = Sampling(20, forced_ids=tuple(range(50, 70)))

    async def scenario():
        assert engine.passes.dense is None  # the one that the start was checked with
        for version, drains in enumerate([True, False, True]):
            move(adapted, version)
            engine.sync(version)
            found = await engine.open(PROMPTS[3]).generate([], forced)
            assert engine.passes.dense is not None
            if drains:
                await engine.drain()
                assert engine.passes.dense is None
            yield found.logprobs

    async def collect():
        return [found async for found in scenario()]

    for version, found in enumerate(run(collect())):
        move(adapted, version)
        assert found == pytest.approx(logprobs_of(adapted, "adapter"), rel=1e-4)


@pytest.mark.parametrize("end", ["drained", "failed", "cancelled"])
def test_the_learner_is_as_it_was_however_sampling_with_dense_weights_ends(adapted, end):
    rows = [([5, 9, 33, 71], [False, False, True, True])]
    adapted.train()
    adapted(lay_out(rows))[0].sum().backward()
    before = learner(adapted)
    policy = Watched(adapted)
    engine = started(policy, decode_weights="dense")
    same(before, learner(adapted))
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
    same(before, learner(adapted))
    adapted.zero_grad()
    adapted(lay_out(rows))[0].sum().backward()
    for kept, weight in zip(before[2], adapted.parameters(), strict=True):
        assert (kept is False) == (weight.grad is None)
        assert kept is False or torch.allclose(kept[1], weight.grad, atol=1e-6)


def test_who_reads_the_network_between_passes_finds_it_as_it_is_learned(adapted):
    engine = started(adapted, decode_weights="dense")

    async def scenario():
        await engine.open(PROMPTS[0]).generate([], GREEDY)
        with torch.no_grad():
            ids = torch.tensor([PROMPTS[0]])
            with adapted.reference():  # the adapter is off, and dense weights know of no such thing
                off = adapted.load()(input_ids=ids).logits
            on = adapted.load()(input_ids=ids).logits
        await engine.drain()
        return off, on

    off, on = run(scenario())
    assert not torch.allclose(off, on, atol=0.1)


def test_pages_are_tried_with_the_weights_that_are_sampled_with(tiny_model):
    policy = Policy(str(tiny_model), "nf4", Lora(r=4), dtype="bfloat16")
    policy.load()
    move(policy, 1)
    assert started(policy, 256, decode_weights="dense").capacity


def test_dense_weights_without_an_adapter_are_refused_with_the_way_out(tiny_policy):
    told = r"decode_weights is 'dense'.*Set it to 'adapter', or add model\.policy\.lora"
    with pytest.raises(RecipeError, match=told):
        started(tiny_policy, decode_weights="dense")
