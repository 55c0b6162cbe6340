"""Checks that refuse a server before anything is trained on its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from turnrl import RecipeError
from turnrl.engines import SampledPolicy
from turnrl.plugin.errors import EngineError
from turnrl.plugin.patience import Unavailable
from turnrl_servers.connection import RequestRefused
from turnrl_servers.server import Fields, Server, ServerInfo

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = "Which river flows through the capital of France? Answer in one word: "
"""A text that learner and server both read, to compare their weights."""
_TRIAL_TOKENS = 16
_TEMPERATURE = 0.6
"""Temperature of the trial. At 1, log-probabilities that ignore the temperature would pass."""


async def examine_server(
    server: Server, max_tokens: int, base: str | None, variable: str | None = None
) -> str:
    """Check that a server can sample, as far as possible without the policy's weights.

    Args:
        server: The server, whose `base` this sets.
        max_tokens: The most tokens of a session.
        base: The name under which it serves the base; None if it serves one model.
        variable: The environment variable with its key; None if none is given.
    Returns:
        The version of its software.
    Raises:
        RecipeError: Naming what differs, and the next step.
    """
    try:
        served = await _describe(server, variable)
        bases = ", ".join(served.windows)
        server.base = base or next(iter(served.windows), "")
        if server.base not in served.windows or (base is None and len(served.windows) > 1):
            raise RecipeError(
                f"model.engine.base is {base!r}, and {server.name} serves {bases}. Set it to the "
                "one that training begins from."
            )
        window = served.windows[server.base]
        if window is not None and window < max_tokens:
            raise RecipeError(
                f"model.rollout.max_tokens is {max_tokens}, and {server.name} has a window of "
                f"{window} tokens. Start it with {server.length_option} "
                f"{max_tokens + server.spare_tokens}, or lower model.rollout.max_tokens."
            )
        return served.version
    except Unavailable as fault:
        raise RecipeError(
            f"{server.name} does not answer ({fault}). Start it, or correct model.engine.url. To "
            "score a run without it: turnrl eval RUN --model.engine Slots."
        ) from fault
    finally:
        await server.connection.close()


async def _describe(server: Server, variable: str | None) -> ServerInfo:
    try:
        return await server.describe()
    except (RequestRefused, LookupError, TypeError) as error:
        if isinstance(error, RequestRefused) and error.status in (401, 403):
            raise RecipeError(
                f"{server.name} wants another key ({error}). Put its key into the environment "
                f"variable that model.engine.api_key_env names ({variable or 'none yet: set it'})."
            ) from error
        raise RecipeError(
            f"the server at {server} is no {server.software}: it does not answer as one does "
            f"({error}). Correct model.engine.url, which has no /v1 at its end."
        ) from error


@final
class Reference:
    """The learner's next-token logits after each of several prefixes of a text, with one version of
    the weights. A server can be compared with them after the learner has moved on.

    Args:
        prompts: The prefixes, N of them.
        logits: (N, V).
    """

    def __init__(self, prompts: Sequence[list[int]], logits: Tensor) -> None:
        self.prompts, self._logits = prompts, logits

    def request(self, server: Server) -> Fields:
        """A request to a server for one token after each prefix."""
        return server.trial_request(self.prompts, _TEMPERATURE)

    def gap(self, tokens: Sequence[tuple[int, float]]) -> float:
        """Mean absolute difference of log-probabilities, in nats.

        Args:
            tokens: A server's token after each prefix, and its log-probability.
        """
        own = (self._logits / _TEMPERATURE).log_softmax(-1)
        gaps = [abs(float(own[n, token]) - theirs) for n, (token, theirs) in enumerate(tokens)]
        return sum(gaps) / len(gaps)


def compute_reference(policy: SampledPolicy) -> Reference:
    """The policy's logits with its present weights."""
    ids = policy.tokenizer(_TEXT, add_special_tokens=False)["input_ids"][:_TRIAL_TOKENS]
    prompts = [ids[: n + 1] for n in range(len(ids))]
    return Reference(prompts, policy.next_logits(ids))


def prove_agreement(server: Server, reference: Reference, answer: object, max_gap: float) -> float:
    """Compare a server's log-probabilities with the learner's.

    Args:
        server: The server.
        reference: The learner's logits.
        answer: The server's answer to `reference.request(...)`.
        max_gap: The largest mean difference, in nats.
    Returns:
        The mean difference.
    Raises:
        EngineError: If it is larger, with the likeliest causes.
    """
    gap = reference.gap(server.trial_tokens(answer))
    if gap > max_gap:
        raise EngineError(
            f"{server.name} gives tokens log-probabilities that differ from the learner's by "
            f"{gap:.3f} on average, and model.engine.max_logprob_gap is {max_gap:g}. It has "
            "another base than model.policy.model, an older adapter, or more bits than "
            "model.policy.quantization leaves; or its log-probabilities ignore the temperature. "
            f"Start it with the model that training begins from, and {server.logprobs_hint}."
        )
    return gap
