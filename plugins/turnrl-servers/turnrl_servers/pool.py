"""Several servers as one: assigns sessions to servers, and moves them when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, final

from turnrl import EngineError, WorldError, say, visible
from turnrl.servers import Patience, Unavailable
from turnrl_servers.connection import Refused
from turnrl_servers.server import Server

T = TypeVar("T")

_CHECK_EVERY_S = 3.0
"""How often servers with requests under way are asked whether they are well."""
_HEALTH_TIMEOUT_S = 5.0
_MAX_FAILED_CHECKS = 2
"""Failed health checks in a row after which a server's requests are given up."""


@final
class Pool:
    """Servers that have the same weights.

    A session stays with its server, which has its history cached. If that server does not answer,
    the session continues on another one, which computes the whole history. If none answers, all
    requests wait for at most `patience_s`.

    Args:
        servers: The servers, at least one.
        patience_s: Seconds without any answer after which the run stops.
        check_alive: Called when none has answered; raises if none ever will.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        patience_s: float,
        check_alive: Callable[[], None] | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self._check_alive = check_alive or (lambda: None)
        self._patience = Patience(self.name, patience_s, self._gone, setting="patience_s")
        self._watch: asyncio.Task[None] | None = None
        self.asleep = False
        """True if a server may be asleep."""
        self._waking = asyncio.Lock()

    @property
    def name(self) -> str:
        """The servers, for messages."""
        software = self.servers[0].software
        several = len(self.servers) > 1
        addresses = ", ".join(map(str, self.servers))
        return f"the {software} servers at {addresses}" if several else f"{software} at {addresses}"

    @property
    def load(self) -> int:
        """Requests under way."""
        return sum(server.connection.load for server in self.servers)

    def choose(self, sessions: Callable[[Server], int]) -> Server:
        """The server for a new session: the one with the fewest sessions.

        Args:
            sessions: Counts the sessions of a server.
        """
        return min([s for s in self.servers if not s.rests] or self.servers, key=sessions)

    async def ask_all(self, send: Callable[[Server], Awaitable[object]]) -> None:
        """Send something to all servers that can be reached, at the same time. If none can be, wait
        and try again.

        Raises:
            EngineError: If none could be reached for `patience_s`.
        """

        async def attempt() -> None:
            self._watch_servers()
            asked = (self._sent(server, send) for server in self.servers)
            faults = list[Unavailable]()
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, Unavailable):
                    faults.append(answer)
                elif isinstance(answer, BaseException):
                    raise answer
            if len(faults) == len(self.servers):
                self._check_alive()
                raise _all_of(faults)

        await self._patience.ask_async(attempt)

    async def ask_any(
        self, first: Server, send: Callable[[Server], Awaitable[T]]
    ) -> tuple[T, Server]:
        """Send something to a server, or to another one if it cannot be reached.

        Returns:
            The answer, and the server that gave it.
        Raises:
            EngineError: If none could be reached for `patience_s`.
        """

        async def attempt() -> tuple[T, Server]:
            self._watch_servers()
            others = sorted(
                (s for s in self.servers if s is not first), key=lambda s: s.connection.load
            )
            every = [first, *others]
            faults = list[Unavailable]()
            for server in [s for s in every if not s.rests] or every:
                try:
                    return await self._sent(server, send), server
                except Unavailable as fault:
                    faults.append(fault)
            self._check_alive()
            raise _all_of(faults)

        return await self._patience.ask_async(attempt)

    async def _sent(self, server: Server, send: Callable[[Server], Awaitable[T]]) -> T:
        """A server's answer.

        Raises:
            Unavailable: If it cannot be reached. It is then left alone for a moment.
        """
        try:
            # a server that hangs accepts requests, whose time limit is far longer
            if server.was_lost and not await server.connection.is_well(_HEALTH_TIMEOUT_S):
                raise Unavailable("its health check failed")
            answer = await send(server)
        except Unavailable as fault:
            raise self._lost(server, fault) from None
        self._answered(server)
        return answer

    async def drain(self) -> None:
        """Wait until no request is under way, and close the connections."""
        while self.load:
            await asyncio.sleep(0.02)
        await self._stop_watching()
        for server in self.servers:
            await server.connection.close()

    async def sleep(self) -> None:
        """Put the servers to sleep, so that they free the GPU's memory. No request may be under
        way.

        Raises:
            EngineError: If one refuses.
        """
        async with self._waking:
            # also if this is cancelled: it does no harm to wake one that is awake
            self.asleep = True
            await self._stop_watching()
            for server in self.servers:
                server.forget()
                try:
                    with contextlib.suppress(Unavailable):  # one that died holds no memory
                        await server.sleep()
                except Refused as error:
                    raise EngineError(
                        f"{server.name} does not give its memory back ({error}). Set "
                        "model.engine.sleeps to false, and leave it a part of the GPU's memory."
                    ) from error
                await server.connection.close()

    async def wake(self) -> None:
        """Wake the servers if they sleep; several turns may call this at once. Each server is
        compared with the learner before it samples.

        Raises:
            EngineError: If one cannot, or none could be reached.
        """
        async with self._waking:
            for server in self.servers if self.asleep else ():
                try:
                    await self.ask_any(server, lambda server: server.wake())
                except Refused as error:
                    raise EngineError(
                        f"{server.name} does not get its memory back ({error}). Lower "
                        "--gpu-memory-utilization in model.engine.arguments, or what the policy "
                        "takes."
                    ) from error
            self.asleep = False

    def _watch_servers(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._check_health())

    async def _stop_watching(self) -> None:
        """End the health checks before connections are closed."""
        watch, self._watch = self._watch, None
        if watch is not None and watch.get_loop() is asyncio.get_running_loop():
            watch.cancel()
            await asyncio.wait([watch])

    async def _check_health(self) -> None:
        """While requests are under way, give up those of servers that fail their health checks: a
        process that hangs keeps its connections open."""
        failed = dict.fromkeys(self.servers, 0)
        await asyncio.sleep(_CHECK_EVERY_S)
        while self.load:  # the next request begins to look again
            for server in self.servers:
                is_idle = not server.connection.load or server.is_reloading
                well = is_idle or await server.connection.is_well(_HEALTH_TIMEOUT_S)
                failed[server] = 0 if well else failed[server] + 1
                if failed[server] >= _MAX_FAILED_CHECKS:
                    server.connection.give_up_calls()
                    failed[server] = 0
            await asyncio.sleep(_CHECK_EVERY_S)

    def _lost(self, server: Server, fault: Unavailable) -> Unavailable:
        if not server.was_lost and len(self.servers) > 1:
            self._print(
                f"{server.name} does not answer ({fault}); its sessions move to another server"
            )
        server.note_loss()
        if len(self.servers) == 1:
            return fault
        return Unavailable(f"{server}: {fault}", f"{fault.retry_after_s:.0f}")

    def _answered(self, server: Server) -> None:
        if server.note_answer() and len(self.servers) > 1:
            self._print(f"{server.name} answers again")

    def _print(self, news: str) -> None:
        say(f"turnrl: {visible(news)}", sys.stderr)

    def _gone(self, problem: str) -> WorldError:
        return EngineError(
            f"{self.name} {problem} Start it again, correct model.engine.url, or raise "
            "model.engine.patience_s."
        )


def _all_of(faults: Sequence[Unavailable]) -> Unavailable:
    """The faults of several servers as one, with the longest of their waits."""
    waits_s = max(fault.retry_after_s for fault in faults)
    return Unavailable("; ".join(map(str, faults)), f"{waits_s:.0f}")
