"""A device: waits for it, and measures its peaks of memory and its best rates."""

from __future__ import annotations

import gc
import time
import timeit
from collections.abc import Callable

import torch


def device() -> torch.device:
    """The GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock() -> float:
    """The time in seconds, once the device has finished all its work."""
    synchronize()
    return time.perf_counter()


def free() -> None:
    """Give back memory of the GPU that nobody holds any more. On a CPU, do nothing."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def peak() -> int | None:
    """The most bytes that tensors took on the device since the last call of this function; None
    without a GPU."""
    if not torch.cuda.is_available():
        return None
    size = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(size)


def free_bytes() -> int | None:
    """Bytes of the device that no tensor takes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0] + reserved)


def copy_bytes_per_s(size: int) -> float:
    """Bytes per second that a large copy reads and writes.

    Args:
        size: Bytes copied.
    """
    source = torch.zeros(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source))


def matmul_flops(size: int) -> float:
    """Operations per second of a product of two square matrices, in bfloat16 on a GPU.

    Args:
        size: Rows.
    """
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device(), dtype=dtype)
    return 2 * size**3 / best_seconds(lambda: matrix @ matrix)


def best_seconds(work: Callable[[], object], repetitions: int = 10) -> float:
    """The least seconds of several repetitions, after one that warms up."""

    def finished() -> None:
        work()
        synchronize()

    finished()
    return min(timeit.repeat(finished, number=1, repeat=repetitions))
