"""`ServerEngine`: an engine that samples with servers, whatever their kind.

A session is a list of token ids. Each turn sends all of them; the server has the beginning in its
prefix cache and computes only what is new. So a session can move to another server at any time, and
loses nothing but speed.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from turnrl import (
    Beside,
    Completion,
    Engine,
    EngineError,
    RecipeError,
    SampledPolicy,
    Sampling,
    Session,
    Surroundings,
    counted,
    on_loop,
    say,
)
from turnrl.servers import Unavailable
from turnrl_servers.connection import Refused
from turnrl_servers.files import has_adapter
from turnrl_servers.folders import (
    Alone,
    Together,
    WeightsFolder,
    check_together,
    is_together,
    make_folder,
    parent_of_weights,
)
from turnrl_servers.pool import Pool
from turnrl_servers.server import Server
from turnrl_servers.settings import ServerSettings
from turnrl_servers.supply import Supply
from turnrl_servers.trial import examine
from turnrl_servers.weights import Adapters, Published, Weights, WholeModel


class _Session(Session):
    """One history that the servers sample."""

    def __init__(
        self, engine: ServerEngine, ids: tuple[int, ...], began: Published, server: Server
    ) -> None:
        self._engine, self._ids, self._began, self._server = engine, ids, began, server
        self._busy = self._closed = False
        engine.sessions[server] += 1

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        self._busy = True
        try:
            ids = (*self._ids, *new_ids)
            done, server = await self._engine.sample(self._server, self._began, ids, sampling)
            self._ids = (*ids, *done.token_ids)
            if server is not self._server:
                self._engine.sessions.subtract([self._server])
                self._engine.sessions[server] += 1
                self._server = server
            return done
        except BaseException:
            self.close()  # the turn's tokens are lost, so the history has a hole
            raise
        finally:
            self._busy = False

    def fork(self) -> _Session:
        self._check()
        return _Session(self._engine, self._ids, self._began, self._server)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.sessions.subtract([self._server])

    def _check(self) -> None:
        if self._closed or self._busy:
            raise RuntimeError(
                "a session generates one turn at a time, and none after close() or a turn that "
                "was cancelled"
            )
        self._engine.running[0].refuse_if_dropped(self._began)


@final
class ServerEngine(Engine):
    """Samples with servers of any kind.

    Args:
        settings: Its settings.
        kind: The kind of server.
        supply: Where the servers come from.
        cuts_distributions: See `Engine`.

    Attributes:
        pool: The servers; None before `start` and after `close`.
        weights: The versions that they have; None before `start` and after `close`.
    """

    seeded = False
    copies_weights = True
    approximates = True

    def __init__(
        self,
        settings: ServerSettings,
        kind: type[Server],
        supply: Supply,
        cuts_distributions: bool = True,
    ) -> None:
        self.settings, self.kind, self.supply = settings, kind, supply
        self.keeps, self.cuts_distributions = settings.keeps, cuts_distributions
        self.pool: Pool | None = None
        self.weights: Weights | None = None
        self._where = Surroundings()
        self.sessions: Counter[Server] = Counter()
        self._in_force: dict[str, str] = {}
        self._folder: WeightsFolder = Alone(settings.folder)

    @property
    def name(self) -> str:
        """See `Engine.name`."""
        return type(self.settings).__name__

    @property
    def in_force(self) -> Mapping[str, str]:
        """See `Engine.in_force`."""
        return self._in_force

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: Surroundings = Surroundings()
    ) -> None:
        """See `Engine.check`. It refuses servers that are away, are of another kind, have another
        tokenizer, a shorter window or no adapters; and settings that several processes cannot
        share."""
        self._where = where
        if where.processes > 1:
            check_together(policy, where, self.supply.starts_servers, self.settings.folder)
        servers = self.supply.ready(policy)
        if servers:
            versions = [self._examined(server, policy, max_tokens) for server in servers]
            self._in_force = {"sampler": self._sampler(versions)}
        if where.processes > 1 and is_together():
            self._folder = Together(make_folder(self.settings.folder) or where.folder or Path())
        else:
            self._folder = Alone(self.settings.folder)

    def _examined(self, server: Server, policy: SampledPolicy, max_tokens: int) -> str:
        """Examine a server. Returns the version of its software."""
        home = parent_of_weights(self.settings.folder, self._where)
        try:
            return examine(
                server, policy, max_tokens, self.supply.base, home, self.settings.api_key_env
            )
        except Unavailable as fault:
            raise RecipeError(
                f"{server.name} does not answer ({fault}). Start it, or correct "
                "model.engine.url. To score a run without it: turnrl eval RUN --model.engine Slots."
            ) from fault

    def beside(self, total: int) -> Beside | None:
        """See `Engine.beside`."""
        return self.supply.beside(total)

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`."""
        home = self._folder.make()
        try:
            self._start(policy, max_tokens, home)
        except BaseException:
            self.close()
            if not self._folder.follows:
                shutil.rmtree(home, ignore_errors=True)
            raise

    def _start(self, policy: SampledPolicy, max_tokens: int, home: Path) -> None:
        servers = self.supply.start(policy, max_tokens, home, self._where.folder)
        self.pool = Pool(servers, self.supply.patience_s, self.supply.check_alive)
        versions = [self._examined(server, policy, max_tokens) for server in servers]
        adapter = has_adapter(policy)
        kind = Adapters if adapter else WholeModel
        self.weights = kind(
            policy,
            self.pool,
            folder=home,
            keeps=self.keeps,
            max_logprob_gap=self.settings.max_logprob_gap,
            follows=self._folder.follows,
        )
        self.sessions.clear()
        sampler = self._sampler(versions)
        if self.settings.urls and not self._folder.follows:
            say(f"turnrl: sampling with {sampler}: {', '.join(self.settings.urls)}", sys.stderr)
        self._in_force = {
            "sampler": sampler,
            "weights while sampling": "base and adapter" if adapter else "the whole model",
        }

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The adapter, or else the whole model, is written to a folder, and the
        servers read it."""
        weights, pool = self.running
        on_loop(self.supply.wake(pool))
        weights.publish(version)
        self._in_force["log-probabilities"] = f"{weights.gap:.1e} from the learner's on average"

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        weights, pool = self.running
        server = pool.choose(lambda server: self.sessions[server])
        return _Session(self, tuple(prompt_ids), weights.newest, server)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self.pool is not None:
            await self.pool.drain()

    def rest(self) -> None:
        """See `Engine.rest`. Servers must still have the weights, and one that the run has started
        may fall asleep."""
        if self.pool is None or self.weights is None:
            return
        on_loop(self.weights.verify())
        if self.supply.rest(self.pool):
            self._in_force["memory between collections"] = "given back"

    def close(self) -> None:
        """See `Engine.close`. It removes the weights that it wrote, here and at the servers."""
        pool, weights = self.pool, self.weights
        self.pool = self.weights = None
        self.sessions.clear()
        try:
            if pool is not None:
                for server in pool.servers:
                    server.connection.give_up_calls()
                on_loop(pool.drain())
        finally:
            self.supply.close()
            if weights is not None:
                weights.close()
            self._folder.leave()

    async def sample(
        self, first: Server, began: Published, ids: tuple[int, ...], sampling: Sampling
    ) -> tuple[Completion, Server]:
        """Sample a turn.

        Args:
            first: The server of the session.
            began: The weights of the session.
            ids: Its tokens.
            sampling: How to sample.
        Returns:
            The turn, and the server that sampled it.
        """
        weights, pool = self.running
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        if sampling.forced_ids:
            raise NotImplementedError(f"{self.name} takes no forced tokens")
        request = first.turn_request(ids, sampling)

        async def ask(server: Server) -> Completion:
            weights, pool = self.running  # the engine may have been closed while this turn waited
            await self.supply.wake(pool)
            answer, version = await weights.sample(server, began, request)
            return server.completion(answer, sampling, version)

        try:
            with weights.pinned(began):
                return await pool.ask_any(first, ask)
        except Refused as error:
            raise EngineError(
                f"{first.software} refused a turn of {len(ids)} tokens and {sampling.max_tokens} "
                f"more ({error}). If it is too long, start it with a larger "
                f"{first.length_option}."
            ) from error

    @property
    def running(self) -> tuple[Weights, Pool]:
        """The weights and the servers of a started engine.

        Raises:
            RuntimeError: If it is not started.
        """
        if self.weights is None or self.pool is None:
            raise RuntimeError("Engine.start() comes first")
        return self.weights, self.pool

    def _sampler(self, versions: Sequence[str]) -> str:
        """The servers' versions and their number, for `in_force`."""
        servers = counted(len(versions), "server")
        return f"{self.kind.software} {', '.join(sorted(set(versions)))}, {servers}"
