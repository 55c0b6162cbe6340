"""`SGLangAPI`: the API of SGLang's server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, final

from turnrl import Completion, EngineError, Sampling
from turnrl.servers import Unavailable
from turnrl_vllm import SHORT_S, Answer, Fields, Refused, Served, Server, ServerAPI

_RELOAD_S = 600.0
"""Time limit of reloading all weights, in seconds."""
_NO_FOLDER = re.compile("repo id|no such file|not a valid|does not appear", re.IGNORECASE)
"""Errors of a server that does not see a folder: it takes the path for a name on the hub."""


@final
class SGLangAPI(ServerAPI):
    """SGLang's own API, `/generate`, and its endpoints for adapters and weights."""

    name = "SGLang"
    sampling = "/generate"
    length_option = "--context-length"
    logprobs_hint = "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment."

    def describe(self, server: Server) -> Served:
        """See `ServerAPI.describe`. The base is named by its path, which changes with its weights,
        so it is called `base` here."""
        version = str(server.ask("GET", "/server_info")["version"])
        models = server.ask("GET", "/v1/models")["data"]
        (window,) = (model["max_model_len"] for model in models if not model.get("parent"))
        return Served(version, {"base": window})

    def tokenize(self, server: Server, text: str) -> list[int]:
        """See `ServerAPI.tokenize`."""
        body = {"prompt": text, "add_special_tokens": False}
        return list(server.ask("POST", "/tokenize", body)["tokens"])

    def offer_adapter(self, server: Server, name: str, folder: str, rank: int) -> Refused | None:
        """See `ServerAPI.offer_adapter`. SGLang checks neither whether it takes adapters nor their
        rank before it has found weights, so the launch settings are compared."""
        settings = server.ask("GET", "/server_info")
        if not settings["enable_lora"]:
            return Refused(400, "LoRA is not enabled")
        allowed = settings.get("max_lora_rank")
        if allowed is not None and allowed < rank:
            return Refused(400, f"LoRA rank {rank} is greater than --max-lora-rank {allowed}")
        try:
            server.ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except Refused as error:
            return error if _NO_FOLDER.search(error.problem) else None
        return None

    def turn(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """See `ServerAPI.turn`. SGLang gives log-probabilities of the whole distribution, whatever
        part of it tokens are drawn from."""
        if sampling.cuts_distribution:
            raise NotImplementedError("SGLang cannot draw from a part of the distribution")
        parameters = _plain(sampling.max_tokens, sampling.temperature)
        if sampling.stop:
            parameters |= {"stop": list(sampling.stop), "no_stop_trim": True}
        if sampling.end_ids:  # the model's own end tokens then end a turn as well
            parameters |= {"stop_token_ids": list(sampling.end_ids), "ignore_eos": False}
        return {"input_ids": list(ids), "return_logprob": True, "sampling_params": parameters}

    def completion(self, answer: Answer, sampling: Sampling, version: int) -> Completion:
        """See `ServerAPI.completion`."""
        tokens, logprobs, why = _sampled(answer)
        kind, matched = why.get("type"), why.get("matched")
        if kind not in ("stop", "length"):
            raise Unavailable(f"it ended a turn with finish_reason {kind!r}")
        reason: Literal["end", "stop", "length"] = "length"
        if tokens[-1] in sampling.end_ids or isinstance(matched, int):
            reason = "end"
        elif kind == "stop":
            reason = "stop"
        elif len(tokens) < sampling.max_tokens:
            raise Unavailable(f"it returned only {len(tokens)} of {sampling.max_tokens} tokens")
        return Completion(tokens, logprobs, reason, version)

    def next_token(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """See `ServerAPI.next_token`."""
        parameters = _plain(1, temperature)
        return {"input_ids": list(prompts), "return_logprob": True, "sampling_params": parameters}

    def next_tokens(self, answer: Answer) -> list[tuple[int, float]]:
        """See `ServerAPI.next_tokens`."""
        sampled = [_sampled(one)[:2] for one in answer]
        return [(tokens[0], logprobs[0]) for tokens, logprobs in sampled]

    def with_adapter(self, name: str) -> Fields:
        """See `ServerAPI.with_adapter`."""
        return {"lora_path": name}

    def with_base(self, base: str, salt: str | None) -> Fields:
        """See `ServerAPI.with_base`."""
        return {"cache_salt": salt}

    async def load_adapter(self, server: Server, name: str, folder: Path) -> None:
        """See `ServerAPI.load_adapter`."""
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await server.ask_async("/load_lora_adapter", body, SHORT_S)
        except Refused as error:
            if "already loaded" not in error.problem:
                raise

    def drop_adapter(self, server: Server, name: str) -> None:
        """See `ServerAPI.drop_adapter`. Turns that SGLang still samples with the adapter end
        first."""
        server.ask("POST", "/unload_lora_adapter", {"lora_name": name}, within_s=5)

    def lacks_adapter(self, error: Refused) -> bool:
        """See `ServerAPI.lacks_adapter`."""
        return "never been loaded" in error.problem or "implicitly load" in error.problem

    async def reload(self, server: Server, folder: Path) -> None:
        """See `ServerAPI.reload`. SGLang empties its prefix cache too."""
        body = {"model_path": str(folder), "weight_version": folder.name}
        await server.ask_async("/update_weights_from_disk", body, _RELOAD_S)

    def next_step(self, error: Refused, folder: Path) -> str:
        """See `ServerAPI.next_step`."""
        problem = error.problem.lower()
        if "not enabled" in problem or error.status in (404, 405):
            return "Start it with --enable-lora, --max-lora-rank and --lora-target-modules."
        if "rank" in problem:
            return (
                "Start it with a larger --max-lora-rank and with all --lora-target-modules, or "
                "lower model.policy.lora.r."
            )
        if _NO_FOLDER.search(problem):
            return (
                f"It does not see the folder {str(folder)!r}. Set model.engine.folder to one that "
                "both see and may read."
            )
        return "Look into its log."


def _plain(max_tokens: int, temperature: float) -> Fields:
    """Sampling parameters with every option that a model's folder could set otherwise.

    Args:
        max_tokens: The most tokens of each answer.
        temperature: Sampling temperature.
    """
    return {
        "max_new_tokens": max_tokens,
        "temperature": temperature,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


def _sampled(answer: Answer) -> tuple[tuple[int, ...], tuple[float, ...], dict[str, object]]:
    """The tokens of an answer, their log-probabilities, and why it ended.

    Raises:
        Unavailable: If the server aborted it before its first token.
        EngineError: If it has none of them.
    """
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        why = dict(meta["finish_reason"])
        if why["type"] == "abort":
            raise Unavailable("it ended a turn with finish_reason 'abort'")
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        if ids and len(ids) == len(logprobs):
            return tuple(ids), tuple(logprobs), why
    except (LookupError, TypeError, ValueError):
        pass
    raise EngineError(
        "SGLang answered without token ids and their log-probabilities. It may be too old: turnrl "
        "was tried with 0.5.23."
    )
