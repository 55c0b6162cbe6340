"""The progress bar of a build."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm.auto import tqdm


@contextmanager
def show_progress(fraction: Callable[[], float | None]) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, twice a second on a terminal and every ten seconds elsewhere.

    Args:
        fraction: Returns the share of the corpus that has been read; None if unknown.
    Yields:
        A function that is called with the number of passages so far.
    """
    every_s = 0.5 if sys.stderr.isatty() else 10
    bar: tqdm[NoReturn] = tqdm(
        unit=" passages", leave=False, mininterval=every_s, miniters=1, delay=every_s
    )

    def report(count: int) -> None:
        if not bar.n:  # a resumed build has passages already, which do not count towards its rate
            bar.initial = bar.n = count
            bar.start_t = time.time()
        if part := fraction():
            bar.total = round(count / part)
        bar.update(count - bar.n)

    try:
        yield report
    finally:
        bar.close()
