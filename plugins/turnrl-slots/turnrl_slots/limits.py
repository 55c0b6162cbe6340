"""Refuses models that pages do not hold, and memory sizes."""

from __future__ import annotations

from typing import NoReturn

from transformers import PretrainedConfig

from turnrl import RecipeError
from turnrl.policy.sizes import read_sizes
from turnrl_slots.sizes import PAGE, count_pages


def raise_unsupported(
    config: PretrainedConfig, why: str, cause: Exception | None = None
) -> NoReturn:
    """Raise the error that a model cannot be sampled.

    Args:
        config: The model's configuration.
        why: The reason, in brackets.
        cause: The error behind it.
    Raises:
        RecipeError: In any case.
    """
    name = (config.architectures or [config.model_type])[0]
    window = read_sizes(config).window
    at_most = f" ({window} or less)" if window else ""
    raise RecipeError(
        f"{name} cannot be sampled by the engine Slots, which keeps keys and values of full "
        f"attention {why}. Set model.rollout.max_tokens within the model's attention "
        f"window{at_most}, or "
        "choose another model."
    ) from cause


def check_layers(config: PretrainedConfig, tokens: int) -> None:
    """Refuse a model if a layer sees less than a trajectory, or has no attention.

    Args:
        config: The model's configuration.
        tokens: Length of the longest trajectory.
    Raises:
        RecipeError: Naming the model.
    """
    sizes = read_sizes(config)
    kinds = set(sizes.kinds or ())
    for kind in sorted(kinds):
        if "attention" not in kind or kind == "linear_attention":
            raise_unsupported(config, f"(it has layers of the kind {kind!r})")
    slides = sizes.slides if sizes.kinds is None else "sliding_attention" in kinds
    chunks = "chunked_attention" in kinds
    for seen, applies in ((sizes.window, slides), (sizes.chunk, chunks)):
        if applies and seen is not None and seen < tokens:
            raise_unsupported(
                config, f"(a layer sees {seen} tokens, and a trajectory has {tokens})"
            )


def check_room(kv_memory: str, budget: int, page_bytes: int, spare: int, tokens: int) -> int:
    """The pages that a budget allows.

    Args:
        kv_memory: The setting, for the message.
        budget: Its bytes.
        page_bytes: Size of one page.
        spare: Pages that belong to no session.
        tokens: Length of the longest trajectory.
    Raises:
        RecipeError: If the longest trajectory does not fit, with both numbers.
    """
    count, needed = budget // page_bytes - spare, count_pages(tokens)
    if count < needed:
        raise RecipeError(
            f"model.engine.kv_memory is {kv_memory!r}: room for {max(count, 0) * PAGE} tokens of "
            f"{page_bytes // PAGE} bytes each, and one trajectory of model.rollout.max_tokens = "
            f"{tokens} takes {needed * page_bytes / 1e6:.1f} MB. Raise kv_memory, or lower "
            "model.rollout.max_tokens."
        )
    return count
