"""An adapter of a few optimiser steps, as a policy in bfloat16 sees it: learning and sampling."""

from __future__ import annotations

import asyncio

import pytest
import torch

from turnrl import Policy, Sampling
from turnrl.policy.compute import find_adapted_layers, joint_product
from turnrl.policy.settings import Lora
from turnrl_slots import Slots

PROMPT, ASKED, ROWS, STEPS = 8, 32, 80, (5, 80)


def grid(*size, seed=0):
    """Numbers of bfloat16, of a size that makes sums of them unlike each other."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=draw).bfloat16()


@pytest.mark.parametrize("shape", [(40, 16, 24), (6, 64, 8)], ids=["one product", "two products"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [4, 8])
def test_base_and_adapter_are_summed_with_one_rounding(shape, bias, rank):
    m, k, n = shape
    assert (k * (m + n) < 4 * m * n) is (m == 40)  # which of its ways it takes
    x, weight, added = grid(m, k), grid(n, k, seed=1), grid(n, seed=2) if bias else None
    narrow, up = grid(m, rank, seed=3), grid(n, rank, seed=4) * 2**-12
    joint = joint_product(x, weight, added, narrow, up)
    base = x.double() @ weight.double().t() + (0 if added is None else added.double())
    part = narrow.double() @ up.double().t()
    assert joint.dtype == torch.bfloat16
    # half a unit, at most 2^-8 of the number, and what sums in float32 lose
    assert ((joint.double() - base - part).abs() <= base.abs() * 2**-8 + 1e-5).all()
    # the base alone is rounded to the same number nearly everywhere: the part is far below a unit
    same = (joint == base.to(torch.bfloat16)).double().mean()
    assert 0.9 < same < 1


def policies(quantization):
    """One base with an adapter, in bfloat16 and in float32."""
    made = []
    for dtype in ("bfloat16", "float32"):
        torch.manual_seed(1)
        policy = Policy("package://turnrl_atlas/starter", quantization, Lora(), dtype=dtype).build()
        policy.load()
        made.append(policy)
    half, exact = made
    if quantization == "none":  # what bfloat16 makes of the base is no matter of the adapter
        exact.load_state_dict({name: x.float() for name, x in half.state_dict().items()})
    return half, exact


def read(policy, rows):
    """Log-probabilities as they are learned from."""
    return torch.cat([scores.logprobs for scores in policy.score_tokens(rows)]).double()


def sampled(policy, rows, decode_weights):
    """Log-probabilities that the engine gives the same tokens."""
    engine = Slots(decode_weights=decode_weights, slots=ROWS).build()
    engine.start(policy, PROMPT + ASKED)

    async def together():
        turns = []
        for text, _ in rows:
            forced = Sampling(ASKED, forced_ids=tuple(text[PROMPT:]))
            turns.append(engine.open(text[:PROMPT]).generate([], forced))
        return await asyncio.gather(*turns)

    logprobs = [turn.logprobs for turn in asyncio.run(together())]
    engine.close()
    return torch.tensor(logprobs).double().flatten()


WAYS = {
    "learning": read,
    "sampling with base and adapter": lambda policy, rows: sampled(policy, rows, "adapter"),
    "sampling with dense weights": lambda policy, rows: sampled(policy, rows, "dense"),
}


@pytest.fixture(scope="module", params=["none", "nf4"])
def scene(request):
    """A policy in bfloat16, rows to read, a function that sets its adapter, and the exact change of
    log-probabilities from that many steps down the gradient to as many up."""
    half, exact = policies(request.param)
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(16, 900, (ROWS, PROMPT + ASKED), generator=draw).tolist()
    rows = [(text, [False] * PROMPT + [True] * ASKED) for text in texts]
    for _, layout in exact.forward_passes(rows, 4096):
        exact(layout).logprobs.sum().backward()
    # while a gradient keeps its sign, a step of Adam is the learning rate times that sign
    ups = {n: x.grad.sign() for n, x in exact.trainable_parameters().items() if "lora_B" in n}

    def move(steps):
        for policy in (half, exact):
            weights = policy.trainable_parameters()
            for name, sign in ups.items():
                weights[name].data.copy_(steps * 1e-5 * sign)

    def exactly(steps):
        move(steps)
        return read(exact, rows).mean()

    return half, rows, move, {n: exactly(n) - exactly(-n) for n in STEPS}


@pytest.mark.parametrize(("scene", "way"), [
    ("nf4", "sampling with dense weights"),
    *(pytest.param(scene, way, marks=pytest.mark.slow) for scene, way in (
        ("none", "learning"), ("none", "sampling with base and adapter"),
        ("none", "sampling with dense weights"),
        ("nf4", "learning"), ("nf4", "sampling with base and adapter"),
    )),
], indirect=["scene"], scope="module")  # fmt: skip
def test_bfloat16_sees_an_adapter_from_its_fifth_step_on(scene, way):
    half, rows, move, exact = scene
    for steps in STEPS:
        seen = []
        for signed in (steps, -steps):
            move(signed)
            seen.append(WAYS[way](half, rows).mean())
        # known to 0.02 from 2,560 tokens, at five steps. A base that is rounded before the adapter
        # is added shows 0.1 of the change, and an adapter merged into bfloat16 weights 0.03
        assert 0.9 < (seen[0] - seen[1]) / exact[steps] < 1.1, steps


def test_a_dense_layer_computes_what_its_adapter_does(scene):
    half, _, move, _ = scene
    move(2000)
    layer = find_adapted_layers(half.network)[0]
    dense, x = layer.dense(), grid(5, layer.base.in_features)
    with torch.no_grad():
        assert torch.equal(dense(x), layer(x))
        assert not torch.equal(dense(x), layer.base(x))
    assert layer.dense_bytes == dense.weight.nbytes
