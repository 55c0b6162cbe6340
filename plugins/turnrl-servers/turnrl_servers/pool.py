"""`Pool`: the servers of a run, which have the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import final

from turnrl.plugin.errors import EngineError
from turnrl.plugin.patience import Patience, Unavailable
from turnrl.plugin.text import make_visible, say
from turnrl_servers.connection import RequestRefused
from turnrl_servers.server import Server

Give = Callable[[Server], Awaitable[None]]
"""Gives a server its weights, and proves that it has them."""


@final
class Pool:
    """Servers that have the same weights.

    A session stays with its server, which has its history cached. A server that does not answer is
    lost, and with it the attempts that it sampled: they begin again on the other servers. The next
    `give_all` gives it the weights again, if it is back. If all are lost, the run waits for one.

    Args:
        servers: The servers, at least one.
        patience_s: Seconds without any answer after which the run stops.
        check_alive: Raises if the servers will never answer.
    """

    def __init__(
        self, servers: Sequence[Server], patience_s: float, check_alive: Callable[[], None]
    ) -> None:
        self.servers = tuple(servers)
        addresses = ", ".join(map(str, servers))
        several = "servers " if len(servers) > 1 else ""
        self._name = f"{servers[0].software} {several}at {addresses}"
        self._check_alive = check_alive
        self._patience = Patience(
            self._name,
            patience_s,
            lambda problem: EngineError(
                f"{self._name} {problem} Start it again, correct model.engine.url, or raise "
                "model.engine.patience_s."
            ),
            setting="patience_s",
        )
        self.giving = asyncio.Lock()
        """Held while servers get weights."""
        self.asleep = False
        """True if a server may be asleep."""

    def choose(self) -> Server:
        """The server for a new session: the one with the fewest sessions."""
        well = [server for server in self.servers if server.lost is None]
        return min(well or self.servers, key=lambda server: server.sessions)

    async def give_all(self, give: Give) -> None:
        """Give weights to each server that answers. If none does, wait and try again.

        Raises:
            EngineError: If none answers for `patience_s`, or one refuses.
        """

        async def attempt() -> None:
            given = [self._give(server, give) for server in self.servers]
            for result in await asyncio.gather(*given, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            faults = [server.lost for server in self.servers if server.lost is not None]
            if len(faults) == len(self.servers):
                self._check_alive()
                raise faults[0]

        await self._patience.ask_async(attempt)

    async def _give(self, server: Server, give: Give) -> None:
        if server.lost is not None and not await server.connection.is_up():
            return  # a server that hangs would keep the others waiting
        try:
            await give(server)
            server.lost = None
        except Unavailable as fault:
            self._note_loss(server, fault)

    async def mark_lost(self, server: Server, fault: Unavailable, give: Give) -> None:
        """Note that a server did not answer. If no other one is left, wait for one, and give it the
        weights.

        Raises:
            EngineError: If none answers for `patience_s`, or one refuses.
        """
        self._note_loss(server, fault)
        async with self.giving:  # the first turn that was lost waits for all
            if all(server.lost is not None for server in self.servers):
                await self.give_all(give)

    def _note_loss(self, server: Server, fault: Unavailable) -> None:
        if server.lost is None and len(self.servers) > 1:
            news = f"{server.name} does not answer ({fault}); its attempts begin again on another"
            say(f"turnrl: {make_visible(news)}", sys.stderr)
        server.lost = fault

    async def sleep(self) -> None:
        """Have the servers free the GPU's memory. No request may be under way.

        Raises:
            EngineError: If one refuses.
        """
        self.asleep = True  # also if this is cancelled: it does no harm to wake one that is awake
        for server in self.servers:
            try:
                with contextlib.suppress(Unavailable):  # one that died holds no memory
                    await server.sleep()
            except RequestRefused as error:
                raise EngineError(
                    f"{server.name} does not give its memory back ({error}). Set "
                    "model.engine.sleeps to false, and leave it a part of the GPU's memory."
                ) from error

    async def wake(self) -> None:
        """Wake the servers if they sleep.

        Raises:
            EngineError: If one cannot wake.
        """
        for server in self.servers if self.asleep else ():
            try:
                await server.wake()
            except (RequestRefused, Unavailable) as error:
                self._check_alive()
                raise EngineError(
                    f"{server.name} does not get its memory back ({error}). Lower "
                    "--gpu-memory-utilization in model.engine.arguments, or what the policy takes."
                ) from error
        self.asleep = False

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        for server in self.servers:
            await server.connection.close()
