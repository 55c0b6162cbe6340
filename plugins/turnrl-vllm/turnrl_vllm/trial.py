"""Checks that refuse a server before anything is trained on its samples."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from turnrl import EngineError, Policy, RecipeError, SampledPolicy
from turnrl_vllm.completions import plain, sampled
from turnrl_vllm.server import Refused, Server

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = "Which river flows through the capital of France? Answer in one word: "
"""A text that learner and server both read, to compare their tokenizers and models."""
_TRIAL = "turnrl-trial"
"""An adapter that is never loaded."""
_TRIAL_TOKENS = 16
_TEMPERATURE = 0.6
"""Temperature of the trial. At 1, log-probabilities that ignore the temperature would pass."""


def examine(
    server: Server,
    policy: SampledPolicy,
    max_tokens: int,
    base: str | None,
    home: Path | None = None,
) -> str:
    """Check that a server can sample a policy, as far as possible without the policy's weights.

    Args:
        server: The server. Its `base` is set.
        policy: The policy, of which the tokenizer and the configuration are loaded.
        max_tokens: The most tokens of a session.
        base: The name under which it serves the base; None if it serves one model.
        home: The folder that it has to read weights from; None for temporary files.
    Returns:
        The version of vLLM.
    Raises:
        RecipeError: Naming what differs, and the next step.
        Unavailable: If it does not answer.
    """
    try:
        version = str(server.ask("GET", "/version")["version"])
        models = server.ask("GET", "/v1/models")["data"]
        served = {model["id"]: model for model in models if not model.get("parent")}
    except (Refused, LookupError, TypeError) as error:
        if isinstance(error, Refused) and error.status in (401, 403):
            raise RecipeError(
                f"vLLM at {server} refuses the key ({error}). Put its key into the environment "
                "variable that model.engine.api_key_env names."
            ) from error
        raise RecipeError(
            f"the server at {server} is no vLLM: it does not answer /version and /v1/models as "
            f"vLLM does ({error}). Correct model.engine.url, which has no /v1 at its end."
        ) from error
    if base is not None and base not in served:
        raise RecipeError(
            f"model.engine.base is {base!r}, and vLLM at {server} serves {', '.join(served)}."
        )
    if base is None and len(served) != 1:
        raise RecipeError(
            f"vLLM at {server} serves {', '.join(served)}. Set model.engine.base to the one that "
            "training begins from."
        )
    server.base = base or next(iter(served))
    window = served[server.base].get("max_model_len")
    if window is not None and window < max_tokens:
        raise RecipeError(
            f"model.rollout.max_tokens is {max_tokens}, and vLLM at {server} has a window of "
            f"{window} tokens. Start it with --max-model-len {max_tokens}, or lower "
            "model.rollout.max_tokens."
        )
    _same_tokenizer(server, policy)
    if isinstance(policy, Policy) and policy.lora is not None:
        _takes_adapters(server, policy.lora.r, home)
    return version


def _same_tokenizer(server: Server, policy: SampledPolicy) -> None:
    own = policy.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    body = {"model": server.base, "prompt": _TEXT, "add_special_tokens": False}
    try:
        theirs = server.ask("POST", "/tokenize", body)["tokens"]
    except (Refused, LookupError, TypeError):
        return  # a router may not forward this; the log-probabilities show it later
    if theirs != own:
        raise RecipeError(
            f"vLLM at {server} serves {server.base!r}, whose tokenizer reads a text as other "
            f"tokens than the policy's ({theirs[:6]} and {own[:6]}). Start it with the model that "
            "model.policy.model names."
        )


def _takes_adapters(server: Server, rank: int, home: Path | None) -> None:
    """Offer it an adapter without weights: vLLM first looks for the folder, then checks the rank,
    and only then looks for the weights."""
    with tempfile.TemporaryDirectory(prefix="turnrl-vllm-", dir=home) as folder:
        if home is not None:
            Path(folder).chmod(0o755)  # servers of other users read it
        settings = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": ["q_proj"],
        }
        Path(folder, "adapter_config.json").write_text(json.dumps(settings))
        try:
            body = {"lora_name": _TRIAL, "lora_path": folder}
            server.ask("POST", "/v1/load_lora_adapter", body)
        except Refused as error:
            if re.search("lora.rank|no adapter found|repo id|no such file", error.problem.lower()):
                raise RecipeError(
                    f"vLLM at {server} cannot take an adapter of rank {rank} ({error}). "
                    f"{step_after(error, home or Path(folder).parent)}"
                ) from error
            if re.search("tensor|weights", error.problem) or _TRIAL in error.problem:
                return
            raise RecipeError(
                f"vLLM at {server} takes no adapters while it runs ({error}). Start it with "
                f"--enable-lora --max-lora-rank {rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
                "in its environment."
            ) from error


def step_after(error: Refused, folder: Path) -> str:
    """The next step for a server that does not take weights from a folder."""
    problem = error.problem.lower()
    if "rank" in problem:
        return "Start it with a larger --max-lora-rank, or lower model.policy.lora.r."
    if "no adapter found" in problem or "repo id" in problem or "no such file" in problem:
        return (
            f"It does not see the folder {str(folder)!r}. Set model.engine.folder to one that both "
            "see and may read."
        )
    if error.status in (404, 405):
        return (
            "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
            "environment; or, to train all weights, with VLLM_SERVER_DEV_MODE=1."
        )
    return "Look into its log."


@final
class Reference:
    """The learner's next-token logits after each of several prefixes of a text, with one version of
    the weights. A server can be compared with them after the learner has moved on.

    Args:
        prompts: The prefixes, N of them.
        logits: (N, V).
        quantized: Whether the learner's base has fewer bits than the one that vLLM serves.
    """

    def __init__(self, prompts: Sequence[list[int]], logits: Tensor, quantized: bool) -> None:
        self.prompts, self.quantized = prompts, quantized
        self._logits = logits

    def request(self) -> dict[str, object]:
        """A request for one token after each prefix."""
        return plain(self.prompts, 1, _TEMPERATURE) | {"ignore_eos": True}

    def gap(self, answer: Any, temperature: float = _TEMPERATURE) -> float:
        """Mean absolute difference, in nats, between a server's log-probabilities of the tokens in
        its answer and the learner's."""
        own = (self._logits / temperature).log_softmax(-1)
        gaps: list[float] = []
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            (token,), (theirs,) = sampled({"choices": [choice]})
            gaps.append(abs(float(own[len(gaps), token]) - theirs))
        return sum(gaps) / len(gaps)


def reference(policy: SampledPolicy) -> Reference:
    """The policy's logits with its present weights."""
    ids = policy.tokenizer(_TEXT, add_special_tokens=False)["input_ids"][:_TRIAL_TOKENS]
    quantized = isinstance(policy, Policy) and policy.quantization != "none"
    prompts = [ids[: n + 1] for n in range(len(ids))]
    return Reference(prompts, policy.next_logits(ids), quantized)


def prove(server: Server, reference: Reference, answer: object, max_gap: float) -> float:
    """Compare a server's log-probabilities with the learner's.

    Args:
        server: The server.
        reference: The learner's logits.
        answer: The server's answer to `reference.request()`.
        max_gap: The largest mean difference, in nats.
    Returns:
        The mean difference.
    Raises:
        EngineError: If it is larger, with the likeliest cause.
    """
    gap = reference.gap(answer)
    if gap <= max_gap:
        return gap
    cause = (
        "It has other weights: another base than model.policy.model, or an older adapter. Start it "
        "again with the model that training begins from."
    )
    if reference.quantized:
        cause = (
            "The policy learns on a base in 4 bits (model.policy.quantization), and vLLM serves it "
            "in 16 bits by default. Set the quantization to none, or raise "
            f"model.engine.max_logprob_gap. If {gap:.3f} is too much for that, the server has "
            "another base."
        )
    if reference.gap(answer, 1.0) < gap / 4:
        cause = (
            "Its log-probabilities are computed before the temperature is applied. Start it with "
            "--logprobs-mode processed_logprobs."
        )
    raise EngineError(
        f"vLLM at {server} gives tokens log-probabilities that differ from the learner's by "
        f"{gap:.3f} on average, and model.engine.max_logprob_gap is {max_gap:g}. {cause}"
    )
