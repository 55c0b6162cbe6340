"""`VLLMAPI`: the API of vLLM's server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, final

from turnrl import Completion, EngineError, Sampling
from turnrl.servers import Unavailable
from turnrl_vllm.api import Answer, Fields, Served, ServerAPI
from turnrl_vllm.server import SHORT_S, Refused, Server

_RELOAD_S = 600.0
"""Time limit of reloading all weights, in seconds."""
_NO_FOLDER = re.compile("no adapter found|repo id|no such file", re.IGNORECASE)
"""Errors of a server that does not see a folder: it takes the path for a name on the hub."""


@final
class VLLMAPI(ServerAPI):
    """The API of vLLM's server, whose requests are those of OpenAI's completions."""

    name = "vLLM"
    sampling = "/v1/completions"
    length_option = "--max-model-len"
    logprobs_hint = "Start it with --logprobs-mode processed_logprobs."

    def describe(self, server: Server) -> Served:
        """See `ServerAPI.describe`."""
        version = str(server.ask("GET", "/version")["version"])
        models = server.ask("GET", "/v1/models")["data"]
        bases = [model for model in models if not model.get("parent")]
        return Served(version, {model["id"]: model.get("max_model_len") for model in bases})

    def tokenize(self, server: Server, text: str) -> list[int]:
        """See `ServerAPI.tokenize`."""
        body = {"model": server.base, "prompt": text, "add_special_tokens": False}
        return list(server.ask("POST", "/tokenize", body)["tokens"])

    def offer_adapter(self, server: Server, name: str, folder: str, rank: int) -> Refused | None:
        """See `ServerAPI.offer_adapter`. vLLM first looks for the folder, then checks the rank, and
        only then looks for the weights."""
        try:
            body = {"lora_name": name, "lora_path": folder}
            server.ask("POST", "/v1/load_lora_adapter", body)
        except Refused as error:
            problem = error.problem
            if re.search("lora.rank", problem.lower()) or _NO_FOLDER.search(problem):
                return error
            if not re.search("tensor|weights", problem) and name not in problem:
                return error
        return None

    def turn(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """See `ServerAPI.turn`."""
        body = _plain(ids, sampling.max_tokens, sampling.temperature)
        if sampling.cuts_distribution:
            body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "top_p": sampling.top_p}
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        # the model's own end tokens end a turn only if they are among these
        return body | {"stop_token_ids": list(sampling.end_ids), "ignore_eos": True}

    def completion(self, answer: Answer, sampling: Sampling, version: int) -> Completion:
        """See `ServerAPI.completion`."""
        why: object = "length"
        with contextlib.suppress(LookupError, TypeError):  # `_sampled` names the fault
            why = answer["choices"][0]["finish_reason"]
        if why not in ("stop", "length"):
            raise Unavailable(f"it ended a turn with finish_reason {why!r}")
        tokens, logprobs = _sampled(answer)
        reason: Literal["end", "stop", "length"] = "length"
        if tokens[-1] in sampling.end_ids:
            reason = "end"
        elif why == "stop":
            reason = "stop"
        elif len(tokens) < sampling.max_tokens:
            raise Unavailable(f"it returned only {len(tokens)} of {sampling.max_tokens} tokens")
        return Completion(tokens, logprobs, reason, version)

    def next_token(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """See `ServerAPI.next_token`."""
        return _plain(prompts, 1, temperature) | {"ignore_eos": True}

    def next_tokens(self, answer: Answer) -> list[tuple[int, float]]:
        """See `ServerAPI.next_tokens`."""
        tokens = []
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            (token,), (logprob,) = _sampled({"choices": [choice]})
            tokens.append((token, logprob))
        return tokens

    def with_adapter(self, name: str) -> Fields:
        """See `ServerAPI.with_adapter`."""
        return {"model": name}

    def with_base(self, base: str, salt: str | None) -> Fields:
        """See `ServerAPI.with_base`."""
        return {"model": base, "cache_salt": salt}

    async def load_adapter(self, server: Server, name: str, folder: Path) -> None:
        """See `ServerAPI.load_adapter`."""
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await server.ask_async("/v1/load_lora_adapter", body, SHORT_S)
        except Refused as error:
            if "already been loaded" not in error.problem:
                raise

    def drop_adapter(self, server: Server, name: str) -> None:
        """See `ServerAPI.drop_adapter`."""
        server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, within_s=5)

    def lacks_adapter(self, error: Refused) -> bool:
        """See `ServerAPI.lacks_adapter`."""
        return error.status == 404

    async def reload(self, server: Server, folder: Path) -> None:
        """See `ServerAPI.reload`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await server.ask_async("/collective_rpc", body, _RELOAD_S)

    async def sleep(self, server: Server) -> None:
        """Have a server free its GPU memory, and keep the base in host memory.

        Raises:
            Unavailable: If it does not answer.
            Refused: If it refuses.
        """
        await server.ask_async("/sleep?level=1", {})

    async def wake(self, server: Server) -> None:
        """Have a server take memory again; it raises what `sleep` does."""
        await server.ask_async("/wake_up", {})

    def next_step(self, error: Refused, folder: Path) -> str:
        """See `ServerAPI.next_step`."""
        if "rank" in error.problem.lower():
            return "Start it with a larger --max-lora-rank, or lower model.policy.lora.r."
        if _NO_FOLDER.search(error.problem):
            return (
                f"It does not see the folder {str(folder)!r}. Set model.engine.folder to one that "
                "both see and may read."
            )
        if error.status in (404, 405):
            return (
                "Start it with --enable-lora, --max-lora-rank, and in its environment "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; or, to train all weights, with "
                "VLLM_SERVER_DEV_MODE=1."
            )
        return "Look into its log."


def _plain(prompt: Sequence[object], max_tokens: int, temperature: float) -> Fields:
    """A request with every sampling option that a model's folder could set otherwise.

    Args:
        prompt: Token ids, or several lists of them.
        max_tokens: The most tokens of each answer.
        temperature: Sampling temperature.
    """
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _sampled(answer: Answer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The tokens of an answer and their log-probabilities.

    Raises:
        EngineError: If it has none.
    """
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if ids and len(ids) == len(logprobs):
            return tuple(ids), tuple(logprobs)
    except (LookupError, TypeError):
        pass
    raise EngineError(
        "vLLM answered without token ids and their log-probabilities. It may be too old: turnrl "
        "was tried with 0.26 and 0.32."
    )
