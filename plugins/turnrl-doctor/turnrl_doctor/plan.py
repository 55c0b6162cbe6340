"""The memory of an iteration, computed from a model's dimensions, and settings that fit.

    work     a model's dimensions, a recipe's part, and the settings
    counts   the bytes of each part in each phase
    plan     the first choice that fits, or the reason why nothing does; and its table

All are functions of numbers alone: no weights, no GPU, no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from turnrl import RecipeError
from turnrl.plugin.text import format_gigabytes
from turnrl_doctor.counts import ENGINE, PHASES, Parts, memory_by_phase
from turnrl_doctor.work import NAMES, Choice, Work
from turnrl_slots.sizes import PAGE, PREFILL_TOKENS

Settings = Mapping[str, Any]
"""Values by the names of `Choice`."""

_SETTING_OF = {
    "keys and values": "model.engine.kv_memory",
    "dense weights": "model.engine.decode_weights",
    "prefill": "model.engine.prefill_tokens",
    "step and logits": "model.engine.slots",
    "kept activations": "model.policy.minibatch_tokens",
    "a layer computed again": "model.policy.minibatch_tokens",
    "gradients of activations": "model.policy.minibatch_tokens",
    "logits": "model.policy.minibatch_tokens",
}
"""The setting that decides how large a part is."""

_SMALLER = {
    "weights": "Take a smaller model, or set model.policy.quantization to nf4.",
    "embedding and head": "Take a smaller model.",
    **dict.fromkeys(
        ("adapter", "gradients", "optimiser", "updates", "rounded weights"),
        "Train fewer weights: set model.policy.lora, or lower its r.",
    ),
}
"""The step that makes a part smaller that no setting of the plan decides."""

_HEADROOM = 0.1
"""Share of a card that stays unused, because the allocator's blocks do not fit exactly."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Args:
        name: The card's own name, or the size that was asked for.
        bytes: Its free memory.
    """

    name: str
    bytes: int

    @property
    def usable(self) -> int:
        """Bytes that a plan may use."""
        return int(self.bytes * (1 - _HEADROOM))


@dataclass(frozen=True)
class CostedChoice:
    """A choice, and its memory.

    Args:
        work: The recipe's part.
        card: The GPU.
        choice: The settings.
        given: Settings that the recipe gives; the plan does not change them.
    """

    work: Work
    card: Card
    choice: Choice
    given: Settings

    @cached_property
    def memory(self) -> Mapping[str, Parts]:
        """Bytes of each part in each phase."""
        return memory_by_phase(self.work, self.choice)

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(PHASES, key=self.total)

    @property
    def most(self) -> int:
        """Bytes of the phase that needs most."""
        return self.total(self.worst)

    def total(self, phase: str) -> int:
        """Bytes of a phase."""
        return sum(self.memory[phase].values())

    def setting(self, phase: str) -> str:
        """The setting to lower first if sampling or learning runs out of memory. For sampling it is
        the setting of its larger pass, or of the pages, which take all memory that is left."""
        if phase == "learning":
            return "model.policy.minibatch_tokens"
        largest = max(("prefill", "step and logits"), key=self.memory[phase].__getitem__)
        small = self.memory[phase][largest] < 10**9
        return _SETTING_OF["keys and values" if small else largest]


def choose(work: Work, card: Card, given: Settings) -> CostedChoice:
    """Find the first settings that fit a card, in the order of `_options`.

    Args:
        work: The recipe's part.
        card: The GPU.
        given: Settings that the recipe gives; the plan does not change them.
    Raises:
        RecipeError: If nothing fits, with the numbers and the first setting to change.
    """
    options = _options(work, given)
    learning = [options.pop(name) for name in ("gradient_checkpointing", "minibatch_tokens")]
    for recomputed, tokens in itertools.product(*learning):
        learned = Choice(gradient_checkpointing=recomputed, minibatch_tokens=tokens)
        plan = CostedChoice(work, card, learned, given)
        if max(map(plan.total, ("loading", "learning", "step", "checkpoint"))) > card.usable:
            continue
        for values in itertools.product(*options.values()):
            sampled = dict(zip(options, values, strict=True))
            fitted = _with_pages(replace(plan, choice=replace(learned, **sampled)))
            if fitted is not None:
                return fitted
    raise _does_not_fit(work, card, given)


def _options(work: Work, given: Settings) -> dict[str, list[Any]]:
    """The values to try for each setting, the fastest first and the smallest last.

    Recomputing a layer costs more than small minibatches do, and learning takes longer than
    sampling, so as few layers as possible are recomputed. Sampling is faster with dense weights
    and with many slots.
    """
    trajectories, layers = work.trajectories, work.shape.layers
    sizes = (65_536, 32_768, 16_384, 12_288, 8192, 6144, 4096, 3072, 2048, 1024, 512)
    slots = [n for n in (384, 256, 192, 128, 96, 64, 32, 16, 8) if n < trajectories]
    options: dict[str, list[Any]] = {
        "gradient_checkpointing": sorted({layers * n // 8 for n in range(9)}),
        "minibatch_tokens": [n for n in sizes if n >= work.max_tokens] or [work.max_tokens],
    }
    if work.sampled:
        options |= {
            "decode_weights": ["dense", "adapter"] if work.rank and work.size == 2 else ["adapter"],
            "slots": [*([trajectories] if trajectories <= 384 else []), *slots],
            "prefill_tokens": [n for n in sizes if 2048 <= n <= PREFILL_TOKENS],
        }
    return options | {name: [value] for name, value in given.items() if name in options}


def _least_pages(work: Work, choice: Choice, given: Settings) -> int:
    """Bytes of the fewest pages with which a choice makes sense: of one trajectory and two pages.
    Dense weights are worth their memory if a third of all trajectories still fit at once."""
    every = work.trajectories * work.max_tokens * work.kv_bytes
    least = (work.max_tokens + 2 * PAGE) * work.kv_bytes
    if choice.decode_weights == "dense" and "decode_weights" not in given:
        least = max(least, every // 3)
    return least


def _with_pages(plan: CostedChoice) -> CostedChoice | None:
    """The plan with as many pages as there is room for; None if it does not fit."""
    work, given, size = plan.work, plan.given, plan.given.get("kv_memory", 0)
    if work.sampled and "kv_memory" not in given:
        room = plan.card.usable - plan.total("sampling")
        least = _least_pages(work, plan.choice, given)
        size = min(room, max(work.trajectories * work.max_tokens * work.kv_bytes, least))
        if size < least:
            return None
        unit = 10**8 if size >= 10**9 else 10**6  # a round number, but not 0
        size = max(size // unit * unit, least)
    fitted = replace(plan, choice=replace(plan.choice, kv_memory=size))
    return fitted if fitted.most <= plan.card.usable else None


def _does_not_fit(work: Work, card: Card, given: Settings) -> RecipeError:
    """The error of a recipe that cannot fit: the smallest choice, and the memory that it needs."""
    smallest = {name: values[-1] for name, values in _options(work, given).items()}
    pages = given.get("kv_memory", _least_pages(work, Choice(), given))
    plan = CostedChoice(work, card, Choice(**smallest, kv_memory=pages), given)
    parts = plan.memory[plan.worst]
    largest = max(parts, key=parts.__getitem__)
    setting = _SETTING_OF.get(largest, "")
    if setting.rpartition(".")[2] in given:
        step = f"Lower {setting}, or leave it out."
    elif largest == ENGINE:
        step = "Lower --gpu-memory-utilization in model.engine.arguments."
    else:
        step = _SMALLER.get(largest, "Lower model.rollout.max_tokens.")
    return RecipeError(
        f"the run does not fit: {plan.worst} needs at least {format_gigabytes(plan.most)} GB, and "
        f"the plan uses {format_gigabytes(card.usable)} of the {format_gigabytes(card.bytes)} GB "
        f"of {card.name}; "
        f"the largest part is {largest} ({format_gigabytes(parts[largest])} GB). {step}"
    )


def table(plan: CostedChoice) -> str:
    """The plan as lines of at most 80 columns."""
    card, choice = plan.card, plan.choice
    lines = [
        f"memory plan for {card.name[:60]}",
        f"  {format_gigabytes(card.bytes)} GB, of which the plan uses "
        f"{format_gigabytes(card.usable)}; in GB",
        f" {'':24}" + "".join(f"{phase:>11}" for phase in PHASES),
    ]
    parts = dict.fromkeys(name for phase in PHASES for name in plan.memory[phase])
    for name in parts:
        sizes = [plan.memory[phase].get(name, 0) for phase in PHASES]
        if any(size >= 5e6 for size in sizes):
            shown = (format_gigabytes(size) if size >= 5e6 else "-" for size in sizes)
            lines.append(f" {name:24}" + "".join(f"{text:>11}" for text in shown))
    totals = "".join(f"{format_gigabytes(plan.total(phase)):>11}" for phase in PHASES)
    lines.append(f" {'sum':24}{totals}")
    lines.append("  settings")
    for name in NAMES:
        if not plan.work.sampled and name not in ("minibatch_tokens", "gradient_checkpointing"):
            continue
        value = getattr(choice, name)
        text = f"{format_gigabytes(value)}GB" if name == "kv_memory" else str(value)
        if name == "gradient_checkpointing":
            text = f"{value} of {plan.work.shape.layers} layers"
        lines.append(f"    {name:24}{text:24}{'given' if name in plan.given else 'by the plan'}")
    return "\n".join(lines)
