"""Loading a policy as a run does, and what is in force then."""

from __future__ import annotations

from turnrl_bench.gpu import device
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found
from turnrl_slots import Slots


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    cases.run("nf4", lambda: _load(bench), 10 if bench.on_gpu else 0)
    cases.run("in force", lambda: _in_force(bench))


def _load(bench: Bench) -> Found:
    bench.task()  # makes the model
    bench.drop()
    device.peak()
    began = device.clock()
    policy = bench.policy("nf4")
    taken = device.clock() - began
    return {
        "loaded_s": taken,
        "peak_bytes": device.peak(),
        "share_prefixes": policy.share_prefixes,
        "in_force": dict(policy.in_force),
    }


def _in_force(bench: Bench) -> Found:
    """The choices of an engine with its defaults."""
    engine = Slots(kv_memory="64MB" if bench.tiny else "4GB")
    began = device.clock()
    engine.start(bench.policy("nf4"), bench.setting.shape.tokens)
    choices: Found = {
        "started_s": device.clock() - began,
        "engine": dict(engine.in_force),
        "capacity": engine.capacity,
        "options": options(engine),
    }
    engine.close()
    return choices


def options(engine: object) -> Found:
    """The engine's public options as they stand."""
    kept = {k: v for k, v in vars(engine).items() if not k.startswith("_")}
    return {k: v for k, v in kept.items() if isinstance(v, str | int | float | bool | None)}
