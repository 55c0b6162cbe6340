"""Learning: an iteration's trajectories as optimiser steps, and steps as minibatches that fit.

A *step* is what one update of the weights is computed from, and one batch to Lightning. It is a
list of *minibatches*, each computed at once. Credit ends here: what leaves this module knows
tokens, turns as stretches of them at most, and no groups.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from turnrl.credit import sampled_turns
from turnrl.objective import ClippedSurrogate, RatioLevel
from turnrl.policy.layout import Layout, Pass
from turnrl.types import TokenRow, Trajectory


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
        first: Whether there was no update yet, so that the ratio is 1 by definition.
        old_logprobs: (N,), what the learner computed before the first update, without dropout; None
            in the first step where its own pass computes the same.
        returns: (N,), the critic's target for each token; None without a critic.
        keep: Takes the log-probabilities (N,) that this step computes, because later steps need
            them; None if they do not.
    """

    layout: Layout
    trajectory: Tensor
    turn: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    first: bool = False
    old_logprobs: Tensor | None = None
    returns: Tensor | None = None
    keep: Callable[[Tensor], None] | None = None

    def __len__(self) -> int:
        return len(self.turn)

    def weightless(self) -> "Minibatch":
        """The same tokens, with no share of the loss."""
        return replace(self, weights=torch.zeros_like(self.weights), keep=None)

    def segments(self, level: RatioLevel) -> Tensor:
        """(N,), for each token the number of its turn or trajectory, or its own."""
        if level == "trajectory":
            return self.trajectory
        if level == "turn":
            return self.trajectory * (self.turn.max() + 1) + self.turn
        return torch.arange(len(self), device=self.turn.device)


_SAMPLE = 8
"""Trajectories that show whether the sampler computes what the learner does."""

_SAME_NATS = 1e-5
"""How far apart two log-probabilities of one token may be to count as the same."""

Step = list[Minibatch]
"""Minibatches of one update of the weights."""

Column = Sequence[Tensor]
"""For each trajectory (N_i,), a number for each of its sampled tokens, in order."""


class TokenColumns:
    """An iteration's trajectories, and columns of numbers for their sampled tokens.

    Args:
        trajectories: N of them.
        advantages: Advantages of their sampled tokens.
        returns: Returns of their sampled tokens, for a critic; None without one.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], advantages: Column, returns: Column | None = None
    ) -> None:
        self.trajectories = trajectories
        self.turns = list(map(sampled_turns, trajectories))  # raises for one without tokens
        self.prompts = list(map(_prompt, trajectories))
        self.counts = torch.tensor(list(map(len, self.turns)))
        self.sampler_logprobs = [torch.tensor(one.sampler_logprobs) for one in trajectories]
        self.advantages, self.returns = advantages, returns

    def order(self, shuffle: torch.Generator) -> Tensor:
        """(N,), the numbers of the trajectories in random order, those of one prompt together."""
        alike: dict[tuple[int, ...] | None, list[int]] = {}
        for i in torch.randperm(len(self.trajectories), generator=shuffle).tolist():
            alike.setdefault(self.prompts[i], []).append(i)
        return torch.tensor([i for some in alike.values() for i in some])

    def minibatch(
        self,
        numbers: Tensor,
        layout: Layout,
        weights: Tensor,
        first: bool,
    ) -> Minibatch:
        """The columns of some trajectories, in the order of a layout.

        Args:
            numbers: (M,), the trajectories' numbers.
            layout: The layout of their rows.
            weights: (M,), each one's share of the loss, per token.
            first: Whether there was no update yet.
        """
        counts = self.counts[numbers]
        rows = numbers.tolist()

        def joined(column: Column) -> Tensor:
            return torch.cat([column[i] for i in rows])

        return Minibatch(
            layout=layout,
            trajectory=numbers.repeat_interleave(counts),
            turn=joined(self.turns),
            advantages=joined(self.advantages),
            weights=weights.repeat_interleave(counts),
            sampler_logprobs=joined(self.sampler_logprobs),
            first=first,
            returns=None if self.returns is None else joined(self.returns),
        )


def _prompt(trajectory: Trajectory) -> tuple[int, ...]:
    """The prompt of the first history that the policy wrote in."""
    samples = trajectory.samples
    return next((sample for sample in samples if sample.sampled), samples[0]).prompt_ids


class OldLogprobs:
    """The learner's log-probabilities of sampled tokens before the first update.

    Where a few trajectories show that the sampler computes the same numbers (in process, in
    float32), its numbers stand for the learner's, and the pass over the others is saved.

    Which numbers a step's ratios are of:

        first step, no dropout      its own, so that the ratio is 1 by definition; nothing is read
        first step, with dropout    its own too; but `importance_cap` compares the sampler with
                                    numbers read without dropout
        later steps, no dropout     those that the first step computed, or read ahead
        later steps, with dropout   read ahead without dropout: a noisy pass gives none

    Args:
        columns: The trajectories.
        read: Computes the learner's log-probabilities of trajectories, under its weights of now.
        updates: How often all trajectories are learned from.
        dropout: Whether the passes of a step have dropout.
        caps_importance: Whether the objective compares the sampler with the learner.
        sampler_differs: Whether the sampler draws from another distribution than the learner's, a
            part of it or that of older weights, so that a few trajectories say nothing about the
            others.
        in_step: Inside it processes may make different numbers of passes; see `Policy.in_step`.
    """

    def __init__(
        self,
        columns: TokenColumns,
        read: Callable[[Sequence[Trajectory]], Column],
        updates: int,
        dropout: bool = False,
        caps_importance: bool = False,
        sampler_differs: bool = False,
        in_step: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._columns, self._read, self._in_step = columns, read, in_step
        self._first_step_gives_them = updates > 1 and not dropout
        self._first_step_needs_them = dropout and caps_importance
        self._reads_all = sampler_differs
        self._known: dict[int, Tensor] = {}

    def look_ahead(self, steps: Sequence[Tensor]) -> None:
        """Read what the steps will need.

        Args:
            steps: The numbers of each step's trajectories.
        """
        given = set(steps[0].tolist()) if self._first_step_gives_them else set()
        needing = steps if self._first_step_needs_them else steps[1:]
        needed = sorted({i for step in needing for i in step.tolist()} - given)
        compared = _spread(needed, _SAMPLE)
        rest = sorted({*needed} - {*compared})
        sampler = self._columns.sampler_logprobs
        with self._in_step():
            self._take(compared)
            gaps = [(self._known[i] - sampler[i]).abs().max() for i in compared]
            alike = bool(gaps) and bool(torch.stack(gaps).max() < _SAME_NATS)  # and finite
            if alike and not self._reads_all:
                self._known |= {i: sampler[i] for i in rest}
            else:
                self._take(rest)

    def _take(self, numbers: Sequence[int]) -> None:
        logprobs = self._read([self._columns.trajectories[i] for i in numbers])
        self._known |= zip(numbers, logprobs, strict=True)

    def join(self, minibatch: Minibatch, numbers: Sequence[int]) -> Minibatch:
        """A minibatch of the trajectories of these numbers, with the log-probabilities that it
        needs, or with where to bring those that it computes."""
        if not minibatch.first or self._first_step_needs_them:
            known = torch.cat([self._known[i] for i in numbers])
            return replace(minibatch, old_logprobs=known)
        if self._first_step_gives_them:
            return replace(minibatch, keep=partial(self._keep, numbers))
        return minibatch

    def _keep(self, numbers: Sequence[int], logprobs: Tensor) -> None:
        counts = self._columns.counts[list(numbers)].tolist()
        self._known |= zip(numbers, logprobs.detach().cpu().split(counts), strict=True)


def _spread(numbers: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of some numbers, far apart, so that they are of many questions."""
    return numbers[:: max(1, len(numbers) // most)][:most]


class Updates:
    """The optimiser steps of one iteration: who is learned from when, and with what weight.

    Trajectories of one prompt stay together as far as steps of equal size allow, because it is read
    once for all that are computed together: prompts are shuffled, and the trajectories of each.

    Args:
        columns: The trajectories and their advantages.
        old: Their log-probabilities from before the first update; read before the first step.
        objective: Weighs tokens.
        updates: How often all trajectories are learned from.
        steps_per_update: Steps that one pass over the trajectories is divided into.
        passes: Divides rows among minibatches; rows of one number stay together.
    """

    def __init__(
        self,
        columns: TokenColumns,
        old: OldLogprobs,
        objective: ClippedSurrogate,
        updates: int,
        steps_per_update: int,
        passes: Callable[[Sequence[TokenRow], Sequence[int]], Iterator[Pass]],
    ) -> None:
        self._columns, self._old, self._objective = columns, old, objective
        self._updates, self._steps_per_update, self._passes = updates, steps_per_update, passes

    def steps(
        self, shuffle: torch.Generator, mean_over_processes: Callable[[Tensor], Tensor]
    ) -> Iterator[Step]:
        """The steps, each made when it is asked for.

        Args:
            shuffle: Source of the random order of trajectories.
            mean_over_processes: Averages a tensor over processes; called once a step by each.
        """
        columns = self._columns
        orders = [columns.order(shuffle) for _ in range(self._updates)]
        steps = [step for order in orders for step in order.tensor_split(self._steps_per_update)]
        self._old.look_ahead(steps)
        for number, chosen in enumerate(steps):
            counts = columns.counts[chosen]
            total = mean_over_processes(torch.tensor([float(counts.sum()), float(len(chosen))]))
            weights = self._objective.weights(counts, *total.tolist())
            step = []
            # the place in this step of each row's trajectory, which may have several rows
            rows = [
                (p, r) for p, i in enumerate(chosen) for r in columns.trajectories[i].token_rows
            ]
            owners = [place for place, _ in rows]
            for numbers, layout in self._passes([row for _, row in rows], owners):
                places = [*dict.fromkeys(owners[n] for n in numbers)]
                batch = columns.minibatch(
                    chosen[places], layout, weights[places], first=number == 0
                )
                step.append(self._old.join(batch, chosen[places].tolist()))
            yield step
