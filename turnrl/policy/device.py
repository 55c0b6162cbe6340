"""Errors of a device, as opposed to errors in the code that was tried on it."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error, on a device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


_REFUSALS = {98, 209, 701, 801, *range(900, 910)}
"""CUDA errors that refuse and leave the device as it was: no such kernel for this card, too little
room for a launch, not supported, not allowed while a graph is captured
(https://docs.nvidia.com/cuda/cuda-runtime-api, cudaError)."""

_DEVICE_WORDS = (
    *("out of memory", "alloc_failed", "defaultcpuallocator", "cuda error"),
    *("same device", "two devices", "expected device", "cpu tensor?"),
)
"""Words in the messages of torch's operations, its checks of fake tensors, and Triton's
launcher."""


def is_device_error(error: BaseException) -> bool:
    """True for an error of memory, of a GPU, or of tensors on two devices.

    Such an error says nothing about the thing that was tried, so a check that tries something must
    raise it: tensors on two devices are a bug in turnrl, and memory that runs out in a check would
    run out in the run.
    """
    if is_out_of_memory(error):
        return True
    if isinstance(error, torch.AcceleratorError):
        # only errors that a device reports have a code
        return getattr(error, "error_code", None) not in _REFUSALS
    text = str(error).lower()
    return isinstance(error, RuntimeError | ValueError) and any(w in text for w in _DEVICE_WORDS)
