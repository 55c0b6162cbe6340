"""An engine that plays scripted texts."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal

from turnrl.types.engine import Completion, Engine, SampledPolicy, Sampling, Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Says = Callable[[int, int], str | Awaitable[str]]
"""Gives the text of a turn, from the number of its session (in the order of forking) and of the
turn."""


class ScriptedEngine(Engine):
    """An engine whose sessions write scripted texts. Each token has a log-probability of -0.5.

    Args:
        tokenizer: Turns the texts into tokens.
        says: Gives the texts, for example `lambda session, turn: "Paris"`; may be a coroutine.

    Attributes:
        asked: (session, history, sampling) of every turn, in order.
        open_sessions: Sessions that are not closed yet.
        drained: True once `drain` was called.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, says: Says) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.asked: list[tuple[int, list[int], Sampling]] = []
        self.open_sessions: set[Session] = set()
        self.drained = False
        self.version = 0
        self._numbers = itertools.count()

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Nothing to do."""

    def sync(self, version: int) -> None:
        """Note the version; the texts do not depend on it."""
        self.version = version

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session without a number; only its forks have numbers."""
        return _Scripted(self, list(prompt_ids), -1, 0)

    async def drain(self) -> None:
        """Note that it was called."""
        self.drained = True

    def close(self) -> None:
        """Nothing to release."""


class _Scripted(Session):
    def __init__(self, engine: ScriptedEngine, history: list[int], number: int, turn: int) -> None:
        self._engine, self._history, self._number, self._turn = engine, history, number, turn
        engine.open_sessions.add(self)

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        engine = self._engine
        self._history += new_ids
        engine.asked.append((self._number, list(self._history), sampling))
        line, self._turn = engine.says(self._number, self._turn), self._turn + 1
        text = line if isinstance(line, str) else await line
        encoded = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = tuple(encoded[: sampling.max_tokens])
        self._history += ids
        cut = len(ids) < len(encoded)
        reason: Literal["length", "stop"] = "length" if cut else "stop"
        return Completion(ids, (-0.5,) * len(ids), reason, engine.version)

    def fork(self) -> Session:
        engine = self._engine
        return _Scripted(engine, list(self._history), next(engine._numbers), self._turn)

    def close(self) -> None:
        self._engine.open_sessions.discard(self)
