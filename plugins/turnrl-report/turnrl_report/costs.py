"""The cost of an iteration beside its rollouts: time to learn, and memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch

from turnrl import Tally


class Costs(L.Callback):
    """Log `train/seconds` and `train/memory_gb` of each iteration."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = (time.perf_counter() - self._began) / trainer.world_size
        pl_module.metrics.log_count("train/seconds", seconds)
        pl_module.metrics.log({"train/memory_gb": Tally(_peak(pl_module.device) / 1e9, 1)})


def _peak(device: torch.device) -> int:
    """The most bytes that this process has held so far, on its GPU if it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
