"""Scores of tokens from the hidden states before them: log-probabilities, entropies and values."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnrl.policy.compute import InOnePass
from turnrl.policy.sizes import LOGITS


class ValueHead(nn.Linear):
    """The critic: the value of a state is a linear function of its normalised hidden state. It
    begins at zero.

    Args:
        width: H, the width of a hidden state.
        device: Where it computes.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, 1, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, states: Tensor) -> Tensor:
        """Hidden states, (M, H), to values, (M,)."""
        width = states.shape[1:]
        return self(nn.functional.rms_norm(states.float(), width) / width[0])[:, 0]  # type: ignore[no-any-return]


def token_logprobs(
    states: Tensor,
    targets: Tensor,
    logits: Callable[[Tensor], Tensor],
    head: nn.Module,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and entropies of their distributions. Logits exist for a chunk of
    tokens at a time. If the head is frozen, their gradient is computed along with them; otherwise
    they are recomputed in the backward pass.

    Args:
        states: (M, H), the hidden state before each token.
        targets: (M,), the tokens.
        logits: The head's logits, (m, H) -> (m, V), in float32.
        head: The head, with a `weight`, (V, H).
        temperature: Divides the logits.
    Returns:
        (M,), log-probabilities; and (M,), entropies in nats, without a gradient.
    """

    def of_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits(states) / temperature, dim=-1)
        chosen = log_p.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return chosen, entropy

    weight = head.weight
    assert isinstance(weight, Tensor)
    size = max(1, LOGITS // weight.shape[0])
    if torch.is_grad_enabled() and not any(p.requires_grad for p in head.parameters()):
        return InOnePass.apply(states, targets, of_chunk, size)  # type: ignore[no-any-return, no-untyped-call]
    if len(targets) <= size:
        return of_chunk(states, targets)
    redone = partial(checkpoint, of_chunk, use_reentrant=False)
    parts = zip(*map(redone, states.split(size), targets.split(size)), strict=True)
    chosen, entropy = map(torch.cat, parts)
    return chosen, entropy
