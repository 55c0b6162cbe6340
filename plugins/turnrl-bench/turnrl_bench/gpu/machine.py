"""The machine, its libraries, and its measured ceilings."""

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

LIBRARIES = (
    *("turnrl", "torch", "transformers", "peft", "bitsandbytes", "triton", "liger-kernel"),
    *("flash-attn", "flash-attn-3", "lightning"),
)


def measure(bench: Bench, cases: Cases) -> None:
    """See `parts`."""
    cases.run("device", _device)
    cases.run("versions", _versions)
    setting = bench.setting
    cases.run("copy", lambda: {"rate": device.copy_bytes_per_s(_size(setting.copied))})
    cases.run("matmul", lambda: {"rate": device.matmul_flops(setting.multiplied)})


def _size(wanted: int) -> int:
    """Bytes that can be copied: a quarter of what is free at most."""
    room = device.free_bytes()
    return wanted if room is None else min(wanted, room // 4)


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
            "driver": _driver(),
        }
    return facts


def _driver() -> str | None:
    """The driver's version, where Linux tells it. Not the doctor's, whose checks import Lightning:
    this part comes first, and has seconds."""
    with suppress(OSError), Path("/proc/driver/nvidia/version").open(encoding="utf-8") as file:
        return file.readline().strip()
    return None


def _versions() -> Found:
    """Of Python, CUDA, and the libraries; None for one that is not installed."""
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
