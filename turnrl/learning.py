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
        before: Where the learner's log-probabilities are kept for the later steps, if they are.
    """

    layout: Layout
    trajectory: Tensor
    turn: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    returns: Tensor | None = None
    before: "OldLogprobs | None" = None

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


class Lesson:
    """An iteration's trajectories as rows of tokens, and columns of numbers for the sampled ones.

    Args:
        trajectories: N of them.
        advantages: Of their sampled tokens.
        returns: Of their sampled tokens, for a critic; None without one.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], advantages: Column, returns: Column | None = None
    ) -> None:
        self.rows: list[Row] = list(map(row, trajectories))
        self.prompts = [trajectory.prompt_ids for trajectory in trajectories]
        self.turns = list(map(sampled_turns, trajectories))
        self.counts = torch.tensor(list(map(len, self.turns)))
        self.sampler_logprobs = [
            torch.tensor(list(compress(trajectory.sampler_logprobs, asked)))
            for trajectory, (_, asked) in zip(trajectories, self.rows, strict=True)
        ]
        self.advantages, self.returns = advantages, returns

    def order(self, shuffle: torch.Generator) -> Tensor:
        """(N,), the numbers of the trajectories in random order, those of one prompt together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for i in torch.randperm(len(self.rows), generator=shuffle).tolist():
            alike.setdefault(self.prompts[i], []).append(i)
        return torch.tensor([i for some in alike.values() for i in some])

    def minibatch(
        self, some: Tensor, layout: Layout, weights: Tensor, old: "OldLogprobs", first: bool
    ) -> Minibatch:
        """The columns of some trajectories, in the order of a layout.

        Args:
            some: (M,), the trajectories' numbers.
            layout: Of their rows.
            weights: (M,), each one's share of the loss, per token.
            old: The learner's log-probabilities from before the first update.
            first: Whether the minibatch is of the first step.
        """
        counts = self.counts[some]

        def column(of: Column) -> Tensor:
            return torch.cat([of[i] for i in some.tolist()])

        return Minibatch(
            layout=layout,
            trajectory=some.repeat_interleave(counts),
            turn=column(self.turns),
            advantages=column(self.advantages),
            weights=weights.repeat_interleave(counts),
            sampler_logprobs=column(self.sampler_logprobs),
            old_logprobs=None if first else old.of(some),
            returns=None if self.returns is None else column(self.returns),
            before=old if first and old.listens else None,
        )


class OldLogprobs:
    """The learner's log-probabilities of sampled tokens before the first update.

    Where a few trajectories show that the sampler computes the same numbers (in process, in
    float32), its numbers stand for the learner's, and the pass over the others is saved.

    Args:
        lesson: The trajectories.
        read: Computes the learner's log-probabilities of rows, under its weights of now.
        truncated: Whether the sampler draws from a part of the distribution. Then the few could be
            alike and the others not, so all are read.
        listens: Whether the first step's own forward pass gives the numbers of its trajectories, by
            `keep`. Otherwise they are read ahead too.
    """

    def __init__(
        self,
        lesson: Lesson,
        read: Callable[[Sequence[Row]], Column],
        truncated: bool = False,
        listens: bool = False,
    ) -> None:
        self.listens = listens
        self._lesson, self._read, self._truncated = lesson, read, truncated
        self._known: dict[int, Tensor] = {}

    def look_ahead(self, steps: Sequence[Tensor]) -> None:
        """Read what the steps after the first will need.

        Args:
            steps: The numbers of each step's trajectories.
        """
        heard = set(steps[0].tolist()) if self.listens else set()
        later = sorted({i for step in steps[1:] for i in step.tolist()} - heard)
        some = later[:: max(1, len(later) // _SAMPLE)][:_SAMPLE]  # of many questions
        rest = sorted({*later} - {*some})
        sampler = self._lesson.sampler_logprobs
        self._take(some)
        gaps = [(self._known[i] - sampler[i]).abs().max() for i in some]
        alike = bool(gaps) and bool(torch.stack(gaps).max() < _SAME_NATS)  # and finite
        if alike and not self._truncated:
            self._known |= {i: sampler[i] for i in rest}
        else:
            self._take(rest)

    def _take(self, numbers: Sequence[int]) -> None:
        found = self._read([self._lesson.rows[i] for i in numbers])
        self._known |= zip(numbers, found, strict=True)

    def keep(self, minibatch: Minibatch, logprobs: Tensor) -> None:
        """Keep the log-probabilities (N,) that the first step computed of a minibatch."""
        numbers, counts = minibatch.trajectory.unique_consecutive(return_counts=True)
        parts = logprobs.detach().cpu().split(counts.tolist())
        self._known |= zip(numbers.tolist(), parts, strict=True)

    def of(self, some: Tensor) -> Tensor:
        """(N,), of the sampled tokens of some trajectories, by their numbers."""
        return torch.cat([self._known[i] for i in some.tolist()])


def plan(
    lesson: Lesson,
    old: OldLogprobs,
    objective: ClippedSurrogate,
    updates: int,
    steps_per_update: int,
    passes: Callable[[Sequence[Row]], Iterator[Pass]],
    shuffle: torch.Generator,
    mean_over_processes: Callable[[Tensor], Tensor],
) -> Iterator[Step]:
    """The optimiser steps of one iteration.

    Trajectories of one prompt stay together as far as steps of equal size allow, because it is read
    once for all that are computed together: prompts are shuffled, and the trajectories of each.

    Args:
        lesson: The trajectories and their advantages.
        old: Their log-probabilities from before the first update; read before the first step.
        objective: Weighs tokens.
        updates: How often all trajectories are learned from.
        steps_per_update: Steps that one pass over the trajectories is divided into.
        passes: Divides rows among minibatches.
        shuffle: Of the order of trajectories.
        mean_over_processes: Averages a tensor over processes; called once a step by each.
    """
    orders = [lesson.order(shuffle) for _ in range(updates)]
    steps = [step for order in orders for step in order.tensor_split(steps_per_update)]
    old.look_ahead(steps)
    for number, chosen in enumerate(steps):
        counts = lesson.counts[chosen]
        total = mean_over_processes(torch.tensor([float(counts.sum()), float(len(chosen))]))
        weights = objective.weights(counts, *total.tolist())
        yield [
            lesson.minibatch(chosen[some], layout, weights[some], old, number == 0)
            for some, layout in passes([lesson.rows[i] for i in chosen])
        ]
