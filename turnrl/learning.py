"""Learning: an iteration's trajectories as optimiser steps, and steps as minibatches that fit.

A *step* is what one update of the weights is computed from, and one batch to Lightning. It is a
list of *minibatches*, each computed at once. Credit ends here: what leaves this module knows
tokens, not turns or groups.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from turnrl.objective import ClippedSurrogate, RatioLevel
from turnrl.types import Trajectory


@dataclass
class Minibatch:
    """B trajectories as per-token streams, padded on the right to T tokens.

    Not frozen, because Lightning moves its tensors in place.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), bool: every real token, tool results included.
        turn_index: (B, T), the turn of each sampled token, -1 elsewhere.
        advantages: (B, T), each sampled token's advantage.
        weights: (B, T), each sampled token's share of the step's loss.
        sampler_logprobs: (B, T), what the sampler computed for each sampled token.
        old_logprobs: (B, T), what the learner computed before the first update; None if there was
            no update yet, so that the ratio is 1 by definition.
        returns: (B, T), what a critic should have expected of each sampled token; None without one.
    """

    input_ids: Tensor
    attention_mask: Tensor
    turn_index: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    returns: Tensor | None = None

    @property
    def loss_mask(self) -> Tensor:
        """(B, T), bool: sampled tokens."""
        return self.turn_index >= 0

    def segments(self, level: RatioLevel) -> Tensor:
        """(N,), for each sampled token the number of its turn or trajectory, or its own."""
        rows, width = self.turn_index.shape
        number = torch.arange(rows, device=self.turn_index.device)[:, None]
        if level == "trajectory":
            return number.expand(rows, width)[self.loss_mask]
        if level == "turn":
            return (number * (self.turn_index.max() + 1) + self.turn_index)[self.loss_mask]
        return torch.arange(int(self.loss_mask.sum()), device=self.turn_index.device)


_SAMPLE, _SAME_NATS = 8, 1e-5
"""Trajectories that are compared, and how far apart two log-probabilities of one token may be."""

Step = list[Minibatch]
"""What one update of the weights is computed from."""


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Tensor],
    token_weights: Tensor,
    old_logprobs: Sequence[Tensor] | None = None,
    returns: Sequence[Tensor] | None = None,
) -> Minibatch:
    """Trajectories as per-token streams.

    Args:
        trajectories: B of them.
        advantages: Of each trajectory's sampled tokens, in order.
        token_weights: (B,), weight of each sampled token of each trajectory.
        old_logprobs: Of each trajectory's sampled tokens, in order; see `Minibatch`.
        returns: The same.
    """

    def padded(rows: Iterable[Sequence[float]], fill: float = 0) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], True, fill)

    turn_index = padded((t.turn_index for t in trajectories), -1)
    mask = turn_index >= 0

    def placed(rows: Sequence[Tensor]) -> Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(list(rows)).float())

    return Minibatch(
        input_ids=padded(t.token_ids for t in trajectories),
        attention_mask=padded([True] * len(t.token_ids) for t in trajectories),
        turn_index=turn_index,
        advantages=placed(advantages),
        weights=token_weights[:, None] * mask,
        sampler_logprobs=padded(t.sampler_logprobs for t in trajectories),
        old_logprobs=None if old_logprobs is None else placed(old_logprobs),
        returns=None if returns is None else placed(returns),
    )


def by_tokens(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Divide rows among minibatches of at most `budget` tokens, padding included.

    Rows of like length come together, so that there is little padding; a row longer than the budget
    is a minibatch of its own.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a minibatch.
    Returns:
        Indices of the rows of each minibatch, shortest rows first.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > budget:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def plan(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Tensor],
    logprobs_now: Callable[[Minibatch], Tensor],
    objective: ClippedSurrogate,
    updates: int,
    steps_per_update: int,
    minibatch_tokens: int,
    shuffle: torch.Generator,
    mean_over_processes: Callable[[Tensor], Tensor],
    returns: Sequence[Tensor] | None = None,
) -> Iterator[Step]:
    """The optimiser steps of one iteration.

    Where a few trajectories show that the sampler computes what the learner does (in process, in
    float32), its numbers stand for the learner's, and the pass over the others is saved.

    Args:
        trajectories: N of them.
        advantages: Of each one's sampled tokens, in order.
        logprobs_now: Gives the learner's log-probabilities of a minibatch's sampled tokens, as it
            is; called before the first step, on what a later one learns from.
        objective: Says how tokens are weighed.
        updates: How often all trajectories are learned from.
        steps_per_update: Steps that one pass over the trajectories is divided into.
        minibatch_tokens: Budget of a minibatch; see `by_tokens`.
        shuffle: Of the order of trajectories.
        mean_over_processes: Averages a tensor over processes; called once a step by each.
        returns: Of each one's sampled tokens, for a critic; None without one.
    """
    counts = torch.tensor([len(one) for one in advantages])
    orders = [torch.randperm(len(trajectories), generator=shuffle) for _ in range(updates)]
    steps = [step for order in orders for step in order.tensor_split(steps_per_update)]

    def minibatches(chosen: Tensor) -> Iterator[list[int]]:
        """Numbers of the trajectories of each minibatch."""
        for some in by_tokens([len(trajectories[i].token_ids) for i in chosen], minibatch_tokens):
            yield chosen[some].tolist()

    def packed(rows: list[int], weights: Tensor, old: dict[int, Tensor] | None = None) -> Minibatch:
        def of(all_: Sequence[Tensor] | dict[int, Tensor] | None) -> list[Tensor] | None:
            return None if all_ is None else [all_[i] for i in rows]

        some = [trajectories[i] for i in rows]
        return pack(some, [advantages[i] for i in rows], weights, of(old), of(returns))

    later = torch.cat([*steps[1:], steps[0][:0]]).unique()
    old: dict[int, Tensor] = {}
    same, gap = False, torch.zeros(())
    for part in (later[:_SAMPLE], later[_SAMPLE:]):
        for rows in minibatches(part):
            batch = packed(rows, torch.ones(len(rows)))
            sampled = batch.sampler_logprobs[batch.loss_mask]
            now = sampled if same else logprobs_now(batch)
            gap = torch.maximum(gap, (now - sampled).abs().max())  # NaN stays
            old |= zip(rows, now.split(counts[rows].tolist()), strict=True)
        same = bool(gap < _SAME_NATS)
    for number, chosen in enumerate(steps):
        total = torch.tensor([float(counts[chosen].sum()), float(len(chosen))])
        weights = torch.zeros(len(trajectories))
        weights[chosen] = objective.weights(counts[chosen], *mean_over_processes(total).tolist())
        step: Step = []
        for rows in minibatches(chosen):
            step.append(packed(rows, weights[rows], old if number > 0 else None))
        yield step
