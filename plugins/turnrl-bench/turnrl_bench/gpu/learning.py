"""Learning from one minibatch, part by part, with activations computed again and with all kept."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from turnrl import Policy, TokenRow, recompute
from turnrl_bench.gpu import device, floors
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found

PARTS = ("forward", "head", "backward")
_LONG_S = 8.0
"""A minibatch that takes longer is measured once."""


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    for name, again in (("recomputed", True), ("kept", False)):
        cases.run(name, partial(_minibatch, bench, again))
    cases.run("old log-probabilities", partial(_reading, bench))
    cases.run("optimiser", partial(_optimiser, bench))


def rows_of(bench: Bench) -> list[TokenRow]:
    """The trajectories as a layout takes them; their sampled tokens are asked for."""
    return [t.token_row for t in bench.played()]


def minibatch(bench: Bench) -> tuple[list[int], Any]:
    """The first full minibatch: which trajectories it has, and how they are laid out."""
    policy = bench.policy("nf4")
    some, layout = next(iter(policy.passes(rows_of(bench), bench.setting.minibatch_tokens)))
    return list(some), move_data_to_device(layout, bench.device)


def sizes_of(layout: Any) -> tuple[int, int, int]:
    """Counts of a pass: its tokens, pairs of a token and one that it attends to, and tokens asked
    for. A token attends to itself and to those before it, whose number is its position."""
    seen = layout.position_ids + 1
    if layout.attention_mask is not None:
        seen = seen * layout.attention_mask
    return layout.input_ids.numel(), int(seen.sum()), layout.targets.numel()


@contextlib.contextmanager
def recomputing(policy: Policy, again: bool) -> Iterator[None]:
    """Within it activations are computed again in the backward pass, or all are kept."""
    recompute(policy.base, again)
    try:
        yield
    finally:
        recompute(policy.base, policy.gradient_checkpointing or False)


def step(policy: Policy, layout: Any) -> Found:
    """Forward, head and backward of one minibatch, in seconds. The loss is a weighted sum of
    log-probabilities, whose gradient is of the size of the surrogate's."""
    marks: list[float] = []
    hook = policy.decoder.register_forward_hook(lambda *_: marks.append(device.clock()))
    try:
        began = device.clock()
        logprobs = policy(layout).logprobs
        asked = device.clock()
        weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device) / len(logprobs)
        (logprobs * weights).sum().backward()
        ended = device.clock()
    finally:
        hook.remove()
    # with checkpointing the layers, not the decoder, are run again, so there is one mark
    return {"forward": marks[0] - began, "head": asked - marks[0], "backward": ended - asked}


def _minibatch(bench: Bench, again: bool) -> Found:
    policy = bench.policy("nf4")
    some, layout = minibatch(bench)
    with recomputing(policy, again):
        device.free()
        device.peak()
        runs, first = [], step(policy, layout)
        peak = device.peak()
        for _ in range(1 if sum(first.values()) > _LONG_S else 3):
            runs.append(step(policy, layout))
    policy.zero_grad()
    device.free()
    typical = {f"{part}_s": statistics.median(run[part] for run in runs) for part in PARTS}
    seconds = statistics.median(sum(run.values()) for run in runs)
    tokens, pairs, asked = sizes_of(layout)
    works = floors.learning(bench.net, "nf4", tokens, pairs, asked)
    return {
        "minibatch_s": seconds,
        **typical,
        **bench.against(seconds, works),
        "first_s": sum(first.values()),
        "tflops": floors.flops(works) / seconds / 1e12,
        "peak_bytes": peak,
        "tokens": tokens,
        "asked": asked,
        "trajectories": len(some),
    }


def _reading(bench: Bench) -> Found:
    """Old log-probabilities of the same trajectories."""
    policy = bench.policy("nf4")
    some, layout = minibatch(bench)
    rows = [rows_of(bench)[i] for i in some]
    read: Callable[[], Any] = partial(policy.read, rows, bench.setting.minibatch_tokens)
    seconds = device.best_seconds(read, 2)
    works = floors.reading(bench.net, "nf4", *sizes_of(layout))
    return {"read_s": seconds, **bench.against(seconds, works)}


def _optimiser(bench: Bench) -> Found:
    """One step of AdamW on what is trained."""
    policy = bench.policy("nf4")
    trained = list(policy.trainable_parameters().values())
    for one in trained:
        one.grad = torch.zeros_like(one)
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    seconds = device.best_seconds(optimizer.step, 3)
    policy.zero_grad()
    device.free()
    return {"step_s": seconds, "trained": sum(p.numel() for p in trained)}
