"""Publishes versions of the weights to the servers, as files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from turnrl.agent.running import on_loop
from turnrl.engines import SampledPolicy
from turnrl.plugin.errors import EngineError
from turnrl.plugin.patience import Unavailable
from turnrl_servers.connection import RequestRefused
from turnrl_servers.files import is_sharded, mark_published, wait_until_published, write
from turnrl_servers.pool import Pool
from turnrl_servers.server import Answer, Fields, Server
from turnrl_servers.trial import Reference, compute_reference, prove_agreement


@dataclass(frozen=True, eq=False)
class Published:
    """One version of the weights, as the servers have it.

    Args:
        version: Optimiser steps behind them. After a checkpoint was loaded, two may have the same.
        name: A name that no other weights ever have.
        folder: Their files.
        reference: The learner's logits with them.
    """

    version: int
    name: str
    folder: Path
    reference: Reference


class Weights(ABC):
    """The versions that the servers have. Coroutines run on the event loop of all collections, and
    the other methods on the thread of the learner.

    Args:
        policy: The policy whose weights sample.
        pool: The servers.
        folder: A folder that this process writes and the servers read.
        keeps: The number of versions that are kept.
        max_logprob_gap: See `prove_agreement`.
        follows: True if another process of the run, with the same folder and weights, publishes
            them. This one waits for it.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        pool: Pool,
        folder: Path,
        keeps: int,
        max_logprob_gap: float,
        follows: bool = False,
    ) -> None:
        self.policy, self.pool = policy, pool
        self.folder, self._keeps, self._follows = folder, keeps, follows
        self.kept: list[Published] = []
        """The versions that the servers have, the newest last."""
        self.gap = 0.0
        """Mean difference of log-probabilities in the last trial, in nats."""
        self._max_logprob_gap = max_logprob_gap
        self._times: Counter[int] = Counter()

    def publish(self, version: int) -> None:
        """Let the servers sample with the present weights, and prove that they do.

        Raises:
            EngineError: If no server can be reached, one refuses, or one has other weights.
        """
        # the name of the folder is this run's alone, and others may use the same servers
        name = f"{self.folder.name}-{version}-{self._times[version]}"
        self._times[version] += 1
        new = Published(version, name, self.folder / name, compute_reference(self.policy))
        with self._changed():
            state = self.policy.network_state() if is_sharded(self.policy) else None
            if self._follows:
                wait_until_published(new.folder)
            else:
                write(self.policy, new.folder, state)
            on_loop(self._give_all(new))
        dropped, self.kept = self.kept[: -self._keeps], self.kept[-self._keeps :]
        if not self._follows:
            mark_published(new.folder)
            self._drop(dropped)

    async def _give_all(self, new: Published) -> None:
        async def give(server: Server) -> None:
            versions = self.kept if server.lost is not None else ()
            await self._give(server, [*versions, new], is_new=True)

        async with self.pool.giving:
            await self.pool.give_all(give)
            self.kept.append(new)

    async def lose(self, server: Server, fault: Unavailable) -> None:
        """See `Pool.mark_lost`."""
        await self.pool.mark_lost(server, fault, lambda server: self._give(server, self.kept))

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Inside this block the servers get other weights."""
        yield

    async def _give(
        self, server: Server, versions: Sequence[Published], is_new: bool = False
    ) -> None:
        """Give versions to one server, and prove that it has them.

        Args:
            server: The server.
            versions: The versions, the newest last.
            is_new: True if no server had the last one before.
        Raises:
            Unavailable: If it cannot be reached.
            EngineError: If it refuses, or has other weights.
        """
        try:
            await self._load(server, versions, is_new)
        except RequestRefused as error:
            raise EngineError(
                f"{server.name} does not take weights ({error}). {server.weights_hint} It also has "
                f"to see the folder {str(self.folder)!r}: model.engine.folder sets another one."
            ) from error

    @abstractmethod
    async def _load(self, server: Server, versions: Sequence[Published], is_new: bool) -> None:
        """Like `_give`, but it raises `RequestRefused` if the server refuses."""

    @abstractmethod
    async def sample(self, server: Server, began: Published, request: Fields) -> tuple[Answer, int]:
        """A server's answer to a request for a turn, and the version that sampled it.

        Args:
            server: The server.
            began: The weights of the session.
            request: The request, without its weights.
        Raises:
            Unavailable: If the server cannot be reached, or has lost its weights.
            RequestRefused: If it refuses the turn.
        """

    async def verify(self) -> None:  # noqa: B027 - an adapter's turn names its weights
        """Check that the turns of a collection had the weights that they should have. No turn may
        be under way.

        Raises:
            EngineError: If a server has lost them unnoticed.
        """

    def close(self) -> None:
        """Remove the files, and have the servers drop the weights."""
        if not self._follows:
            self._drop(self.kept)
            shutil.rmtree(self.folder, ignore_errors=True)
        self.kept = []

    def _drop(self, versions: Sequence[Published]) -> None:
        for old in versions:
            shutil.rmtree(old.folder, ignore_errors=True)

    async def _prove(self, server: Server, published: Published, weights: Fields) -> None:
        """Compare a server with the learner.

        Args:
            server: The server.
            published: The weights that it should have.
            weights: The fields of a request that select them.
        """
        # it may wait behind turns, so it has the time limit of a turn
        answer = await server.answer(published.reference.request(server) | weights)
        self.gap = prove_agreement(server, published.reference, answer, self._max_logprob_gap)


@final
class Adapters(Weights):
    """Publishes the adapter alone, under a new name for each version. A name is never used twice,
    because a server's prefix cache is keyed by it."""

    async def _load(self, server: Server, versions: Sequence[Published], is_new: bool) -> None:
        for published in versions:
            await server.load_adapter(published.name, published.folder)
            await self._prove(server, published, server.with_adapter(published.name))

    async def sample(self, server: Server, began: Published, request: Fields) -> tuple[Answer, int]:
        try:
            return await server.answer(request | server.with_adapter(began.name)), began.version
        except RequestRefused as error:
            if server.lacks_adapter(error):
                raise Unavailable("it was started again, and has no adapters") from error
            raise

    def _drop(self, versions: Sequence[Published]) -> None:
        async def drop() -> None:
            for server in self.pool.servers:
                for old in versions if server.lost is None else ():
                    with contextlib.suppress(Unavailable, RequestRefused):
                        await server.drop_adapter(old.name)

        on_loop(drop())
        super()._drop(versions)


@final
class WholeModel(Weights):
    """Publishes all weights, which replace the older ones. Turns under way finish first. Each time
    a server reloads weights it gets a new cache salt, so that nothing that was cached under older
    weights is used again."""

    _under_way, _is_changing, _unverified = 0, False, False

    async def _load(self, server: Server, versions: Sequence[Published], is_new: bool) -> None:
        newest = versions[-1]
        if not (is_new and self._follows):  # the first process has had the server reload them
            await server.reload(newest.folder)
        server.salt = secrets.token_hex(8)
        await self._prove(server, newest, server.with_base(server.salt))

    async def sample(self, server: Server, began: Published, request: Fields) -> tuple[Answer, int]:
        while self._is_changing:
            await asyncio.sleep(0.01)
        self._under_way += 1
        self._unverified = True
        try:
            version = self.kept[-1].version
            return await server.answer(request | server.with_base(server.salt)), version
        finally:
            self._under_way -= 1

    async def verify(self) -> None:
        """See `Weights.verify`. A server that is restarted between two turns answers the second one
        with the weights of its start."""
        sampled, self._unverified = self._unverified, False
        for server in self.pool.servers if sampled else ():
            if server.lost is not None:
                continue
            try:
                with contextlib.suppress(Unavailable):  # the next version finds it lost
                    await self._prove(server, self.kept[-1], server.with_base(server.salt))
            except EngineError as error:
                raise EngineError(
                    f"{server.name} was restarted between two turns, and has sampled with the "
                    f"weights of its start since then ({error}) Nothing was learned from these "
                    "turns. Resume the run from its last checkpoint."
                ) from error

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Inside this block no turn is being sampled, in any process."""

        async def pause() -> None:
            self._is_changing = True
            while self._under_way:
                await asyncio.sleep(0.01)
            await self.verify()  # a run that samples ahead never rests

        try:
            on_loop(pause())
            if is_sharded(self.policy):
                import torch

                torch.distributed.barrier()
            yield
        finally:
            self._is_changing = False
