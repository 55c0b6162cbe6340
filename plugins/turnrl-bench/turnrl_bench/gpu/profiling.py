"""Some decode steps and one minibatch under torch's profiler: the largest kernels, and the gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from turnrl_bench.gpu import device, learning
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.decoding import Case, Wave, engine_of, play
from turnrl_bench.gpu.passes import TimedPolicy
from turnrl_bench.gpu.results import Cases, Found

LARGEST = 10
_BEFORE = 8
"""Steps before those that are profiled: by then all sizes are warm, and recorded."""


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    # the profiler wants to be set up by the main thread, not by an engine's
    with profile(activities=_activities(bench.on_gpu)):
        torch.zeros(1, device=bench.device)
    rows = bench.setting.rows[0]
    first = Case(rows=rows)
    cases.run(f"decode: {first.name}", partial(_decode, bench, first))
    cases.run("minibatch", partial(_minibatch, bench))
    for graphs in (False, True):
        case = Case(weights="adapter", graphs=graphs, rows=rows)
        cases.run(f"decode: {case.name}", partial(_decode, bench, case))


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what some intervals cover together."""
    covered, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered


def kernels(profiled: Any, on_gpu: bool) -> Found:
    """The largest kernels of a profile by their own time, and how long the device did nothing
    between the first one's begin and the last one's end.

    Args:
        found: The profile.
        on_gpu: Count a GPU's kernels; otherwise the operations of a CPU.
    """
    wanted = "CUDA" if on_gpu else "CPU"
    # a named range, such as `Optimizer.step`, is no kernel
    events = [
        e for e in profiled.events() if e.device_type.name == wanted and not e.is_user_annotation
    ]
    took: dict[str, list[float]] = {}
    for event in events:
        own = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        took.setdefault(event.name, []).append(own)
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    whole = max(e for _, e in spans) - min(b for b, _ in spans) if spans else 0.0
    busy, all_us = union(spans), sum(map(sum, took.values()))
    largest = sorted(took.items(), key=lambda pair: -sum(pair[1]))[:LARGEST]
    return {
        "span_ms": whole / 1e3,
        "busy_ms": busy / 1e3,
        "gap_share": 1 - busy / whole if whole else None,
        "kernels": len(events),
        "largest": [
            {"name": name[:120], "count": len(us), "ms": sum(us) / 1e3, "share": sum(us) / all_us}
            for name, us in largest
        ],
    }


def _activities(on_gpu: bool) -> list[ProfilerActivity]:
    return [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]


class _Window:
    """A profile of the passes between two, begun and ended in the thread that computes them."""

    def __init__(self, on_gpu: bool, first: int, count: int) -> None:
        self.profile = profile(activities=_activities(on_gpu), acc_events=True)
        self.first, self.last = first, first + count
        self.ended = False

    def at(self, number: int) -> None:
        """Called before each pass's logits."""
        if number == self.first:
            torch.zeros(1, device=device.device())
            device.synchronize()
            self.profile.start()
        elif number == self.last:
            device.synchronize()
            self.profile.stop()
            self.ended = True


def _decode(bench: Bench, case: Case) -> Found:
    setting = bench.setting
    steps = setting.profiled
    turn = (_BEFORE + steps + 4,)
    wave = Wave.drawn(case.rows, setting.shape, turn, setting.network.vocab, ragged=False)
    window = _Window(bench.on_gpu, _BEFORE, steps)
    policy = TimedPolicy(bench.policy(case.kind))
    with engine_of(bench, wave, case, policy) as engine:
        policy.on_pass = window.at  # not before: while it starts it has passes of its own
        asyncio.run(play(engine, wave, policy))
    if not window.ended:
        raise RuntimeError(f"the {steps} steps to be profiled were not reached")
    return {
        "steps": steps,
        "in_force": dict(engine.in_force),
        **kernels(window.profile, bench.on_gpu),
    }


def _minibatch(bench: Bench) -> Found:
    policy = bench.policy("nf4")
    _, layout = learning.minibatch(bench)
    again = not bench.results.case("learning", "kept")
    with learning.recomputing(policy, again):
        learning.step(policy, layout)
        device.synchronize()
        with profile(activities=_activities(bench.on_gpu), acc_events=True) as profiled:
            learning.step(policy, layout)
            device.synchronize()
    policy.zero_grad()
    return {"recomputed": again, **kernels(profiled, bench.on_gpu)}
