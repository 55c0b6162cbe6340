"""`VLLM`, an engine in a process of its own, behind HTTP.

A session is a list of token ids. Each turn sends all of them; vLLM has the beginning in its prefix
cache and computes only what is new. So a session can move to another server at any time, and loses
nothing but speed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from turnrl import (
    Beside,
    Completion,
    Engine,
    EngineError,
    Policy,
    RecipeError,
    SampledPolicy,
    Sampling,
    Session,
    Surroundings,
    at_least,
    installed,
    on_loop,
)
from turnrl.servers import Unavailable
from turnrl_vllm import completions
from turnrl_vllm.pool import Pool
from turnrl_vllm.server import Refused, Server
from turnrl_vllm.started import ASLEEP, Started, check_python, give_back_cache, gpu_share
from turnrl_vllm.together import Together, check_together, is_together
from turnrl_vllm.trial import examine
from turnrl_vllm.weights import Adapters, Published, Weights, WholeModel, has_adapter, write


class _Session(Session):
    """One history that the servers sample."""

    def __init__(
        self, engine: VLLM, ids: tuple[int, ...], began: Published, server: Server
    ) -> None:
        self._engine, self._ids, self._began, self._server = engine, ids, began, server
        self._busy = self._closed = False
        engine._held[server] += 1

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        self._busy = True
        try:
            ids = (*self._ids, *new_ids)
            done, server = await self._engine._sample(self._server, self._began, ids, sampling)
            self._ids = (*ids, *done.token_ids)
            if server is not self._server:
                self._engine._held.subtract([self._server])
                self._engine._held[server] += 1
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
            self._engine._held.subtract([self._server])

    def _check(self) -> None:
        if self._closed or self._busy:
            raise RuntimeError(
                "a session generates one turn at a time, and none after close() or a turn that "
                "was cancelled"
            )
        self._engine._running[0].check(self._began)


@final
@dataclass(eq=False, repr=False)
class VLLM(Engine):
    """Samples with vLLM servers, given or started by the run.

    Give either `url` or `python`. A server must be able to read the folder that this process writes
    the weights to.

    Args:
        url: Address of a server, such as http://localhost:8000, or several addresses. They must
            serve the base that training begins from.
        python: Interpreter of an environment with vLLM. The run starts a server with it on this
            machine, starts it again if it dies, and ends it.
        arguments: More arguments of `vllm serve` for that server, such as
            `[--gpu-memory-utilization, "0.4"]`.
        base: The name under which the servers serve the base; null if they serve one model.
        api_key_env: Environment variable with the servers' key; no key is sent if this is null or
            the variable is not set. A server that the run starts gets a key of its own.
        folder: Where weights are written for the servers. Null is a folder for temporary files of
            this machine, or the run's folder if several processes learn together.
        keeps: Versions of an adapter that the servers have at a time. Set `--max-loras` of a given
            server to one more.
        patience_s: Seconds without any answer after which the run stops; until then requests are
            sent again.
        timeout_s: Seconds that one turn may take.
        start_timeout_s: Seconds that a server may take to start.
        sleeps: Whether a server that the run starts gives back its GPU's memory while the policy
            learns, and keeps its base in the machine's memory. Null: if the policy is on a GPU. A
            run that samples ahead (`max_staleness`) lets it stay awake.
        max_logprob_gap: Largest mean difference between the servers' log-probabilities and the
            learner's in a trial, in nats. Each server is compared with each version before it
            samples turns with it.
    Attributes:
        pool: The servers; this and the next two are None before `start` and after `close`.
        weights: The versions that they have.
        started: The server that the run has started, if it has.
    Raises:
        RecipeError: If neither or both of `url` and `python` are given, or an option makes no
            sense.
    """

    seeded = False
    copies_weights = True
    importance_cap = 2.0

    url: str | list[str] | None = None
    python: str | None = None
    arguments: list[str] = field(default_factory=list)
    base: str | None = None
    api_key_env: str | None = "VLLM_API_KEY"
    folder: str | None = None
    keeps: int = 2
    patience_s: float = 300.0
    timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    sleeps: bool | None = None
    max_logprob_gap: float = 0.15

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            how_many = "both url and python" if self.url is not None else "neither url nor python"
            raise RecipeError(
                f"VLLM has {how_many}. Give the url of a server that runs, or the python of an "
                "environment with vLLM, and the run starts one."
            )
        if self.url is not None and len({*self._urls}) != max(1, len(self._urls)):
            raise RecipeError(
                f"model.engine.url is {self.url!r}; give an address, or several different ones"
            )
        for url in self._urls:
            if not re.fullmatch(r"https?://[^/@?\s]+(/[^@?\s]*)?", url) or url.endswith("/v1"):
                raise RecipeError(
                    f"model.engine.url is {url!r}; it must look like http://localhost:8000, "
                    "without /v1, a password or a query"
                )
        if self.arguments and self.python is None:
            raise RecipeError(
                "model.engine.arguments are for a server that the run starts, and model.engine.url "
                "gives one. Start that one with them, or give python."
            )
        for argument in self.arguments:
            if re.match(r"--\S+\s", argument):
                raise RecipeError(
                    f"model.engine.arguments has {argument!r}. Write an option and its value as "
                    f"two items: {', '.join(map(repr, argument.split(maxsplit=1)))}."
                )
        if self.base is not None and self.url is None:
            raise RecipeError(
                "model.engine.base names what a given server serves, and the run starts one here. "
                "Leave it out."
            )
        if self.sleeps and self.python is None:
            raise RecipeError(
                "model.engine.sleeps is for a server that the run starts, and others may use the "
                "ones in model.engine.url. Leave it out."
            )
        at_least(1, "model.engine.", self, "keeps", whole=True, optional=False)
        least = ("patience_s", "timeout_s", "start_timeout_s", "max_logprob_gap")
        at_least(0, "model.engine.", self, *least, optional=False)
        self.pool: Pool | None = None
        self.weights: Weights | None = None
        self.started: Started | None = None
        self._where = Surroundings()
        self._sleeps = False
        self._held: Counter[Server] = Counter()
        self._in_force: dict[str, str] = {}
        self._together: Together | None = None

    @property
    def _urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def in_force(self) -> Mapping[str, str]:
        """See `Engine.in_force`."""
        return self._in_force

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: Surroundings = Surroundings()
    ) -> None:
        """See `Engine.check`. It refuses servers that are away, are no vLLM, have another
        tokenizer, a shorter window or no adapters; an interpreter without vLLM; and settings that
        several processes cannot share."""
        self._where = where
        if where.processes > 1:
            check_together(policy, where, self.python is not None, self.folder)
        if self.python is not None:
            check_python(self.python)
            if not isinstance(policy, Policy):
                raise RecipeError("VLLM with python serves a turnrl.Policy. Give url in its place.")
        servers = self._servers()
        if servers:
            versions = [self._examined(server, policy, max_tokens) for server in servers]
            self._in_force = {"sampler": _sampler(versions)}
        self._together = None
        if where.processes > 1 and is_together():
            self._together = Together(self._home() or where.folder or Path())

    def _examined(self, server: Server, policy: SampledPolicy, max_tokens: int) -> str:
        try:
            return examine(server, policy, max_tokens, self.base, self._parent())
        except Unavailable as fault:
            raise RecipeError(
                f"vLLM at {server} does not answer ({fault}). Start it, or correct "
                "model.engine.url. To evaluate a run without it, add --model.engine Slots."
            ) from fault

    def beside(self, total: int) -> Beside | None:
        """See `Engine.beside`. A server that the run starts takes the share that `arguments`
        set."""
        share = gpu_share(self.arguments)
        if self.python is None or share is None:
            return None
        awake = int(share * total)
        return Beside(awake, awake if self.sleeps is False else min(awake, ASLEEP))

    def rehearsal(self) -> AbstractContextManager[Engine]:
        """See `Engine.rehearsal`. With `python`, a server is started with the rehearsal's small
        base. Given servers have the run's base, so the default engine samples in their place."""
        if self.python is not None:
            check_python(self.python)
            return contextlib.nullcontext(replace(self))
        default: Engine = installed("turnrl_engines")["Slots"]()
        return default.rehearsal()

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`. With `python`, it starts the server."""
        home = self._own_folder() if self._together is None else self._together.folder()
        follows = self._together is not None and self._together.follows
        try:
            self._start(policy, max_tokens, home, follows)
        except BaseException:
            self.close()
            if not follows:
                shutil.rmtree(home, ignore_errors=True)
            raise

    def _own_folder(self) -> Path:
        home = Path(tempfile.mkdtemp(prefix="turnrl-vllm-", dir=self._home()))
        atexit.register(shutil.rmtree, home, ignore_errors=True)  # whatever ends the program
        if self.folder is not None:
            home.chmod(0o755)  # servers of other users read it
        return home

    def _start(self, policy: SampledPolicy, max_tokens: int, home: Path, follows: bool) -> None:
        adapter = has_adapter(policy)
        servers = self._servers()
        if self.python is not None:
            assert isinstance(policy, Policy)
            model = policy.folder
            if not adapter:
                model = str(home / "base")  # in the form in which later versions are written
                write(policy, home / "base")
            policy.tokenizer.save_pretrained(home / "tokenizer")
            log = home.with_name(f"{home.name}.log")
            if self._where.folder is not None:
                self._where.folder.mkdir(parents=True, exist_ok=True)
                log = self._where.folder / "vllm.log"
            arguments = ["--tokenizer", str(home / "tokenizer"), *self.arguments]
            self._sleeps = policy.device.type == "cuda" if self.sleeps is None else self.sleeps
            give_back_cache()
            self.started = started = Started(
                self.python,
                policy,
                model=model,
                max_tokens=max_tokens,
                adapters=self.keeps + 1,
                arguments=arguments,
                log=log,
                keeps_log=self._where.folder is not None,
                folder=home,
                sleeps=self._sleeps,
            )
            servers = [Server(started.url, started.key, self.timeout_s)]
            started.wait(servers[0].is_up, self.start_timeout_s)
        # a server that the run restarts takes as long as it took to start
        patience_s = self.patience_s + (self.start_timeout_s if self.python is not None else 0)
        check_alive = None if self.started is None else self.started.check
        self.pool = Pool(servers, patience_s, check_alive)
        versions = [self._examined(server, policy, max_tokens) for server in servers]
        kind = Adapters if adapter else WholeModel
        self.weights = kind(
            policy,
            self.pool,
            folder=home,
            keeps=self.keeps,
            max_logprob_gap=self.max_logprob_gap,
            follows=follows,
        )
        self._held.clear()
        self._in_force = {
            "sampler": _sampler(versions),
            "weights while sampling": "base and adapter" if adapter else "the whole model",
        }

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The adapter, or else the whole model, is written to a folder, and the
        servers read it."""
        weights, pool = self._running
        on_loop(self._wake(pool))
        weights.publish(version)
        self._in_force["log-probabilities"] = f"{weights.gap:.1e} from the learner's on average"

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        weights, pool = self._running
        server = pool.choose(lambda server: self._held[server])
        return _Session(self, tuple(prompt_ids), weights.newest, server)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self.pool is not None:
            await self.pool.drain()

    def rest(self) -> None:
        """See `Engine.rest`. A server that the run has started falls asleep."""
        if self._sleeps and self.started is not None and self.pool is not None:
            self.started.note(asleep=True)
            on_loop(self.pool.sleep())
            self._in_force["memory between collections"] = "given back"

    async def _wake(self, pool: Pool) -> None:
        if pool.asleep:
            if self.started is not None:
                self.started.note(asleep=False)
            give_back_cache()
            await pool.wake()

    def close(self) -> None:
        """See `Engine.close`. It ends a server that it started, and removes the weights that it
        wrote."""
        pool, weights, started = self.pool, self.weights, self.started
        self.pool = self.weights = self.started = None
        self._held.clear()
        try:
            if pool is not None:
                for server in pool.servers:
                    server.give_up_calls()
                on_loop(pool.drain())
        finally:
            if started is not None:
                started.close()
            if weights is not None:
                weights.close()
            if self._together is not None and not self._together.follows:
                self._together.leave()

    async def _sample(
        self, first: Server, began: Published, ids: tuple[int, ...], sampling: Sampling
    ) -> tuple[Completion, Server]:
        weights, pool = self._running
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        if sampling.forced_ids:
            raise NotImplementedError("VLLM takes no forced tokens")
        body = completions.request(ids, sampling)

        async def ask(server: Server) -> Completion:
            weights, pool = self._running  # or it was closed since
            await self._wake(pool)
            answer, version = await weights.sample(server, began, body)
            return completions.completion(answer, sampling, version)

        try:
            with weights.turn(began):
                return await pool.ask_one(first, ask)
        except Refused as error:
            raise EngineError(
                f"vLLM refused a turn of {len(ids)} tokens and {sampling.max_tokens} more "
                f"({error}). If it is too long, start vLLM with a larger --max-model-len."
            ) from error

    def _home(self) -> Path | None:
        if self.folder is None:
            return None
        home = Path(self.folder).expanduser().absolute()
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(
                f"model.engine.folder is {self.folder!r}, which cannot be made ({error})"
            ) from error
        return home

    def _parent(self) -> Path | None:
        """The folder in which the folder for weights will be made; None for temporary files."""
        if self.folder is not None or self._where.processes == 1 or self._where.folder is None:
            return self._home()
        folder = self._where.folder.absolute()
        return next(parent for parent in (folder, *folder.parents) if parent.is_dir())

    def _servers(self) -> list[Server]:
        key = os.environ.get(self.api_key_env or "", "").strip()
        return [Server(url, key, self.timeout_s) for url in self._urls]

    @property
    def _running(self) -> tuple[Weights, Pool]:
        if self.weights is None or self.pool is None:
            raise RuntimeError("Engine.start() comes first")
        return self.weights, self.pool


def _sampler(versions: Sequence[str]) -> str:
    """vLLM's versions and the number of servers, for `in_force`."""
    servers = "1 server" if len(versions) == 1 else f"{len(versions)} servers"
    return f"vLLM {', '.join(sorted(set(versions)))}, {servers}"
