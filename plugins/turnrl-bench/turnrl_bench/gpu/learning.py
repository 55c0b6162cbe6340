"""Learning from one minibatch, part by part, with activations recomputed and with all kept."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from turnrl import Policy, recompute
from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found

_LONG_S = 8.0
"""A minibatch that takes longer is measured once."""


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    for name, recomputes in (("recomputed", True), ("kept", False)):
        cases.run(name, partial(_minibatch, bench, recomputes))
    cases.run("old log-probabilities", partial(_reading, bench))
    cases.run("optimiser", partial(_optimiser, bench))


def minibatch(bench: Bench) -> tuple[list[int], object]:
    """The first full minibatch: the numbers of its trajectories, and their layout."""
    policy, rows = bench.policy("nf4"), [row for t in bench.played() for row in t.token_rows]
    numbers, layout = next(policy.forward_passes(rows, bench.setting.minibatch_tokens))
    return numbers, move_data_to_device(layout, bench.device)


def counts_of(layout: Any) -> tuple[int, int, int]:
    """Counts of a pass: its tokens, its pairs of a token and a token that it attends to, and its
    tokens whose log-probabilities are computed. A token attends to itself and to earlier tokens."""
    seen = layout.position_ids + 1
    if layout.attention_mask is not None:
        seen = seen * layout.attention_mask
    return layout.input_ids.numel(), int(seen.sum()), layout.targets.numel()


@contextlib.contextmanager
def recomputing(policy: Policy, recomputes: bool) -> Iterator[None]:
    """Recompute activations in the backward pass meanwhile, or keep all of them."""
    recompute(policy.base, recomputes)
    try:
        yield
    finally:
        recompute(policy.base, policy.gradient_checkpointing or False)


def step(policy: Policy, layout: object) -> dict[str, float]:
    """Seconds of the forward pass, the head and the backward pass of one minibatch. The loss is a
    weighted sum of log-probabilities, whose gradient is as large as the surrogate's."""
    marks: list[float] = []
    hook = policy.decoder.register_forward_hook(lambda *_: marks.append(device.clock()))
    try:
        began = device.clock()
        logprobs = policy(layout).logprobs
        headed = device.clock()
        weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device) / len(logprobs)
        (logprobs * weights).sum().backward()
        ended = device.clock()
    finally:
        hook.remove()
    # checkpointing runs the layers again, but not the decoder, so there is only one mark
    return {"forward": marks[0] - began, "head": headed - marks[0], "backward": ended - headed}


def _minibatch(bench: Bench, recomputes: bool) -> Found:
    policy = bench.policy("nf4")
    numbers, layout = minibatch(bench)
    with recomputing(policy, recomputes):
        device.peak()
        runs, first = [], step(policy, layout)
        peak = device.peak()
        for _ in range(1 if sum(first.values()) > _LONG_S else 3):
            runs.append(step(policy, layout))
    policy.zero_grad()
    seconds = statistics.median(sum(run.values()) for run in runs)
    tokens, pairs, asked = counts_of(layout)
    costs = floors.learning(bench.net, "nf4", tokens, pairs, asked)
    return {
        "minibatch_s": seconds,
        **{f"{part}_s": statistics.median(run[part] for run in runs) for part in first},
        **bench.against(seconds, costs),
        "first_s": sum(first.values()),
        "tflops": sum(cost.flops for cost in costs) / seconds / 1e12,
        "peak_bytes": peak,
        "tokens": tokens,
        "asked": asked,
        "trajectories": len(numbers),
    }


def _reading(bench: Bench) -> Found:
    """Old log-probabilities of the same trajectories."""
    policy = bench.policy("nf4")
    numbers, layout = minibatch(bench)
    rows = [row for i in numbers for row in bench.played()[i].token_rows]
    seconds = device.best_seconds(lambda: policy.read(rows, bench.setting.minibatch_tokens), 2)
    costs = floors.reading(bench.net, "nf4", *counts_of(layout))
    return {"read_s": seconds, **bench.against(seconds, costs)}


def _optimiser(bench: Bench) -> Found:
    """One step of AdamW on the trained weights."""
    policy = bench.policy("nf4")
    trained = list(policy.trainable_parameters().values())
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    seconds = device.best_seconds(torch.optim.AdamW(trained, lr=0.0).step, 3)
    policy.zero_grad()
    return {"step_s": seconds, "trained": sum(p.numel() for p in trained)}
