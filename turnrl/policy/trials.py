"""Trials of a loaded policy: its head, the fastest attention that is correct here, its memory."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from turnrl.plugin.errors import RecipeError, summarize_error
from turnrl.policy.device import is_device_error
from turnrl.policy.layout import ForwardPass, Layout, lay_out, supports_ragged
from turnrl.policy.settings import Policy
from turnrl.policy.sizes import read_sizes
from turnrl.types import TokenRow, TokenScores

_logger = logging.getLogger(__name__)


class TrialModel(Protocol):
    """The part of a loaded `LanguageModel` that a trial needs."""

    settings: Policy

    @property
    def is_sharded(self) -> bool: ...
    @property
    def base(self) -> Any: ...
    @property
    def config(self) -> PretrainedConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    def compare_logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward_passes(
        self, rows: Sequence[TokenRow], budget: int | None
    ) -> Iterator[ForwardPass]: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    @property
    def __call__(self) -> Callable[..., TokenScores]: ...


class ForwardMethod(NamedTuple):
    """How forward passes compute token sequences.

    Args:
        share: True if shared beginnings are computed once.
        kernel: True if a GPU's kernel for ragged batches computes the attention.
        text: A description for people.
    """

    share: bool
    kernel: bool
    text: str


def check_head(policy: TrialModel) -> None:
    """Refuse an architecture that scales or caps logits after its head: computed from the head
    alone, they would be silently wrong."""
    expected, logits = policy.compare_logits(torch.tensor([[0, 1]], device=policy.device))
    if not torch.allclose(expected, logits, rtol=2e-2, atol=2e-2):
        raise RecipeError(
            f"model.policy.model {policy.settings.model!r} ({type(policy.base).__name__}) changes "
            "logits after its head, which turnrl does not reproduce. Choose another architecture."
        )


def choose_method(policy: TrialModel) -> ForwardMethod:
    """Find the fastest method that works here: shared prefixes, by a GPU's kernel or
    in padded batches; or padded rows."""
    if not policy.settings.share_prefixes:
        return ForwardMethod(False, False, "padded rows, each sequence from its first token")
    why: str | None = None
    for kernel in (True, False):
        if kernel and not supports_ragged(policy.device, policy.compute_dtype):
            continue
        if (why := check_sharing(policy, kernel)) is None:
            how = "torch's varlen kernel" if kernel else "padded batches"
            return ForwardMethod(True, kernel, f"prompts once, {how}")
        if kernel:
            _logger.warning(
                f"the kernel for ragged batches does not work here ({why}): attention while "
                "learning is computed in padded batches, which is slower"
            )
    _logger.warning(
        f"while learning, each trajectory is read from its first token ({why}): a group's "
        "prompt is computed once for each of its trajectories"
    )
    return ForwardMethod(False, False, f"padded rows, each sequence from its first token ({why})")


def check_sharing(policy: TrialModel, kernel: bool) -> str | None:
    """Read two texts with a common beginning both shared and padded, forward and back. Return the
    reason if sharing does not work, else None. Errors of memory and of devices are raised, because
    they say nothing about the model."""
    sizes = read_sizes(policy.config)
    kinds = set(sizes.kinds or ())
    if unsupported := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of {min(unsupported)}"
    if sizes.tuned:
        return "its attention depends on a token's place in the row"
    rows = [([1, 2, 3, 4, *rest], [False] * 5 + [True] * 3) for rest in ([5, 6, 7, 8], [9] * 4)]
    device = policy.device
    windows: set[int | None] = set()

    def attend(*seen: Any) -> Tensor:
        windows.add(seen[-1])
        return Layout.attend(ways[0], *seen)

    ways = [move_data_to_device(lay_out(rows, share, kernel), device) for share in (True, False)]
    ways[0].attend = attend
    try:
        with torch.no_grad():
            padded = policy(ways[1]).logprobs
        shared = policy(ways[0]).logprobs
        norm = _gradient_norm(policy, shared.sum())
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if is_device_error(error):
            raise
        if policy.is_sharded:  # weights gathered when the pass failed would stay so, and untrained
            raise RecipeError(
                f"{type(policy.base).__name__} cannot read shared beginnings once "
                f"({summarize_error(error)}). Set model.policy.share_prefixes to false."
            ) from error
        return summarize_error(error)
    if sizes.window is not None and not windows - {None} and kinds != {"full_attention"}:
        return f"its attention ignores its window of {sizes.window} tokens"
    if not norm.isfinite():
        return "its gradient is not finite"
    gap = float((shared.detach() - padded).abs().mean())
    # rounding alone gives 1e-5 in float32, and a few hundredths in bfloat16
    limit = 1e-3 if policy.compute_dtype == torch.float32 else 0.25
    return None if gap < limit else f"log-probabilities were {gap:.2g} nats apart"


def _gradient_norm(policy: TrialModel, value: Tensor) -> Tensor:
    """The norm of a value's gradient, which is then dropped. It is the same in all processes that
    share the policy."""
    try:
        value.backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    finally:
        for parameter in policy.parameters():
            parameter.grad = None
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def try_learning(policy: TrialModel, tokens: int, longest: int) -> None:
    """Compute log-probabilities of made-up sequences and their gradient, and drop both.

    Args:
        tokens: Tokens of all sequences together.
        longest: The most tokens of one sequence.
    """
    draw = torch.Generator().manual_seed(0)  # its own, so that a run's random numbers stay the same
    vocabulary = policy.config.get_text_config().vocab_size
    rows: list[TokenRow] = []
    for begin in range(0, tokens, longest):
        size = max(min(longest, tokens - begin), 2)
        ids = torch.randint(vocabulary, (size,), generator=draw).tolist()
        rows.append((ids, [n > 0 for n in range(size)]))
    _, layout = next(policy.forward_passes(rows, tokens))
    _gradient_norm(policy, policy(move_data_to_device(layout, policy.device)).logprobs.sum())
