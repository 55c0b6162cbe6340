"""Refusing what cannot be sampled: from options and a model's configuration, before any weights are
loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, Protocol, get_args

import torch
from transformers import PretrainedConfig

from turnrl import RecipeError, SampledPolicy, at_least, parse_bytes
from turnrl_slots.pages import PAGE, Shapes, pages_of
from turnrl_slots.ways import Attention


class Options(Protocol):
    """The options of `Slots`, as a recipe gives them."""

    @property
    def slots(self) -> int | None: ...
    @property
    def prefill_tokens(self) -> int | None: ...
    @property
    def kv_memory(self) -> str: ...
    @property
    def decode_weights(self) -> str: ...
    @property
    def attention(self) -> str: ...


def budget_of(engine: Options) -> int | None:
    """Check the options of an engine, as its attributes are now: a memory plan may have filled in
    some that the recipe leaves open.

    Returns:
        The bytes of `kv_memory`; None for `auto`.
    Raises:
        RecipeError: If one of them is no setting.
    """
    at_least(1, "model.engine.", engine, "slots", "prefill_tokens", whole=True)
    choices = {"decode_weights": ("auto", "adapter", "dense"), "attention": get_args(Attention)}
    for name, values in choices.items():
        if (value := getattr(engine, name)) not in values:
            raise RecipeError(
                f"model.engine.{name} is {value!r}; choose one of {', '.join(values)}"
            )
    if engine.kv_memory == "auto":
        return None
    return parse_bytes(engine.kv_memory, "model.engine.kv_memory", "'auto', or ")


def refuse(config: PretrainedConfig, why: str, cause: Exception | None = None) -> NoReturn:
    """Say that a model cannot be sampled.

    Args:
        config: The model's configuration.
        why: The reason, in brackets.
        cause: The error behind it.
    Raises:
        RecipeError: In any case.
    """
    name = (config.architectures or [config.model_type])[0]
    window = getattr(config.get_text_config(), "sliding_window", None)
    at_most = f" ({window} or less)" if window else ""
    raise RecipeError(
        f"{name} cannot be sampled by the engine Slots, which keeps keys and values of full "
        f"attention {why}. Set rollout.max_tokens within the model's attention window{at_most}, or "
        "choose another model."
    ) from cause


def check_layers(config: PretrainedConfig, tokens: int) -> None:
    """Refuse a model with layers that see less than a trajectory, or that do not attend.

    Args:
        config: The model's configuration.
        tokens: Length of the longest trajectory.
    Raises:
        RecipeError: Naming the model.
    """
    text = config.get_text_config()
    kinds: list[str] | None = getattr(text, "layer_types", None)
    for kind in sorted(set(kinds or ())):
        if "attention" not in kind or kind == "linear_attention":
            refuse(config, f"(it has layers of the kind {kind!r})")
    window = getattr(text, "sliding_window", None)
    if kinds is None:
        slides = getattr(text, "use_sliding_window", True)
    else:
        slides = "sliding_attention" in kinds
    chunk = getattr(text, "attention_chunk_size", None)
    chunks = "chunked_attention" in (kinds or ())
    for sees, holds in ((window, slides), (chunk, chunks)):
        if holds and isinstance(sees, int) and sees < tokens:
            refuse(config, f"(a layer sees {sees} tokens, and a trajectory has {tokens})")


def check_room(kv_memory: str, budget: int, page_bytes: int, spare: int, tokens: int) -> int:
    """The pages that a budget allows.

    Args:
        kv_memory: As it is set.
        budget: In bytes.
        page_bytes: Size of one page.
        spare: Pages that belong to no session.
        tokens: Length of the longest trajectory.
    Raises:
        RecipeError: If that trajectory does not fit, with both numbers.
    """
    count, needed = budget // page_bytes - spare, pages_of(tokens)
    if count < needed:
        raise RecipeError(
            f"model.engine.kv_memory is {kv_memory!r}: room for {max(count, 0) * PAGE} tokens of "
            f"{page_bytes // PAGE} bytes each, and one trajectory of rollout.max_tokens = {tokens} "
            f"takes {needed * page_bytes / 1e6:.1f} MB. Raise kv_memory, or lower "
            "rollout.max_tokens."
        )
    return count


def least_shapes(policy: SampledPolicy) -> Shapes | None:
    """The shapes of keys and values by a configuration, in the smallest type that the policy may
    come to have; None if it does not tell."""
    config = policy.config.get_text_config()
    asking, width = (getattr(config, n, None) for n in ("num_attention_heads", "hidden_size"))
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_key_value_heads", None) or asking
    size = getattr(config, "head_dim", None)
    if size is None and isinstance(width, int) and isinstance(asking, int):
        size = width // asking
    numbers: list[Any] = [layers, heads, size, asking]
    # some share keys and values among layers, or keep something smaller in their place
    other = any(getattr(config, n, None) for n in ("kv_lora_rank", "num_kv_shared_layers"))
    if other or not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    # `Policy` says it; another policy may have half precision
    dtype_on = getattr(policy, "dtype_on", lambda _: torch.bfloat16)
    return replace(Shapes(*numbers), dtype=dtype_on("cuda"))
