"""The machine, its libraries, its highest rates, and a policy loaded on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from turnrl_bench.gpu import device
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.results import Cases, Found
from turnrl_doctor.checks import driver_version
from turnrl_slots import Slots

LIBRARIES = (
    *("turnrl", "torch", "transformers", "peft", "bitsandbytes", "triton", "liger-kernel"),
    *("flash-attn", "flash-attn-3", "lightning"),
)


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    cases.run("device", _device)
    cases.run("versions", _versions)
    setting, room = bench.setting, device.free_bytes()
    copied = setting.copied if room is None else min(setting.copied, room // 4)
    cases.run("copy", lambda: {"rate": device.copy_bytes_per_s(copied)})
    cases.run("matmul", lambda: {"rate": device.matmul_flops(setting.multiplied)})


def load(bench: Bench, cases: Cases) -> None:
    """Load a policy as a run does, start an engine with its defaults, and note the choices in
    force."""
    cases.run("nf4", lambda: _load(bench))


def _load(bench: Bench) -> Found:
    _ = bench.model  # made first
    device.peak()
    began = device.clock()
    policy = bench.policy("nf4")
    loaded = device.clock()
    peak, engine = device.peak(), Slots(kv_memory="4GB" if bench.on_gpu else "64MB")
    engine.start(policy, bench.setting.shape.tokens)
    in_force = {**policy.in_force, **engine.in_force}
    engine.close()
    return {
        "loaded_s": loaded - began,
        "started_s": device.clock() - loaded,
        "peak_bytes": peak,
        "share_prefixes": policy.way.share,
        "in_force": in_force,
    }


def _device() -> Found:
    facts: Found = {"processor": processor(), "cores": os.cpu_count(), "name": "CPU"}
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "name": seen.name,
            "bytes": total,
            "free_bytes": free,
            "capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": seen.multi_processor_count,
            "gpus": torch.cuda.device_count(),
            "driver": driver_version(),
        }
    return facts


def _versions() -> Found:
    """Versions of Python, CUDA, and the libraries; None for a library that is not installed."""
    return {**dict.fromkeys(LIBRARIES), **versions(LIBRARIES), "cuda": torch.version.cuda}


def processor() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of Python, and of the packages among these that are installed."""
    by_name = {"python": platform.python_version()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name
