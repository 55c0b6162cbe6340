"""Publishes versions of the weights to the servers, as files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from turnrl import EngineError, SampledPolicy, on_loop
from turnrl.servers import Unavailable
from turnrl_servers.connection import Refused
from turnrl_servers.files import is_divided, mark_published, wait_until_published, write
from turnrl_servers.pool import Pool
from turnrl_servers.server import Server
from turnrl_servers.trial import Reference, prove, reference


@dataclass(eq=False)
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
    turns: int = field(default=0, init=False)
    """Turns under way with them."""


class Weights(ABC):
    """The versions that the servers have. Turns are sampled on the event loop's thread, and
    versions are published on another.

    Args:
        policy: The policy whose weights sample.
        pool: The servers.
        folder: A folder that this process writes and the servers read.
        keeps: The number of versions that are kept.
        max_logprob_gap: See `prove`.
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
        self.folder, self.keeps = folder, keeps
        self.gap = 0.0
        """Mean difference of log-probabilities in the last trial, in nats."""
        self._max_logprob_gap, self._follows = max_logprob_gap, follows
        self._times: Counter[int] = Counter()
        self._lock = threading.Condition()
        self._versions: list[Published] = []
        """All versions that the servers may still have, the newest last."""

    @property
    def newest(self) -> Published:
        """The weights that new sessions sample with."""
        with self._lock:
            return self._versions[-1]

    def publish(self, version: int) -> None:
        """Let the servers sample with the present weights, and prove that they do.

        Raises:
            EngineError: If no server can be reached, one refuses, or one has other weights.
        """
        # the name of the folder is this run's alone, and others may use the same servers
        name = f"{self.folder.name}-{version}-{self._times[version]}"
        self._times[version] += 1
        new = Published(version, name, self.folder / name, reference(self.policy))
        with self._changed():
            state = self.policy.network_state() if is_divided(self.policy) else None
            if self._follows:
                wait_until_published(new.folder)
            else:
                write(self.policy, new.folder, state)
            self._load_everywhere(new)
        dropped = self._take_old()
        if not self._follows:
            mark_published(new.folder)
            for old in dropped:
                self._forget(old)
                shutil.rmtree(old.folder, ignore_errors=True)

    @contextlib.contextmanager
    def pinned(self, began: Published) -> Iterator[None]:
        """Inside this block the weights are not dropped.

        Raises:
            RuntimeError: If they are no longer kept.
        """
        with self._lock:
            self.refuse_if_dropped(began)
            began.turns += 1
        try:
            yield
        finally:
            with self._lock:
                began.turns -= 1

    def refuse_if_dropped(self, began: Published) -> None:
        """Refuse a session whose weights are gone.

        Raises:
            RuntimeError: If they are no longer kept.
        """
        with self._lock:
            if began not in self._versions[-self.keeps :]:
                raise RuntimeError("a session ends when its weights are gone: open a new one")

    def _changed(self) -> AbstractContextManager[None]:
        """Inside this block the servers get other weights."""
        return contextlib.nullcontext()

    def _load_everywhere(self, new: Published) -> None:
        """Give the weights to the servers, before any turn is sampled with them."""

        async def load(server: Server) -> None:
            async with server.reserved():
                await self._load(server, new, first=True)

        on_loop(self.pool.ask_all(load))
        with self._lock:
            self._versions.append(new)

    @abstractmethod
    async def _load(self, server: Server, published: Published, first: bool = False) -> None:
        """Give weights to one server, which the caller holds, and prove that it has them.

        Args:
            server: The server.
            published: The weights.
            first: True if they are new. A server that was restarted gets older ones too.
        Raises:
            Unavailable: If it cannot be reached.
            EngineError: If it refuses, or has other weights.
        """

    def _forget(self, old: Published) -> None:  # noqa: B027 - replaced weights need nothing
        """Have the servers drop weights."""

    @abstractmethod
    async def sample(
        self, server: Server, began: Published, body: dict[str, object]
    ) -> tuple[object, int]:
        """A server's answer to a request for a turn, and the version that sampled it.

        Args:
            server: The server.
            began: The weights of the session.
            body: The request, without the name of a model.
        Raises:
            Unavailable: If the server cannot be reached.
            Refused: If it refuses the turn.
            EngineError: If it has other weights.
        """

    async def verify(self) -> None:  # noqa: B027 - an adapter's turn names its weights
        """Check that the turns of a collection had the weights that they should have. No turn may
        be under way.

        Raises:
            EngineError: If a server has lost them unnoticed.
        """

    def close(self) -> None:
        """Remove the files, and have the servers drop the weights."""
        with self._lock:
            every, self._versions = self._versions, []
        if not self._follows:
            for old in every:
                self._forget(old)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _take_old(self) -> list[Published]:
        """Remove and return the versions beyond `keeps` that no turn uses any more."""
        with self._lock:
            old = [version for version in self._versions[: -self.keeps] if not version.turns]
            self._versions = [version for version in self._versions if version not in old]
        return old

    @contextlib.contextmanager
    def _refusals(self, server: Server) -> Iterator[None]:
        """Raise an error with the next step if a server does not take weights."""
        try:
            yield
        except Refused as error:
            step = server.next_step(error, self.folder)
            raise EngineError(f"{server.name} does not take weights ({error}). {step}") from error

    async def _prove(
        self, server: Server, published: Published, selecting: dict[str, object]
    ) -> None:
        """Compare a server with the learner.

        Args:
            server: The server.
            published: The weights that it should have.
            selecting: The fields of a request that select them.
        """
        body = published.reference.request(server) | selecting
        # it may wait behind turns, so it has the time limit of a turn
        answer = await server.answer(body)
        self.gap = prove(server, published.reference, answer, self._max_logprob_gap)


@final
class Adapters(Weights):
    """Publishes the adapter alone, under a new name for each version. A name is never used twice,
    because a server's prefix cache is keyed by it."""

    async def _load(self, server: Server, published: Published, first: bool = False) -> None:
        # the server may have it from the first process, or may have been restarted
        with self._refusals(server):
            await server.load_adapter(published.name, published.folder)
        await self._prove(server, published, server.with_adapter(published.name))
        server.has.add(published.name)

    async def sample(
        self, server: Server, began: Published, body: dict[str, object]
    ) -> tuple[object, int]:
        body = body | server.with_adapter(began.name)
        async with server.reserved():
            if began.name not in server.has:
                await self._load(server, began)
            has = server.has
        try:
            return await server.answer(body), began.version
        except Refused as error:
            if not server.lacks_adapter(error):
                raise
        # it was restarted since, and has lost its adapters
        async with server.reserved():
            if server.has is has:  # no other turn has noticed before
                server.has = set()
            if began.name not in server.has:
                await self._load(server, began)
        return await server.answer(body), began.version

    def _forget(self, old: Published) -> None:
        for server in self.pool.servers:
            server.has.discard(old.name)
            if not server.was_lost:  # one that only hung may have it, though it is not in `has`
                with contextlib.suppress(Unavailable, Refused):
                    server.drop_adapter(old.name)


@final
class WholeModel(Weights):
    """Publishes all weights, which replace the older ones. Turns under way finish first. Each time
    a server reloads weights it gets a new cache salt, so that nothing that was cached under older
    weights is used again."""

    _requests, _changing, _unverified = 0, False, False

    def _load_everywhere(self, new: Published) -> None:
        on_loop(self.verify())  # a run that samples ahead never rests
        for server in self.pool.servers:
            server.salt = None
        super()._load_everywhere(new)

    async def _load(self, server: Server, published: Published, first: bool = False) -> None:
        server.salt = None
        if not (first and self._follows):  # the first process has had the server reload them
            server.is_reloading = True
            try:
                with self._refusals(server):
                    await server.reload(published.folder)
            finally:
                server.is_reloading = False
        salt = secrets.token_hex(8)
        await self._prove(server, published, server.with_base(salt))
        server.salt = salt

    async def sample(
        self, server: Server, began: Published, body: dict[str, object]
    ) -> tuple[object, int]:
        while not self._enter():
            await asyncio.sleep(0.01)
        try:
            newest = self.newest
            async with server.reserved():
                if server.salt is None:
                    # it may have been restarted, with the weights that training began from
                    await self._load(server, newest)
                salted = body | server.with_base(server.salt)
            answer = await server.answer(salted)
            self._unverified = True
            if server.weights_of(answer) not in (None, newest.name):
                server.forget()
                raise Unavailable("it has lost its weights, and gets them again")
            return answer, newest.version
        finally:
            self._leave()

    async def verify(self) -> None:
        """See `Weights.verify`. A server that is restarted between two turns answers the second one
        with the weights of its start, and only some name the weights in their answers."""
        sampled, self._unverified = self._unverified, False
        for server in self.pool.servers if sampled else ():
            if server.salt is None:
                continue
            try:
                with contextlib.suppress(Unavailable):  # its next turn gives it the weights anyway
                    await self._prove(server, self.newest, server.with_base(server.salt))
            except EngineError as error:
                raise EngineError(
                    f"{server.name} was restarted between two turns, and has sampled with the "
                    f"weights of its start since then ({error}) Nothing was learned from these "
                    "turns. Resume the run from its last checkpoint."
                ) from error

    def close(self) -> None:
        """See `Weights.close`. The servers get back the weights that they were started with."""
        is_first = not self._follows and bool(self._versions)
        super().close()
        for server in self.pool.servers if is_first else ():
            if not server.was_lost:  # the end of a run does not wait for one that hangs
                with contextlib.suppress(Unavailable, Refused):
                    server.restore()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Inside this block no turn is being sampled, in any process."""
        try:
            with self._lock:
                self._changing = True
                self._lock.wait_for(lambda: not self._requests)
            if is_divided(self.policy):
                import torch

                torch.distributed.barrier()
            yield
        finally:
            with self._lock:
                self._changing = False

    def _enter(self) -> bool:
        with self._lock:
            self._requests += not self._changing
            return not self._changing

    def _leave(self) -> None:
        with self._lock:
            self._requests -= 1
            self._lock.notify_all()
