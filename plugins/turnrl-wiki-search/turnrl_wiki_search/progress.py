"""The progress bar of a build or a check."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tqdm.auto import tqdm


class Progress:
    """A bar on stderr, rewritten twice a second on a terminal and every ten seconds elsewhere.

    Args:
        fraction: Returns the share of the corpus that has been read; None if unknown.
        unit: The unit of the count.
        total: The number to reach, if it is known from the start.
    """

    def __init__(
        self,
        fraction: Callable[[], float | None] = lambda: None,
        unit: str = " passages",
        total: int | None = None,
    ) -> None:
        self._fraction = fraction
        self._unit, self._total = unit, total
        self._start = time.perf_counter()
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, count: int, read: int | None = None) -> None:
        """Show a count. `read` is the number of passages that `fraction` refers to, if it is not
        the count."""
        if self._bar is None:
            every_s = 0.5 if sys.stderr.isatty() else 10
            # a resumed build has passages already, which do not count towards its rate
            self._bar = tqdm(
                unit=self._unit,
                total=self._total,
                initial=count,
                leave=False,
                mininterval=every_s,
                miniters=1,
                delay=every_s,
            )
        if part := self._fraction():
            self._bar.total = round((read or count) / part)
        self._bar.update(count - self._bar.n)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Passages per second since the first report."""
        bar = self._bar
        return 0.0 if bar is None else (bar.n - bar.initial) / (bar.format_dict["elapsed"] or 1.0)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
