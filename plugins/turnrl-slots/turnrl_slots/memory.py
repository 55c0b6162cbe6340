"""The bytes that keys and values may take."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import torch

from turnrl import RecipeError
from turnrl.plugin.errors import summarize_error

_SHARE_OF_MACHINE = 0.25
"""Share of all memory on a machine without a GPU, for `kv_memory: auto`. A share of the free memory
would vary between runs, and batches, and so last digits, may depend on it."""

_SHARE_OF_GPU = 0.7
"""Share of the GPU memory that is free after the weights are loaded."""

_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""C's library."""


def auto_memory(device: torch.device, beside: int) -> int:
    """Bytes for keys and values if the recipe sets none: a quarter of the machine's memory, or most
    of the free memory on a GPU.

    Args:
        device: The device that will hold them.
        beside: Bytes on the device that something else is going to take.
    """
    if device.type != "cpu":
        empty_cache(device)  # what loading left behind is free too
        try:
            free, _ = torch.accelerator.get_memory_info(device)
        except (RuntimeError, ValueError) as error:
            raise RecipeError(
                f"model.engine.kv_memory is 'auto' on {device}, which does not report how much "
                f"of its memory is free ({summarize_error(error)}). Give a size, such as '4GB'."
            ) from error
        return int(_SHARE_OF_GPU * max(free - beside, 0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path("/sys/fs/cgroup", limit).read_text()))
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return int(_SHARE_OF_MACHINE * memory / processes)


def empty_cache(device: torch.device) -> None:
    """Give unused memory that the allocator keeps back to the device; on a CPU with glibc, back to
    the system."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # a device whose allocator keeps nothing
            torch.accelerator.empty_cache()
    elif _LIBRARY is not None:
        with contextlib.suppress(AttributeError):  # another C library than glibc
            _LIBRARY.malloc_trim(0)
