"""`VLLMServer`: how vLLM's server is asked."""

from __future__ import annotations

import re
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
class VLLMServer(Server):
    """A vLLM server, whose requests are those of OpenAI's completions."""

    software = "vLLM"
    tried = "0.26 and 0.32"
    turn_path = "/v1/completions"
    adapters_path = "/v1"
    length_option = "--max-model-len"
    logprobs_hint = "with --logprobs-mode processed_logprobs"
    weights_hint = (
        "Start it with --enable-lora, a --max-lora-rank of at least model.policy.lora.r, and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment; or, to train all weights, with "
        "VLLM_SERVER_DEV_MODE=1."
    )
    refusals = re.compile(r"Call to (add_lora|collective_rpc|sleep|wake_up) method failed")

    async def describe(self) -> ServerInfo:
        """See `Server.describe`."""
        version = str((await self.connection.ask("GET", "/version"))["version"])
        models = (await self.connection.ask("GET", "/v1/models"))["data"]
        bases = [model for model in models if not model.get("parent")]
        return ServerInfo(version, {model["id"]: model.get("max_model_len") for model in bases})

    def turn_request(self, ids: Sequence[int], sampling: Sampling) -> Fields:
        """See `Server.turn_request`."""
        body = _plain(ids, sampling.max_tokens, sampling.temperature)
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        # the model's own end tokens end a turn only if they are among these
        return body | {"stop_token_ids": list(sampling.end_ids), "ignore_eos": True}

    def trial_request(self, prompts: Sequence[list[int]], temperature: float) -> Fields:
        """See `Server.trial_request`."""
        return _plain(prompts, 1, temperature) | {"ignore_eos": True}

    def parse_sampled(self, answer: Answer) -> list[ServerSample]:
        """See `Server.parse_sampled`."""
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [
            ServerSample(
                tuple(choice["token_ids"]),
                tuple(choice["logprobs"]["token_logprobs"]),
                str(choice["finish_reason"]),
            )
            for choice in choices
        ]

    def with_adapter(self, name: str) -> Fields:
        """See `Server.with_adapter`."""
        return {"model": name}

    def with_base(self, salt: str) -> Fields:
        """See `Server.with_base`."""
        return {"model": self.base, "cache_salt": salt}

    def lacks_adapter(self, error: RequestRefused) -> bool:
        """See `Server.lacks_adapter`."""
        return error.status == 404

    async def reload(self, folder: Path) -> None:
        """See `Server.reload`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.connection.ask("POST", "/collective_rpc", body, RELOAD_S)

    async def sleep(self) -> None:
        """See `Server.sleep`."""
        await self.connection.ask("POST", "/sleep?level=1", {})

    async def wake(self) -> None:
        """See `Server.wake`."""
        await self.connection.ask("POST", "/wake_up", {})


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
