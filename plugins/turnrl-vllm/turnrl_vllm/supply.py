"""`StartedByRun`: a vLLM server that the run starts, lets sleep and ends."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch

from turnrl import Beside, LanguageModel, RecipeError, SampledPolicy
from turnrl_servers import Server, Supply, has_adapter, write
from turnrl_vllm.server import VLLMServer
from turnrl_vllm.settings import VLLM
from turnrl_vllm.started import ASLEEP, Started, check_python, gpu_share


@final
class StartedByRun(Supply):
    """A server that the run starts on this machine, lets sleep and ends.

    Args:
        settings: How to start it, and how long to wait for it.
        python: Interpreter of an environment with vLLM.
    """

    starts_servers = True
    base = None

    def __init__(self, settings: VLLM, python: str) -> None:
        self.settings, self.python = settings, python
        self.started: Started | None = None
        """Its process, while it runs."""
        self._sleeps = False

    @property
    def sleeps(self) -> bool:
        """See `Supply.sleeps`."""
        return self._sleeps

    def ready(self, policy: SampledPolicy) -> list[Server]:
        """See `Supply.ready`. There is none yet."""
        check_python(self.python)
        if not isinstance(policy, LanguageModel):
            raise RecipeError("VLLM with python serves a turnrl.Policy. Give url in its place.")
        return []

    def beside(self, total: int) -> Beside | None:
        """See `Supply.beside`. The server takes the share that its arguments set."""
        share = gpu_share(self.settings.arguments)
        if share is None:
            return None
        awake = int(share * total)
        return Beside(awake, awake if self.settings.sleeps is False else min(awake, ASLEEP))

    def start(
        self, policy: SampledPolicy, max_tokens: int, home: Path, run: Path | None
    ) -> list[Server]:
        """See `Supply.start`. Starts vLLM with the base, and waits until it answers."""
        assert isinstance(policy, LanguageModel), "checked"
        model = policy.folder
        if not has_adapter(policy):
            model = str(home / "base")  # in the form in which later versions are written
            write(policy, home / "base")
        policy.tokenizer.save_pretrained(home / "tokenizer")
        log = home.with_name(f"{home.name}.log")
        if run is not None:
            run.mkdir(parents=True, exist_ok=True)
            log = run / "vllm.log"
        sleeps = self.settings.sleeps
        self._sleeps = policy.device.type == "cuda" if sleeps is None else sleeps
        torch.cuda.empty_cache()  # so that vLLM can take it
        self.started = started = Started(
            self.python,
            policy,
            model=model,
            max_tokens=max_tokens,
            adapters=self.settings.keeps + 1,
            arguments=["--tokenizer", str(home / "tokenizer"), *self.settings.arguments],
            log=log,
            keeps_log=run is not None,
            folder=home,
            sleeps=self._sleeps,
        )
        server = VLLMServer(started.url, started.key, self.settings.timeout_s)
        started.wait(server.connection.is_up, self.settings.start_timeout_s)
        return [server]

    def check_alive(self) -> None:
        """See `Supply.check_alive`."""
        if self.started is not None:
            self.started.check()

    def close(self) -> None:
        """See `Supply.close`."""
        started, self.started = self.started, None
        if started is not None:
            started.close()
