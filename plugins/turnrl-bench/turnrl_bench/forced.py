"""`Forced`: an engine whose turns have a script's tokens, so that two ways to do the same work can
be timed on the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from turnrl import Completion, Engine, SampledPolicy, Sampling, Session, Surroundings

Script = Callable[[tuple[int, ...], int, int], Sequence[int]]
"""Returns the ids that a turn begins with, from a prompt's ids, the number of the trajectory within
its question, and the number of the turn. No ids force nothing."""

_OWN = ("engine", "script", "seeded", "version", "note")


@final
class Forced(Engine):
    """Samples with another engine and forces its tokens; that engine still computes everything.

    Trajectories are numbered in the order in which they are forked from their prompt. A branch has
    the tokens of its trajectory.

    Args:
        engine: The engine that samples; None computes nothing and gives log-probabilities of zero,
            to measure learning alone.
        script: Gives the tokens.

    Attributes:
        note: Called with `sync` when a collection begins on new weights, and with `drain` when the
            whole collection is sampled.
    """

    def __init__(self, engine: Engine | None, script: Script) -> None:
        self.note: Callable[[Literal["sync", "drain"]], None] = lambda when: None
        self.engine = engine
        self.script = script
        self.seeded = engine.seeded if engine is not None else True
        self.version = 0

    def __getattr__(self, name: str) -> object:
        """An option of the engine inside, because a memory plan reads options and fills them in."""
        if name.startswith("__") or name in _OWN or self.engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: object) -> None:
        inside = None if name in _OWN else self.engine
        if inside is not None and name in vars(inside):
            setattr(inside, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        """The capacity of the engine inside, which may grow."""
        return None if self.engine is None else self.engine.capacity

    @property
    def in_force(self) -> Mapping[str, str]:
        """The choices in force in the engine inside."""
        return {} if self.engine is None else self.engine.in_force

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: Surroundings = Surroundings()
    ) -> None:
        """See `Engine.check`."""
        if self.engine is not None:
            self.engine.check(policy, max_tokens, where)

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`."""
        if self.engine is not None:
            self.engine.start(policy, max_tokens)

    def sync(self, version: int) -> None:
        """See `Engine.sync`."""
        self.note("sync")
        self.version = version
        if self.engine is not None:
            self.engine.sync(version)

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """See `Engine.open`."""
        session = None if self.engine is None else self.engine.open(prompt_ids)
        return _Forced(self, session, tuple(prompt_ids), itertools.count())

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self.engine is not None:
            await self.engine.drain()
        self.note("drain")

    def close(self) -> None:
        """See `Engine.close`."""
        if self.engine is not None:
            self.engine.close()


@dataclass(eq=False)
class _Forced(Session):
    """One history. `numbers` counts the trajectories of a prompt, which itself has no number."""

    engine: Forced
    session: Session | None
    prompt_ids: tuple[int, ...]
    numbers: Iterator[int]
    number: int | None = None
    turn: int = 0

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        forced = tuple(self.engine.script(self.prompt_ids, self.number or 0, self.turn))
        self.turn += 1
        if self.session is not None:
            sampling = replace(sampling, forced_ids=forced or sampling.forced_ids)
            return await self.session.generate(new_ids, sampling)
        forced = forced[: sampling.max_tokens]
        ended = bool(forced) and forced[-1] in sampling.end_ids
        reason: Literal["end", "length"] = "end" if ended else "length"
        return Completion(forced, (0.0,) * len(forced), reason, self.engine.version)

    def fork(self) -> Session:
        session = None if self.session is None else self.session.fork()
        number = next(self.numbers) if self.number is None else self.number
        return replace(self, session=session, number=number)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
