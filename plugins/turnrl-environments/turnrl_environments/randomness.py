"""Turns, and random numbers of an attempt's own, for environments that are not thread-safe.

Some environments seed `random` and `numpy.random` at `reset` and draw from them. Attempts side by
side would then draw from each other's numbers, so the attempts of a group would not even begin in
the same state.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

T = TypeVar("T")

_TURN = threading.Lock()


@final
class OwnRandom:
    """Random numbers of one attempt.

    Args:
        seed: What they begin with, until the environment seeds them: below 2**32.
    """

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    def copied(self) -> OwnRandom:
        """The same numbers, which go their own way from here."""
        return copy.copy(self)  # states are never changed

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that draws from the process's numbers. Such calls take turns."""
        import numpy as np

        with _TURN:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                return function(*arguments)
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
