"""The options of the engine as they are in force: read when it starts, because a memory plan may
have filled in some that the recipe leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from turnrl import RecipeError, parse_bytes
from turnrl_slots.ways import Attention

if TYPE_CHECKING:
    from turnrl_slots.engine import Slots

_PREFILL_TOKENS = 16_384

_SLOTS_OF_CPU = 256
"""Where rows are many, a CPU gains nothing by more of them, and last digits depend on it."""


@dataclass(frozen=True)
class Settings:
    """The choices in force from one `start` to the next.

    Args:
        slots: The most turns sampled at once; None for as many as have memory.
        prefill_tokens: The most tokens read in one forward pass.
        kv_memory: As it is set.
        budget: The same in bytes; None for `auto`.
        merged: Whether dense sums of base and adapter are sampled with.
        attention: Which way of attention is tried.
        cuda_graphs: Whether steps are recorded.
        keep_memory: Whether pages, sums and graphs are kept between collections.
    """

    slots: int | None
    prefill_tokens: int
    kv_memory: str
    budget: int | None
    merged: bool
    attention: Attention
    cuda_graphs: bool
    keep_memory: bool

    @classmethod
    def of(cls, engine: Slots) -> Settings:
        """The options of an engine, as its attributes are now.

        Raises:
            RecipeError: If one of them is no setting.
        """
        slots, prefill = engine.slots, engine.prefill_tokens
        for name, number in (("slots", slots), ("prefill_tokens", prefill)):
            if number is not None and number < 1:
                raise RecipeError(
                    f"model.engine.{name} is {number}; it must be at least 1, or null for the "
                    "engine's own choice"
                )
        for name, value, values in (
            ("decode_weights", engine.decode_weights, ("auto", "adapter", "merged")),
            ("attention", engine.attention, get_args(Attention)),
        ):
            if value not in values:
                raise RecipeError(
                    f"model.engine.{name} is {value!r}; choose one of {', '.join(values)}"
                )
        return cls(
            slots,
            _PREFILL_TOKENS if prefill is None else prefill,
            engine.kv_memory,
            None
            if engine.kv_memory == "auto"
            else parse_bytes(engine.kv_memory, "model.engine.kv_memory", "'auto', or "),
            engine.decode_weights == "merged",
            engine.attention,
            engine.cuda_graphs,
            bool(engine.keep_memory),
        )

    def rows(self, on_cpu: bool, pages: int) -> int:
        """The most turns sampled at once, where there are so many pages."""
        return self.slots or (_SLOTS_OF_CPU if on_cpu else pages)
