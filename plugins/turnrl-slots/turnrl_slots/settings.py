"""The settings of `Slots`. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from turnrl.engines import EngineSettings
from turnrl.plugin.errors import check_at_least, check_one_of, parse_bytes

if TYPE_CHECKING:
    from turnrl_slots.engine import SlotsEngine


@final
@dataclass(frozen=True)
class Slots(EngineSettings):
    """Samples with the policy's own weights, in this process.

    Turns requested in the same tick of the event loop are admitted in the order in which their
    sessions were opened, so equal requests give equal batches and equal results to the last digit.

    Null options are filled in before the start, by a memory plan (`model.gpu_memory`) if there is
    one.

    Args:
        slots: The most turns sampled at once. Null for as many as fit into memory; 256 on a CPU.
        prefill_tokens: The most tokens read in one forward pass, not counting sampled tokens; on a
            CPU never more than 512. Null for 16384.
        kv_memory: The most memory for keys and values: a size such as `4GB`; `auto` is a quarter of
            the memory of the machine or container, divided among the processes, or on a GPU most of
            the memory that is free once the weights are loaded.
        decode_weights: How to sample a policy with an adapter. `adapter` uses the base as it is
            stored and the adapter, as in learning. `dense` uses the base as dense weights with the
            adapter beside it. `dense` computes the same with fewer operations: a step reads each
            weight once (2 bytes in half precision), while `adapter` dequantises a 4-bit base in
            every step. With 7 billion weights, `dense` takes 13 GB in half precision, beside the
            learner. `auto` is `adapter`, unless a memory plan has room for `dense`.
        cuda_graphs: Record the passes that sample a token of each turn as CUDA graphs, and replay
            them, if a GPU kernel computes the attention (half precision on CUDA). Elsewhere, for
            example on a CPU, it changes nothing.
        attention: `auto` computes attention with a GPU's kernels, in half precision, if they give
            the right result here. `plain` uses products of matrices, as on a CPU.
    """

    slots: int | None = None
    prefill_tokens: int | None = None
    kv_memory: str = "auto"
    decode_weights: Literal["auto", "adapter", "dense"] = "auto"
    cuda_graphs: bool = True
    attention: Literal["auto", "plain"] = "auto"

    def __post_init__(self) -> None:
        check_at_least(1, "model.engine.", self, "slots", "prefill_tokens", whole=True)
        check_one_of(("auto", "adapter", "dense"), "model.engine.", self, "decode_weights")
        check_one_of(("auto", "plain"), "model.engine.", self, "attention")
        _ = self.kv_bytes

    @property
    def kv_bytes(self) -> int | None:
        """The bytes of `kv_memory`; None for `auto`.

        Raises:
            RecipeError: If it is no size.
        """
        if self.kv_memory == "auto":
            return None
        return parse_bytes(self.kv_memory, "model.engine.kv_memory", "'auto', or ")

    def build(self) -> SlotsEngine:
        """See `EngineSettings.build`."""
        from turnrl_slots.engine import SlotsEngine  # imports torch

        return SlotsEngine(self)

    def for_rehearsal(self) -> Slots:
        """See `EngineSettings.for_rehearsal`: less memory, and the same other options."""
        return replace(self, slots=8, prefill_tokens=512, kv_memory="256MB")
