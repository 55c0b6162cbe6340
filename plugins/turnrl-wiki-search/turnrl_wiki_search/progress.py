"""Progress of a build, for whoever waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Progress:
    """A line on stderr, rewritten on a terminal and repeated every ten seconds elsewhere.

    Args:
        fraction: Gives the share of the corpus that has been read, or None if it is not known.
    """

    def __init__(self, fraction: Callable[[], float | None]) -> None:
        self._fraction = fraction
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.perf_counter()
        self._first: tuple[int, float | None, float] | None = None
        self._passages = 0

    def __call__(self, passages: int) -> None:
        now = time.perf_counter()
        if (
            self._first is None
        ):  # a build that was taken up has passages already; they were not made now
            self._first = (passages, self._fraction(), now)
        self._passages = passages
        if now - self._last < (0.5 if self._terminal else 10):
            return
        self._last = now
        parts = [f"{passages:,} passages", f"{self.rate:,.0f}/s"]
        fraction = self._fraction()
        if fraction:
            parts.append(f"{fraction:.1%}")
            first, start = self._first[1] or 0.0, self._first[2]
            if fraction > first:
                left = (1 - fraction) * (now - start) / (fraction - first)
                parts.append(f"{_duration(left)} left")
        print(
            ", ".join(parts),
            end="\x1b[K\r" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Passages per second since the first report."""
        if self._first is None:
            return 0.0
        return (self._passages - self._first[0]) / max(time.perf_counter() - self._first[2], 1e-9)

    def end(self) -> None:
        if self._terminal:
            print(end="\x1b[K", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
