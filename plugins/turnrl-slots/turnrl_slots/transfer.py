"""Copies of numbers between the host and the computing device: few copies, and no waiting for them.

A copy of a few bytes takes as long as a short kernel, and a copy from ordinary memory makes the
host wait until the device has finished all earlier work. So the numbers of a pass travel together,
and to a GPU they travel from pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 4
"""Numbers of 4 bytes in 16 bytes; kernels expect their arguments at multiples of 16 bytes."""


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, array: np.ndarray) -> None:
    """Write an array over a tensor of the same shape and type."""
    host = torch.from_numpy(array)
    if target.device.type == "cuda":
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        target.copy_(host)


def pack(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays of int32 or float32 to a device in a single copy."""
    assert all(array.dtype in (np.int32, np.float32) for array in arrays)
    begins = [0, *accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)]
    flat = np.zeros(begins[-1], np.int32)
    for begin, array in zip(begins, arrays, strict=False):
        flat[begin : begin + array.size] = array.ravel().view(np.int32)
    uploaded = upload(flat, device)
    parts = (
        uploaded[begin : begin + array.size].view(array.shape)
        for begin, array in zip(begins, arrays, strict=False)
    )
    return [
        part.view(torch.float32) if array.dtype == np.float32 else part
        for part, array in zip(parts, arrays, strict=True)
    ]


def download(tokens: Tensor, logprobs: Tensor) -> tuple[list[int], list[float]]:
    """Fetch (R,) tokens and their (R,) log-probabilities in float32, in a single copy."""
    stacked = torch.stack([tokens.int(), logprobs.contiguous().view(torch.int32)]).cpu()
    return stacked[0].tolist(), stacked[1].view(torch.float32).tolist()
