"""The boundary to a device's memory: its peak use, and the phase in which it ran out."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from turnrl.plugin.errors import DeviceMemoryError
from turnrl.policy.device import is_out_of_memory
from turnrl.policy.sizes import ALLOCATOR

_LOWERS = {
    "loading": "the size of model.policy.model (nf4 in model.policy.quantization takes the least)",
    "sampling": "the engine's memory",
    "learning": "model.policy.minibatch_tokens",
}
"""The setting that lowers the memory of a phase."""


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of this process so far: on its GPU, or all of its memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).is_file():
        # Linux's `ru_maxrss` starts from the memory of the process that started this one
        (held,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        return int(held) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


class Memory:
    """The phases of a run that fill a device's memory: `loading`, `sampling` and `learning`.

    Args:
        planned: For each phase in the plan, its bytes and the setting that lowers them; empty
            without a plan.
    """

    def __init__(self, planned: Mapping[str, tuple[int, str]] = MappingProxyType({})) -> None:
        self.planned = planned

    @contextlib.contextmanager
    def phase(self, name: str, setting: str | None = None) -> Iterator[None]:
        """A block in which running out of memory names the phase and the next step.

        Args:
            name: The phase.
            setting: The setting that lowers its memory, if there is no plan; None for the usual
                one.
        Raises:
            DeviceMemoryError: In place of the device's own error.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            planned, setting = self.planned.get(name, (None, setting or _LOWERS[name]))
            plan = "" if planned is None else f", planned with {planned / 1e9:.1f} GB"
            first = str(error).strip().partition(". GPU")[0].partition("\n")[0]
            grows = any("expandable_segments" in os.environ.get(name, "") for name in ALLOCATOR)
            more = (
                "" if grows else " Start Python with PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
            raise DeviceMemoryError(
                f"the GPU's memory ran out while {name}{plan} ({first}). Lower {setting}, or see "
                f"'turnrl doctor RECIPE' for what takes how much.{more}"
            ) from error
