"""`ServerEngine`: an engine that samples with servers, whatever their kind.

A session is a list of token ids. Each turn sends all of them; the server has the beginning in its
prefix cache and computes only what is new.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import torch

from turnrl import Sampling
from turnrl.agent.running import on_loop
from turnrl.engines import Completion, Engine, RunContext, SampledPolicy, ServerMemory, Session
from turnrl.plugin.errors import EngineError, TrajectoryLost
from turnrl.plugin.patience import Unavailable
from turnrl.plugin.text import format_count, say
from turnrl_servers.connection import RequestRefused
from turnrl_servers.files import has_adapter
from turnrl_servers.folders import WeightsFolder, check_together
from turnrl_servers.pool import Pool
from turnrl_servers.server import Server
from turnrl_servers.settings import ServerSettings
from turnrl_servers.supply import ServerSource
from turnrl_servers.trial import examine_server
from turnrl_servers.weights import Adapters, Published, Weights, WholeModel


class _Session(Session):
    """One history that a server samples."""

    def __init__(
        self, engine: ServerEngine, ids: tuple[int, ...], began: Published, server: Server
    ) -> None:
        self._engine, self._ids, self._began, self._server = engine, ids, began, server
        self._busy = self._closed = False
        server.sessions += 1

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        self._busy = True
        ids = (*self._ids, *new_ids)
        try:
            done = await self._engine.sample(self._server, self._began, ids, sampling)
        except BaseException:
            self.close()  # the turn's tokens are lost, so the history has a hole
            raise
        finally:
            self._busy = False
        self._ids = (*ids, *done.token_ids)
        return done

    def fork(self) -> _Session:
        self._check()
        return _Session(self._engine, self._ids, self._began, self._server)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.sessions -= 1

    def _check(self) -> None:
        if self._closed or self._busy:
            raise RuntimeError(
                "a session generates one turn at a time, and none after close() or a turn that "
                "was cancelled"
            )
        if self._began not in self._engine.running[0].kept:
            raise RuntimeError("a session ends when its weights are gone: open a new one")


@final
class ServerEngine(Engine):
    """Samples with servers of any kind.

    Args:
        settings: Its settings.
        kind: The kind of server.
        supply: Where the servers come from.

    Attributes:
        pool: The servers; None before `start` and after `close`.
        weights: The versions that they have; None before `start` and after `close`.
    """

    seeded = False
    copies_weights = True
    approximates = True

    def __init__(self, settings: ServerSettings, kind: type[Server], supply: ServerSource) -> None:
        self.settings, self.kind, self.supply = settings, kind, supply
        self.keeps = settings.keeps
        self.pool: Pool | None = None
        self.weights: Weights | None = None
        self._where = RunContext()
        self._active_choices: dict[str, str] = {}
        self._folder: WeightsFolder | None = None

    @property
    def name(self) -> str:
        """See `Engine.name`."""
        return type(self.settings).__name__

    @property
    def active_choices(self) -> Mapping[str, str]:
        """See `Engine.active_choices`."""
        return self._active_choices

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: RunContext = RunContext()
    ) -> None:
        """See `Engine.check`. It refuses servers that are away, are of another kind or have a
        shorter window, and settings that several processes cannot share."""
        self._where = where
        if where.processes > 1:
            check_together(policy, where, self.supply.starts_servers, self.settings.folder)
        if servers := self.supply.running_servers(policy):
            self._active_choices = {"sampler": self._examine(servers, max_tokens)}
        self._folder = WeightsFolder(self.settings.folder, where)

    def _examine(self, servers: Sequence[Server], max_tokens: int) -> str:
        """Examine servers. Returns their versions and their number, for `active_choices`."""
        base, variable = self.supply.base, self.settings.api_key_env
        versions = {
            on_loop(examine_server(server, max_tokens, base, variable)) for server in servers
        }
        number = format_count(len(servers), "server")
        return f"{self.kind.software} {', '.join(sorted(versions))}, {number}"

    def server_memory(self, total: int) -> ServerMemory | None:
        """See `Engine.server_memory`."""
        return self.supply.server_memory(total)

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`."""
        self._folder = self._folder or WeightsFolder(self.settings.folder, self._where)
        home = self._folder.make()
        try:
            self._start(policy, max_tokens, home, self._folder.follows)
        except BaseException:
            self.close()
            if not self._folder.follows:
                shutil.rmtree(home, ignore_errors=True)
            raise

    def _start(self, policy: SampledPolicy, max_tokens: int, home: Path, follows: bool) -> None:
        settings, adapter = self.settings, has_adapter(policy)
        servers = self.supply.start(policy, max_tokens, home, self._where.folder)
        sampler = self._examine(servers, max_tokens)
        self.pool = Pool(servers, settings.patience_s, self.supply.check_alive)
        kind = Adapters if adapter else WholeModel
        gap = settings.max_logprob_gap
        self.weights = kind(policy, self.pool, home, settings.keeps, gap, follows)
        if settings.urls and not follows:
            say(f"turnrl: sampling with {sampler}: {', '.join(settings.urls)}", sys.stderr)
        self._active_choices = {
            "sampler": sampler,
            "weights while sampling": "base and adapter" if adapter else "the whole model",
        }

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The adapter, or else the whole model, is written to a folder, and the
        servers read it."""
        weights, pool = self.running
        if pool.asleep:
            torch.cuda.empty_cache()  # so that the servers can take it
            on_loop(pool.wake())
        weights.publish(version)
        self._active_choices["log-probabilities"] = (
            f"{weights.gap:.1e} from the learner's on average"
        )

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        weights, pool = self.running
        return _Session(self, tuple(prompt_ids), weights.kept[-1], pool.choose())

    async def sample(
        self, server: Server, began: Published, ids: tuple[int, ...], sampling: Sampling
    ) -> Completion:
        """Sample a turn.

        Args:
            server: The server of the session.
            began: The weights of the session.
            ids: Its tokens.
            sampling: How to sample.
        Raises:
            TrajectoryLost: If the server did not answer.
            EngineError: If it refuses, or none has answered for `patience_s`.
        """
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        if sampling.forced_ids:
            raise NotImplementedError(f"{self.name} takes no forced tokens")
        weights, _ = self.running
        try:
            if server.lost is not None:
                raise server.lost
            answer, version = await weights.sample(
                server, began, server.turn_request(ids, sampling)
            )
            return server.completion(answer, sampling, version)
        except Unavailable as fault:
            await weights.lose(server, fault)
            raise TrajectoryLost(f"{server.name} did not answer a turn ({fault}).") from fault
        except RequestRefused as error:
            raise EngineError(
                f"{server.software} refused a turn of {len(ids)} tokens and {sampling.max_tokens} "
                f"more ({error}). If it is too long, start it with a larger "
                f"{server.length_option}."
            ) from error

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self.pool is not None:
            await self.pool.close()

    def release_memory(self) -> None:
        """See `Engine.release_memory`. Servers must still have the weights, and one that the run
        has started may fall asleep."""
        if self.pool is None or self.weights is None:
            return
        on_loop(self.weights.verify())
        if self.supply.sleeps:
            on_loop(self.pool.sleep())
            self._active_choices["memory between collections"] = "given back"

    def close(self) -> None:
        """See `Engine.close`. It removes the weights that it wrote, here and at the servers."""
        pool, weights = self.pool, self.weights
        self.pool = self.weights = None
        try:
            if pool is not None and weights is not None:
                weights.close()
                on_loop(pool.close())
        finally:
            self.supply.close()

    @property
    def running(self) -> tuple[Weights, Pool]:
        """The weights and the servers of a started engine.

        Raises:
            RuntimeError: If it is not started.
        """
        if self.weights is None or self.pool is None:
            raise RuntimeError("Engine.start() comes first")
        return self.weights, self.pool
