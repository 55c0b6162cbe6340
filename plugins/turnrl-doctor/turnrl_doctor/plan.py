"""The memory and the time of an iteration, computed from a model's dimensions, and the fastest
settings that fit.

    work     a model's dimensions, a recipe's part, and the settings
    counts   the bytes of each part in each phase
    speed    the seconds of an iteration on a card
    plan     the best choice, or the reason why nothing fits
    table    a plan as lines

All are functions of numbers alone: no weights, no GPU, no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from turnrl import RecipeError
from turnrl_doctor.counts import ENGINE, PHASES, Parts, learning, memory
from turnrl_doctor.speed import Card, learning_s, seconds
from turnrl_doctor.work import Choice, Work
from turnrl_slots.sizes import PAGE, PREFILL_TOKENS

Settings = Mapping[str, Any]
"""Values by the names of `Choice`."""

_SETTING_OF = {
    "keys and values": "model.engine.kv_memory",
    "dense weights": "model.engine.decode_weights",
    "prefill": "model.engine.prefill_tokens",
    "step and logits": "model.engine.slots",
    "graphs": "model.engine.keep_memory",
    "kept activations": "model.policy.minibatch_tokens",
    "a layer computed again": "model.policy.minibatch_tokens",
    "gradients of activations": "model.policy.minibatch_tokens",
    "logits": "model.policy.minibatch_tokens",
}
"""The setting that decides how large a part is."""


@dataclass(frozen=True)
class CostedChoice:
    """A choice, and its cost.

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
        return memory(self.work, self.choice)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Computed seconds of an iteration, by phase."""
        return seconds(self.work, self.choice, self.card)

    @property
    def spent(self) -> float:
        """Seconds of an iteration."""
        return sum(self.seconds.values())

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
    """Find the fastest settings that fit a card.

    Args:
        work: The recipe's part.
        card: The GPU.
        given: Settings that the recipe gives; the plan does not change them.
    Raises:
        RecipeError: If nothing fits, with the numbers and the first setting to change.
    """
    tried = (CostedChoice(work, card, choice, given) for choice in _candidates(work, card, given))
    fitting = (fitted for plan in tried if (fitted := _with_pages(plan)) is not None)
    best = min(fitting, key=lambda plan: (plan.spent, plan.most), default=None)
    if best is None:
        raise _does_not_fit(work, card, given)
    return best


def _options(work: Work, given: Settings) -> dict[str, list[Any]]:
    """The values to try for each setting."""
    trajectories, layers = work.trajectories, work.shape.layers
    sizes = (65_536, 32_768, 16_384, 12_288, 8192, 6144, 4096, 3072, 2048, 1024, 512)
    slots = (8, 16, 32, 64, 96, 128, 192, 256, 384)
    options: dict[str, list[Any]] = {
        "slots": sorted({trajectories, *(n for n in slots if n < trajectories)}),
        "prefill_tokens": [n for n in sizes if 2048 <= n <= PREFILL_TOKENS],
        "minibatch_tokens": [n for n in sizes if n >= work.max_tokens] or [work.max_tokens],
        "gradient_checkpointing": sorted({layers * n // 8 for n in range(9)}),
        "decode_weights": ["adapter", "dense"] if work.rank and work.size == 2 else ["adapter"],
        "keep_memory": [False, True],
    }
    return options | {name: [value] for name, value in given.items() if name in options}


def _candidates(work: Work, card: Card, given: Settings) -> Iterator[Choice]:
    """The combinations worth trying, without pages.

    Learning depends on the settings of sampling only through the memory that they keep meanwhile.
    So of its own settings, only those enter that no others beat in both time and memory.
    """
    options = _options(work, given)
    learned = [options.pop(name) for name in ("minibatch_tokens", "gradient_checkpointing")]
    ways = []
    for tokens, recomputed in itertools.product(*learned):
        way = Choice(minibatch_tokens=tokens, gradient_checkpointing=recomputed)
        size = sum(learning(work, tokens, recomputed).values())
        ways.append((learning_s(work, way, card), size, way))
    front: list[tuple[float, int, Choice]] = []
    for spent, size, way in sorted(ways, key=lambda entry: entry[:2]):
        if not front or size < front[-1][1]:
            front.append((spent, size, way))
    sampling = options if work.sampled else {}
    for values in itertools.product(*sampling.values()):
        chosen = dict(zip(sampling, values, strict=True))
        for *_, way in front:
            yield replace(way, **chosen)


def _least_pages(work: Work) -> int:
    """Bytes of the pages of one trajectory, plus two pages."""
    return (work.max_tokens + 2 * PAGE) * work.kv_bytes


def _with_pages(plan: CostedChoice) -> CostedChoice | None:
    """The plan with as many pages as there is room for; None if it does not fit."""
    work, given = plan.work, plan.given
    size = given.get("kv_memory", 0)
    if work.sampled and "kv_memory" not in given:
        phases = ("sampling", *(("learning", "step") if plan.choice.keep_memory else ()))
        room = plan.card.usable - max(map(plan.total, phases))
        least = _least_pages(work)
        size = min(room, max(work.trajectories * work.max_tokens * work.kv_bytes, least))
        if size < least:
            return None
        unit = 10**8 if size >= 10**9 else 10**6  # a round number, but not 0
        size = max(size // unit * unit, least)
    fitted = replace(plan, choice=replace(plan.choice, kv_memory=size))
    return fitted if fitted.most <= plan.card.usable else None


def _does_not_fit(work: Work, card: Card, given: Settings) -> RecipeError:
    """The error of a recipe that cannot fit: the smallest choice, and the memory that it needs."""
    pages = given.get("kv_memory", _least_pages(work))
    choices = (replace(choice, kv_memory=pages) for choice in _candidates(work, card, given))
    plan = min(
        (CostedChoice(work, card, choice, given) for choice in choices), key=lambda plan: plan.most
    )
    parts = plan.memory[plan.worst]
    largest = max(parts, key=parts.__getitem__)
    return RecipeError(
        f"the run does not fit: {plan.worst} needs at least {gigabytes(plan.most)} GB, and "
        f"the plan uses {gigabytes(card.usable)} of the {gigabytes(card.bytes)} GB of {card.name}; "
        f"the largest part is {largest} ({gigabytes(parts[largest])} GB). "
        f"{_remedy(work, largest, given)}"
    )


def _remedy(work: Work, largest: str, given: Settings) -> str:
    """The first setting to change, as a sentence."""
    if largest == ENGINE:
        return (
            "Let it take less (--gpu-memory-utilization in model.engine.arguments, if it is vLLM)."
        )
    setting = _SETTING_OF.get(largest, "")
    if setting.rpartition(".")[2] in given:
        return f"Lower {setting}, or leave it out."
    undivided = work.shares == 1
    if not undivided and largest in ("weights", "embedding and head", "gradients", "optimiser"):
        return "Share the policy among more processes (trainer.devices), or take a smaller model."
    if largest in ("weights", "embedding and head", "matrices on their way", "gathered weights"):
        if work.rank and not work.four_bit and undivided:
            return "Set model.policy.quantization to nf4, or take a smaller model."
        return "Take a smaller model, or a larger card."
    if largest in ("gradients", "optimiser", "updates", "adapter"):
        if not work.rank:
            return "Add model.policy.lora, or take a smaller model."
        return "Lower model.policy.lora.r."
    if given.get("gradient_checkpointing") == 0:
        return "Set model.policy.gradient_checkpointing to true, or leave it out."
    return "Lower model.rollout.max_tokens."


def given_up(plan: CostedChoice) -> Iterator[tuple[str, float, int]]:
    """Changes that would each be faster but do not fit: the name, the seconds saved, and the most
    additional bytes in any phase."""
    work = plan.work
    faster: list[tuple[str, str, object]] = [
        ("kept pages and graphs", "keep_memory", True),
        ("keeping all activations", "gradient_checkpointing", 0),
        (f"{work.trajectories} slots", "slots", work.trajectories),
    ]
    if work.rank and work.size == 2:
        faster.append(("dense weights", "decode_weights", "dense"))
    if work.sampled:
        all_pages = work.trajectories * work.max_tokens * work.kv_bytes
        faster.append(("pages for all trajectories", "kv_memory", all_pages))
    for change, name, value in faster:
        changed = replace(plan, choice=replace(plan.choice, **{name: value}))  # type: ignore[arg-type]
        saved = plan.spent - changed.spent
        added = max(changed.total(phase) - plan.total(phase) for phase in PHASES)
        if name not in plan.given and saved > 0.05 and added > 0:
            yield change, saved, added


def gigabytes(size: float) -> str:
    """`5.63`, `47.1`: three digits, in units of 10^9 bytes."""
    return f"{size / 1e9:.2f}" if size < 9.995e9 else f"{size / 1e9:.1f}"
