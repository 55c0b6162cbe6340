"""Turns as requests to vLLM's `/v1/completions`, and as its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from turnrl import Completion, EngineError, Sampling
from turnrl.servers import Unavailable


def plain(prompt: Sequence[object], max_tokens: int, temperature: float) -> dict[str, object]:
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


def request(ids: Sequence[int], sampling: Sampling) -> dict[str, object]:
    """A request for a turn, without the name of a model."""
    body = plain(ids, sampling.max_tokens, sampling.temperature)
    if sampling.cuts_distribution:
        body |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "top_p": sampling.top_p}
    if sampling.stop:
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    # the model's own end tokens end a turn only if they are among these
    return body | {"stop_token_ids": list(sampling.end_ids), "ignore_eos": True}


def completion(answer: Any, sampling: Sampling, version: int) -> Completion:
    """The turn in an answer to `request`.

    Args:
        answer: The answer.
        sampling: As in the request.
        version: Of the weights that sampled it.
    Raises:
        Unavailable: If the server aborted it.
        EngineError: See `sampled`.
    """
    why: object = "length"
    with contextlib.suppress(LookupError, TypeError):  # `sampled` names the fault
        why = answer["choices"][0]["finish_reason"]
    if why not in ("stop", "length"):
        raise Unavailable(f"it ended a turn with finish_reason {why!r}")
    tokens, logprobs = sampled(answer)
    reason: Literal["end", "stop", "length"] = "length"
    if tokens[-1] in sampling.end_ids:
        reason = "end"
    elif why == "stop":
        reason = "stop"
    elif len(tokens) < sampling.max_tokens:
        raise Unavailable(f"it returned only {len(tokens)} of {sampling.max_tokens} tokens")
    return Completion(tokens, logprobs, reason, version)


def sampled(answer: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
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
