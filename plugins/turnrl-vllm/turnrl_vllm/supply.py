"""`StartedServer`: a vLLM server that the run starts, lets sleep and ends."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from turnrl import RecipeError
from turnrl.agent.running import on_loop
from turnrl.engines import SampledPolicy, ServerMemory
from turnrl.plugin.errors import EngineError
from turnrl.plugin.text import make_visible, say
from turnrl.policy.model import LanguageModel
from turnrl_servers import Server, ServerSource, has_adapter, write
from turnrl_vllm import keeper
from turnrl_vllm.server import VLLMServer
from turnrl_vllm.settings import VLLM

_ASLEEP = 3 * 10**9
"""Bytes of a GPU that a sleeping server keeps for its context and graphs. A 7B with a share of 0.5
on an H100 kept 2.4 GB."""
_LOOK_EVERY_S = 1.0
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank takes."""
_SHARE = "--gpu-memory-utilization"


@final
class StartedServer(ServerSource):
    """A server that the run starts on this machine, lets sleep and ends.

    Args:
        settings: How to start it, and how long to wait for it.
        python: Interpreter of an environment with vLLM.
    Attributes:
        url: Its address, once it is started.
        key: The key that it asks for.
    """

    starts_servers = True
    base = None

    def __init__(self, settings: VLLM, python: str) -> None:
        self.settings, self.python = settings, python
        self.url, self.key = "", secrets.token_hex(16)
        self._sleeps = False
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log, self._is_temporary = Path(), False

    @property
    def sleeps(self) -> bool:
        """See `ServerSource.sleeps`."""
        return self._sleeps

    def running_servers(self, policy: SampledPolicy) -> list[Server]:
        """See `ServerSource.running_servers`. There is none yet."""
        check_python(self.python)
        if not isinstance(policy, LanguageModel):
            raise RecipeError("VLLM with python serves a turnrl.Policy. Give url in its place.")
        return []

    def server_memory(self, total: int) -> ServerMemory | None:
        """See `ServerSource.server_memory`. The server takes the share that its arguments set."""
        share = gpu_share(self.settings.arguments)
        if share is None:
            return None
        awake = int(share * total)
        return ServerMemory(awake, awake if self.settings.sleeps is False else min(awake, _ASLEEP))

    def start(
        self, policy: SampledPolicy, max_tokens: int, home: Path, run: Path | None
    ) -> list[Server]:
        """See `ServerSource.start`. Starts vLLM with the base, and waits until it answers."""
        assert isinstance(policy, LanguageModel), "checked"
        on_gpu, sleeps = policy.device.type == "cuda", self.settings.sleeps
        self._sleeps = on_gpu if sleeps is None else sleeps
        self._log, self._is_temporary = home.with_name(f"{home.name}.log"), run is None
        if run is not None:
            run.mkdir(parents=True, exist_ok=True)
            self._log = run / "vllm.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = self._command(policy, max_tokens, home, port)
        torch.cuda.empty_cache()  # so that vLLM can take it
        keep = [sys.executable, keeper.__file__, str(os.getpid()), str(home), str(self._log)]
        self._keeper = subprocess.Popen(
            [*keep, *command],
            stdin=subprocess.DEVNULL,
            env=self._environment(policy),
        )
        server = VLLMServer(self.url, self.key, self.settings.timeout_s)
        self._wait_for(server)
        return [server]

    def _command(self, policy: LanguageModel, max_tokens: int, home: Path, port: int) -> list[str]:
        model, more = policy.folder, list[str]()
        if policy.files.origin.revision is not None:
            more += ["--revision", policy.files.origin.revision]
        if policy.lora is None:
            model, more = str(home / "base"), []
            write(policy, home / "base")  # in the form in which later versions are written
        else:
            rank = next((rank for rank in _RANKS if rank >= policy.lora.r), policy.lora.r)
            more += ["--enable-lora", "--max-lora-rank", str(rank)]
            more += ["--max-loras", str(self.settings.keeps + 1)]
        if self._sleeps and policy.device.type == "cuda":  # elsewhere vLLM refuses it
            more += ["--enable-sleep-mode"]
        policy.tokenizer.save_pretrained(home / "tokenizer")
        return [
            *(self.python, "-m", "vllm.entrypoints.cli.main", "serve", model),
            *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max_tokens), "--generation-config", "vllm"),
            *("--dtype", str(policy.compute_dtype).removeprefix("torch.")),
            *("--logprobs-mode", "processed_logprobs", *more),
            *("--tokenizer", str(home / "tokenizer"), *self.settings.arguments),
        ]

    def _environment(self, policy: LanguageModel) -> dict[str, str]:
        more = {"VLLM_API_KEY": self.key, "VLLM_NO_USAGE_STATS": "1"}
        if has_adapter(policy):
            more["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._sleeps or not has_adapter(policy):
            more["VLLM_SERVER_DEV_MODE"] = "1"
        return {**os.environ, **more}

    def _wait_for(self, server: Server) -> None:
        began, patience_s = time.monotonic(), self.settings.start_timeout_s
        say(f"turnrl: starting vLLM; its log is {self._log}", sys.stderr)
        while not on_loop(server.connection.is_up()):
            self.check_alive("ended while it was starting")
            if time.monotonic() - began > patience_s:
                raise self._fault(f"has not answered for {patience_s:g} s while it was starting")
            time.sleep(_LOOK_EVERY_S)
        say(f"turnrl: vLLM answers, {time.monotonic() - began:.0f} s after its start", sys.stderr)

    def check_alive(self, how: str = "has ended") -> None:
        """See `ServerSource.check_alive`. The message has the end of vLLM's log.

        Args:
            how: How the message describes its end.
        """
        if self._keeper is not None and self._keeper.poll() is not None:
            raise self._fault(how)

    def _fault(self, how: str) -> EngineError:
        self._is_temporary = False
        end = _tail(self._log)
        advice = ""
        if re.search("out of memory|gpu.memory.utilization|free memory", end, re.IGNORECASE):
            advice = " Lower --gpu-memory-utilization in model.engine.arguments."
        return EngineError(f"vLLM {how}.{advice} The end of its log, {str(self._log)!r}:\n{end}")

    def close(self) -> None:
        """See `ServerSource.close`."""
        ending, self._keeper = self._keeper, None
        if ending is None:
            return
        ending.terminate()
        ending.wait()
        if self._is_temporary:
            self._log.unlink(missing_ok=True)


def check_python(python: str) -> None:
    """Check that an interpreter has vLLM, without starting it.

    Raises:
        RecipeError: If it is no interpreter, or has no vLLM.
    """
    # a folder of that name, such as an environment's own, is a package too, without an origin
    find = (
        "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(not (s and s.origin))"
    )
    try:
        ended = subprocess.run([python, "-c", find], capture_output=True, timeout=60)
        problem = "has no package vllm" if ended.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"does not run here ({error})"
    if problem:
        raise RecipeError(
            f"model.engine.python is {python!r}, which {problem}. Give the path of the interpreter "
            "of an environment with vLLM: python -m venv vllm && vllm/bin/pip install vllm, then "
            "python: vllm/bin/python"
        )


def gpu_share(arguments: Sequence[str]) -> float | None:
    """The share of a GPU's memory that vLLM takes with these arguments; None if they set it in
    another way."""
    if any(word.startswith("--kv-cache-memory") for word in arguments):
        return None
    words = [part for word in arguments for part in word.split("=", 1)]
    if _SHARE not in words:
        return 0.92  # vLLM's own
    try:
        return float(words[words.index(_SHARE) + 1])
    except (LookupError, ValueError):
        return None  # vLLM refuses it


def _tail(log: Path, lines_shown: int = 12) -> str:
    """The last lines of a log, below the earlier lines that name an error: vLLM prints the cause
    far above its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    named = [line for line in lines[:-lines_shown] if re.search(r"\w+Error: |\berror: ", line)]
    return make_visible("\n".join([*dict.fromkeys(named[-4:]), *lines[-lines_shown:]]))
