"""`VLLM`: samples with vLLM, in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from turnrl import Beside, Engine, Policy, RecipeError, SampledPolicy, at_least, on_loop
from turnrl_servers import Pool, Server, ServerEngine, has_adapter, write
from turnrl_vllm.started import ASLEEP, Started, check_python, give_back_cache, gpu_share
from turnrl_vllm.vllm_api import VLLMAPI


@final
@dataclass(eq=False, repr=False)
class VLLM(ServerEngine):
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
        started: The server that the run has started, if it has.
    Raises:
        RecipeError: If neither or both of `url` and `python` are given, or an option makes no
            sense.
    """

    api = VLLMAPI()

    python: str | None = None
    arguments: list[str] = field(default_factory=list)
    base: str | None = None
    api_key_env: str | None = "VLLM_API_KEY"
    start_timeout_s: float = 600.0
    sleeps: bool | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            how_many = "both url and python" if self.url is not None else "neither url nor python"
            raise RecipeError(
                f"VLLM has {how_many}. Give the url of a server that runs, or the python of an "
                "environment with vLLM, and the run starts one."
            )
        super().__post_init__()
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
        at_least(0, "model.engine.", self, "start_timeout_s", optional=False)
        self.started: Started | None = None
        self._sleeps = False

    @property
    def _base(self) -> str | None:
        return self.base

    @property
    def _starts_one(self) -> bool:
        return self.python is not None

    def _check_own(self, policy: SampledPolicy) -> None:
        if self.python is not None:
            check_python(self.python)
            if not isinstance(policy, Policy):
                raise RecipeError("VLLM with python serves a turnrl.Policy. Give url in its place.")

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
        base."""
        if self.python is None:
            return super().rehearsal()
        check_python(self.python)
        return contextlib.nullcontext(replace(self))

    def _begin(self, policy: SampledPolicy, max_tokens: int, home: Path) -> list[Server]:
        """With `python`, start vLLM with the base, and wait until it answers."""
        if self.python is None:
            return super()._begin(policy, max_tokens, home)
        assert isinstance(policy, Policy), "checked"
        model = policy.folder
        if not has_adapter(policy):
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
        server = Server(started.url, started.key, self.timeout_s, self.api.name)
        started.wait(server.is_up, self.start_timeout_s)
        return [server]

    def _patience(self) -> tuple[float, Callable[[], None] | None]:
        if self.started is None:
            return self.patience_s, None
        # a server that the run restarts takes as long as it took to start
        return self.patience_s + self.start_timeout_s, self.started.check

    def rest(self) -> None:
        """See `Engine.rest`. A server that the run has started falls asleep."""
        if self._sleeps and self.started is not None and self.pool is not None:
            self.started.note(asleep=True)
            on_loop(self.pool.sleep(self.api.sleep))
            self._in_force["memory between collections"] = "given back"

    async def _wake(self, pool: Pool) -> None:
        if pool.asleep:
            if self.started is not None:
                self.started.note(asleep=False)
            give_back_cache()
            await pool.wake(self.api.wake)

    def _end_own(self) -> None:
        started, self.started = self.started, None
        if started is not None:
            started.close()
