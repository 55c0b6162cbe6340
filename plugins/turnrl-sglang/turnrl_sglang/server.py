"""`SGLangServer`: how SGLang's server is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import final

from turnrl import Sampling
from turnrl_servers import (
    RELOAD_S,
    Answer,
    Fields,
    RequestRefused,
    Server,
    ServerInfo,
    ServerSample,
)


@final
class SGLangServer(Server):
    """An SGLang server, asked through its own API, `/generate`, and its endpoints for adapters and
    weights."""

    software = "SGLang"
    tried = "0.5.23"
    turn_path = "/generate"
    length_option = "--context-length"
    spare_tokens = 6
    logprobs_hint = "without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
    weights_hint = (
        "Start it with --enable-lora, --lora-target-modules all, and a --max-lora-rank of at least "
        "model.policy.lora.r."
    )

    async def describe(self) -> ServerInfo:
        """See `Server.describe`. The base is named by its path, which changes with its weights,
        so it is called `base` here."""
        settings = await self.connection.ask("GET", "/server_info")
        models = (await self.connection.ask("GET", "/v1/models"))["data"]
        windows = [model["max_model_len"] for model in models if not model.get("parent")]
        if len(windows) != 1:
            raise LookupError(f"it serves {len(windows)} models")
        # it needs some tokens of its window itself, and its cache may be smaller than that
        window = min(windows[0], int(settings["max_req_input_len"]))
        return ServerInfo(str(settings["version"]), {"base": window})

    def turn_request(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """See `Server.turn_request`."""
        parameters = _plain(sampling.max_tokens, sampling.temperature)
        # a server that samples deterministically would give all attempts the same seed
        parameters["sampling_seed"] = sampling.seed % 2**31
        if sampling.stop:
            parameters |= {"stop": list(sampling.stop), "no_stop_trim": True}
        if sampling.end_ids:  # the model's own end tokens then end a turn as well
            parameters |= {"stop_token_ids": list(sampling.end_ids), "ignore_eos": False}
        return {"input_ids": list(ids), "return_logprob": True, "sampling_params": parameters}

    def trial_request(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """See `Server.trial_request`."""
        parameters = _plain(1, temperature)
        return {"input_ids": list(prompts), "return_logprob": True, "sampling_params": parameters}

    def parse_sampled(self, answer: Answer) -> list[ServerSample]:
        """See `Server.parse_sampled`."""
        return [_sampled(turn) for turn in (answer if isinstance(answer, list) else [answer])]

    def with_adapter(self, name: str) -> Fields:
        """See `Server.with_adapter`."""
        return {"lora_path": name}

    def with_base(self, salt: str) -> Fields:
        """See `Server.with_base`."""
        return {"cache_salt": salt}

    def lacks_adapter(self, error: RequestRefused) -> bool:
        """See `Server.lacks_adapter`."""
        return "never been loaded" in error.problem or "implicitly load" in error.problem

    async def reload(self, folder: Path) -> None:
        """See `Server.reload`. SGLang empties its prefix cache too, for which no request may be
        under way: it aborts those that this process has given up."""
        body: Fields = {"model_path": str(folder), "abort_all_requests": True}
        await self.connection.ask("POST", "/update_weights_from_disk", body, RELOAD_S)


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


def _sampled(answer: Answer) -> ServerSample:
    """What was sampled after one history."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    # a request that was aborted before its first token has none
    pairs = meta.get("output_token_logprobs", ())
    logprobs = tuple(math.nan if logprob is None else logprob for logprob, *_ in pairs)
    ended_by_token = isinstance(reason.get("matched"), int)
    return ServerSample(tuple(answer["output_ids"]), logprobs, str(reason["type"]), ended_by_token)
