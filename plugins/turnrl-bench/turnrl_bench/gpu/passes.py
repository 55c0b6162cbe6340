"""An engine's forward passes, timed from outside.

An engine asks the policy for hidden states (`hidden`), and for logits once a pass (`logits`).
`TimedPolicy` stands in the policy's place and notes the time of both. The engine waits for the
device once a pass, for the sampled tokens. So the interval that begins with a pass's logits holds
the device's work of that pass. A pass without a call of `hidden` was replayed from a CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from turnrl import Policy
from turnrl_bench.gpu.results import Found


@dataclass
class Pass:
    """One pass.

    Args:
        began: When its logits were asked for.
        rows: Tokens that it sampled.
        read: Tokens that were computed for it, 0 for a replay.
        seconds: Until the next one.
    """

    began: float
    rows: int
    read: int
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """`replayed` from a graph, `computed` (a token of each row, and fewer rows of padding than
        rows), or `reading` (with new text)."""
        if self.read == 0:
            return "replayed"
        return "reading" if self.read >= 2 * self.rows else "computed"


class TimedPolicy:
    """A policy as an engine sees it, whose passes are noted.

    Args:
        policy: The policy.
    Attributes:
        on_pass: Called with the number of each pass, in the engine's thread, before its logits.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._read = policy, 0
        self.on_pass: Callable[[int], None] = lambda number: None
        self.passes: list[Pass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def hidden(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """See `Policy.hidden`."""
        self._read += input_ids.numel()
        return self._policy.hidden(input_ids, *args, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Policy.logits`."""
        now = time.perf_counter()
        self._close(now)
        self.on_pass(len(self.passes))
        self.passes.append(Pass(now, hidden.shape[0], self._read))
        self._read = 0
        return self._policy.logits(hidden)

    def _close(self, now: float) -> None:
        if self.passes and not self.passes[-1].seconds:
            self.passes[-1].seconds = now - self.passes[-1].began

    def begin(self) -> None:
        """Forget what an engine did while it started."""
        self.passes, self._read = [], 0

    def pause(self) -> None:
        """The last pass is over, and nothing follows at once."""
        self._close(time.perf_counter())


def summary(passes: list[Pass]) -> Found:
    """Passes by kind, the time of a step with all rows, and all of them in short."""
    kinds: Found = {}
    for kind in ("replayed", "computed", "reading"):
        some = [p for p in passes if p.kind == kind]
        if some:
            kinds[kind] = {
                "passes": len(some),
                "seconds": sum(p.seconds for p in some),
                "median_ms": 1e3 * statistics.median(p.seconds for p in some),
                "tokens": sum(p.read for p in some),
            }
    most = max((p.rows for p in passes), default=0)
    steps = [p for p in passes if p.rows == most and p.kind == "replayed"]
    steps = steps or [p for p in passes if p.rows == most and p.kind == "computed"]
    return {
        "step_rows": most,
        "step_ms": 1e3 * statistics.median(p.seconds for p in steps) if steps else None,
        "kinds": kinds,
        "timeline_rows_read_ms": [[p.rows, p.read, round(1e3 * p.seconds, 3)] for p in passes],
    }
