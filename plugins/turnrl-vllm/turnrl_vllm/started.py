"""`Started`: the process of a server that the run starts."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import final

from turnrl import EngineError, LanguageModel, RecipeError, on_loop, say, visible
from turnrl_vllm import keeper

_LOOK_EVERY_S = 1.0
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank takes."""


ASLEEP = 3 * 10**9
"""Bytes of a GPU that a sleeping server keeps for its context and graphs. A 7B with a share of 0.5
on an H100 kept 2.4 GB."""
_SHARE = "--gpu-memory-utilization"


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


def check_python(python: str) -> None:
    """Check that an interpreter has vLLM, without starting it.

    Raises:
        RecipeError: If the interpreter does not exist, or has no vLLM.
    """
    if Path(python).is_dir():
        raise RecipeError(
            f"model.engine.python is {python!r}, which is a folder. Give the path of the "
            f"interpreter in it: {Path(python) / 'bin' / 'python'}"
        )
    # a folder of that name, such as an environment's own, is a package too, without an origin
    find = (
        "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(not (s and s.origin))"
    )
    try:
        ended = subprocess.run([python, "-c", find], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecipeError(
            f"model.engine.python is {python!r}, which is no Python that runs here ({error}). Give "
            "the path of the interpreter of an environment with vLLM: python -m venv vllm && "
            "vllm/bin/pip install vllm, then python: vllm/bin/python"
        ) from error
    if ended.returncode:
        raise RecipeError(
            f"model.engine.python is {python!r}, which has no package vllm. Install it there: "
            f"{python} -m pip install vllm"
        )


@final
class Started:
    """A vLLM server, from its start to its end.

    Args:
        python: The interpreter of an environment with vLLM.
        policy: The policy, whose weights are loaded.
        model: The folder of its base.
        max_tokens: The server's context length.
        adapters: The number of adapters that it serves at a time.
        arguments: More arguments of `vllm serve`.
        log: Its log file.
        keeps_log: Whether the log stays although the server has started.
        folder: Files for it, which are removed if this process is killed.
        sleeps: Whether it frees its GPU memory while the policy learns.
    """

    def __init__(
        self,
        python: str,
        policy: LanguageModel,
        *,
        model: str,
        max_tokens: int,
        adapters: int,
        arguments: Sequence[str],
        log: Path,
        keeps_log: bool,
        folder: Path,
        sleeps: bool,
    ) -> None:
        self.log, self._keeps_log = log, keeps_log
        self._has_failed = False
        self.key = secrets.token_hex(16)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        own = [
            *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max_tokens), "--generation-config", "vllm"),
            *("--dtype", str(policy.compute_dtype).removeprefix("torch.")),
            *("--logprobs-mode", "processed_logprobs"),
        ]
        if policy.lora is not None:
            rank = next((rank for rank in _RANKS if rank >= policy.lora.r), policy.lora.r)
            own += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(adapters)]
        if sleeps and policy.device.type == "cuda":  # elsewhere vLLM refuses it
            own += ["--enable-sleep-mode"]
        if model == policy.folder and policy.files.origin.revision is not None:
            own += ["--revision", policy.files.origin.revision]
        serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        self._keeper = subprocess.Popen(
            [sys.executable, keeper.__file__, str(folder), str(log), *serve, *own, *arguments],
            stdin=subprocess.PIPE,
            env=_environment(self.key, policy.lora is not None, sleeps),
        )

    def wait(self, is_up: Callable[[], Coroutine[object, object, bool]], patience_s: float) -> None:
        """Wait until the server answers.

        Args:
            is_up: Gives True once it answers.
            patience_s: Seconds that it may take.
        Raises:
            EngineError: If it ends or takes longer; the message has the end of its log.
        """
        began = time.monotonic()
        say(f"turnrl: starting vLLM; its log is {self.log}", sys.stderr)
        while not on_loop(is_up()):
            self.check("ended while it was starting")
            if time.monotonic() - began > patience_s:
                raise self._over(f"has not answered for {patience_s:g} s while it was starting")
            time.sleep(_LOOK_EVERY_S)
        say(f"turnrl: vLLM answers, {time.monotonic() - began:.0f} s after its start", sys.stderr)

    def check(self, how: str = "has ended") -> None:
        """Raise if the server has ended.

        Args:
            how: How the message describes that.
        Raises:
            EngineError: If it has ended; the message has the end of its log.
        """
        if self._keeper.poll() is not None:
            raise self._over(how)

    def _over(self, how: str) -> EngineError:
        self._has_failed = True
        end = _tail(self.log)
        advice = ""
        if re.search("out of memory|gpu.memory.utilization|free memory", end, re.IGNORECASE):
            advice = " Lower --gpu-memory-utilization in model.engine.arguments."
        return EngineError(f"vLLM {how}.{advice} The end of its log, {str(self.log)!r}:\n{end}")

    def close(self) -> None:
        """End it."""
        # not only by closing the pipe, whose end a forked process of the run may have as well
        self._keeper.terminate()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()
        if not self._keeps_log and not self._has_failed:
            self.log.unlink(missing_ok=True)


def _environment(key: str, adapters: bool, sleeps: bool) -> Mapping[str, str]:
    more = {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    if adapters:
        more["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if sleeps or not adapters:
        more["VLLM_SERVER_DEV_MODE"] = "1"
    return {**os.environ, **more}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tail(log: Path, lines_shown: int = 12) -> str:
    """The last lines of a log, below the earlier lines that name an error: vLLM prints the cause
    far above its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    named = [line for line in lines[:-lines_shown] if re.search(r"\w+Error: |\berror: ", line)]
    return visible("\n".join([*dict.fromkeys(named[-4:]), *lines[-lines_shown:]]))
