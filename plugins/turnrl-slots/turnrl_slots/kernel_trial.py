"""Finds out at the start of a run whether a GPU's kernels compute attention over pages here."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional as F

from turnrl.plugin.errors import summarize_error
from turnrl.policy.device import is_device_error
from turnrl.policy.layout import supports_ragged
from turnrl_slots.pages import Shapes
from turnrl_slots.sizes import PAGE

_logger = logging.getLogger(__name__)

KERNEL = "Triton kernel, pages read in place; gathered where prompts are read"
PLAIN = "products of matrices, pages gathered in every layer"
"""Descriptions of attention with kernels, and without."""

_COST = (
    "Attention is computed by plain products of matrices: sampling takes 2.9 times as long "
    "(measured with 128 turns of Qwen2.5-7B on an H100)."
)


def has_kernel(shapes: Shapes, device: torch.device) -> bool:
    """Find out whether the kernels compute attention on this device, both for one token per
    sequence and for several. A run on a GPU that has to do without gets a warning.

    Args:
        shapes: Shapes of keys and values.
        device: The device that holds them.
    """
    if not supports_ragged(device, shapes.dtype):
        if device.type == "cuda":
            name = str(shapes.dtype).removeprefix("torch.")
            _logger.warning(
                f"no kernel reads keys and values in {name}. {_COST} Set model.policy.dtype to "
                "'bfloat16' (with model.policy.lora) for a faster run."
            )
        return False
    fault = _fault(shapes, device)
    if fault is not None:
        _logger.warning(f"no kernel computes attention over pages here ({fault}). {_COST}")
    return fault is None


@torch.inference_mode()
def _fault(shapes: Shapes, device: torch.device) -> str | None:
    """The reason why the kernels do not work; None if they do."""
    # one token per sequence, with keys undivided and divided; then several tokens
    tries = [((1, 1), 1), ((1, 1), 2), ((1, 3), None)]
    try:
        gap = max(_gap(counts, parts, shapes, device) for counts, parts in tries)
    except Exception as error:  # compilers have errors of their own
        if is_device_error(error):
            raise
        return summarize_error(error)
    return None if gap < 0.05 else f"it is off by {gap:.2g}"  # bfloat16 rounds by 0.004


def _gap(counts: tuple[int, int], parts: int | None, shapes: Shapes, device: torch.device) -> float:
    """Largest difference between a kernel and plain attention, for the last `counts` tokens of two
    sequences, one of three pages and one of a single page."""
    rng = torch.Generator().manual_seed(0)  # separate: a run's numbers must not depend on this

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device="cpu").to(device, shapes.dtype)

    keys, values = (noise(5, PAGE, shapes.heads, shapes.size) for _ in range(2))
    query = noise(sum(counts), shapes.asking, shapes.size)
    tables, used = [[4, 1, 3], [2]], [2 * PAGE + 7, 9]
    table = torch.tensor([tables[0], [2, 0, 0]], dtype=torch.int32, device=device)
    begins = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    scale = shapes.size**-0.5
    from turnrl_slots import kernel  # on a CPU it is not needed

    sequences = kernel.Sequences(table, begins, lengths, sum(counts), max(counts))
    attended = kernel.attend(query, keys, values, sequences, scale, parts)
    wanted = []
    for pages, length, queries in zip(tables, used, query.split(counts), strict=True):
        # (1, heads, tokens, D) each
        keys_values = (side[pages].flatten(0, 1)[:length] for side in (keys, values))
        q, k, v = (side.transpose(0, 1)[None].float() for side in (queries, *keys_values))
        seen = torch.ones(len(queries), length, dtype=torch.bool, device=device)
        seen = seen.tril(length - len(queries))
        plain = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        wanted.append(plain[0].transpose(0, 1))
    return float((attended.float() - torch.cat(wanted)).abs().max())
