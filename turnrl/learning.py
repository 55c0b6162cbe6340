"""Learning: an iteration's trajectories as optimiser steps, and steps as minibatches that fit.

A *step* is what one update of the weights is computed from, and one batch to Lightning. It is a
list of *minibatches*, each computed at once. Credit ends here: what leaves this module knows
tokens, turns as stretches of them at most, and no groups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from turnrl.objective import ClippedSurrogate, RatioLevel
from turnrl.policy.layout import Layout, Pass
from turnrl.scoring import sampled_turns
from turnrl.types import Row, Trajectory


@dataclass
class Minibatch:
    """N sampled tokens of some trajectories, as columns, and the layout that they are computed in.

    Not frozen, because Lightning moves its tensors in place.

    Args:
        layout: The trajectories, their sampled tokens asked for.
        trajectory: (N,), the number of each token's trajectory in the iteration.
        turn: (N,), of each token.
        advantages: (N,), of each token.
        weights: (N,), each token's share of the step's loss.
        sampler_logprobs: (N,), what the sampler computed for each token.
        old_logprobs: (N,), what the learner computed before the first update; None if there was no
            update yet, so that the ratio is 1 by definition.
        returns: (N,), what a critic should have expected of each token; None without one.
    """

    layout: Layout
    trajectory: Tensor
    turn: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.turn)

    def segments(self, level: RatioLevel) -> Tensor:
        """(N,), for each token the number of its turn or trajectory, or its own."""
        if level == "trajectory":
            return self.trajectory
        if level == "turn":
            return self.trajectory * (self.turn.max() + 1) + self.turn
        return torch.arange(len(self), device=self.turn.device)


_SAMPLE, _SAME_NATS = 8, 1e-5
"""Trajectories that are compared, and how far apart two log-probabilities of one token may be."""

Step = list[Minibatch]
"""Minibatches of one update of the weights."""

Column = Sequence[Tensor]
"""For each trajectory (N_i,), a number for each of its sampled tokens, in order."""


def row(trajectory: Trajectory) -> Row:
    """A trajectory as a layout takes it; its sampled tokens are asked for."""
    return trajectory.token_ids, [k >= 0 for k in trajectory.turn_index]


def plan(
    trajectories: Sequence[Trajectory],
    advantages: Column,
    logprobs_now: Callable[[Sequence[Row]], Column],
    objective: ClippedSurrogate,
    updates: int,
    steps_per_update: int,
    passes: Callable[[Sequence[Row]], Iterator[Pass]],
    shuffle: torch.Generator,
    mean_over_processes: Callable[[Tensor], Tensor],
    returns: Column | None = None,
    truncated: bool = False,
    first_logprobs: dict[int, Tensor] | None = None,
) -> Iterator[Step]:
    """The optimiser steps of one iteration.

    Trajectories of one prompt stay together as far as steps of equal size allow, because it is read
    once for all that are computed together: prompts are shuffled, and the trajectories of each.

    Where a few trajectories show that the sampler computes what the learner does (in process, in
    float32), its numbers stand for the learner's, and the pass over the others is saved; unless it
    draws from a part of the distribution, where the few could be alike and others not.

    Args:
        trajectories: N of them.
        advantages: Of their sampled tokens.
        logprobs_now: Gives the learner's log-probabilities of sampled tokens, as the learner is;
            called before the first step, on what a later one learns from.
        objective: Says how tokens are weighed.
        updates: How often all trajectories are learned from.
        steps_per_update: Steps that one pass over the trajectories is divided into.
        passes: Divides trajectories among minibatches.
        shuffle: Of the order of trajectories.
        mean_over_processes: Averages a tensor over processes; called once a step by each.
        returns: Of their sampled tokens, for a critic; None without one.
        truncated: Whether the sampler draws from a part of the distribution.
        first_logprobs: Log-probabilities of sampled tokens by the number of the trajectory, which
            the learner fills in while it computes the first step, before it asks for the second.
            They are then not computed ahead. None if the learner keeps none.
    """
    rows = list(map(row, trajectories))
    turns = list(map(sampled_turns, trajectories))
    each = zip(trajectories, rows, strict=True)
    sampler = [torch.tensor(list(compress(t.sampler_logprobs, asked))) for t, (_, asked) in each]
    counts = torch.tensor(list(map(len, turns)))
    orders = [_shuffled(trajectories, shuffle) for _ in range(updates)]
    steps = [step for order in orders for step in order.tensor_split(steps_per_update)]

    def laid_out(chosen: Tensor) -> Iterator[Pass]:
        """Numbers of the trajectories of each minibatch, and how they are laid out."""
        for some, layout in passes([rows[i] for i in chosen]):
            yield chosen[some].tolist(), layout

    def column(of: Column | dict[int, Tensor], some: list[int]) -> Tensor:
        return torch.cat([of[i] for i in some])

    known = set() if first_logprobs is None else set(steps[0].tolist())
    later = sorted({i for step in steps[1:] for i in step.tolist()} - known)
    some = later[:: max(1, len(later) // _SAMPLE)][:_SAMPLE]  # of many questions
    rest = sorted({*later} - {*some})
    old = dict(zip(some, logprobs_now([rows[i] for i in some]), strict=True))
    gaps = [(now - sampler[i]).abs().max() for i, now in old.items()]
    alike = bool(gaps) and bool(torch.stack(gaps).max() < _SAME_NATS)  # and finite
    if alike and not truncated:
        old |= {i: sampler[i] for i in rest}
    else:
        old |= zip(rest, logprobs_now([rows[i] for i in rest]), strict=True)
    for number, chosen in enumerate(steps):
        if number == 1 and first_logprobs is not None:
            old |= first_logprobs
        total = torch.tensor([float(counts[chosen].sum()), float(len(chosen))])
        weights = torch.zeros(len(trajectories))
        weights[chosen] = objective.weights(counts[chosen], *mean_over_processes(total).tolist())
        yield [
            Minibatch(
                layout=layout,
                trajectory=torch.tensor(some).repeat_interleave(counts[some]),
                turn=column(turns, some),
                advantages=column(advantages, some),
                weights=weights[some].repeat_interleave(counts[some]),
                sampler_logprobs=column(sampler, some),
                old_logprobs=column(old, some) if number > 0 else None,
                returns=None if returns is None else column(returns, some),
            )
            for some, layout in laid_out(chosen)
        ]


def _shuffled(trajectories: Sequence[Trajectory], shuffle: torch.Generator) -> Tensor:
    """Numbers of the trajectories in random order, those of one prompt together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i in torch.randperm(len(trajectories), generator=shuffle).tolist():
        alike.setdefault(trajectories[i].prompt_ids, []).append(i)
    return torch.tensor([i for some in alike.values() for i in some])
