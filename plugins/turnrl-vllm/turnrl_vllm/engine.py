"""`VLLM`, an engine in a process of its own, behind HTTP.

A session is its token ids. Each turn sends all of them, and vLLM reads only what is new: its cache
of prefixes has the rest. So a session needs nothing of its server but speed, and can go on at any
other one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final

from turnrl import (
    Completion,
    Engine,
    EngineError,
    Policy,
    RecipeError,
    SampledPolicy,
    Sampling,
    Session,
    at_least,
    installed,
    on_loop,
)
from turnrl.servers import Unavailable
from turnrl_vllm.group import Group
from turnrl_vllm.server import Refused, Server
from turnrl_vllm.started import Started, check_python
from turnrl_vllm.together import Together, is_together
from turnrl_vllm.trial import examine, read_choice, turn
from turnrl_vllm.weights import Adapters, Published, Weights, WholeModel, write

_Reason = Literal["end", "stop", "length"]


class _Session(Session):
    """One history, sampled by the servers."""

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
            self.close()  # what was sampled of the turn is lost, so the history has a hole
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
        with self._engine._turn(self._began):  # or its weights are gone
            return


@final
@dataclass(eq=False, repr=False)
class VLLM(Engine):
    """Samples with vLLM servers, given or started by the run.

    Give `url` or `python`. A server must read the folder that this process writes the weights to.

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
        start_s: Seconds that a server may take to start.
        sleeps: Whether a server that the run starts gives back its GPU's memory while the policy
            learns, and keeps its base in the machine's memory. Null: if the policy is on a GPU. A
            run that samples ahead (`max_staleness`) lets it stay awake.
        most_gap: Largest mean difference between the servers' log-probabilities and the learner's
            in a trial, in nats. Each server is compared with each version before it samples turns
            with it.
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
    start_s: float = 600.0
    sleeps: bool | None = None
    most_gap: float = 0.15

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            given = "both url and python" if self.url is not None else "neither url nor python"
            raise RecipeError(
                f"VLLM has {given}. Give the url of a server that runs, or the python of an "
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
        for one in self.arguments:
            if re.match(r"--\S+\s", one):
                raise RecipeError(
                    f"model.engine.arguments has {one!r}. Write an option and its value as two "
                    f"items: {', '.join(map(repr, one.split(maxsplit=1)))}."
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
        least = ("patience_s", "timeout_s", "start_s", "most_gap")
        at_least(0, "model.engine.", self, *least, optional=False)
        self._group: Group | None = None
        self._weights: Weights | None = None
        self._started: Started | None = None
        self._sleeps = False
        self._held: Counter[Server] = Counter()
        self._told: dict[str, str] = {}
        self._together: Together | None = None
        self.log: Path | None = None

    @property
    def _urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def in_force(self) -> Mapping[str, str]:
        """See `Engine.in_force`."""
        return self._told

    def check(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.check`. Servers that are away, are no vLLM, have another tokenizer, a shorter
        window or no adapters; an interpreter without vLLM; what several processes cannot share."""
        if self.processes > 1:
            self._check_together(policy)
        if self.python is not None:
            check_python(self.python)
            if not isinstance(policy, Policy):
                raise RecipeError("VLLM with python serves a turnrl.Policy. Give url in its place.")
        servers = self._servers()
        if servers:
            versions = [self._examined(server, policy, max_tokens) for server in servers]
            self._told = {"sampler": _sampler(versions)}
        self._together = None
        if self.processes > 1 and is_together():
            self._together = Together(self._home() or self.run_folder or Path())

    def _examined(self, server: Server, policy: SampledPolicy, max_tokens: int) -> str:
        try:
            return examine(server, policy, max_tokens, self.base, self._parent())
        except Unavailable as fault:
            raise RecipeError(
                f"vLLM at {server} does not answer ({fault}). Start it, or correct "
                "model.engine.url. To evaluate a run without it, add --model.engine Slots."
            ) from fault

    def rehearsal(self) -> AbstractContextManager[Engine]:
        """See `Engine.rehearsal`. A server of its own is started, with the rehearsal's small base.
        Given servers have the run's base, so the default engine samples in their place."""
        if self.python is not None:
            check_python(self.python)
            return _rehearsed(replace(self))
        default: Engine = installed("turnrl_engines")["Slots"]()
        return default.rehearsal()

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """See `Engine.start`. It starts the server, if that is what was asked for."""
        home = self._own_folder() if self._together is None else self._together.folder()
        follows = self._together is not None and self._together.follows
        try:
            self._start(policy, max_tokens, home, follows)
        except BaseException:
            self.close()
            if not follows:
                shutil.rmtree(home, ignore_errors=True)
            raise

    def _check_together(self, policy: SampledPolicy) -> None:
        """Whether the processes that learn together can do so with the same servers."""
        if self.python is not None:
            raise RecipeError(
                f"model.engine.python would start a server for each of {self.processes} processes, "
                "all with the same memory. Start servers yourself, and give their addresses in "
                "model.engine.url."
            )
        if not _has_adapter(policy) and not self.divided:
            raise RecipeError(
                f"{self.processes} processes train all weights, and a server would read new ones "
                "while another process samples. Train an adapter (model.policy.lora), use one "
                "process, or let the processes share one policy (trainer.strategy: fsdp2)."
            )
        if self.folder is None and self.run_folder is None:
            raise RecipeError(
                "several processes share the weights for vLLM, and this run has no folder. Set "
                "model.engine.folder to a path that all processes and servers have."
            )

    def _own_folder(self) -> Path:
        home = Path(tempfile.mkdtemp(prefix="turnrl-vllm-", dir=self._home()))
        atexit.register(shutil.rmtree, home, ignore_errors=True)  # whatever ends the program
        if self.folder is not None:
            home.chmod(0o755)  # servers of other users read it
        return home

    def _start(self, policy: SampledPolicy, max_tokens: int, home: Path, follows: bool) -> None:
        has_adapter = _has_adapter(policy)
        servers = self._servers()
        if self.python is not None:
            assert isinstance(policy, Policy)
            model = policy.folder
            if not has_adapter:
                model = str(home / "base")  # in the form in which later versions are written
                write(policy, home / "base")
            policy.tokenizer.save_pretrained(home / "tokenizer")
            self.log = home.with_name(f"{home.name}.log")  # which stays
            if self.run_folder is not None:
                self.run_folder.mkdir(parents=True, exist_ok=True)
                self.log = self.run_folder / "vllm.log"
            arguments = ["--tokenizer", str(home / "tokenizer"), *self.arguments]
            self._sleeps = policy.device.type == "cuda" if self.sleeps is None else self.sleeps
            _give_back_cache()
            self._started = started = Started(
                self.python,
                policy,
                model,
                max_tokens,
                self.keeps + 1,
                arguments,
                self.log,
                home,
                self._sleeps,
            )
            servers = [Server(started.url, started.key, self.timeout_s)]
            started.wait(lambda: _is_up(servers[0]), self.start_s)
        # one of its own that died takes as long to come back as it took to start
        patience_s = self.patience_s + (self.start_s if self.python is not None else 0)
        still = None if self._started is None else self._started.check
        self._group = Group(servers, patience_s, still)
        versions = [self._examined(server, policy, max_tokens) for server in servers]
        kind = Adapters if has_adapter else WholeModel
        self._weights = kind(
            policy,
            self._group,
            home,
            self.keeps,
            self.most_gap,
            follows,
        )
        self._held.clear()
        self._told = {
            "sampler": _sampler(versions),
            "weights while sampling": "base and adapter" if has_adapter else "the whole model",
        }

    def sync(self, version: int) -> None:
        """See `Engine.sync`. The adapter, or else the whole model, is written to a folder, and the
        servers read it."""
        weights, group = self._running
        on_loop(self._wake(group))
        weights.publish(version)
        self._told["log-probabilities"] = f"{weights.gap:.1e} from the learner's on average"

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        """See `Engine.open`."""
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        weights, group = self._running
        server = group.choose(lambda one: self._held[one])
        return _Session(self, tuple(prompt_ids), weights.newest, server)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self._group is not None:
            await self._group.drain()

    def rest(self) -> None:
        """See `Engine.rest`. A server of its own falls asleep."""
        if self._sleeps and self._started is not None and self._group is not None:
            self._started.note(asleep=True)
            on_loop(self._group.sleep())
            self._told["memory between collections"] = "given back"

    async def _wake(self, group: Group) -> None:
        if group.asleep:
            if self._started is not None:
                self._started.note(asleep=False)
            _give_back_cache()
            await group.wake()

    def close(self) -> None:
        """See `Engine.close`. It ends a server that it started, and removes the weights that it
        wrote."""
        group, weights, started = self._group, self._weights, self._started
        self._group = self._weights = self._started = None
        self._held.clear()
        try:
            if group is not None:
                for server in group.servers:
                    server.give_up_calls()
                on_loop(group.drain())
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
        weights, group = self._running
        if sampling.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}, but a turn has at least one token"
            )
        if sampling.forced_ids:
            raise NotImplementedError("VLLM takes no forced tokens")
        body = _request(ids, sampling)
        try:
            with weights.turn(began):
                (done, acted), server = await group.ask_one(
                    first, lambda one: self._ask(weights, one, began, body, sampling)
                )
        except Refused as error:
            raise EngineError(
                f"vLLM refused a turn of {len(ids)} tokens and {sampling.max_tokens} more "
                f"({error}). If it is too long, start vLLM with a larger --max-model-len."
            ) from error
        tokens, logprobs, reason = done
        return Completion(tokens, logprobs, reason, acted), server

    async def _ask(
        self,
        weights: Weights,
        server: Server,
        began: Published,
        body: dict[str, object],
        sampling: Sampling,
    ) -> tuple[tuple[tuple[int, ...], tuple[float, ...], _Reason], int]:
        """A turn's tokens, their log-probabilities, and why it ended; and the version."""
        await self._wake(self._running[1])
        answer, acted = await weights.sample(server, began, body)
        return _read(answer, sampling), acted

    def _turn(self, began: Published) -> AbstractContextManager[None]:
        return self._running[0].turn(began)

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
        """The folder in which the one for weights will be made; None if that is a temporary one."""
        if self.folder is not None or self.processes == 1 or self.run_folder is None:
            return self._home()
        folder = self.run_folder.absolute()
        return next(one for one in (folder, *folder.parents) if one.is_dir())

    def _servers(self) -> list[Server]:
        key = os.environ.get(self.api_key_env or "", "").strip()
        return [Server(url, key, self.timeout_s) for url in self._urls]

    @property
    def _running(self) -> tuple[Weights, Group]:
        if self._weights is None or self._group is None:
            raise RuntimeError("Engine.start() comes first")
        return self._weights, self._group


@contextlib.contextmanager
def _rehearsed(engine: VLLM) -> Iterator[Engine]:
    """An engine whose server leaves no log, unless it failed and an error names the log."""
    yield engine
    if engine.log is not None:
        engine.log.unlink(missing_ok=True)


def _sampler(versions: Sequence[str]) -> str:
    """vLLM's versions and the number of servers, for people to read."""
    servers = "1 server" if len(versions) == 1 else f"{len(versions)} servers"
    return f"vLLM {', '.join(sorted(set(versions)))}, {servers}"


def _has_adapter(policy: SampledPolicy) -> bool:
    return isinstance(policy, Policy) and policy.lora is not None


def _give_back_cache() -> None:
    """Leave vLLM the GPU's memory that this process keeps without using it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_up(server: Server) -> bool:
    try:
        server.ask("GET", "/health", within_s=5)
    except (Unavailable, Refused):
        return False
    return True


def _request(ids: Sequence[int], sampling: Sampling) -> dict[str, object]:
    body = turn(ids, sampling.max_tokens, sampling.temperature)
    if sampling.cuts_distribution:
        body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "top_p": sampling.top_p}
    if sampling.stop:
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    # the model's own end tokens end a turn only where they are among these
    return body | {"stop_token_ids": list(sampling.end_ids), "ignore_eos": True}


def _read(answer: Any, sampling: Sampling) -> tuple[tuple[int, ...], tuple[float, ...], _Reason]:
    """A turn's tokens, their log-probabilities, and why it ended.

    Raises:
        Unavailable: If the server broke it off.
    """
    why = "length"
    with contextlib.suppress(LookupError, TypeError):  # of which `read_choice` tells
        why = answer["choices"][0]["finish_reason"]
    if why not in ("stop", "length"):
        raise Unavailable(f"it ended a turn with finish_reason {why!r}")
    tokens, logprobs = read_choice(answer)
    if tokens[-1] in sampling.end_ids:
        return tokens, logprobs, "end"
    if why == "stop":
        return tokens, logprobs, "stop"
    if len(tokens) < sampling.max_tokens:
        raise Unavailable(f"it returned only {len(tokens)} of {sampling.max_tokens} tokens")
    return tokens, logprobs, "length"
