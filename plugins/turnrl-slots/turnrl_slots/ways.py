"""Tries out which way of attention over pages works on this device."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import activate_flash_attention_impl

from turnrl import RecipeError
from turnrl.plugin.errors import in_short
from turnrl.policy.device import of_the_device
from turnrl.policy.layout import takes_ragged
from turnrl_slots import kernel
from turnrl_slots.pages import Shapes, Way
from turnrl_slots.settings import Attention
from turnrl_slots.sizes import PAGE

_logger = logging.getLogger(__name__)

_ORDER: tuple[Way, ...] = ("pages", "triton", "gathered")

NAMES: dict[Way | None, str] = {
    "pages": "torch's kernel, pages read in place",
    "triton": "Triton kernel, pages read in place; gathered where prompts are read",
    "gathered": "torch's kernel, pages gathered in every layer",
    None: "products of matrices, pages gathered in every layer",
}
"""A description of each way."""

_COSTS: dict[Way | None, str] = {
    "gathered": "Keys and values are gathered in every layer: sampling takes 1.7 times as long "
    "(measured with 128 turns of Qwen2.5-7B on an H100).",
    None: "Attention is computed by plain products of matrices: sampling takes 2.9 times as long "
    "(measured with 128 turns of Qwen2.5-7B on an H100).",
}


def unavailable(attention: Attention) -> str | None:
    """The package that a way needs, if it is not installed."""
    needs = {"triton": "triton", "fa3": "flash_attn_interface"}.get(attention)
    return needs if needs is not None and find_spec(needs) is None else None


def find_way(shapes: Shapes, device: torch.device, attention: Attention = "auto") -> Way | None:
    """Find the first way that computes attention on this device, both for one token per sequence
    and for several. A run that ends up with a slow way gets a warning.

    Args:
        shapes: Shapes of keys and values.
        device: The device that holds them.
        attention: The option of the engine: one way alone, or `auto` for all in turn.
    Returns:
        The way; None for attention without a kernel (`turnrl_slots.attention`).
    Raises:
        RecipeError: If the requested way does not work here.
    """
    if attention == "plain":
        return None
    if not takes_ragged(device, shapes.dtype):
        name = str(shapes.dtype).removeprefix("torch.")
        if attention != "auto":
            raise RecipeError(
                f"model.engine.attention is {attention!r}, which takes bfloat16 or float16 on a "
                f"CUDA device, and this policy is {name} on {device}. Set it to 'auto'."
            )
        if device.type == "cuda":
            _logger.warning(
                f"no kernel reads keys and values in {name}. {_COSTS[None]} Set "
                "model.policy.dtype to 'bfloat16' (with model.policy.lora) for a faster run."
            )
        return None
    if attention == "fa3":
        _activate()
    wanted: tuple[Way, ...] = _ORDER
    if attention != "auto":
        wanted = ("pages",) if attention == "fa3" else (attention,)
    refused: list[str] = []
    for way in wanted:
        why = _fault(way, shapes, device)
        if why is None:
            if attention == "auto" and way in _COSTS:
                _warn(way, refused)
            return way
        refused.append(f"{way}: {why}")
        _logger.info("no attention over pages (%s): %s", way, why)
    if attention != "auto":
        raise RecipeError(
            f"model.engine.attention is {attention!r}, which does not work here ({refused[0]}). "
            "Set it to 'auto', which takes the fastest way that does."
        )
    _warn(None, refused)
    return None


def _warn(way: Way | None, refused: list[str]) -> None:
    _logger.warning(f"{_COSTS[way]} Faster ways do not work here ({'; '.join(refused)}).")


def _activate() -> None:
    """Let torch compute with FlashAttention 3 from now on, here and in learning."""
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        if of_the_device(error):
            raise
        raise RecipeError(
            "model.engine.attention is 'fa3', and FlashAttention 3 cannot be activated "
            f"({in_short(error)}). Install flash_attn_interface on a Hopper card, or set it to "
            "'auto'."
        ) from error


@torch.inference_mode()
def _fault(way: Way, shapes: Shapes, device: torch.device) -> str | None:
    """The reason why a way does not work; None if it does."""
    try:
        # one token per sequence, then several; our own kernel with keys undivided and divided
        tries: list[tuple[tuple[int, int], int | None]] = [((1, 1), None), ((1, 3), None)]
        if way == "triton":
            tries = [((1, 1), 1), ((1, 1), 2), ((1, 3), None)]
        gap = max(_gap(way, counts, parts, shapes, device) for counts, parts in tries)
    except Exception as error:  # compilers have errors of their own
        if of_the_device(error):
            raise
        return in_short(error)
    return None if gap < 0.05 else f"it is off by {gap:.2g}"  # bfloat16 rounds by 0.004


def _gap(
    way: Way, counts: tuple[int, int], parts: int | None, shapes: Shapes, device: torch.device
) -> float:
    """Largest difference between the kernel and plain attention, for the last `counts` tokens of
    two sequences, one of three pages and one of a single page."""
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
    sequences = kernel.Sequences(table, begins, lengths, sum(counts), max(counts))
    attended = kernel.attend(way, query, keys, values, sequences, scale, parts)
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
